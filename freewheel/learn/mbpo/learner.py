"""MBPO: SAC on short rollouts of a learned model, which is fitted on a clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freewheel.core import Array, Chunk, Metrics, RowCounts, Snapshot, Transitions, to_numpy
from freewheel.errors import FreewheelError
from freewheel.learn.mbpo.dynamics import Ensemble, ModelSpec, pack
from freewheel.learn.mbpo.fitting import Fit, Fitter, Question
from freewheel.learn.mbpo.model_env import ModelEnv, open_loop_error
from freewheel.learn.mbpo.terminations import rule, task_function
from freewheel.learn.replay import Batch, Replay
from freewheel.learn.sac.learner import SAC
from freewheel.learn.settings import LearnerSpec, MBPOConfig
from freewheel.seeding import tree

LOOK = 0.2  # seconds between two looks at whether the run is to end, while a fit is waited for
TRAIL, TRAIL_LANES = 64, 16  # steps and lanes of each author that multi-step predictions are checked on
HORIZON = 5  # steps ahead, or as far as rollouts go where that is more


class MBPO:
    """Three clocks: rows arrive, the agent is updated, the model is fitted. Implements core.Learner."""

    def __init__(self, config: MBPOConfig, task: LearnerSpec) -> None:
        self.config, self._task = config, task
        reward = None if config.reward == "learned" else task_function("mbpo.reward", config.reward)
        termination = rule(config.termination, task.world)
        obs, actions = task.policy.obs_size, task.policy.action_size
        spec = ModelSpec(
            obs, actions, config.members, config.model_hidden, config.predict, reward is None, termination is None
        )
        self.model = Ensemble(spec, task.device)
        dice = torch.Generator(task.device)
        dice.manual_seed(tree(task.seed, "learner", "dream"))
        self._starts = round(config.rollouts_per_row * config.model_every)
        self._dream = ModelEnv(self.model, config.elites, self._starts, dice, reward, termination)
        self.sac = SAC(config, task, self._mixed)
        kept = config.keep_models * self._starts * config.rollout_schedule[3]
        self.model_buffer = Replay(kept, self.sac.replay.columns, task.device, tree(task.seed, "learner", "imagined"))
        self.sac.agent.dice.append(self.model_buffer.generator)
        self._real = int(config.batch * config.real_ratio + 1e-9)
        build = partial(Fitter, spec, config, task.seed, task.device, task.compile)
        assert task.executors is not None, "the model is fitted somewhere"
        self._executor = task.executors(build, "the model")
        self._asked_at: deque[int] = deque()  # rows there were when each fit under way was asked for
        self._sent = self._model_rows = 0  # rows that the fitter has; rows that the present model was fitted to
        self._fits = self._model_steps = 0
        self._told: dict[str, float] = {}
        self._trail: dict[int, deque[Tensor]] = {}

    @property
    def version(self) -> int:
        return self.sac.version

    @property
    def ready(self) -> bool:
        return self.sac.ready

    @property
    def buffer_util(self) -> float:
        return self.sac.buffer_util

    @property
    def fallback(self) -> str:
        """Why there is no graph, where one was asked for."""
        return self.sac.fallback

    @property
    def hungry(self) -> bool:
        return self.sac.hungry

    def observe(self, chunk: Chunk[Any]) -> None:
        self._follow(chunk)
        self.sac.observe(chunk)

    def update(self) -> Metrics:
        """Adopt a model if one is finished, have the next one fitted if it is due, and update the agent."""
        self._tend()
        about = dict(self.sac.update())
        counts = {
            "real_data": self.sac.pace.rows,
            "model_data": self.model_buffer.added,
            "agent_updates": self.sac.pace.updates,
            "dynamics_updates": self._model_steps,
        }
        about |= counts
        if len(about) > 1 + len(counts):  # a publication
            about |= self._told
            about |= {
                "loss/model_lag": float(self.sac.pace.rows - self._model_rows),
                "loss/model_version": float(self._fits),
            }
            self._told = {}
        return about

    def snapshot(self) -> Snapshot:
        return self.sac.snapshot()

    def rows(self) -> RowCounts:
        return self.sac.rows()

    def state_dict(self) -> dict[str, Array]:
        """The fitter's own state stays where it runs: after a restart it is given all real rows again."""
        counts = np.array([self._fits, self._model_steps, self._model_rows], np.int64)
        state: dict[str, Array] = {"model.counts": counts, "model.elites": to_numpy(self._dream.elites).copy()}
        state |= {f"model.{name}": to_numpy(value) for name, value in self.model.state().items()}
        state |= {f"imagined.{name}": value for name, value in self.model_buffer.state_dict().items()}
        state["dream"] = self._dream.generator.get_state().numpy()
        return state | {f"sac.{name}": value for name, value in self.sac.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        parts: dict[str, dict[str, Array]] = {}
        for name, value in state.items():
            part, _, rest = name.partition(".")
            parts.setdefault(part, {})[rest] = value
        self.sac.load_state_dict(parts["sac"])
        self.model_buffer.load_state_dict(parts["imagined"])
        self.model.load(parts["model"])
        self._dream.elites.copy_(torch.as_tensor(parts["model"]["elites"]))
        self._dream.generator.set_state(torch.as_tensor(state["dream"]))
        self._fits, self._model_steps, self._model_rows = (int(count) for count in parts["model"]["counts"])
        self._sent = max(0, self.sac.pace.rows - self.sac.replay.count)

    def _tend(self) -> None:
        """The model is never more than two fits' worth of rows behind: then the agent waits for it."""
        rows = self.sac.pace.rows
        if rows < self.config.learning_starts:
            return
        self._look()
        newest = self._asked_at[-1] if self._asked_at else self._model_rows
        if not self._executor.busy and (not self._fits or rows - newest >= self.config.model_every):
            self._ask(rows)
            self._look()  # in turn, the answer is there
        while self._asked_at and (not self._fits or rows - self._asked_at[0] >= self.config.model_every):
            while (fit := self._executor.result(LOOK)) is None:
                self._task.waiting()
            self._adopt(fit)

    def _look(self) -> None:
        while (fit := self._executor.result()) is not None:
            self._adopt(fit)

    def _ask(self, rows: int) -> None:
        new = self.sac.replay.newest(min(rows - self._sent, self.sac.replay.count))
        self._executor.submit(Question(new if new.is_cuda else new.numpy()))
        self._sent = rows
        self._asked_at.append(rows)

    def _adopt(self, fit: Fit | FreewheelError) -> None:
        if isinstance(fit, FreewheelError):
            self._task.waiting()  # a signal that ends the run may have ended the fitter first
            raise fit
        self.model.load(fit.state)
        self._dream.elites.copy_(torch.as_tensor(fit.elites))
        self._fits += 1
        self._model_rows = self._asked_at.popleft()
        self._model_steps += int(fit.metrics["model/steps"])
        self._told = {f"loss/{name.replace('/', '_')}": value for name, value in fit.metrics.items()}
        self._imagine()
        self._check()

    def _imagine(self) -> None:
        """Roll the present policy out from real states, and keep what only the newest models imagined."""
        self.model_buffer.expire(self._fits - self.config.keep_models + 1)
        columns = self.sac.replay.columns
        self._dream.begin(columns.split(self.sac.replay.sample(self._starts).rows).obs)
        for _ in range(self.length):
            obs = self._dream.obs.clone()
            action, _ = self.sac.agent.policy.act(obs)
            step = self._dream.step(action)
            rows = pack(obs, action, step.reward, step.terminated, torch.ones_like(step.valid), step.next_obs)
            self.model_buffer.add(rows[step.valid], self._fits)
        if not self.model_buffer.count:
            raise FreewheelError(
                "the model predicts nothing but infinities; give it more rows to start with (mbpo.learning_starts)"
            )

    @property
    def length(self) -> int:
        """Of a rollout, by the schedule."""
        begin, end, short, long = self.config.rollout_schedule
        progress = (self.sac.pace.rows - begin) / max(1, end - begin)
        return int(short + (long - short) * min(1.0, max(0.0, progress)))

    def _mixed(self) -> Batch:
        """A few real rows, and imagined ones for the rest."""
        real = self.sac.replay.sample(self._real).rows
        imagined = self.model_buffer.sample(self.config.batch - self._real).rows
        return self.sac.replay.columns.split(torch.cat([real, imagined]))

    def _follow(self, chunk: Chunk[Any]) -> None:
        """Keep the latest steps of a few lanes of each author, in order."""
        some = Transitions(
            **{field.name: getattr(chunk.data, field.name)[:, :TRAIL_LANES] for field in fields(Transitions)}
        )
        lanes = some.reward.shape[1]
        whole = replace(some, valid=some.valid | True)
        columns, device = self.sac.replay.columns, self._task.device
        rows = columns.pack(whole, device, has_final_obs=self._task.has_final_obs).unflatten(0, (-1, lanes))
        columns.split(rows).known.mul_(torch.as_tensor(some.valid, device=device))
        trail = self._trail.setdefault(chunk.origin.worker, deque())
        trail.append(rows)
        while sum(map(len, trail)) - len(trail[0]) >= TRAIL:
            trail.popleft()

    def _check(self) -> None:
        """How far multi-step predictions are from what happened."""
        horizon = max(HORIZON, self.length)
        parts = [torch.cat(list(trail)) for trail in self._trail.values()]
        parts = [part for part in parts if len(part) > horizon]
        if not parts:
            return
        errors = []
        for part in parts:
            batch = self.sac.replay.columns.split(part)
            errors.append(
                open_loop_error(
                    self.model, self._dream.elites, batch.obs, batch.action, batch.next_obs, horizon, batch.known
                )
            )
        error = torch.stack(errors).mean(0).tolist()
        self._told |= {"loss/model_error_1": error[0], f"loss/model_error_{horizon}": error[-1]}
