"""Stragglers: workers that are much slower than the rest are reported once; means of all workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from freewheel.core import WORKER_TIME, Episode
from freewheel.transport.clock import Pause, clock
from freewheel.transport.workers.heartbeats import RESET, STEP, WAIT, WINDOW, Heartbeats, Stragglers


class FakeWorkers:
    """Workers with step times set by the test, and a clock controlled by the test."""

    def __init__(self, heartbeats: Heartbeats, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now, monotonic_ns=lambda: round(self.now * 1e9))
        monkeypatch.setattr("freewheel.transport.workers.heartbeats.time", clock)
        monkeypatch.setattr("freewheel.transport.clock.clock.pauses", [])  # real ones have another time
        self.heartbeats, self.workers = heartbeats, len(heartbeats.memory["steps"])
        self.times = np.zeros((self.workers, len(WORKER_TIME)), np.int64)
        for worker in range(self.workers):
            heartbeats.enter(worker, WAIT)
        self.stragglers = Stragglers(heartbeats, self.times)

    def play(self, seconds: float, step_s: Sequence[float], reset_share: float = 0.0) -> list[str]:
        """All workers step for this long with these times of a step; returns the new messages."""
        self.now += seconds
        for worker, each in enumerate(step_s):
            steps = round(seconds / each)
            self.heartbeats.memory["steps"][worker] += steps
            busy = steps * each * 1e9
            self.times[worker, WORKER_TIME.index("step")] += round(busy * (1 - reset_share))
            self.times[worker, WORKER_TIME.index("reset")] += round(busy * reset_share)
        return self.stragglers.slow()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWorkers]:
    with closing(Heartbeats(4, 1)) as heartbeats:
        yield FakeWorkers(heartbeats, monkeypatch)


EVEN = (0.01, 0.01, 0.01, 0.01)
UNEVEN = (0.01, 0.01, 0.5, 0.01)


def test_no_worker_is_slow_at_first(fake: FakeWorkers) -> None:
    assert fake.stragglers.slow() == []
    assert fake.stragglers.mean_step() == 0.0
    assert fake.play(1.0, EVEN) == []


def test_a_slow_worker_is_reported_once_and_again_after_it_recovered(fake: FakeWorkers) -> None:
    assert fake.play(10.0, UNEVEN) == ["worker 2 is slow: 500 ms a step, the others 10 ms"]
    assert fake.play(10.0, UNEVEN) == []
    for _ in range(4):
        assert fake.play(WINDOW, EVEN) == []
    assert fake.play(10.0, UNEVEN, reset_share=1.0) == ["worker 2 is slow: 500 ms a step, the others 10 ms"]


def test_slow_means_ten_times_the_median(fake: FakeWorkers) -> None:
    assert fake.play(10.0, (0.01, 0.01, 0.1, 0.01)) == []
    assert fake.play(30.0, (0.01, 0.01, 0.125, 0.01)) == ["worker 2 is slow: 125 ms a step, the others 10 ms"]


@pytest.mark.parametrize(("phase", "slow"), [(STEP, True), (RESET, True), (WAIT, False)])
def test_a_long_step_counts_before_it_has_ended(fake: FakeWorkers, phase: int, slow: bool) -> None:
    fake.heartbeats.enter(1, phase)
    messages = fake.play(3.0, (0.01, 100.0, 0.01, 0.01))
    assert messages == (["worker 1 is slow: 3 s a step, the others 10 ms"] if slow else [])


def test_a_short_running_step_does_not_count(fake: FakeWorkers) -> None:
    fake.play(3.0, EVEN)
    fake.heartbeats.enter(1, STEP)
    assert fake.play(0.9, (0.01, 100.0, 0.01, 0.01)) == [], "it may have lost the processor"


def test_of_two_workers_one_can_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Heartbeats(2, 1)) as heartbeats:
        fake = FakeWorkers(heartbeats, monkeypatch)
        assert fake.play(10.0, (0.5, 0.01)) == ["worker 0 is slow: 500 ms a step, the others 10 ms"]


def test_only_the_last_seconds_count(fake: FakeWorkers) -> None:
    fake.play(1000.0, EVEN)
    for _ in range(2):
        fake.now += WINDOW
        fake.stragglers.slow()
    assert fake.play(2.0, UNEVEN) == ["worker 2 is slow: 500 ms a step, the others 10 ms"]


def test_the_table_has_the_means_of_all_workers(fake: FakeWorkers) -> None:
    fake.play(2.0, UNEVEN, reset_share=0.25)
    for seconds in (1.0, 2.0):
        fake.stragglers.take(2, [Episode(0, 0, 0, (), 0.0, 1, seconds, ())])
    fake.stragglers.take(2, ())
    table = fake.stragglers.table()
    assert [row["worker"] for row in table] == [0, 1, 2, 3]
    assert table[2] == {
        "worker": 2,
        "steps": 4,
        "step_s": pytest.approx(0.375),
        "reset_s": pytest.approx(0.25),  # a quarter of 2 s in 2 episodes
        "episodes": 2,
        "episode_s": pytest.approx(1.5),
    }
    assert (table[0]["steps"], table[0]["episodes"], table[0]["episode_s"]) == (200, 0, None)
    assert fake.stragglers.mean_step() == pytest.approx(8.0 / 604)
    fake.heartbeats.memory["steps"][:] += 50  # of open fragments: their time is not known yet
    assert fake.stragglers.mean_step() == pytest.approx(8.0 / 604)


def test_all_episodes_count_even_if_their_rows_were_dropped(fake: FakeWorkers) -> None:
    assert fake.stragglers.produced() == {"count": 0, "length_mean": None, "seconds_mean": None}
    for worker, length, seconds in ((0, 10, 1.0), (3, 30, 4.0)):
        fake.stragglers.take(worker, [Episode(0, 0, 0, (), 0.0, length, seconds, ())])
    assert fake.stragglers.produced() == {"count": 2, "length_mean": 20.0, "seconds_mean": 2.5}


def test_a_step_with_one_of_two_pauses_in_it_is_not_slow(fake: FakeWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are stopped for 2.5 s, and the trainer alone again before the worker has closed its fragment."""
    monkeypatch.setattr(clock, "pauses", [])
    fake.stragglers._pauses = 0
    fake.play(2.0, EVEN)
    clock.pauses += [Pause(102.0, 104.5), Pause(105.0, 107.5)]
    fake.times[1, WORKER_TIME.index("step")] += int(2.5e9)
    assert fake.play(1.0, EVEN) == []
    assert fake.stragglers.mean_step() == pytest.approx(0.01)
    fake.times[2, WORKER_TIME.index("step")] += int(5.1e9)  # both
    assert fake.play(1.0, EVEN) == []
    assert fake.stragglers.mean_step() == pytest.approx(0.01, rel=0.05)


def test_what_is_left_of_a_pause_makes_no_quick_worker_slow(fake: FakeWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 0.02 ms: a pause of which 50 ms are counted as steps is thirty times as much."""
    monkeypatch.setattr(clock, "pauses", [])
    fake.stragglers._pauses = 0
    fake.play(0.0002, (0.00002,) * 4)
    clock.pauses.append(Pause(fake.now, fake.now + 3.0))
    fake.now += 3.0
    assert fake.play(0.06, (0.00002, 0.00002, 0.0007, 0.00002)) == []
