"""PPO where the simulator is: the same updates as learn/ppo.py on tensors, every part of them a replayable computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from freewheel.core import Array, Chunk, Metrics, RowCounts, Snapshot, Transitions
from freewheel.errors import SetupError
from freewheel.learn.adam import FusedAdam
from freewheel.learn.moments import TensorRunningMoments
from freewheel.learn.ppo.objective import Losses, Terms, surrogate
from freewheel.learn.ppo.tensor_targets import targets
from freewheel.learn.settings import LearnerSpec, PPOConfig
from freewheel.policies.device_actor import TensorPolicy
from freewheel.rollout.graphs import Program
from freewheel.seeding import generator, tree

FIELDS = tuple(field.name for field in fields(Transitions))
NORM = len(Losses._fields)  # where the norm of the gradient stands among the sums


class DevicePPO:
    """Learns from batches of exactly S rows of a batched simulator. Implements core.Learner."""

    def __init__(self, config: PPOConfig, task: LearnerSpec) -> None:
        if config.reward_scale != "none":
            raise SetupError("ppo.reward_scale returns is not there for batched simulators; use none")
        self.config, self._task, self.version = config, task, 0
        dice = tree(task.seed, "learner")
        self.policy = TensorPolicy(task.policy, generator(task.seed, "weights"), task.device, dice)
        if task.start is not None:
            self.policy.begin(task.start.params)
        self.net = self.policy.net
        own = [] if self.net.log_std is None else [self.net.log_std]
        self._adam = FusedAdam([*self.net.module.parameters(), *own], config.lr, eps=1e-5)
        self._held: deque[tuple[Transitions[Tensor], int]] = deque()  # steps [t, B] of one version
        self._parts: list[Chunk[Tensor]] = []  # of a fragment whose other lanes are still to come
        self._steps = task.rows // task.lanes  # T
        self._held_steps = self._trained = self._stale = self._skipped = 0
        self._in_use = 0  # rows of an update that is under way, or was cut short
        self._moments = (
            TensorRunningMoments(task.policy.obs_size, task.device, task.start) if task.policy.normalised else None
        )
        self._make_tensors()
        self._programs: tuple[Program, Program] | None = None

    @property
    def ready(self) -> bool:
        return self._held_steps >= self._steps

    @property
    def hungry(self) -> bool:
        return not self.ready

    @property
    def buffer_util(self) -> float:
        """The part of the next update's rows that is there."""
        return min(1.0, self._held_steps / self._steps)

    @property
    def fallback(self) -> str:
        """Why there is no graph, where one was asked for."""
        return next((program.fallback for program in self._programs or () if program.fallback), "")

    def observe(self, chunk: Chunk[Tensor]) -> None:
        self._parts.append(chunk)
        if sum(part.data.reward.shape[1] for part in self._parts) < self._task.lanes:
            return
        parts, self._parts = self._parts, []
        data = parts[0].data if len(parts) == 1 else Transitions(
            **{name: torch.cat([getattr(part.data, name) for part in parts], dim=1) for name in FIELDS}
        )  # fmt: skip
        self._held.append((data, chunk.version))
        self._held_steps += len(data.reward)
        self._expire()
        if self._moments is not None:
            self._moments.add(data.obs.flatten(0, 1))

    def update(self) -> Metrics:
        """All epochs over exactly S rows; if a number stops being finite, as if it had never been."""
        lags, self._in_use = self._seal(), self._task.rows
        before = self.net.vector.clone(), [part.clone() for part in self._adam.state]
        prepare, step = self._programs or self._prepare_programs()
        prepare()
        epochs, parts = self._improve(step)
        sums = self._sums.tolist()
        finite = all(np.isfinite(sums))
        self._in_use = 0
        if finite:
            self._trained += self._task.rows
        else:
            self.net.vector.copy_(before[0])
            for part, value in zip(self._adam.state, before[1], strict=True):
                part.copy_(value)
            self._skipped += self._task.rows
        if self._moments is not None:
            mean, scale = self._moments.normaliser()
            for start, stop in self._task.policy.normalised:
                self.policy.mean[start:stop], self.policy.scale[start:stop] = mean[start:stop], scale[start:stop]
        self.version += 1
        self._expire()
        names = [f"loss/{name}" for name in (*Losses._fields, "grad_norm")]
        told = {name: value / (epochs * parts) for name, value in zip(names, sums[:-1], strict=True)} if finite else {}
        lag = {"lag_mean": float(np.mean(lags)), "lag_max": float(max(lags)), "loss/ess": sums[-1] if finite else 0.0}
        return told | lag | {"loss/skipped": float(not finite)}

    def snapshot(self) -> Snapshot:
        return Snapshot(self.version, self.policy.weights(on_device=True))

    def rows(self) -> RowCounts:
        dropped = {cause: rows for cause, rows in (("stale", self._stale), ("nan", self._skipped)) if rows}
        waiting = self._held_steps * self._task.lanes + sum(part.rows for part in self._parts) + self._in_use
        return RowCounts(trained=self._trained, queued=waiting, dropped=dropped)

    def state_dict(self) -> dict[str, Array]:
        counts = [self.version, self._trained, self._skipped, self._stale]
        state: dict[str, Array] = {
            "params": torch.cat([self.policy.mean, self.policy.scale, self.net.vector]).cpu().numpy(),
            "counts": np.array(counts, np.int64),
            "rng": self.policy.dice.get_state().numpy(),
        }
        state |= {f"adam.{i}": value.cpu().numpy().copy() for i, value in enumerate(self._adam.state)}
        return state if self._moments is None else state | {"obs_moments": self._moments.state()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        tensors = {name: torch.as_tensor(value) for name, value in state.items()}
        self.version, self._trained, self._skipped, self._stale = (int(count) for count in tensors["counts"])
        size = self._task.policy.obs_size
        for place, value in zip(
            (self.policy.mean, self.policy.scale, self.net.vector),
            tensors["params"].split([size, size, len(self.net.vector)]), strict=True,
        ):  # fmt: skip
            place.copy_(value)
        self.policy.dice.set_state(tensors["rng"])
        for i, value in enumerate(self._adam.state):
            value.copy_(tensors[f"adam.{i}"])
        if self._moments is not None:
            self._moments.restore(np.asarray(state["obs_moments"]))

    def _expire(self) -> None:
        """Give up what is older than the bound; the gate has seen to it that there is none."""
        limit = self._task.max_lag
        while limit is not None and self._held and self._held[0][1] < self.version - limit:
            steps = len(self._held.popleft()[0].reward)
            self._held_steps -= steps
            self._stale += steps * self._task.lanes

    def _make_tensors(self) -> None:
        policy, device, shape = self._task.policy, self._task.device, (self._steps, self._task.lanes)
        rows = min(self.config.minibatch, self._task.rows)
        self._minibatches = max(1, self._task.rows // rows)
        self._minibatch = self._task.rows // self._minibatches
        discrete = policy.head == "categorical"

        def room(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        flags = {name: room(*shape, dtype=torch.bool) for name in ("terminated", "truncated", "valid")}
        columns = {name: room(*shape, policy.obs_size) for name in ("obs", "next_obs")}
        action = room(*shape, dtype=torch.int64) if discrete else room(*shape, policy.action_size)
        numbers = {name: room(*shape) for name in ("log_prob", "reward")}
        self._data = Transitions(**columns, **numbers, **flags, action=action)
        self._inputs = room(self._task.rows, policy.obs_size)
        self._scalars = room(self._task.rows, 4)  # reference, weight, advantage, value
        self._order = room(self._task.rows, dtype=torch.int64)
        self._at = room(1, dtype=torch.int64)
        self._sums = room(NORM + 2)  # losses, norm of the gradient; then the effective sample size
        self._clip, self._entropy = room(), room()

    def _seal(self) -> list[int]:
        """The oldest T steps, copied to where the programs read them; their lags by step."""
        at, lags = 0, []
        while at < self._steps:
            data, version = self._held.popleft()
            steps = min(len(data.reward), self._steps - at)
            for name in FIELDS:
                getattr(self._data, name)[at : at + steps] = getattr(data, name)[:steps]
            if steps < len(data.reward):
                self._held.appendleft((Transitions(**{name: getattr(data, name)[steps:] for name in FIELDS}), version))
            lags += [self.version - version] * steps
            at += steps
        self._held_steps -= self._steps
        return lags

    def _prepare_programs(self) -> tuple[Program, Program]:
        weights = [self.net.vector, *self._adam.state, self._sums, self._at]
        self._programs = (
            Program(self._prepare, self._task.compile, state=[self._inputs, self._scalars, self._sums]),
            Program(self._step, self._task.compile, state=weights),
        )
        return self._programs

    @torch.no_grad()
    def _prepare(self) -> None:
        """Values, ratios and targets of all rows."""
        data, config = self._data, self.config
        inputs = self.policy.inputs(data.obs.flatten(0, 1))
        self._inputs.copy_(inputs)
        output = self.net(inputs)
        action, behaviour = data.action.flatten(0, 1), data.log_prob.flatten()
        start = self.net.law(inputs, output.head).log_prob(action)
        ratio = (start - behaviour).exp()
        self._sums[-1] = ratio.sum().square() / (ratio.square().sum() * len(ratio))
        value = output.value.view_as(data.reward)
        next_value = self.net(self.policy.inputs(data.next_obs.flatten(0, 1))).value.view_as(data.reward)
        advantage, target = targets(data, value, next_value, ratio.view_as(value), config)
        decoupled = config.surrogate == "decoupled"
        reference = start if decoupled else behaviour
        weight = ratio.clamp(max=config.rho_bar) if decoupled else torch.ones_like(ratio)
        self._scalars.copy_(torch.stack([reference, weight, advantage.flatten(), target.flatten()], -1))

    def _improve(self, step: Program) -> tuple[int, int]:
        """Epochs × minibatches; how many of each."""
        config, fade = self.config, 1.0 - self._progress()
        self._adam.lr.fill_(config.lr * (fade if config.lr_schedule == "linear" else 1.0))
        self._clip.fill_(config.clip * (fade if config.clip_schedule == "linear" else 1.0))
        self._entropy.fill_(config.entropy * (fade if config.entropy_schedule == "linear" else 1.0))
        self._sums[:-1].zero_()
        for epoch in range(config.epochs):
            before = self._sums[Losses._fields.index("kl")].clone() if config.target_kl else None
            keys = torch.rand(len(self._order), generator=self.policy.dice, device=self._order.device)
            self._order.copy_(keys.argsort())
            self._at.zero_()
            for _ in range(self._minibatches):
                step()
            if before is not None and config.target_kl is not None:
                kl = float(self._sums[Losses._fields.index("kl")] - before) / self._minibatches
                if kl > 1.5 * config.target_kl:
                    return epoch + 1, self._minibatches
        return config.epochs, self._minibatches

    def _step(self) -> None:
        """One gradient step on the next minibatch of the present order."""
        config = self.config
        rows = self._order[self._at + torch.arange(self._minibatch, device=self._at.device)]
        inputs, action = self._inputs[rows], self._data.action.flatten(0, 1)[rows]
        reference, weight, advantage, value = self._scalars[rows].unbind(-1)
        if config.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        output = self.net(inputs)
        terms = Terms(output, self.net.law(inputs, output.head), action, reference, weight, advantage, value)
        losses = surrogate(terms, self._clip)
        self._adam.forget()
        (losses[0] + config.value * losses[1] - self._entropy * losses[2]).backward()
        with torch.no_grad():
            grads = [parameter.grad for parameter in self._adam.parameters if parameter.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            torch._foreach_mul_(grads, (config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            self._adam.step()
            self._sums[:-1] += torch.cat([losses.detach(), norm[None]])
            self._at += self._minibatch

    def _progress(self) -> float:
        done = self._trained + self._skipped
        return 0.0 if self._task.total_steps is None else min(1.0, done / self._task.total_steps)
