"""Calls all sinks of a run, so that a sink that fails or is slow can neither end the run nor slow it down."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from freewheel.errors import FreewheelError, SetupError
from freewheel.sinks.sink import RunInfo, Sink, SinkEntry
from freewheel.transport.background import BackgroundCalls

FAILURES = 3  # in a row, after which a sink is no longer called
WAITING = 1_000  # rows and notes that wait at most for a slow sink
PATIENCE = 30.0  # seconds for slow sinks to finish at the end of a run


class SinkGuard:
    """Calls one sink, in a separate thread unless it is `direct`, and counts the rows that it misses."""

    def __init__(self, sink: Sink, name: str) -> None:
        self.name, self._sink = name, sink
        self.direct = bool(getattr(sink, "direct", False))
        self._thread = None if self.direct else BackgroundCalls(name, WAITING)
        self._given = self._written = self._failures = 0  # rows, rows, failed calls in a row
        self._slow = self._off = False
        own = getattr(sink, "news", None)  # messages of one of our sinks for the user
        self.news: deque[str] = own if isinstance(own, deque) else deque()  # both threads append to it

    @property
    def problem(self) -> str:
        """Describes the rows that the sink has missed; empty if there are none."""
        own: str = getattr(self._sink, "problem", "")
        missed = self._given - self._written
        return own or (f"the sink {self.name} has missed {missed} of {self._given} rows" if missed else "")

    def write(self, row: Mapping[str, Any]) -> None:
        self._given += 1
        self._call(partial(self._write, row))

    def note(self, text: str) -> None:
        self._call(partial(self._sink.note, text))

    def catch_up(self) -> None:
        if self._thread is None and (late := getattr(self._sink, "catch_up", None)) is not None:
            self._try(late)

    def close(self, summary: Mapping[str, Any], patience: float) -> None:
        last = partial(self._try, partial(self._sink.close, summary), always=True)
        if self._thread is None:
            last()
        elif not self._thread.close(last, patience):
            self.news.append(f"the sink {self.name} did not finish within {patience:g} s; the run ends without it")

    def _write(self, row: Mapping[str, Any]) -> None:
        self._sink.write(row)
        self._written += 1

    def _call(self, call: Callable[[], object]) -> None:
        if self._off:
            return
        if self._thread is None:
            self._try(call)
        elif not self._thread.submit(partial(self._try, call)) and not self._slow:
            self._slow = True
            self.news.append(f"the sink {self.name} is too slow: it misses rows, which are counted; training continues")

    def _try(self, call: Callable[[], object], *, always: bool = False) -> None:
        if self._off and not always:
            return
        try:
            call()
            self._failures = 0
        except Exception as error:  # noqa: BLE001 - a sink may be foreign code
            self._failures += 1
            if self._failures == FAILURES:
                self._off = True
                what = f"the sink {self.name} has failed {FAILURES} times in a row, the last time with {_shown(error)}"
                self.news.append(f"{what}; it is no longer called, training continues")
            elif always:
                self.news.append(f"the sink {self.name} could not be closed: {_shown(error)}")


class SinkSet:
    """The sinks of a run as one. Implements sink.Sink."""

    def __init__(self) -> None:
        self._sink_set: list[SinkGuard] = []
        self._early: list[str] | None = []  # notes that wait until all sinks are open

    def open(self, entries: Sequence[SinkEntry], info: RunInfo, others: Sequence[Sink] = ()) -> None:
        """Open these sinks, and add others that are already open."""
        for entry in entries:
            try:
                sink = entry.open(info)
            except FreewheelError:
                raise
            except Exception as error:
                raise SetupError(f"the sink {entry.name} cannot be opened: {_shown(error)}") from error
            if sink is not None:
                self._sink_set.append(SinkGuard(sink, entry.name))
        self._sink_set += [SinkGuard(sink, type(sink).__name__) for sink in others]
        early, self._early = self._early or [], None
        for text in early:
            self.note(text)

    @property
    def problems(self) -> list[str]:
        """The rows that sinks have missed so far, one line per sink."""
        return [outlet.problem for outlet in self._sink_set if outlet.problem]

    def write(self, row: Mapping[str, Any]) -> None:
        for outlet in self._sink_set:
            outlet.write(row)
        self._tell()

    def catch_up(self) -> None:
        """Let sinks retry failed writes, so that `problems` has only what remains."""
        for outlet in self._sink_set:
            outlet.catch_up()

    def note(self, text: str) -> None:
        if self._early is not None:
            self._early.append(text)
            return
        for outlet in self._sink_set:
            outlet.note(text)

    def close(self, summary: Mapping[str, Any], patience: float = PATIENCE) -> None:
        """Close sinks with a thread first, so that direct sinks can report the problems of the others."""
        screens = [outlet for outlet in self._sink_set if outlet.direct]
        for outlet in self._sink_set:
            if not outlet.direct:
                outlet.close(summary, patience)
        self._tell(screens)
        for outlet in screens:
            outlet.close({**summary, "problems": [*summary.get("problems", ()), *self._new(summary)]}, patience)

    def _new(self, summary: Mapping[str, Any]) -> list[str]:
        return [problem for problem in self.problems if problem not in summary.get("problems", ())]

    def _tell(self, listeners: Sequence[SinkGuard] | None = None) -> None:
        for outlet in self._sink_set:
            while outlet.news:
                text = outlet.news.popleft()
                for listener in self._sink_set if listeners is None else listeners:
                    listener.note(text)


def _shown(error: Exception) -> str:
    """Return one line about an exception, even if its text is long or cannot be read."""
    try:
        text = str(error).strip().splitlines()[0][:200] if str(error).strip() else ""
    except Exception:  # noqa: BLE001 - a foreign __str__ may raise
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
