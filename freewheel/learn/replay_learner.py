"""The base of learners with a replay buffer. Rows set the pace of updates; the algorithm supplies the gradient step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from freewheel.core import Array, Chunk, Learner, Metrics, RowBuffer, RowCounts, Snapshot, Transitions
from freewheel.errors import FreewheelError, UsageError
from freewheel.learn.chunks import from_arrays, to_arrays, under
from freewheel.learn.data_parallel import checksum, gathered, own_seed, require_same, share
from freewheel.learn.finite import STATISTICS, KeptFinite, Trained
from freewheel.learn.moments import StoredMoments
from freewheel.learn.replay.buffer import ReplayBuffer
from freewheel.learn.replay.n_step import Successors
from freewheel.learn.replay.priority import Uniform
from freewheel.learn.replay.rows import Columns, ReplayMinibatch
from freewheel.learn.spec import LearnerSpec, ReplayConfig
from freewheel.learn.update_ratio import UpdateRatio
from freewheel.seeding import tree

REPORT = 50  # updates between two reads of the losses: on a GPU each read is a wait
BURST = 32  # most updates between two checks for new chunks, by default


class Update(Trained, Protocol):
    """The gradient step of an algorithm with a replay buffer."""

    unread: int  # steps since `losses` was last called

    @property
    def fallback(self) -> str: ...  # why there is no CUDA graph where one was requested
    def step(self) -> None: ...  # draw a batch and learn from it


class ReplayLearner(Learner):
    """Learns from rows of a replay buffer. `version` counts publications. If weights are not finite before a
    publication, the learner puts the last good ones back."""

    not_finite: str = ""  # in the last publication
    remedy = "lower its lr, or scale rewards"

    def __init__(
        self,
        config: ReplayConfig,
        spec: LearnerSpec,
        make_update: Callable[[Callable[[], ReplayMinibatch]], Update],
        *,
        priority: Uniform | None = None,
        successors: Successors | None = None,
    ) -> None:
        policy, device, peers = spec.policy, spec.compute.device, spec.services.peers
        self.config: ReplayConfig = config
        self.batch = share(config.batch, peers)  # rows of an update that this learner draws
        if not self.batch:
            raise UsageError(f"{config.name}.batch {config.batch} cannot be divided among {peers.count} learners")
        self._peers, count = peers, peers.count
        self.spec, self.version = spec, 0
        self.replay = ReplayBuffer(
            config.rows_kept(spec),
            Columns(policy.obs_size, policy.action_columns),
            device,
            tree(own_seed(spec), "learner", "replay"),
            priority=priority,
            successors=successors,
        )
        self._publish_every = -(-config.publish_every // count) if config.publish_every else spec.batch.rows
        self._published = 0  # rows up to the present version
        self.pace = UpdateRatio(config.ratio * count, -(-config.learning_starts // count), self._publish_every)
        self.updater = make_update(self.draw)
        self.burst = BURST
        self._waiting: deque[Chunk[Any]] = deque()
        self._waiting_rows = self._stored = 0
        on_gpu = torch.device(device).type == "cuda" and spec.world.batched_on_device
        self.finite = KeptFinite(self.updater, self._put_back, asks=on_gpu and count == 1)
        self._lags: list[tuple[int, int]] = []  # (lag, rows) since the last publication
        self._moments: StoredMoments | None = None  # of observations
        if policy.normalised:
            self._moments = StoredMoments(policy.obs_size, spec.start, shared=count > 1)

    @property
    def ready(self) -> bool:
        return self.pace.due >= 1 or self._complete(self.pace.rows)

    @property
    def fallback(self) -> str:
        return self.updater.fallback

    @property
    def buffer_util(self) -> float:
        """The filled share of the replay buffer."""
        return self.replay.count / self.replay.capacity

    @property
    def hungry(self) -> bool:
        return not self._waiting and not self.pace.behind

    def observe(self, chunk: Chunk[Any]) -> None:
        self._waiting.append(chunk)
        self._waiting_rows += chunk.rows
        self._admit()

    def update(self) -> Metrics:
        """Make the updates that are due, up to a burst or the next publication. Learners that train together meet here.
        The one with the fewest due updates sets the pace, because each draws its share of a batch from its own rows."""
        count = min(self.pace.due, self.burst, max(0, self.pace.updates_for(self._boundary) - self.pace.updates))
        alone, services, least = self._peers.count == 1, self.spec.services, self.pace.rows
        if not alone:
            count, least = self._agree(count)
        if count:
            if not self.pace.updates:
                self.before_updates()
            self.finite.begin()
        for _ in range(count):
            self.updater.step()
            self.pace.updates += 1
            if alone:
                services.between_steps()
            else:  # no interruption: the other learners wait in the next step
                services.report()
        self._admit()
        about: dict[str, float] = {"updates": count}
        return about | self._publish() if self._complete(self.pace.rows if alone else least) else about

    def before_updates(self) -> None:
        """Prepare the first update, when all learners have the rows that learning starts with. It must read normalised
        observations like later updates do, even before the first publication."""
        if self._moments is not None and not self._published:
            self._normalise_stored()

    def _normalise_stored(self) -> None:
        """Normalise observations by the statistics of the rows that all learners have stored so far."""
        if self._moments is not None:
            self._moments.follow(self.replay, self.pace.rows)
            self._moments.pool(gathered(self._peers, self._moments.since))
            self._normalise()

    def _agree(self, count: int) -> tuple[int, int]:
        """Return how many updates all learners can make now, and the fewest rows that any of them has. All learners
        adopt the learning rate of the first one and the longest publication interval."""
        rate = self.learning_rate
        mine = [count, self.pace.rows, self._publish_every, rate]
        counts, rows, every, rates = gathered(self._peers, np.array(mine)).T
        self._publish_every = self.pace.slack = int(every.max())
        if not math.isnan(rate) and rates[0] != rate:
            self.learning_rate = float(rates[0])
        return int(counts.min()), int(rows.min())

    @property
    def _boundary(self) -> int:
        return self._published + self._publish_every

    def _complete(self, rows: int) -> bool:
        """Return whether the rows of the next version are here and the updates that they require are done."""
        return rows >= self._boundary and self.pace.updates >= self.pace.updates_for(self._boundary)

    def snapshot(self) -> Snapshot:
        """Return the weights. They stay on the GPU for a batched simulator there."""
        policy = self.updater.policy
        if self.finite.asks:
            return Snapshot(self.version, policy.named(self.finite.on_device(self.pace.updates)))
        self._keep_finite()
        return Snapshot(self.version, policy.weights(on_device=self.spec.world.batched_on_device))

    def rows(self) -> RowCounts:
        return RowCounts(trained=self._stored, queued=self._waiting_rows)

    def draw(self) -> ReplayMinibatch:
        return self.replay.draw(self.batch).minibatch(self.replay.columns, self.config.gamma)

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
        if self._moments is not None:
            state |= {"obs_moments": self._moments.state(), "obs_measured": np.array(self._moments.measured)}
        return state

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
            self._moments.measured = int(state.get("obs_measured", self.pace.rows))

    def _admit(self) -> None:
        """Store waiting chunks until updates are too far behind the stored rows."""
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

    def _packed(self, data: Transitions[Any]) -> Tensor:
        world, device = self.spec.world, self.spec.compute.device
        return self.replay.columns.pack(data, device, has_final_obs=world.has_final_obs)

    def _publish(self) -> dict[str, float]:
        self.version += 1
        self._published = self._boundary
        about = self.updater.losses() if self.updater.unread >= REPORT else {}
        self.finite.look(self.pace.updates, about, wait=False)
        self.not_finite = self.finite.told()
        about = {} if self.not_finite else about
        late, rows, latest, stored = self._pool_statistics()
        self._normalise()
        if rows:
            about |= {"replay/lag_mean": late / rows, "replay/lag_max": latest}
        about["replay/drawn"] = self.pace.updates * self.config.batch
        about["replay/updates_per_row"] = self.pace.achieved(stored, self._peers.count)
        return about | {"update/skipped": float(bool(self.not_finite))}

    def _normalise(self) -> None:
        put_back = bool(self.not_finite)  # the restored policy has old statistics
        if self._moments is not None and not self._moments.write_to(self.updater.policy, self.pace.rows, now=put_back):
            self.not_finite = STATISTICS  # the normaliser stays as it was

    def _pool_statistics(self) -> tuple[float, ...]:
        """Return, over all learners: the sum of lags, the number of rows and the greatest lag since the last
        publication, and the number of all stored rows. Afterwards all learners have the same observation statistics."""
        late, rows = sum(lag * rows for lag, rows in self._lags), sum(rows for _, rows in self._lags)
        mine = (float(late), float(rows), float(max((lag for lag, _ in self._lags), default=0)), float(self.pace.rows))
        self._lags.clear()
        if self._moments is not None:
            self._moments.follow(self.replay, self.pace.rows)
        if self._peers.count == 1:
            return mine
        since = np.zeros(0) if self._moments is None else self._moments.since
        table = gathered(self._peers, np.concatenate([mine, [checksum(self.updater.policy.net.vector)], since]))
        require_same(table[:, 4])
        if self._moments is not None:
            self._moments.pool(table[:, 5:])
        late, rows, _, stored = table[:, :4].sum(0).tolist()
        return late, rows, float(table[:, 2].max()), stored

    def _keep_finite(self) -> None:
        """Restore the last good state if necessary, before weights leave. Several learners do so only to publish."""
        if self._peers.count == 1:
            self.finite.look(self.pace.updates)

    def _put_back(self, state: Mapping[str, Array]) -> None:
        rate = self.learning_rate
        self.updater.load_state_dict(state)
        if not math.isnan(rate):
            self.learning_rate = rate  # a hook may have changed it since
