"""Sinks that raise, block or cannot be opened: the run goes on at its own speed, and what they miss is counted (R23)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from freewheel.errors import SetupError
from freewheel.metrics.meter import Budget
from freewheel.sinks import sink_set
from freewheel.sinks.sink import RunInfo, Sink, SinkEntry
from freewheel.sinks.sink_set import FAILURES, SinkSet

INFO = RunInfo(path=Path("runs/x"), title="x", budget=Budget(steps=100), algorithm="ppo", mode="batch")


class Screen:
    direct = True

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.notes: list[str] = []
        self.summary: Mapping[str, Any] = {}
        self.thread = ""

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)
        self.thread = threading.current_thread().name

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary


class Tracker(Screen):
    """Somebody else's."""

    direct = False


class Raising(Tracker):
    """Raises from its k-th row on, for so many rows."""

    def __init__(self, after: int, rows: int = 10**9) -> None:
        super().__init__()
        self.after, self.until, self.seen = after, after + rows, 0

    def write(self, row: Mapping[str, Any]) -> None:
        self.seen += 1
        if self.after < self.seen <= self.until:
            raise ConnectionError("no route to host\nand more")
        super().write(row)


class Blocking(Tracker):
    """Stays in `write` until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def write(self, row: Mapping[str, Any]) -> None:
        self.gate.wait(20)
        super().write(row)


def opened(*sinks: Sink) -> SinkSet:
    group = SinkSet()
    group.open([], INFO, sinks)
    return group


def test_a_sink_that_raises_is_switched_off_and_what_it_misses_is_counted() -> None:
    screen, raising, other = Screen(), Raising(after=2), Tracker()
    group = opened(raising, screen, other)
    for number in range(10):
        group.write({"n": number})
    group.close({"exit_code": 0, "problems": []})
    assert [row["n"] for row in screen.rows] == [row["n"] for row in other.rows] == list(range(10))
    assert (len(raising.rows), raising.seen) == (2, 2 + FAILURES)
    (note,) = screen.notes
    error = "ConnectionError: no route to host; it is no longer called, training continues"
    assert note == f"the sink Raising has failed {FAILURES} times in a row, the last time with {error}"
    assert screen.summary["problems"] == ["the sink Raising has missed 8 of 10 rows"]
    assert raising.summary == {"exit_code": 0, "problems": []}  # it is closed all the same


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("rows", "missed", "notes"), [(FAILURES - 1, FAILURES - 1, 0), (100, 7, 1)])
def test_a_few_failures_are_forgiven_and_more_end_nothing(direct: bool, rows: int, missed: int, notes: int) -> None:
    screen, raising = Screen(), Raising(after=3, rows=rows)
    raising.direct = direct
    group = opened(raising, screen)
    for number in range(10):
        group.write({"n": number})
    group.close({})
    assert (len(screen.rows), len(screen.notes), len(raising.rows)) == (10, notes, 10 - missed)
    assert screen.summary["problems"] == [f"the sink Raising has missed {missed} of 10 rows"]


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocking]:
    monkeypatch.setattr(sink_set, "WAITING", 4)
    sink = Blocking()
    yield sink
    sink.gate.set()


def test_a_sink_that_blocks_slows_nothing_down(blocking: Blocking) -> None:
    screen = Screen()
    group = opened(blocking, screen)
    for number in range(1000):  # at 20 s a row the test would not end
        group.write({"n": number})
    group.close({}, patience=0.05)
    assert len(screen.rows) == 1000
    assert [note.split(":")[0] for note in screen.notes] == [
        "the sink Blocking is too slow",
        "the sink Blocking did not finish within 0.05 s; the run ends without it",
    ]
    assert screen.summary["problems"] == ["the sink Blocking has missed 1000 of 1000 rows"]


def test_a_slow_sink_gets_the_rows_that_fit_and_the_end(blocking: Blocking) -> None:
    group = opened(blocking, Screen())
    for number in range(10):
        group.write({"n": number})
    blocking.gate.set()
    group.close({"exit_code": 0})
    assert [row["n"] for row in blocking.rows] in ([0, 1, 2, 3], [0, 1, 2, 3, 4])  # the thread may have taken one
    assert blocking.summary == {"exit_code": 0}


def test_only_direct_sinks_are_called_by_the_thread_of_the_training() -> None:
    screen, tracker = Screen(), Tracker()
    group = opened(screen, tracker)
    group.write({})
    group.close({})
    assert (screen.thread, tracker.thread) == (threading.current_thread().name, "freewheel-Tracker")


def test_a_sink_that_cannot_be_opened_is_told_before_the_run_starts() -> None:
    def refuse(run: RunInfo) -> Sink:
        raise PermissionError("no key\nsee https://...")

    with pytest.raises(SetupError, match=r"^the sink mine cannot be opened: PermissionError: no key$"):
        SinkSet().open([SinkEntry("mine", refuse)], INFO)


def test_what_is_said_while_sinks_are_opened_reaches_all_of_them() -> None:
    screen, group = Screen(), SinkSet()
    group.note("early")
    group.open([SinkEntry("screen", lambda _: screen)], INFO)
    group.note("late")
    group.close({})
    assert screen.notes == ["early", "late"]


class Telling(Tracker):
    """Has something to say of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.news = deque(["the server does not answer"])


def test_what_a_sink_has_to_say_reaches_the_user() -> None:
    screen, telling = Screen(), Telling()
    sinks = opened(screen, telling)
    sinks.write({"wall_s": 1.0})
    sinks.close({})
    assert "the server does not answer" in screen.notes
    assert not telling.news
