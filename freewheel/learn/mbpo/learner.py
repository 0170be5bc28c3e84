"""MBPO: SAC on short rollouts of a dynamics model, which an executor fits to arriving rows."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freewheel.core import TRANSITION_FIELDS, Array, Chunk, Metrics, RowBuffer, Transitions, to_numpy
from freewheel.errors import DivergedError, FreewheelError
from freewheel.learn.chunks import under
from freewheel.learn.data_parallel import own_seed, share
from freewheel.learn.finite import SkippedUpdates, is_finite
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.mbpo.dynamics import Ensemble, ModelSpec
from freewheel.learn.mbpo.fitting import Continuation, Fit, Fitter
from freewheel.learn.mbpo.model_env import ModelEnv, look, open_loop_error
from freewheel.learn.mbpo.rollouts import Rollouts
from freewheel.learn.mbpo.task import model_rows
from freewheel.learn.replay.buffer import ReplayBuffer
from freewheel.learn.replay.rows import ReplayMinibatch
from freewheel.learn.sac.learner import SAC
from freewheel.learn.spec import LearnerSpec
from freewheel.seeding import tree

LOOK = 0.1  # seconds between two checks whether the run has to end, during a wait for a fit
TRAIL, TRAIL_LANES = 64, 16  # steps and lanes of each author for the check of multi-step predictions
MODEL_REMEDY = "lower --mbpo.model-lr, or scale observations and rewards"
HORIZON = 5  # steps of the check of multi-step predictions, or the length of rollouts if that is larger


class MBPO(SAC):
    """A SAC that also learns from rows of a model. Rows, updates and fits each have their own pace. Each of several
    learners that train together fits a model to its own rows and makes its share of the rollouts."""

    config: MBPOConfig

    def __init__(self, config: MBPOConfig, spec: LearnerSpec) -> None:
        peers = spec.services.peers
        every, rows, kept = (
            -(-total // peers.count) for total in (config.model_every, config.model_rows, config.model_buffer)
        )
        config = replace(config, model_every=every, model_rows=rows, model_buffer=kept)  # this learner's share
        super().__init__(config, spec)
        device, seed, columns = spec.compute.device, own_seed(spec), self.replay.columns
        self._view, task = look(config, spec)
        learned, seen = (task[0] is None, task[1] is None), replace(columns, obs_size=self._view.size)
        sizes = (config.members, config.model_hidden, config.predict)
        choices = spec.policy.action_size if spec.policy.discrete else 0
        model = ModelSpec(seen, *sizes, *learned, predicted=self._view.predicted, choices=choices)
        self.model = Ensemble(model, device)
        self._starts = config.rollouts
        noise = tree(seed, "learner", "dream")  # names of seeds must not change, or seeded runs would
        longest, most, compile_ = config.rollout_schedule[3], config.max_disagreement, spec.compute.compile
        self._model_env = ModelEnv(self.model, config.elites, self._starts, noise, task, self._view, most)
        self._rollouts = Rollouts(self._model_env, self.updater.policy, longest, compile_)
        services = spec.services  # with peers, which wait for this learner, nothing may interrupt an update
        self._while_waiting = services.while_waiting if peers.count == 1 else services.report
        self._rollouts.between_steps = services.between_steps if peers.count == 1 else services.report
        self.model_buffer = ReplayBuffer(config.rows_of_models, columns, device, tree(seed, "learner", "imagined"))
        self.updater.generators.append(self.model_buffer.generator)
        self._real = min(self.batch, share(int(config.batch * config.real_ratio + 1e-9), peers))
        assert spec.services.executors is not None, "the model needs an executor"
        fitter = partial(_fitter, model, config, seed, device, compile_)
        self._executor = spec.services.executors(fitter, "the model")
        self._requested_at: deque[int] = deque()  # number of rows at the request of each running fit
        self._sent = self._model_rows = 0  # rows that the fitter has; rows that the present model is fitted to
        self._tried = 0  # number of rows at the request of the last finished fit
        self._fits = self._model_steps = 0
        self._fits_skipped = SkippedUpdates("the model of mbpo", MODEL_REMEDY, "fits")
        self._fitter: Mapping[str, Array] = {}  # state of the last fit, from which another fitter can continue
        self._continues = False  # whether this run's fitter, still empty, continues another one's work
        self._about: dict[str, float] = {}  # metrics for the next publication
        self._trail: dict[int, deque[Tensor]] = {}

    def observe(self, chunk: Chunk[Any]) -> None:
        self._follow(chunk)
        super().observe(chunk)

    def update(self) -> Metrics:
        """Adopt a finished model, request the next fit if it is due, and update SAC."""
        self._manage_fits()
        version = self.version
        about = dict(super().update())
        about |= {
            "real_data": self.pace.rows,
            "model_data": self.model_buffer.added,
            "agent_updates": self.pace.updates,
            "dynamics_updates": self._model_steps,
        }
        if self.version > version:
            lag = float(self.pace.rows - self._model_rows)
            about |= self._about | {"model/lag_rows": lag, "model/version": float(self._fits)}
            self._about = {}
        return about

    def buffers(self) -> Mapping[str, RowBuffer]:
        return {**super().buffers(), "model_buffer": self.model_buffer}

    def state_dict(self) -> dict[str, Array]:
        """Return the state, with the fitter's state at the present model. A resumed run starts a running fit again."""
        counts = np.array([self._fits, self._model_steps, self._model_rows], np.int64)
        state: dict[str, Array] = {"model.counts": counts, "model.elites": to_numpy(self._model_env.elites).copy()}
        state |= {f"model.{name}": to_numpy(value) for name, value in self.model.state().items()}
        state |= {f"fitter.{name}": to_numpy(value) for name, value in self._fitter.items()}
        state |= {f"model_buffer.{name}": value for name, value in self.model_buffer.state_dict().items()}
        state["model_env"] = self._model_env.generator.get_state().numpy()
        state["about"] = np.frombuffer(json.dumps(self._about).encode(), np.uint8)
        for worker, trail in self._trail.items():
            state[f"trail.{worker}"] = to_numpy(torch.cat(list(trail)))
            state[f"trail.{worker}.steps"] = np.array([len(part) for part in trail])
        return state | {f"sac.{name}": value for name, value in super().state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        super().load_state_dict(under("sac.", state))
        self.model_buffer.load_state_dict(under("model_buffer.", state))
        self.model.load(under("model.", state))
        self._model_env.elites.copy_(torch.as_tensor(state["model.elites"]))
        self._model_env.generator.set_state(torch.as_tensor(state["model_env"]))
        self._fits, self._model_steps, self._model_rows = (int(count) for count in state["model.counts"])
        self._fitter, self._continues = under("fitter.", state), True
        self._sent = self._model_rows if self._fitter else max(0, self.pace.rows - self.replay.count)
        self._about = json.loads(np.asarray(state["about"]).tobytes())
        for name, steps in under("trail.", state).items():
            if (worker := name.removesuffix(".steps")) != name:
                rows = torch.tensor(np.asarray(state[f"trail.{worker}"]), device=self.spec.compute.device)
                self._trail[int(worker)] = deque(rows.split(np.asarray(steps).tolist()))

    def _manage_fits(self) -> None:
        """Adopt and request fits. Updates wait for the model before it is more than two fits' rows behind."""
        rows = self.pace.rows
        if rows < self.pace.starts:
            return
        self._collect_fits()
        newest = self._requested_at[-1] if self._requested_at else max(self._tried, self._model_rows)
        if not self._executor.busy and (not self._fits or rows - newest >= self.config.model_every):
            with self.spec.services.span("fit"):
                self._request(rows)
            self._collect_fits()  # a serial executor is done by now
        while self._requested_at and (not self._fits or rows - self._requested_at[0] >= self.config.model_every):
            with self.spec.services.span("wait-model"):
                while (fit := self._executor.result(LOOK)) is None:
                    self._while_waiting()
            self._adopt(fit)

    def _collect_fits(self) -> None:
        while (fit := self._executor.result()) is not None:
            self._adopt(fit)

    def _request(self, rows: int) -> None:
        new = self._export(self._seen(self.replay.newest(min(rows - self._sent, self.replay.count))))
        self._executor.submit(self._continuation(new) if self._continues and self._fitter else new)
        self._sent, self._continues = rows, False
        self._requested_at.append(rows)

    def _continuation(self, new: Array) -> Continuation:
        """Return the rows, model and optimiser of the earlier fitter, for an empty one."""
        had = min(int(self._fitter["seen"]), self.config.model_rows)
        kept = min(had, self.replay.count - len(new))
        rows = self._export(self._seen(self.replay.newest(kept + len(new))[:kept]))
        state = {name: self._export(value) for name, value in self.model.state().items()}
        return Continuation(new, rows, state, self._fitter)

    def _seen(self, rows: Tensor) -> Tensor:
        return model_rows(self._view, self.replay.columns, rows)

    @staticmethod
    def _export(rows: Tensor) -> Array:
        return rows if rows.is_cuda else rows.numpy()

    def _adopt(self, fit: Fit | FreewheelError) -> None:
        if isinstance(fit, FreewheelError):
            self.spec.services.while_waiting()  # a signal to the run may have ended the fitter first
            raise fit
        self._tried = self._requested_at.popleft()
        if fit.not_finite and not self._fits:
            raise DivergedError(f"mbpo: the {fit.not_finite} of the first model is not finite; {MODEL_REMEDY}")
        self._fits_skipped.take(fit.not_finite)
        if fit.not_finite:
            return
        self.model.load(fit.state)
        self._fitter = fit.fitter
        self._model_env.elites.copy_(torch.as_tensor(fit.elites))
        self._fits += 1
        self._model_rows = self._tried
        self._model_steps += int(fit.metrics["model/steps"])
        self._about = dict(fit.metrics)
        with self.spec.services.span("rollout"):
            self._roll_out()
            self._check()

    def _roll_out(self) -> None:
        """Roll out the present policy in the model, from real states. Rows of older models expire. Before the first
        publication a single learner sets the normaliser; several cannot, as their fits end at different times."""
        if self._peers.count == 1 and not self._published:
            self._normalise_stored()
        self._keep_finite()
        if not is_finite(self.updater.policy.net.vector):
            return  # several learners put the policy back together, later; until then they use older rows
        self.model_buffer.expire(self._fits - self.config.keep_models + 1)
        states = self.replay.columns.split(self.replay.sample(self._starts)).obs
        try:
            self._rollouts(states, self.length)
        finally:  # keep the finished steps, also if the run's time ends here
            rows = self._rollouts.rows
            self.model_buffer.add(rows, self._fits)
        self._about["model/rollout_length"] = len(rows) / self._starts
        if not self.model_buffer.count:
            remedy = "give it more rows to start with (mbpo.learning_starts)"
            raise DivergedError(f"no prediction of the model is finite; {remedy}")

    @property
    def length(self) -> int:
        """The steps of a rollout, by the schedule."""
        begin, end, short, long = self.config.rollout_schedule
        progress = (self.pace.rows * self.spec.services.peers.count - begin) / max(1, end - begin)
        return int(short + (long - short) * min(1.0, max(0.0, progress)))

    def draw(self) -> ReplayMinibatch:
        """Draw a share of real rows, and model rows for the rest."""
        real, gamma = self.replay.draw(self._real), self.config.gamma
        model_rows = self.model_buffer.sample(self.batch - self._real)
        return real.and_also(model_rows, gamma).minibatch(self.replay.columns, gamma)

    def _follow(self, chunk: Chunk[Any]) -> None:
        """Keep the latest steps of the first lanes of each author, in order."""
        some = Transitions(*(getattr(chunk.data, name)[:, :TRAIL_LANES] for name in TRANSITION_FIELDS))
        rows = self._packed(replace(some, valid=some.valid | True)).unflatten(0, (-1, some.reward.shape[1]))
        self.replay.columns.split(rows).has_successor.mul_(torch.as_tensor(some.valid, device=rows.device))
        trail = self._trail.setdefault(chunk.origin.worker, deque())
        trail.append(rows)
        while sum(map(len, trail)) - len(trail[0]) >= TRAIL:
            trail.popleft()

    def _check(self) -> None:
        """Measure the error of multi-step predictions on recorded rows."""
        horizon = max(HORIZON, self.length)
        parts = [torch.cat(list(trail)) for trail in self._trail.values()]
        batches = [self.replay.columns.split(part) for part in parts if len(part) > horizon]
        if batches:
            args = self.model, self._model_env.elites
            errors = [open_loop_error(*args, batch, horizon, self._view) for batch in batches]
            error = torch.stack(errors).mean(0).tolist()
            self._about |= {"model/error_1": error[0], f"model/error_{horizon}": error[-1]}


def _fitter(*args: Any) -> Callable[[Any], Generator[None, None, Fit]]:
    """Return a fitter for an executor, which may interrupt it between steps."""
    return Fitter(*args).in_steps
