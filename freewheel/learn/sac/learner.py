"""SAC: soft actor-critic over a replay buffer, its updates paced by the rows that arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from freewheel.core import Array, Chunk, Metrics, RowCounts, Snapshot
from freewheel.errors import FreewheelError, SetupError
from freewheel.learn.moments import RunningMoments
from freewheel.learn.pace import Pace
from freewheel.learn.replay import Batch, Columns, Replay
from freewheel.learn.sac.update import SACUpdate
from freewheel.learn.settings import LearnerSpec, SACConfig
from freewheel.seeding import tree

REPORT = 50  # updates between two looks at the losses: on a GPU a look is a wait
BURST = 32  # updates at most between two looks at what has arrived


class SAC:
    """Learns from rows drawn again and again. `version` counts publications. Implements core.Learner."""

    def __init__(self, config: SACConfig, task: LearnerSpec, draw: Callable[[], Batch] | None = None) -> None:
        if task.policy.head != "squashed":
            raise SetupError(
                f"{task.algo} needs a squashed head and bounded Box actions; {task.world or 'this world'} has others"
            )
        self.config, self.version = config, 0
        self._task = task
        columns = Columns(task.policy.obs_size, task.policy.action_size)
        self.replay = Replay(config.rows_kept(task), columns, task.device, tree(task.seed, "learner", "replay"))
        publish_every = config.publish_every or task.rows
        self.pace = Pace(config.ratio, config.learning_starts, publish_every)
        self._published, self._publish_every = 0, publish_every  # rows behind the present version, and behind each
        self.agent = SACUpdate(config, task, draw or self.draw, dice=[self.replay.generator])
        self._waiting: deque[Chunk[Any]] = deque()
        self._waiting_rows = self._stored = 0
        self._lags: list[tuple[int, int]] = []  # (lag, rows) since the last publication
        self._moments = RunningMoments(task.policy.obs_size, task.start) if task.policy.normalised else None

    @property
    def ready(self) -> bool:
        return self.pace.due >= 1 or self._complete

    @property
    def buffer_util(self) -> float:
        """How full the replay buffer is."""
        return self.replay.count / self.replay.capacity

    @property
    def fallback(self) -> str:
        """Why there is no graph, where one was asked for."""
        return self.agent.fallback

    @property
    def hungry(self) -> bool:
        return not self._waiting and not self.pace.behind

    def observe(self, chunk: Chunk[Any]) -> None:
        self._waiting.append(chunk)
        self._waiting_rows += chunk.rows
        self._admit()

    def update(self) -> Metrics:
        """As many updates as are due, up to a burst or the next publication."""
        count = min(self.pace.due, BURST, max(0, self.pace.called_for(self._boundary) - self.pace.updates))
        for _ in range(count):
            self.agent.step()
        self.pace.updates += count
        self._admit()
        about: dict[str, float] = {"updates": count}
        return about | self._publish() if self._complete else about

    @property
    def _boundary(self) -> int:
        return self._published + self._publish_every

    @property
    def _complete(self) -> bool:
        """The rows of the next version are there, and all updates that they call for are done."""
        return self.pace.rows >= self._boundary and self.pace.updates >= self.pace.called_for(self._boundary)

    def snapshot(self) -> Snapshot:
        """Beside a batched simulator on a GPU, the weights stay there."""
        return Snapshot(self.version, self.agent.policy.weights(on_device=self._task.batched_on_device))

    def rows(self) -> RowCounts:
        return RowCounts(trained=self._stored, queued=self._waiting_rows)

    def draw(self) -> Batch:
        return self.replay.columns.split(self.replay.sample(self.config.batch).rows)

    def state_dict(self) -> dict[str, Array]:
        pace = self.pace
        counts = np.array([self.version, self._stored, pace.rows, pace.updates, self._published], np.int64)
        state: dict[str, Array] = {"counts": counts}
        state |= {f"replay.{name}": value for name, value in self.replay.state_dict().items()}
        state |= {f"agent.{name}": value for name, value in self.agent.state_dict().items()}
        return state if self._moments is None else state | {"obs_moments": self._moments.state()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.version, self._stored, self.pace.rows, self.pace.updates, self._published = (
            int(count) for count in state["counts"]
        )
        self.replay.load_state_dict(_under("replay.", state))
        self.agent.load_state_dict(_under("agent.", state))
        if self._moments is not None:
            self._moments.restore(np.asarray(state["obs_moments"]))

    def _admit(self) -> None:
        """Store what waits, unless updates are too far behind the rows that are there."""
        while self._waiting and not self.pace.behind:
            chunk = self._waiting.popleft()
            rows = self.replay.columns.pack(chunk.data, self._task.device, has_final_obs=self._task.has_final_obs)
            if len(rows) != chunk.rows:
                raise FreewheelError(f"a chunk says {chunk.rows} rows and holds {len(rows)}: please report this")
            self.replay.add(rows)
            self._waiting_rows -= chunk.rows
            self._stored += chunk.rows
            self.pace.rows += chunk.rows
            self._lags.append((self.version - chunk.version, chunk.rows))
            if self._moments is not None:
                self._moments.add(rows[:, : self._task.policy.obs_size].cpu().numpy())

    def _publish(self) -> dict[str, float]:
        self.version += 1
        self._published = self._boundary
        about = self.agent.losses() if self.agent.unread >= REPORT else {}
        if not all(np.isfinite(value) for value in about.values()):
            raise FreewheelError(f"{self._task.algo} has diverged ({about}): lower its lr, or set critic_norm")
        if self._moments is not None:
            self.agent.policy.normalise(self._moments.mean, 1.0 / self._moments.deviation)
        if self._lags:
            about["lag_mean"] = sum(lag * rows for lag, rows in self._lags) / sum(rows for _, rows in self._lags)
            about["lag_max"] = float(max(lag for lag, _ in self._lags))
            self._lags.clear()
        return about | {
            "loss/updates_per_row": self.pace.achieved,
            "buffer_util": self.replay.count / self.replay.capacity,
        }


def _under(prefix: str, state: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
