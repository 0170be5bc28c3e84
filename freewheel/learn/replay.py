"""Replay: a preallocated ring of rows, on the CPU or on a GPU, sampled uniformly by a generator of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from freewheel.core import Array, Transitions
from freewheel.errors import SetupError

SHARE = 0.8  # of the free memory that one buffer may take


@dataclass(frozen=True)
class Columns:
    """Where the parts of a packed row stand: one row is one gather, whatever it holds."""

    obs_size: int  # D
    action_size: int  # A

    @property
    def width(self) -> int:
        return 2 * self.obs_size + self.action_size + 3

    def split(self, rows: Tensor) -> Batch:
        sizes = [self.obs_size, self.action_size, 1, 1, 1, self.obs_size]
        obs, action, reward, terminated, known, next_obs = rows.split(sizes, dim=-1)
        return Batch(obs, action, reward.squeeze(-1), terminated.squeeze(-1), known.squeeze(-1), next_obs)

    def pack(self, data: Transitions[Any], device: torch.device | str, *, has_final_obs: bool = True) -> Tensor:
        """The valid rows [n, width] of [T, B] transitions. has_final_obs: the successor of an episode's last row is known."""
        numpy = isinstance(data.obs, np.ndarray)
        obs, action, reward, terminated, truncated, next_obs, valid = map(torch.as_tensor, _fields(data))
        known = torch.ones_like(reward) if has_final_obs else (~(terminated | truncated)).float()
        parts = (obs.float(), action, _column(reward), _column(terminated), _column(known), next_obs.float())
        rows = torch.cat(parts, dim=-1).flatten(0, 1)
        if numpy and not bool(valid.all()):  # device worlds have no gaps, and a look would be a wait
            rows = rows[valid.flatten()]
        return rows.to(device, non_blocking=True)


class Batch(NamedTuple):
    """Rows by part, [N, ...] float32."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    terminated: Tensor
    known: Tensor  # whether next_obs is the true successor
    next_obs: Tensor


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows drawn, where they stand, and what each counts."""

    rows: Tensor  # [n, width]
    index: Tensor  # [n]
    weight: Tensor  # [n]: 1 while sampling is uniform


class Replay:
    """The newest rows that fit. Rows may be added by version, and expire by it."""

    def __init__(self, capacity: int, columns: Columns, device: str, seed: int) -> None:
        self.capacity, self.columns = capacity, columns
        require_room(self.bytes, device, f"a replay buffer of {capacity:,} rows")
        self._rows = torch.zeros(capacity, columns.width, device=device)
        self.generator = torch.Generator(device)
        self.generator.manual_seed(seed)
        self.added = self.count = 0  # rows ever, rows there now
        self._versions: deque[tuple[int, int]] = deque()  # (version, `added` after its last row)
        self._span = torch.zeros(
            2, dtype=torch.int64, device=device
        )  # first row and count, where a graph can read them
        self._ones: dict[int, Tensor] = {}

    @property
    def bytes(self) -> int:
        return self.capacity * self.columns.width * 4

    def add(self, rows: Tensor, version: int = 0) -> None:
        """Copy rows [n, width] in; they can be drawn when all of them are there."""
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
        """Give up rows of versions before this one; how many."""
        begin = self.added - self.count
        while self._versions and self._versions[0][0] < oldest:
            begin = max(begin, self._versions.popleft()[1])
        gone = self.count - (self.added - begin)
        self.count -= gone
        self._publish()
        return gone

    def sample(self, count: int) -> Sample:
        """Uniform, with replacement; nothing here waits for the device."""
        draw = torch.rand(count, dtype=torch.float64, device=self._rows.device, generator=self.generator)
        index = ((draw * self._span[1]).long() + self._span[0]) % self.capacity
        if count not in self._ones:
            self._ones[count] = torch.ones(count, device=self._rows.device)
        return Sample(self._rows.index_select(0, index), index, self._ones[count])

    def newest(self, count: int) -> Tensor:
        """The last `count` rows added, in order."""
        at = (self.added - count) % self.capacity
        first = min(count, self.capacity - at)
        return torch.cat([self._rows[at : at + first], self._rows[: count - first]])

    def state_dict(self) -> dict[str, Array]:
        counts = np.array([self.added, self.count], np.int64)
        return {
            "rows": self.newest(self.count).cpu().numpy(),
            "counts": counts,
            "versions": np.array(self._versions, np.int64).reshape(-1, 2),
            "rng": self.generator.get_state().numpy(),
        }

    def load_state_dict(self, state: dict[str, Array]) -> None:
        rows = torch.as_tensor(state["rows"])
        added, count = (int(number) for number in state["counts"])
        self.added, self.count = added - count, 0
        self._versions.clear()
        self.add(rows.to(self._rows.device))
        self._versions = deque((int(version), int(end)) for version, end in state["versions"])
        self.generator.set_state(torch.as_tensor(state["rng"]))

    def _publish(self) -> None:
        self._span[0].fill_((self.added - self.count) % self.capacity)
        self._span[1].fill_(self.count)


def require_room(size: int, device: str, what: str) -> None:
    """Refuse what does not fit, before it is taken."""
    on_gpu = torch.device(device).type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    if size > SHARE * free:
        raise SetupError(
            f"{what} takes {size / 2**30:.1f} GB of {'GPU ' if on_gpu else ''}memory and {free / 2**30:.1f} GB are free; "
            "set a smaller buffer"
        )


def _fields(data: Transitions[Any]) -> tuple[Array, ...]:
    return data.obs, data.action, data.reward, data.terminated, data.truncated, data.next_obs, data.valid


def _column(values: Tensor) -> Tensor:
    return values.float().unsqueeze(-1)
