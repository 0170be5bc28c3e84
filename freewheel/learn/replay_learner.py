"""The learner over a replay buffer: the rows that arrive set the pace of its updates. The gradient step is the algorithm's."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from freewheel.core import (
    AdjustableLearner,
    Array,
    Chunk,
    Metrics,
    NDArray,
    RowBuffer,
    RowCounts,
    Snapshot,
    Transitions,
)
from freewheel.errors import FreewheelError
from freewheel.learn.chunks import from_arrays, to_arrays, under
from freewheel.learn.finite import STATISTICS, WEIGHTS, LastGood, first_not_finite, is_finite
from freewheel.learn.moments import RunningMoments
from freewheel.learn.n_step import Successors
from freewheel.learn.priority import Uniform
from freewheel.learn.replay import Columns, Minibatch, Replay
from freewheel.learn.spec import LearnerSpec, ReplayConfig
from freewheel.policies.nets import TensorPolicy
from freewheel.seeding import tree

REPORT = 50  # updates between two looks at the losses: on a GPU a look is a wait
NO_METRICS: Metrics = types.MappingProxyType({})
BURST = 32  # updates at most between two looks at what has arrived, by default


class Pace:
    """Counts rows and updates. Updates never run ahead of `ratio` a row, and rows are not taken while updates are more than
    `slack` rows' worth behind: they wait with the learner, uncounted, and so do the workers that wrote them."""

    def __init__(self, ratio: float, starts: int, slack: int) -> None:
        self.ratio, self.starts, self.slack = ratio, starts, slack
        self.rows = self.updates = 0

    def updates_for(self, rows: int) -> int:
        """Updates that this many rows require; none while they are fewer than learning starts with."""
        return int(self.ratio * max(0, rows - self.starts) + 1e-9)

    @property
    def due(self) -> int:
        """Updates that the rows taken so far still require."""
        return self.updates_for(self.rows) - self.updates

    @property
    def behind(self) -> bool:
        """Too far behind to take more rows."""
        return self.due > self.ratio * self.slack

    @property
    def achieved(self) -> float:
        """Updates per row since learning began."""
        return self.updates / max(1, self.rows - self.starts)


class Update(Protocol):
    """The gradient step of an algorithm with a replay buffer."""

    policy: TensorPolicy
    unread: int  # steps since `losses` was last called

    @property
    def fallback(self) -> str: ...  # why there is no CUDA graph where one was requested
    def step(self) -> None: ...  # draw a batch and learn from it
    def losses(self) -> dict[str, float]: ...  # means since the last call
    def state_dict(self) -> dict[str, Array]: ...
    def load_state_dict(self, state: Mapping[str, Array]) -> None: ...


class ReplayLearner:
    """Learns from rows of a replay buffer. `version` counts publications. Implements core.Learner, core.GraphedLearner,
    core.BufferedLearner, core.SkippingLearner and pacing.control.BurstLearner: if weights are not finite when they are to be
    published, the last good ones are put back."""

    remedy = "lower its lr, or scale rewards"

    def __init__(
        self,
        config: ReplayConfig,
        spec: LearnerSpec,
        make_update: Callable[[Callable[[], Minibatch]], Update],
        *,
        priority: Uniform | None = None,
        successors: Successors | None = None,
    ) -> None:
        policy, device = spec.policy, spec.compute.device
        self.config: ReplayConfig = config
        self.spec, self.version = spec, 0
        self.replay = Replay(
            config.rows_kept(spec),
            Columns(policy.obs_size, policy.action_columns),
            device,
            tree(spec.seed, "learner", "replay"),
            priority=priority,
            successors=successors,
        )
        self._publish_every = config.publish_every or spec.batch.rows
        self._published = 0  # rows behind the present version
        self.pace = Pace(config.ratio, config.learning_starts, self._publish_every)
        self.updater = make_update(self.draw)
        self.burst = BURST
        self._waiting: deque[Chunk[Any]] = deque()
        self._waiting_rows = self._stored = 0
        self.not_finite = self._put_back = ""  # of the last publication; since then
        self._good: LastGood | None = None  # None: nothing was updated yet
        self._checked = 0  # updates when weights were last looked at
        self._lags: list[tuple[int, int]] = []  # (lag, rows) since the last publication
        self._moments = RunningMoments[NDArray](policy.obs_size, spec.start) if policy.normalised else None

    @property
    def ready(self) -> bool:
        return self.pace.due >= 1 or self._complete

    @property
    def fallback(self) -> str:
        return self.updater.fallback

    @property
    def buffer_util(self) -> float:
        """The part of the replay buffer that is filled."""
        return self.replay.count / self.replay.capacity

    @property
    def hungry(self) -> bool:
        return not self._waiting and not self.pace.behind

    def observe(self, chunk: Chunk[Any]) -> None:
        self._waiting.append(chunk)
        self._waiting_rows += chunk.rows
        self._admit()

    def update(self) -> Metrics:
        """As many updates as are due, up to a burst or the next publication."""
        count = min(self.pace.due, self.burst, max(0, self.pace.updates_for(self._boundary) - self.pace.updates))
        if self._good is None:
            self._good = LastGood(self.updater.state_dict())
        for _ in range(count):
            self.updater.step()
            self.pace.updates += 1
            self.spec.services.between_steps()
        self._admit()
        about: dict[str, float] = {"updates": count}
        return about | self._publish() if self._complete else about

    @property
    def _boundary(self) -> int:
        return self._published + self._publish_every

    @property
    def _complete(self) -> bool:
        """The rows of the next version are here, and all updates that they require are done."""
        return self.pace.rows >= self._boundary and self.pace.updates >= self.pace.updates_for(self._boundary)

    def snapshot(self) -> Snapshot:
        """The weights stay on the GPU for a batched simulator there."""
        self._keep_finite()
        return Snapshot(self.version, self.updater.policy.weights(on_device=self.spec.world.batched_on_device))

    def rows(self) -> RowCounts:
        return RowCounts(trained=self._stored, queued=self._waiting_rows)

    def draw(self) -> Minibatch:
        return self.replay.draw(self.config.batch).minibatch(self.replay.columns, self.config.gamma)

    def buffers(self) -> Mapping[str, RowBuffer]:
        return {"replay": self.replay}

    def state_dict(self) -> dict[str, Array]:
        self._keep_finite()
        pace = self.pace
        counts = np.array([self.version, self._stored, pace.rows, pace.updates, self._published], np.int64)
        state: dict[str, Array] = {"counts": counts}
        state |= {f"replay.{name}": value for name, value in self.replay.state_dict().items()}
        state |= {f"update.{name}": value for name, value in self.updater.state_dict().items()}
        state |= {f"waiting.{name}": value for name, value in to_arrays(self._waiting).items()}
        state["lags"] = np.array(self._lags, np.int64).reshape(-1, 2)
        return state if self._moments is None else state | {"obs_moments": self._moments.state()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.version, self._stored, self.pace.rows, self.pace.updates, self._published = map(int, state["counts"])
        self.replay.load_state_dict(under("replay.", state))
        self.updater.load_state_dict(under("update.", state))
        device = self.spec.compute.device if self.spec.world.batched_on_device else None
        self._waiting = deque(from_arrays(under("waiting.", state), device))
        self._waiting_rows = sum(chunk.rows for chunk in self._waiting)
        self._lags = [(int(lag), int(rows)) for lag, rows in np.asarray(state["lags"])]
        if self._moments is not None:
            self._moments.restore(np.asarray(state["obs_moments"]))

    def _admit(self) -> None:
        """Store what waits, unless updates are too far behind the rows that are stored."""
        while self._waiting and not self.pace.behind:
            chunk = self._waiting.popleft()
            rows = self._packed(chunk.data)
            if len(rows) != chunk.rows:
                raise FreewheelError(f"a chunk of {chunk.rows} rows holds {len(rows)}: please report this")
            self.replay.add(rows)
            self.replay.follow(chunk.data, chunk.origin.lane0, rows)
            self._waiting_rows -= chunk.rows
            self._stored += chunk.rows
            self.pace.rows += chunk.rows
            self._lags.append((self.version - chunk.version, chunk.rows))
            if self._moments is not None:
                self._moments.add(rows[:, : self.spec.policy.obs_size].cpu().numpy())

    def _packed(self, data: Transitions[Any]) -> Tensor:
        world, device = self.spec.world, self.spec.compute.device
        return self.replay.columns.pack(data, device, has_final_obs=world.has_final_obs)

    def _publish(self) -> dict[str, float]:
        self.version += 1
        self._published = self._boundary
        about = self.updater.losses() if self.updater.unread >= REPORT else {}
        self._keep_finite(about)
        self.not_finite, self._put_back = self._put_back, ""
        about = {} if self.not_finite else about
        if self._moments is not None:
            mean, scale = self._moments.mean, 1.0 / self._moments.deviation
            if is_finite(mean) and is_finite(scale):
                self.updater.policy.normalise(mean, scale)
            else:  # the network reads observations as before
                self.not_finite = STATISTICS
        if self._lags:
            about["replay/lag_mean"] = sum(lag * rows for lag, rows in self._lags) / sum(rows for _, rows in self._lags)
            about["replay/lag_max"] = float(max(lag for lag, _ in self._lags))
            self._lags.clear()
        about["replay/drawn"] = self.pace.updates * self.config.batch
        return about | {"replay/updates_per_row": self.pace.achieved, "update/skipped": float(bool(self.not_finite))}

    def _keep_finite(self, losses: Metrics = NO_METRICS) -> None:
        """Before weights leave: put the last good state back if these losses or the policy are not finite. Now and then all that
        is trained is looked at, and remembered if it is good."""
        updater, steps, good = self.updater, self.pace.updates, self._good
        if good is None or steps == self._checked:
            return
        self._checked = steps
        broken = first_not_finite(losses) or ("" if is_finite(updater.policy.net.vector) else WEIGHTS)
        if not broken and good.is_old(steps):
            broken = good.renew(updater.state_dict(), steps)
        if broken:
            self._put_back = first_not_finite({**losses, **updater.losses()}) or broken
            learner: object = self
            rate = learner.learning_rate if isinstance(learner, AdjustableLearner) else 0.0
            updater.load_state_dict(good.state)
            updater.losses()  # those of the state are told already
            if isinstance(learner, AdjustableLearner):
                learner.learning_rate = rate  # a hook may have changed it since
