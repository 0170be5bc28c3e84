"""PPO that tolerates lag: clipped-importance targets and a decoupled surrogate, on either of two engines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from freewheel.core import Array, Chunk, Learner, Metrics, NDArray, RowCounts, Snapshot, to_numpy
from freewheel.errors import SetupError
from freewheel.learn.chunks import under
from freewheel.learn.data_parallel import checksum, gathered, own_seed, require_same
from freewheel.learn.finite import STATISTICS, is_finite
from freewheel.learn.moments import ReturnScale, RunningMoments
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.numpy_engine import NumpyEngine, supports
from freewheel.learn.ppo.rollout_buffer import RolloutBuffer
from freewheel.learn.ppo.targets import Coefficients, Everybody
from freewheel.learn.ppo.torch_engine import TorchEngine
from freewheel.learn.spec import OBS_STATISTICS, POLICY, RETURN_STATISTICS, LearnerSpec, Schedule
from freewheel.policies.nets import PolicyNet, TensorPolicy
from freewheel.seeding import generator, tree


class PPO(Learner):
    """Learns from batches of exactly S rows, or of a number of whole episodes."""

    not_finite: str = ""
    remedy = "lower --ppo.lr, or scale rewards (--ppo.reward-scale returns)"

    def __init__(self, config: PPOConfig, spec: LearnerSpec) -> None:
        self.config, self.spec, self.version = config, spec, 0
        simulated = spec.world.batched_on_device
        self.engine = build_engine(config, spec)
        self._buffer: RolloutBuffer[Any] = RolloutBuffer(spec.batch.lanes if simulated else None)
        self._trained = self._skipped = self._stale = 0
        self._in_use = 0  # rows of an update that is running, or was interrupted
        self._lr: float | None = None  # the assigned rate; None: the schedule sets it
        self._agreed: float | None = None  # finished share of the run, over several learners
        device, shared = spec.compute.device if simulated else None, spec.services.peers.count > 1
        self._moments: RunningMoments[Any] | None = None
        if spec.policy.normalised:
            self._moments = RunningMoments(spec.policy.obs_size, spec.start, device=device, shared=shared)
        self._scale: ReturnScale[Any] | None = None
        if config.reward_scale == "returns":
            self._scale = ReturnScale(spec.batch.lanes, config.gamma, device=device, shared=shared)

    @property
    def ready(self) -> bool:
        return self._filled >= 1

    @property
    def buffer_util(self) -> float:
        """The share of the next update's rows or episodes that is here."""
        return min(1.0, self._filled)

    @property
    def fallback(self) -> str:
        return self.engine.fallback

    @property
    def learning_rate(self) -> float:
        return self._faded(self.config.lr, self.config.lr_schedule) if self._lr is None else self._lr

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._lr = value

    @property
    def _filled(self) -> float:
        batch = self.spec.batch
        if batch.episodes is not None:
            return self._buffer.episodes / batch.episodes
        return self._buffer.available / batch.rows

    def observe(self, chunk: Chunk[Any]) -> None:
        max_lag = self.spec.batch.max_lag
        if max_lag is not None and chunk.version < self.version - max_lag:
            self._stale += chunk.rows
            return
        self._buffer.add(chunk)
        whole = chunk.rows == chunk.data.reward.shape[0] * chunk.data.reward.shape[1]
        if self._moments is not None:
            obs = chunk.data.obs
            self._moments.add(obs.reshape(-1, obs.shape[-1]) if whole else obs[chunk.data.valid])
        if self._scale is not None:
            self._scale.add(chunk.data, chunk.origin.lane0, chunk.rows)

    def update(self) -> Metrics:
        """Make all epochs over one batch. If a number is not finite, weights and optimiser stay as before."""
        wanted = self.spec.batch
        batch = (
            self._buffer.take(wanted.rows) if wanted.episodes is None else self._buffer.take_episodes(wanted.episodes)
        )
        self._in_use = batch.rows
        counts, lags = self._agree(batch.rows, np.bincount(self.version - batch.flatten(batch.version)))
        about = {"lag_mean": float(np.arange(len(lags)) @ lags / lags.sum()), "lag_max": float(len(lags) - 1)}
        about |= {f"lag/share_{late}": float(share) for late, share in enumerate(lags / lags.sum())}
        found = self.engine.improve(batch, Everybody(counts, len(lags) > 1), self._coefficients())
        self.not_finite, metrics = (found, {}) if isinstance(found, str) else ("", found)
        skipped = bool(self.not_finite)
        self._skipped += batch.rows if skipped else 0
        self._trained += 0 if skipped else batch.rows
        self._in_use = 0
        if self._moments is not None:
            mean, scale = self._moments.mean, 1.0 / self._moments.deviation
            if is_finite(mean) and is_finite(scale):
                self.engine.normalise(mean, scale)
            else:  # the normaliser stays as it was
                self.not_finite = STATISTICS
        self.version += 1
        if wanted.max_lag is not None:
            self._stale += self._buffer.expire(self.version - wanted.max_lag)
        return about | metrics | {"update/skipped": float(skipped)}

    def _agree(self, rows: int, lags: NDArray) -> tuple[list[int], NDArray]:
        """Return the rows of this update in each learner, and the number of all rows by lag. Afterwards all learners
        have the same statistics, the same progress, and the assigned learning rate of the first."""
        peers = self.spec.services.peers
        if peers.count == 1:
            return [rows], lags
        returns = None if self._scale is None else self._scale.moments
        pools = [pool for pool in (self._moments, returns) if pool is not None]
        rate, done = math.nan if self._lr is None else self._lr, self._trained + self._skipped
        mine = [rows, len(lags), done, self.spec.total_steps or 0, rate, checksum(self.engine.net.vector)]
        parts = [np.array(mine), *(pool.since for pool in pools)]
        first, *others = np.split(
            gathered(peers, np.concatenate(parts)), np.cumsum([len(part) for part in parts])[:-1], 1
        )
        for pool, part in zip(pools, others, strict=True):
            pool.pool(part)
        counts, lengths, done_by_all, steps, rates, sums = first.T
        require_same(sums)
        self._agreed = done_by_all.sum() / max(1.0, steps.sum())
        self._lr = None if math.isnan(rates[0]) else float(rates[0])
        late = np.zeros(int(lengths.max()))
        late[: len(lags)] = lags
        peers.sum(late)
        return [int(count) for count in counts], late

    def snapshot(self) -> Snapshot:
        return Snapshot(self.version, self.engine.weights())

    def rows(self) -> RowCounts:
        dropped = {cause: rows for cause, rows in (("stale", self._stale), ("nan", self._skipped)) if rows}
        return RowCounts(trained=self._trained, queued=self._buffer.rows + self._in_use, dropped=dropped)

    def learned(self) -> dict[str, NDArray]:
        found = {f"{POLICY}{name}": to_numpy(value) for name, value in self.engine.weights().items()}
        if self._moments is not None:
            found[OBS_STATISTICS] = self._moments.state()
        return found if self._scale is None else found | {RETURN_STATISTICS: self._scale.moments.state()}

    def adopt(self, learned: Mapping[str, NDArray]) -> None:
        self.engine.load(under(POLICY, learned))
        if self._moments is not None:
            self._moments.restore(learned[OBS_STATISTICS])
            self.engine.normalise(self._moments.mean, 1.0 / self._moments.deviation)
        if self._scale is not None:
            self._scale.moments.restore(learned[RETURN_STATISTICS])

    def state_dict(self) -> dict[str, Array]:
        state = self.engine.state_dict()
        state["counts"] = np.array([self.version, self._trained, self._skipped, self._stale], np.int64)
        if self._lr is not None:
            state["learning_rate"] = np.array(self._lr)
        if self._moments is not None:
            state["obs_moments"] = self._moments.state()
        state |= {f"held.{name}": value for name, value in self._buffer.state().items()}
        return state if self._scale is None else state | self._scale.state()

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.engine.load_state_dict(state)
        self.version, self._trained, self._skipped, self._stale = map(int, state["counts"])
        arrays = {name: np.asarray(value) for name, value in state.items()}
        self._lr = float(arrays["learning_rate"]) if "learning_rate" in arrays else None
        device = self.spec.compute.device if self.spec.world.batched_on_device else None
        self._buffer.restore(under("held.", state), device)
        if self._moments is not None:
            self._moments.restore(arrays["obs_moments"])
        if self._scale is not None:
            self._scale.restore(arrays["return_moments"], arrays["running_return"])

    def _coefficients(self) -> Coefficients:
        config = self.config
        clip = self._faded(config.clip, config.clip_schedule)
        entropy = self._faded(config.entropy, config.entropy_schedule)
        factor = None if self._scale is None else self._scale.factor
        return Coefficients(self.learning_rate, clip, entropy, factor)

    def _faded(self, value: float, schedule: Schedule) -> float:
        total = self.spec.total_steps
        own = 0.0 if total is None else (self._trained + self._skipped) / total
        done = min(1.0, own if self._agreed is None else self._agreed)
        return value * (1.0 - done if schedule == "linear" else 1.0)


def build_engine(config: PPOConfig, spec: LearnerSpec) -> NumpyEngine | TorchEngine:
    """Build the numpy engine if it supports the network and rows come from CPU workers, else the torch engine."""
    own, first, device = own_seed(spec), generator(spec.seed, "weights"), spec.compute.device
    rng = generator(own, "learner")
    possible = supports(spec.policy, device) and not spec.world.batched_on_device
    if config.gradient == "analytic" and not possible:
        raise SetupError("ppo.gradient analytic serves plain MLPs (tanh, relu, elu) with CPU workers; use auto")
    if possible and config.gradient != "autograd":
        net = PolicyNet(spec.policy, first, device)
        if spec.start is not None:
            net.begin(spec.start.params)
        return NumpyEngine(config, net, rng, spec.services)
    policy = TensorPolicy(spec.policy, first, device, tree(own, "learner"))
    if spec.start is not None:
        policy.begin(spec.start.params)
    return TorchEngine(config, spec, policy, rng)
