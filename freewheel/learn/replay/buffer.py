"""The replay buffer: a preallocated ring of packed rows on the CPU or a GPU, with a random generator for sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from freewheel.core import Array, NDArray, Transitions, to_numpy
from freewheel.errors import SetupError
from freewheel.learn.replay.n_step import Successors
from freewheel.learn.replay.priority import Uniform
from freewheel.learn.replay.rows import Columns, Drawn

SHARE = 0.8  # largest share of the free memory that one buffer may take


class ReplayBuffer:
    """A ring of the newest rows. Each row is added under a version and expires by version. Implements core.RowBuffer.

    `draw` follows the priority, and returns rows over several steps if `successors` is given.
    """

    def __init__(
        self,
        capacity: int,
        columns: Columns,
        device: str,
        seed: int,
        *,
        priority: Uniform | None = None,
        successors: Successors | None = None,
    ) -> None:
        self.capacity, self.columns = capacity, columns
        self.priority, self._successors = priority or Uniform(), successors
        require_room(self.bytes, device, f"a replay buffer of {capacity:,} rows")
        self._rows = torch.zeros(capacity, columns.width, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.added = self.count = 0  # rows ever added, rows stored now
        self._versions: deque[tuple[int, int]] = deque()  # (version, `added` after its last row)
        self._span = torch.zeros(2, dtype=torch.int64, device=device)  # first place and count; CUDA graphs read them
        self.before_overwriting: Callable[[int], None] | None = None

    @property
    def bytes(self) -> int:
        return self.capacity * self.columns.width * 4

    def add(self, rows: Tensor, version: int = 0) -> None:
        """Copy rows [n, width] into the ring. They can be drawn once all of them are stored."""
        if self.before_overwriting is not None:
            self.before_overwriting(self.added + len(rows) - self.capacity)
        self.added += max(0, len(rows) - self.capacity)
        rows = rows[-self.capacity :]
        self._put(self.added, rows)
        for places in self._places(self.added, self.added + len(rows)):
            self.priority.add(places.start, places.stop)
        self.added += len(rows)
        self.count = min(self.capacity, self.count + len(rows))
        if self._versions and self._versions[-1][0] == version:
            self._versions.pop()
        self._versions.append((version, self.added))
        self._publish()

    def expire(self, oldest: int) -> int:
        """Remove the rows of versions before `oldest`, and return their number."""
        begin = self.added - self.count
        while self._versions and self._versions[0][0] < oldest:
            begin = max(begin, self._versions.popleft()[1])
        expired = self.count - (self.added - begin)
        for places in self._places(begin - expired, begin):
            self.priority.remove(places.start, places.stop)
        self.count -= expired
        self._publish()
        return expired

    def sample(self, count: int) -> Tensor:
        """Draw rows [count, width] uniformly, with replacement, without waiting for the device."""
        return self._rows.index_select(0, Uniform().choose(count, self._span, self.generator).places % self.capacity)

    def draw(self, count: int) -> Drawn:
        """Draw `count` rows by priority, with replacement, without waiting for the device."""
        choice = self.priority.choose(count, self._span, self.generator)
        places, weight = choice.places % self.capacity, choice.weight
        rows = self._rows.index_select(0, places)
        told = places if self.priority.wants_errors else None
        if self._successors is None:
            return Drawn(rows, None, weight, told)
        ring, before = self.columns.split(self._rows), self.columns.obs_size + self.columns.action_size
        steps = self._successors.walk(places, ring.reward)
        last = self._rows.index_select(0, steps.last)
        rows = torch.cat([rows[:, :before], steps.reward[:, None], last[:, before + 1 :]], dim=1)
        return Drawn(rows, steps.discount, weight, told)

    def newest(self, count: int) -> Tensor:
        """Return the last `count` rows added, in order."""
        return self._stored(self.added - count, self.added)

    @property
    def row_bytes(self) -> int:
        return self.columns.width * 4

    @property
    def shared(self) -> bool:
        """Return whether another thread may read. Reads of GPU memory must stay in order with the learner's work."""
        return self._rows.device.type == "cpu"

    def read(self, first: int, end: int) -> NDArray:
        rows = self._stored(first, end)
        if not rows.is_cuda:
            return to_numpy(rows)
        pinned = rows.to("cpu", non_blocking=True)  # torch reuses the pinned memory; several times faster
        torch.cuda.current_stream(rows.device).synchronize()
        return to_numpy(pinned.clone())

    def write(self, first: int, rows: NDArray) -> None:
        """Restore rows, without those that no longer fit: the capacity may have become smaller."""
        left_out = max(0, self.added - self.count - first)
        self._put(first + left_out, torch.as_tensor(rows[left_out:]).to(self._rows.device))

    def follow(self, data: Transitions[Any], lane0: int, rows: Tensor) -> None:
        """Link rows to their successors, for n-step returns. The newest `rows` are these transitions [T, B]."""
        if self._successors is not None:
            first, split = self.added - len(rows), self.columns.split
            self._successors.add(data, lane0, split(rows), first, split(self._rows))

    def state_dict(self) -> dict[str, Array]:
        """Return the state without the rows, see core.Learner.buffers."""
        state: dict[str, Array] = {
            "counts": np.array([self.added, self.count], np.int64),
            "versions": np.array(self._versions, np.int64).reshape(-1, 2),
            "rng": self.generator.get_state().numpy(),
        }
        for part in self._parts:
            state |= part.state_dict(self.added - self.count, self.added)
        return state

    def load_state_dict(self, state: dict[str, Array]) -> None:
        """Restore the state. The caller must write the rows afterwards."""
        self.added, count = map(int, state["counts"])
        self.count = min(count, self.capacity)
        self._versions = deque((int(version), int(end)) for version, end in state["versions"])
        self.generator.set_state(torch.as_tensor(state["rng"]))
        for part in self._parts:
            part.load_state_dict(state, self.added - self.count, self.added)
        self._publish()

    @property
    def _parts(self) -> list[Uniform | Successors]:
        """The objects that keep further data about rows."""
        return [self.priority] if self._successors is None else [self.priority, self._successors]

    def _places(self, first: int, end: int) -> list[range]:
        """Return the places of rows [first, end), before and after the wrap."""
        at, count = first % self.capacity, end - first
        return [part for part in (range(at, min(at + count, self.capacity)), range(at + count - self.capacity)) if part]

    def _put(self, first: int, rows: Tensor) -> None:
        """Store rows under the numbers from `first` on."""
        at = first % self.capacity
        before_wrap = min(len(rows), self.capacity - at)
        self._rows[at : at + before_wrap] = rows[:before_wrap]
        if before_wrap < len(rows):
            self._rows[: len(rows) - before_wrap] = rows[before_wrap:]

    def _stored(self, first: int, end: int) -> Tensor:
        """Return a copy of rows [first, end)."""
        at = first % self.capacity
        before_wrap = min(end - first, self.capacity - at)
        return torch.cat([self._rows[at : at + before_wrap], self._rows[: end - first - before_wrap]])

    def _publish(self) -> None:
        self._span[0].fill_((self.added - self.count) % self.capacity)
        self._span[1].fill_(self.count)


def require_room(size: int, device: str, what: str) -> None:
    """Raise SetupError if `what` does not fit into free memory, before anything is allocated."""
    on_gpu = torch.device(device).type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    if size > SHARE * free:
        needs = f"{size / 2**30:.1f} GB of {'GPU ' if on_gpu else ''}memory"
        raise SetupError(f"{what} takes {needs} and {free / 2**30:.1f} GB are free; set a smaller buffer")
