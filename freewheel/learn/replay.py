"""Replay buffer: a preallocated ring of packed rows, on the CPU or on a GPU, sampled uniformly by a generator of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from freewheel.core import Array, NDArray, Transitions, to_numpy
from freewheel.errors import SetupError

SHARE = 0.8  # of the free memory: the most that one buffer may take


class Batch(NamedTuple):
    """The parts of packed rows [..., width], in this order, float32."""

    obs: Tensor  # [..., D]
    action: Tensor  # [..., A]; a discrete one is its number, A = 1
    reward: Tensor  # [...]
    terminated: Tensor  # [...]
    has_successor: Tensor  # [...] 1 where next_obs is the true successor; where 0, next_obs means nothing
    next_obs: Tensor  # [..., D]


class Minibatch(NamedTuple):
    """What one gradient step learns from: the target of a row is reward + discount × the value of next_obs."""

    obs: Tensor  # [N, D]
    action: Tensor  # [N, A]
    reward: Tensor  # [N]
    discount: Tensor  # [N] what the future counts; 0 where the episode terminated
    next_obs: Tensor  # [N, D]
    weight: Tensor | None = None  # [N] of each row in the critics' loss, 1 on average; None: all are 1

    @classmethod
    def of(cls, rows: Batch, gamma: float) -> Minibatch:
        """Of rows as they were stored."""
        discount = torch.rsub(rows.terminated, gamma, alpha=gamma)  # gamma × (1 - terminated)
        return cls(rows.obs, rows.action, rows.reward, discount, rows.next_obs)


def pack(
    obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, has_successor: Tensor, next_obs: Tensor
) -> Tensor:
    """Rows [..., width]; the scalars come as [...], of any type, and so do discrete actions."""
    action = action if action.dim() == obs.dim() else action[..., None]
    scalars = torch.stack([part.float() for part in (reward, terminated, has_successor)], dim=-1)
    return torch.cat([obs.float(), action.float(), scalars, next_obs.float()], dim=-1)


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
    """The newest rows that fit. Rows are added under a version, and expire by it. Implements core.RowBuffer."""

    def __init__(self, capacity: int, columns: Columns, device: str, seed: int) -> None:
        self.capacity, self.columns = capacity, columns
        require_room(self.bytes, device, f"a replay buffer of {capacity:,} rows")
        self._rows = torch.zeros(capacity, columns.width, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.added = self.count = 0  # rows ever, rows stored now
        self._versions: deque[tuple[int, int]] = deque()  # (version, `added` after its last row)
        self._span = torch.zeros(2, dtype=torch.int64, device=device)  # first row and count, where graphs read them
        self.before_overwriting: Callable[[int], None] | None = None

    @property
    def bytes(self) -> int:
        return self.capacity * self.columns.width * 4

    def add(self, rows: Tensor, version: int = 0) -> None:
        """Copy rows [n, width] in; they can be drawn as soon as all of them are stored."""
        if self.before_overwriting is not None:
            self.before_overwriting(self.added + len(rows) - self.capacity)
        self.added += max(0, len(rows) - self.capacity)
        rows = rows[-self.capacity :]
        self._put(self.added, rows)
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
        return self._stored(self.added - count, self.added)

    @property
    def row_bytes(self) -> int:
        return self.columns.width * 4

    @property
    def shared(self) -> bool:
        """Memory of a GPU is read in the order of the learner's own work."""
        return self._rows.device.type == "cpu"

    def read(self, first: int, end: int) -> NDArray:
        return to_numpy(self._stored(first, end))

    def write(self, first: int, rows: NDArray) -> None:
        """Rows that no longer fit are left out: the capacity may have become smaller."""
        left_out = max(0, self.added - self.count - first)
        self._put(first + left_out, torch.as_tensor(rows[left_out:]).to(self._rows.device))

    def state_dict(self) -> dict[str, Array]:
        """Without the rows: see core.BufferedLearner."""
        return {
            "counts": np.array([self.added, self.count], np.int64),
            "versions": np.array(self._versions, np.int64).reshape(-1, 2),
            "rng": self.generator.get_state().numpy(),
        }

    def load_state_dict(self, state: dict[str, Array]) -> None:
        """The rows have to be written after this."""
        self.added, count = map(int, state["counts"])
        self.count = min(count, self.capacity)
        self._versions = deque((int(version), int(end)) for version, end in state["versions"])
        self.generator.set_state(torch.as_tensor(state["rng"]))
        self._publish()

    def _put(self, first: int, rows: Tensor) -> None:
        """Store rows by their numbers, from `first` on."""
        at = first % self.capacity
        before_wrap = min(len(rows), self.capacity - at)
        self._rows[at : at + before_wrap] = rows[:before_wrap]
        self._rows[: len(rows) - before_wrap] = rows[before_wrap:]

    def _stored(self, first: int, end: int) -> Tensor:
        """A copy of rows by their numbers."""
        at = first % self.capacity
        before_wrap = min(end - first, self.capacity - at)
        return torch.cat([self._rows[at : at + before_wrap], self._rows[: end - first - before_wrap]])

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
