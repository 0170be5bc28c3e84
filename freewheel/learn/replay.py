"""The replay buffer, a preallocated ring of packed rows on the CPU or on a GPU, and the learner over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil
import torch
from torch import Tensor

from freewheel.core import Array, Chunk, Metrics, NDArray, RowCounts, Snapshot, Transitions
from freewheel.errors import FreewheelError, SetupError
from freewheel.learn.moments import RunningMoments
from freewheel.learn.spec import LearnerSpec, ReplayConfig
from freewheel.policies.nets import TensorPolicy
from freewheel.seeding import tree

SHARE = 0.8  # of the free memory: the most that one buffer may take


class Batch(NamedTuple):
    """The parts of packed rows [..., width], in this order, float32."""

    obs: Tensor  # [..., D]
    action: Tensor  # [..., A]
    reward: Tensor  # [...]
    terminated: Tensor  # [...]
    has_successor: Tensor  # [...] 1 where next_obs is the true successor; where 0, next_obs means nothing
    next_obs: Tensor  # [..., D]


def pack(
    obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, has_successor: Tensor, next_obs: Tensor
) -> Tensor:
    """Rows [..., width]; the scalars come as [...], of any type."""
    scalars = torch.stack([part.float() for part in (reward, terminated, has_successor)], dim=-1)
    return torch.cat([obs.float(), action, scalars, next_obs.float()], dim=-1)


@dataclass(frozen=True)
class Columns:
    """Where the parts of a packed row stand: drawing a row is one gather."""

    obs_size: int  # D
    action_size: int  # A

    @property
    def width(self) -> int:
        return 2 * self.obs_size + self.action_size + 3

    def split(self, rows: Tensor) -> Batch:
        """Packed rows as named views."""
        sizes = [self.obs_size, self.action_size, 1, 1, 1, self.obs_size]
        obs, action, reward, terminated, has_successor, next_obs = rows.split(sizes, dim=-1)
        return Batch(obs, action, reward.squeeze(-1), terminated.squeeze(-1), has_successor.squeeze(-1), next_obs)

    def pack(self, data: Transitions[Any], device: torch.device | str, *, has_final_obs: bool = True) -> Tensor:
        """The valid rows [n, width] of [T, B] transitions. has_final_obs: the successor of an episode's last row is known."""
        parts: Any = Transitions(*(torch.as_tensor(getattr(data, part.name)) for part in fields(Transitions)))
        known = torch.ones_like(parts.reward) if has_final_obs else ~(parts.terminated | parts.truncated)
        rows = pack(parts.obs, parts.action, parts.reward, parts.terminated, known, parts.next_obs).flatten(0, 1)
        if isinstance(data.obs, np.ndarray) and not data.valid.all():
            rows = rows[
                parts.valid.flatten()
            ]  # a batched simulator has no gaps: to look for them would wait for the device
        return rows.to(device, non_blocking=True)


class Replay:
    """The newest rows that fit. Rows are added under a version, and expire by it."""

    def __init__(self, capacity: int, columns: Columns, device: str, seed: int) -> None:
        self.capacity, self.columns = capacity, columns
        require_room(self.bytes, device, f"a replay buffer of {capacity:,} rows")
        self._rows = torch.zeros(capacity, columns.width, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.added = self.count = 0  # rows ever, rows stored now
        self._versions: deque[tuple[int, int]] = deque()  # (version, `added` after its last row)
        self._span = torch.zeros(2, dtype=torch.int64, device=device)  # first row and count, where graphs read them

    @property
    def bytes(self) -> int:
        return self.capacity * self.columns.width * 4

    def add(self, rows: Tensor, version: int = 0) -> None:
        """Copy rows [n, width] in; they can be drawn as soon as all of them are stored."""
        self.added += max(0, len(rows) - self.capacity)
        rows = rows[-self.capacity :]
        at = self.added % self.capacity
        first = min(len(rows), self.capacity - at)
        self._rows[at : at + first] = rows[:first]
        self._rows[: len(rows) - first] = rows[first:]
        self.added += len(rows)
        self.count = min(self.capacity, self.count + len(rows))
        if self._versions and self._versions[-1][0] == version:
            self._versions.pop()
        self._versions.append((version, self.added))
        self._publish()

    def expire(self, oldest: int) -> int:
        """Remove rows of versions before this one; returns how many."""
        begin = self.added - self.count
        while self._versions and self._versions[0][0] < oldest:
            begin = max(begin, self._versions.popleft()[1])
        expired = self.count - (self.added - begin)
        self.count -= expired
        self._publish()
        return expired

    def sample(self, count: int) -> Tensor:
        """Rows [count, width], uniform, with replacement; nothing here waits for the device."""
        draw = torch.rand(count, dtype=torch.float64, device=self._rows.device, generator=self.generator)
        index = ((draw * self._span[1]).long() + self._span[0]) % self.capacity
        return self._rows.index_select(0, index)

    def newest(self, count: int) -> Tensor:
        """The last `count` rows added, in order."""
        at = (self.added - count) % self.capacity
        first = min(count, self.capacity - at)
        return torch.cat([self._rows[at : at + first], self._rows[: count - first]])

    def state_dict(self) -> dict[str, Array]:
        return {
            "rows": self.newest(self.count).cpu().numpy(),
            "counts": np.array([self.added, self.count], np.int64),
            "versions": np.array(self._versions, np.int64).reshape(-1, 2),
            "rng": self.generator.get_state().numpy(),
        }

    def load_state_dict(self, state: dict[str, Array]) -> None:
        added, count = map(int, state["counts"])
        self.added, self.count = added - count, 0
        self.add(torch.as_tensor(state["rows"]).to(self._rows.device))
        self._versions = deque((int(version), int(end)) for version, end in state["versions"])
        self.generator.set_state(torch.as_tensor(state["rng"]))

    def _publish(self) -> None:
        self._span[0].fill_((self.added - self.count) % self.capacity)
        self._span[1].fill_(self.count)


def require_room(size: int, device: str, what: str) -> None:
    """Refuse what does not fit, before memory is allocated."""
    on_gpu = torch.device(device).type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    if size > SHARE * free:
        needs = f"{size / 2**30:.1f} GB of {'GPU ' if on_gpu else ''}memory"
        raise SetupError(f"{what} takes {needs} and {free / 2**30:.1f} GB are free; set a smaller buffer")


REPORT = 50  # updates between two looks at the losses: on a GPU a look is a wait
BURST = 32  # updates at most between two looks at what has arrived


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
    """Learns from rows of a replay buffer. `version` counts publications. Implements core.Learner and core.GraphedLearner."""

    def __init__(
        self, config: ReplayConfig, spec: LearnerSpec, make_update: Callable[[Callable[[], Batch]], Update]
    ) -> None:
        policy, device = spec.policy, spec.compute.device
        self.config: ReplayConfig = config
        self.spec, self.version = spec, 0
        columns = Columns(policy.obs_size, policy.action_size)
        self.replay = Replay(config.rows_kept(spec), columns, device, tree(spec.seed, "learner", "replay"))
        self._publish_every = config.publish_every or spec.batch.rows
        self._published = 0  # rows behind the present version
        self.pace = Pace(config.ratio, config.learning_starts, self._publish_every)
        self.updater = make_update(self.draw)
        self._waiting: deque[Chunk[Any]] = deque()
        self._waiting_rows = self._stored = 0
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
        count = min(self.pace.due, BURST, max(0, self.pace.updates_for(self._boundary) - self.pace.updates))
        for _ in range(count):
            self.updater.step()
        self.pace.updates += count
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
        return Snapshot(self.version, self.updater.policy.weights(on_device=self.spec.world.batched_on_device))

    def rows(self) -> RowCounts:
        return RowCounts(trained=self._stored, queued=self._waiting_rows)

    def draw(self) -> Batch:
        return self.replay.columns.split(self.replay.sample(self.config.batch))

    def state_dict(self) -> dict[str, Array]:
        pace = self.pace
        counts = np.array([self.version, self._stored, pace.rows, pace.updates, self._published], np.int64)
        state: dict[str, Array] = {"counts": counts}
        state |= {f"replay.{name}": value for name, value in self.replay.state_dict().items()}
        state |= {f"update.{name}": value for name, value in self.updater.state_dict().items()}
        return state if self._moments is None else state | {"obs_moments": self._moments.state()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.version, self._stored, self.pace.rows, self.pace.updates, self._published = map(int, state["counts"])
        self.replay.load_state_dict(under("replay.", state))
        self.updater.load_state_dict(under("update.", state))
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
        if not all(np.isfinite(value) for value in about.values()):
            raise FreewheelError(f"{self.config.name} has diverged ({about}): lower its lr")
        if self._moments is not None:
            self.updater.policy.normalise(self._moments.mean, 1.0 / self._moments.deviation)
        if self._lags:
            about["lag_mean"] = sum(lag * rows for lag, rows in self._lags) / sum(rows for _, rows in self._lags)
            about["lag_max"] = float(max(lag for lag, _ in self._lags))
            self._lags.clear()
        return about | {"replay/updates_per_row": self.pace.achieved}


def under(prefix: str, state: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
