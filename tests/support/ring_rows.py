"""Rows with known content: step number k of a worker differs from every other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freewheel.core import WORKER_TIME, ActionSpec, EnvSpec, Episode, Failure, Slice, Transitions
from freewheel.transport.shm.channel import Channel, Reader, Shape, Writer
from freewheel.transport.wire import Fragment

NO_TIME = [0] * len(WORKER_TIME)


def shape(workers: int = 1, slots: int = 3, steps: int = 4, lanes: int = 2) -> Shape:
    columns, actions = (Slice("obs", 0, 2, (2,)),), ActionSpec("box", 1, (-1.0,), (1.0,))
    spec = EnvSpec("Numbered-v0", lanes, 2, "float32", columns, actions, measures=("score",))
    return Shape(spec, workers, slots, steps)


def row(number: int, lanes: int) -> Transitions:
    """[1, B] all columns of step `number`."""
    k, lane = np.full((1, lanes), number, np.float32), np.arange(lanes, dtype=np.float32)[None]
    return Transitions(
        obs=np.stack([k, lane], axis=-1),
        action=(k * 2 + lane)[..., None],
        log_prob=-k,
        reward=k + lane / 8,
        terminated=(k + lane) % 5 == 0,
        truncated=(k + lane) % 7 == 0,
        next_obs=np.stack([k + 1, lane], axis=-1),
        valid=np.ones((1, lanes), np.bool_),
    )


def episode(number: int, lane: int = 0) -> Episode:
    return Episode(lane, number, 2**31 - 1 - number, (), number / 4, 10 + number, number / 8, (number + 0.5,))


class Pen:
    """Writes numbered steps with a Writer."""

    def __init__(self, writer: Writer, number: int = 0) -> None:
        self.writer, self.number = writer, number
        self._data: Transitions | None = None
        self._t = 0

    def begin(self, version: int = 0) -> None:
        self._data, self._t = self.writer.begin(version), 0

    def step(
        self, valid: Sequence[bool] | None = None, episodes: Sequence[Episode] = (), failures: Sequence[Failure] = ()
    ) -> None:
        data, t = self._data, self._t
        assert data is not None
        written = row(self.number, data.valid.shape[1])
        for name in Transitions.__dataclass_fields__:
            getattr(data, name)[t] = getattr(written, name)[0]
        if valid is not None:
            data.valid[t] = valid
        self.writer.row(t, int(np.count_nonzero(data.valid[t])), episodes, failures)
        self.number, self._t = self.number + 1, t + 1

    def commit(self, time: Sequence[int] = NO_TIME) -> None:
        self._data = None
        self.writer.commit(time)

    def fragment(self, steps: int, version: int = 0) -> None:
        self.begin(version)
        for _ in range(steps):
            self.step()
        self.commit()


def numbers(fragment: Fragment) -> list[int]:
    """The step numbers of a fragment; checks every column of every row."""
    data = fragment.data
    lanes = data.valid.shape[1]
    found = [int(k) for k in data.obs[:, 0, 0]]
    for t, number in enumerate(found):
        expected = row(number, lanes)
        for name in Transitions.__dataclass_fields__:
            if name != "valid":
                np.testing.assert_array_equal(getattr(data, name)[t], getattr(expected, name)[0], err_msg=name)
    assert fragment.rows == np.count_nonzero(data.valid)
    return found


class CountingReader:
    """A Reader that keeps and counts its fragments."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.reader = channel, Reader(channel)
        workers = range(channel.shape.workers)
        self.steps: list[list[int]] = [[] for _ in workers]  # numbers delivered
        self.rows = [0 for _ in workers]
        self.lost = [0 for _ in workers]
        self.fragments: list[Fragment] = []

    def count(self, fragment: Fragment) -> Fragment:
        self.steps[fragment.worker] += numbers(fragment)
        self.rows[fragment.worker] += fragment.rows
        self.lost[fragment.worker] += sum(fragment.lost.values())
        self.fragments.append(fragment)
        return fragment

    def take(self, worker: int = 0) -> Fragment:
        return self.count(self.reader.take(worker))

    def take_open(self, worker: int = 0) -> Fragment | None:
        fragment = self.reader.take_open(worker)
        return None if fragment is None else self.count(fragment)

    def take_all(self) -> None:
        memory = self.channel.memory
        for worker in self.reader.ready():
            end = int(memory["committed"][worker])
            while memory["taken"][worker] < end:
                self.take(worker)

    def balance(self, worker: int = 0) -> int:
        """Rows the worker has produced; checks that each is counted exactly once."""
        account = self.reader.account(worker)
        assert min(account) >= 0
        found = self.rows[worker] + self.lost[worker] + account.queued + account.open
        if self.channel.shape.workers == 1:
            found += self.reader.overflowed
        assert account.produced == found
        return account.produced
