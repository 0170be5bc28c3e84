"""The loop: the order of its calls, what the gate holds back, what is published."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from freewheel.core import Chunk, Metrics, Origin, RowCounts, Snapshot, Tick, Transitions
from freewheel.errors import DivergedError
from freewheel.loop import loop as training_loop


def chunk(rows: int) -> Chunk:
    nothing = np.zeros((0, 1))
    return Chunk(Transitions(*[nothing] * 8), 0, Origin(0, 0, 0, 0), (), nothing, np.zeros(10, np.int64), rows)


class Tape:
    """The calls in order, each with the kind of learner time that was running."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.kinds: set[tuple[str, str]] = set()
        self.doing = "other"

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """All that the loop calls of a Meter."""
        self.doing = kind
        yield
        self.doing = "other"

    def note(self, name: str, *details: object) -> None:
        self.calls.append(" ".join(map(str, (name, *details))))
        self.kinds.add((name, self.doing))

    def cut(self) -> list[str]:
        """The calls since the last cut."""
        calls, self.calls = self.calls, []
        return calls


class Source:
    """What the loop calls of a Collector: it has chunks of these rows at every call; the test sets the oldest version."""

    def __init__(self, tape: Tape, *rows: int) -> None:
        self.tape, self.deliveries = tape, rows
        self.oldest_version: int | None = 0

    def publish(self, snapshot: Snapshot, done: int) -> None:
        self.tape.note("publish", snapshot.version)
        self.done, self.context = done, snapshot.context

    def collect(self, wait: bool) -> Sequence[Chunk]:
        self.tape.note("collect", "waiting" if wait else "glancing")
        return [chunk(rows) for rows in self.deliveries]

    def oldest(self) -> int | None:
        return self.oldest_version


class Pupil:
    """What the loop calls of a Learner that is ready with `needed` rows, and hungry while it is not ready, or always."""

    not_finite: str | None = None

    def __init__(self, tape: Tape, needed: int, *, always_hungry: bool = False) -> None:
        self.tape, self.needed, self.always_hungry = tape, needed, always_hungry
        self.version = self.held = 0

    @property
    def ready(self) -> bool:
        return self.held >= self.needed

    @property
    def hungry(self) -> bool:
        return self.always_hungry or not self.ready

    def observe(self, chunk: Chunk) -> None:
        self.tape.note("observe", chunk.rows)
        self.held += chunk.rows

    def update(self) -> Metrics:
        self.tape.note("update", self.version)
        self.held -= self.needed
        self.version += 1
        return {"loss/policy": float(self.version)}

    def snapshot(self) -> Snapshot:
        return Snapshot(self.version, {})

    def rows(self) -> RowCounts:
        return RowCounts(trained=self.needed * self.version, queued=self.held, dropped={"stale": self.version})


@pytest.fixture
def tape() -> Tape:
    return Tape()


def loop(source: Any, pupil: Any, tape: Any, **options: Any) -> Iterator[Tick]:
    return training_loop(source, pupil, tape, **options)


def turns(ticks: Iterator[Tick], count: int, tape: Tape) -> list[list[str]]:
    return [tape.cut() for _ in itertools.islice(ticks, count)]


def test_it_collects_until_the_learner_is_ready_then_updates_and_publishes(tape: Tape) -> None:
    ticks = loop(Source(tape, 5), Pupil(tape, needed=10), tape)
    assert tape.cut() == []  # nothing happens before the first tick is asked for
    assert turns(ticks, 4, tape) == [
        ["publish 0", "collect waiting", "observe 5"],
        ["collect waiting", "observe 5", "update 0", "publish 1"],
        ["collect waiting", "observe 5"],
        ["collect waiting", "observe 5", "update 1", "publish 2"],
    ]


def test_contexts_are_published_with_the_weights(tape: Tape) -> None:
    source, table = Source(tape, 10), np.ones((2, 3), np.float32)
    ticks = loop(source, Pupil(tape, needed=10), tape, contexts=lambda: table)
    assert [source.context is table for _ in itertools.islice(ticks, 3)] == [True] * 3
    next(loop(source, Pupil(tape, needed=10), tape))
    assert source.context.shape == (0, 0)


def test_publish_reports_the_rows_that_the_learner_has_finished(tape: Tape) -> None:
    source = Source(tape, 10)
    seen = [source.done for _ in itertools.islice(loop(source, Pupil(tape, needed=10), tape), 3)]
    assert seen == [11, 22, 33]  # ten trained and one dropped an update


def test_a_tick_reports_its_turn(tape: Tape) -> None:
    first, second = itertools.islice(loop(Source(tape, 2, 3), Pupil(tape, needed=10), tape), 2)
    assert [part.rows for part in first.chunks] == [2, 3]
    assert (first.env_steps, first.version, first.metrics) == (5, 0, None)
    assert (second.env_steps, second.version, second.metrics) == (10, 1, {"loss/policy": 1.0})


def test_a_learner_that_is_not_hungry_gets_nothing(tape: Tape) -> None:
    ticks = loop(Source(tape, 25), Pupil(tape, needed=10), tape)
    assert turns(ticks, 3, tape) == [
        ["publish 0", "collect waiting", "observe 25", "update 0", "publish 1"],
        ["update 1", "publish 2"],
        ["collect waiting", "observe 25", "update 2", "publish 3"],
    ]


def test_a_learner_that_is_ready_and_hungry_never_waits(tape: Tape) -> None:
    ticks = loop(Source(tape, 10), Pupil(tape, needed=10, always_hungry=True), tape)
    assert turns(ticks, 2, tape)[0] == ["publish 0", "collect waiting", "observe 10", "update 0", "publish 1"]
    pupil = Pupil(tape, needed=0, always_hungry=True)
    assert turns(loop(Source(tape), pupil, tape), 2, tape) == [
        ["publish 0", "collect glancing", "update 0", "publish 1"],
        ["collect glancing", "update 1", "publish 2"],
    ]


@pytest.mark.parametrize(
    ("max_lag", "oldest", "goes"),
    [
        *[(0, 3, False), (0, 4, True), (1, 2, False), (1, 3, True), (2, 1, False), (2, 2, True)],
        *[(0, None, True), (None, 0, True)],
    ],
)
def test_an_update_waits_for_rows_that_would_be_too_old_after_it(
    tape: Tape, max_lag: int | None, oldest: int | None, goes: bool
) -> None:
    """Update v waits while anything of version ≤ v - max_lag is open or queued."""
    source, pupil = Source(tape), Pupil(tape, needed=0)
    source.oldest_version, pupil.version = oldest, 3
    (calls,) = turns(loop(source, pupil, tape, max_lag=max_lag), 1, tape)
    assert calls == ["publish 3", *(["update 3", "publish 4"] if goes else ["collect waiting"])]


def test_the_gate_opens_within_the_turn_in_which_the_old_rows_arrive(tape: Tape) -> None:
    source, pupil = Source(tape, 1), Pupil(tape, needed=1)
    source.oldest_version, pupil.version, pupil.held = 1, 3, 1
    deliver = source.collect

    def collect(wait: bool) -> Sequence[Chunk]:
        assert source.oldest_version is not None
        source.oldest_version += 1
        return deliver(wait)

    source.collect = collect  # type: ignore[method-assign]
    assert turns(loop(source, pupil, tape, max_lag=1), 2, tape) == [
        ["publish 3", "collect waiting", "observe 1"],
        ["collect waiting", "observe 1", "update 3", "publish 4"],
    ]


def test_the_kinds_of_learner_time(tape: Tape) -> None:
    turns(loop(Source(tape, 5), Pupil(tape, needed=5), tape), 2, tape)
    assert tape.kinds == {
        ("publish", "other"),  # the first one
        ("collect", "wait-data"),
        ("observe", "observe"),
        ("update", "update"),
        ("publish", "publish"),
    }
    assert tape.doing == "other"


def test_a_loop_that_goes_on_counts_from_the_rows_that_were_delivered(tape: Tape) -> None:
    pupil = Pupil(tape, needed=4)
    pupil.held, pupil.version = 3, 2
    first = next(loop(Source(tape, 5), pupil, tape))
    assert first.env_steps == 8 + 3 + 2 + 5, "trained, held, dropped, and new"
    assert first.version == 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_never_published(tape: Tape, value: float) -> None:
    """Whatever the learner: ours check themselves."""

    class Diverging(Pupil):
        def snapshot(self) -> Snapshot:
            weight = np.array([1.0, value if self.version == 2 else 0.0])
            return Snapshot(self.version, {"bias": np.zeros(2), "weight": weight})

    source = Source(tape, 64)
    told = r"^the weights 'weight' of version 2 are not finite: the learner has diverged;"
    with pytest.raises(DivergedError, match=told):
        list(itertools.islice(loop(source, Diverging(tape, 64), tape), 5))
    assert [call for call in tape.calls if call.startswith("publish")] == ["publish 0", "publish 1"]
