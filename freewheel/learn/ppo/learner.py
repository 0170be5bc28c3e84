"""PPO that stands lag: clipped-importance targets, a decoupled surrogate, one flat parameter vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from freewheel.core import Array, Chunk, Metrics, NDArray, RowCounts, Snapshot
from freewheel.errors import SetupError
from freewheel.learn.adam import Adam
from freewheel.learn.moments import ReturnScale, RunningMoments
from freewheel.learn.ppo import analytic
from freewheel.learn.ppo.objective import Autograd, Coefficients, Losses, Minibatch, Objective
from freewheel.learn.ppo.rollout_buffer import RolloutBatch, RolloutBuffer
from freewheel.learn.ppo.targets import Discount, Targets, continues, estimate, temporal_difference
from freewheel.learn.settings import LearnerSpec, PPOConfig
from freewheel.policies.nets import PolicyNet
from freewheel.policies.spec import FlatParams, network_inputs
from freewheel.seeding import generator, generator_state, restore_generator


class PPO:
    """Learns from batches of exactly S rows. Implements core.Learner."""

    def __init__(self, config: PPOConfig, task: LearnerSpec) -> None:
        self.config, self.version = config, 0
        self._task = task
        self._rng = generator(task.seed, "learner")
        self.net = PolicyNet(task.policy, generator(task.seed, "weights"), task.device)
        if task.start is not None:
            self.net.begin(task.start.params)
        self._objective = _choose_objective(config, self.net, task.device)
        self._adam = Adam(self.net.vector, self.net.grad)
        self._held = RolloutBuffer()
        self._trained = self._skipped = self._stale = 0
        self._in_use = 0  # rows of an update that is under way, or was cut short
        self._moments = RunningMoments(task.policy.obs_size, task.start) if task.policy.normalised else None
        self._scale = ReturnScale(task.lanes, config.gamma) if config.reward_scale == "returns" else None

    @property
    def ready(self) -> bool:
        if self._task.episodes is not None:
            return self._held.chunks >= self._task.episodes
        return self._held.rows >= self._task.rows

    @property
    def hungry(self) -> bool:
        return not self.ready

    @property
    def buffer_util(self) -> float:
        """The part of the next update's rows or episodes that is there."""
        if self._task.episodes is not None:
            return min(1.0, self._held.chunks / self._task.episodes)
        return min(1.0, self._held.rows / self._task.rows)

    def observe(self, chunk: Chunk) -> None:
        if self._task.max_lag is not None and chunk.version < self.version - self._task.max_lag:
            self._stale += chunk.rows
            return
        self._held.add(chunk)
        if self._moments is not None:
            self._moments.add(chunk.data.obs[chunk.data.valid])
        if self._scale is not None:
            self._scale.add(chunk.data, chunk.origin.lane0)

    @np.errstate(over="ignore", invalid="ignore")  # what overflows is seen in the gradient, not told by a warning
    def update(self) -> Metrics:
        """All epochs over exactly S rows; if a number stops being finite, as if it had never been."""
        before = self._held.rows
        episodes = self._task.episodes
        sealed = self._held.seal(self._task.rows) if episodes is None else self._held.seal_chunks(episodes)
        self._in_use = rows = before - self._held.rows
        batch, about = self._prepare(sealed)
        weights = self._adam.remember()
        losses = self._improve(batch)
        if losses is None:
            self._adam.recall(*weights)
            self._skipped += rows
        else:
            self._trained += rows
            about |= losses
        about["loss/skipped"] = float(losses is None)
        self._in_use = 0
        self.net.pull()
        self._renew_statistics()
        self.version += 1
        if self._task.max_lag is not None:
            self._stale += self._held.expire(self.version - self._task.max_lag)
        return about

    def snapshot(self) -> Snapshot:
        layout = {name: view.shape for name, view in self.net.params.views.items()}
        return Snapshot(self.version, FlatParams(layout, self.net.params.vector.copy()).views)

    def rows(self) -> RowCounts:
        dropped = {cause: rows for cause, rows in (("stale", self._stale), ("nan", self._skipped)) if rows}
        return RowCounts(trained=self._trained, queued=self._held.rows + self._in_use, dropped=dropped)

    def state_dict(self) -> dict[str, Array]:
        _, mean, square, steps = self._adam.remember()
        state: dict[str, Array] = {
            "params": self.net.params.vector.copy(),
            "adam.mean": mean.cpu().numpy(),
            "adam.square": square.cpu().numpy(),
            "counts": np.array([self.version, self._trained, self._skipped, steps, self._stale], np.int64),
            "rng": generator_state(self._rng),
        }
        if self._moments is not None:
            state["obs_moments"] = self._moments.state()
        if self._scale is not None:
            state |= {"return_moments": self._scale.moments.state(), "running_return": self._scale.running.copy()}
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        arrays = {name: np.array(value) for name, value in state.items()}
        self.version, self._trained, self._skipped, steps, self._stale = (int(count) for count in arrays["counts"])
        self.net.params.vector[...] = arrays["params"]
        self.net.push()
        mean, square = (torch.from_numpy(arrays[f"adam.{name}"]) for name in ("mean", "square"))
        self._adam.recall(self.net.vector, mean, square, steps)
        restore_generator(self._rng, arrays["rng"])
        if self._moments is not None:
            self._moments.restore(arrays["obs_moments"])
        if self._scale is not None:
            self._scale.moments.restore(arrays["return_moments"])
            self._scale.running[...] = arrays["running_return"]

    def _prepare(self, sealed: RolloutBatch) -> tuple[Minibatch, dict[str, float]]:
        """Every row with its targets, flattened to [N, ...]."""
        data, flat = sealed.data, sealed.flatten
        inputs, action, behaviour = self._inputs(flat(data.obs)), flat(data.action), flat(data.log_prob)
        lag = self.version - flat(sealed.version)
        about = {"lag_mean": float(lag.mean()), "lag_max": float(lag.max()), "loss/ess": 1.0}
        weight = ratio = None
        reference = behaviour
        if lag.any():
            value, start = self._objective.evaluate(inputs, action)
            ratio = np.exp(start - behaviour)
            about["loss/ess"] = float(ratio.sum() ** 2 / (np.square(ratio).sum() * len(ratio)))
            shares = np.bincount(lag) / len(lag)
            about |= {f"loss/lag_{late}": float(share) for late, share in enumerate(shares)}
            if self.config.surrogate == "decoupled":
                reference, weight = start, np.minimum(self.config.rho_bar, ratio)
        else:  # the policy that chose these rows is the one about to be improved
            value = self._objective.values(inputs)
        if self.config.targets == "plain":
            ratio = None
        targets = self._targets(sealed, sealed.spread(value), None if ratio is None else sealed.spread(ratio))
        goal = flat(targets.value)
        about["loss/explained_variance"] = 1.0 - float(np.var(goal - value) / (np.var(goal) + 1e-8))
        return Minibatch(inputs, action, reference, weight, flat(targets.advantage), goal), about

    def _targets(self, sealed: RolloutBatch, value: NDArray, ratio: NDArray | None) -> Targets:
        data, config = sealed.data, self.config
        goes_on = continues(data.terminated, data.truncated, data.valid)
        next_value = np.zeros_like(value)
        next_value[:-1] = np.where(goes_on[:-1], value[1:], 0)
        bootstrap = data.valid & ~goes_on & ~data.terminated
        if bootstrap.any():
            next_value[bootstrap] = self._objective.values(self._inputs(data.next_obs[bootstrap]))
        reward = sealed.spread(sealed.flatten(data.reward))  # whatever stands in a gap is gone
        if self._scale is not None:
            reward = reward * np.float32(self._scale.factor)
        delta = temporal_difference(reward, data.terminated, value, next_value, config.gamma)
        discount = Discount(config.gamma, config.gae_lambda, config.rho_bar, config.c_bar)
        return estimate(delta, value, goes_on, ratio, discount)

    def _improve(self, batch: Minibatch) -> dict[str, float] | None:
        """Epochs × minibatches of gradient steps; None as soon as a gradient is not finite."""
        config, progress = self.config, self._progress()
        lr = config.lr * _fade(config.lr_schedule, progress)
        weights = Coefficients(
            clip=config.clip * _fade(config.clip_schedule, progress),
            value=config.value,
            entropy=config.entropy * _fade(config.entropy_schedule, progress),
        )
        seen: list[Losses] = []
        norms: list[float] = []
        for part in self._minibatches(batch):
            losses = self._objective.gradient(part, weights)
            norm = float(torch.linalg.vector_norm(self.net.grad))
            if not np.isfinite(norm):
                return None
            seen.append(losses)
            norms.append(norm)
            if config.target_kl is not None and losses.kl > 1.5 * config.target_kl:
                break
            if norm > config.max_grad_norm:
                self.net.grad.mul_(config.max_grad_norm / (norm + 1e-6))
            self._adam.step(lr)
        means = {
            f"loss/{name}": float(value) for name, value in zip(Losses._fields, np.mean(seen, axis=0), strict=True)
        }
        return means | {"loss/grad_norm": float(np.mean(norms))}

    def _minibatches(self, batch: Minibatch) -> Iterator[Minibatch]:
        rows = len(batch.action)
        parts = max(1, rows // self.config.minibatch)
        for _ in range(self.config.epochs):
            shuffled = batch.take(self._rng.permutation(rows)) if parts > 1 else batch
            for part in range(parts):
                yield self._standardise(shuffled.take(slice(rows * part // parts, rows * (part + 1) // parts)))

    def _standardise(self, part: Minibatch) -> Minibatch:
        if not self.config.normalize_advantage or len(part.advantage) < 2:
            return part
        rows = len(part.advantage)
        centred = part.advantage - part.advantage.sum() / np.float32(rows)
        deviation = math.sqrt(float(centred @ centred) / (rows - 1))
        return part._replace(advantage=centred / np.float32(deviation + 1e-8))

    def _inputs(self, obs: NDArray) -> NDArray:
        return network_inputs(self.net.spec, self.net.params.views, obs)

    def _renew_statistics(self) -> None:
        """What was observed so far becomes part of the next version's weights."""
        if self._moments is not None:
            for start, stop in self.net.spec.normalised:
                self.net.params.views["norm.mean"][start:stop] = self._moments.mean[start:stop]
                self.net.params.views["norm.scale"][start:stop] = 1.0 / self._moments.deviation[start:stop]

    def _progress(self) -> float:
        done = self._trained + self._skipped
        return 0.0 if self._task.total_steps is None else min(1.0, done / self._task.total_steps)


def _choose_objective(config: PPOConfig, net: PolicyNet, device: str) -> Objective:
    possible = analytic.supports(net.spec, device)
    if config.gradient == "analytic" and not possible:
        raise SetupError("ppo.gradient analytic serves plain MLPs (tanh, relu, elu) on the CPU; use auto")
    return analytic.Analytic(net) if possible and config.gradient != "autograd" else Autograd(net)


def _fade(schedule: str, progress: float) -> float:
    return 1.0 - progress if schedule == "linear" else 1.0
