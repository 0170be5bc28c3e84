"""Gives the recorded answers of a schedule to a learner that asks the same questions again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator

from freewheel.run.schedule.log import Check, LogLine, Schedule

AHEAD = 64  # lines read in advance, so that workers can act before the learner asks


class EndOfSchedule(Exception):  # noqa: N818 - not a failure
    """The schedule has no more lines."""


class Answers:
    """Gives each question its next answer. Lines are read when needed; `seen` is called up to AHEAD lines earlier."""

    def __init__(self, schedule: Schedule, seen: Callable[[LogLine], None] = lambda _: None) -> None:
        self._lines, self._seen = iter(schedule), seen
        self._window: deque[LogLine] = deque()
        self._collected: deque[int | LogLine] = deque()  # a number of calls that found nothing, or what a call found
        self._oldest: deque[int | None] = deque()
        self._checks: deque[Check] = deque()
        self._polls: Counter[int] = Counter()  # polls so far, by executor
        self._known: Counter[int] = Counter()  # polls whose answers have been read, by executor
        self._got: set[tuple[int, int]] = set()  # (executor, number) of polls that had a result
        self.end: str | None = None  # why the run ended, once that has been read

    def collect(self) -> LogLine | None:
        """Return what the recorded call found; None: nothing."""
        while not self._collected:
            self._open()
        first = self._collected[0]
        if isinstance(first, int):
            self._collected[0] = first - 1
            if first == 1:
                self._collected.popleft()
            return None
        self._collected.popleft()
        return first

    def oldest(self) -> int | None:
        while not self._oldest:
            self._open()
        return self._oldest.popleft()

    def poll(self, executor: int) -> bool:
        """Return whether this poll of an executor had a result."""
        self._polls[executor] += 1
        while self._polls[executor] > self._known[executor]:
            self._open()
        question = executor, self._polls[executor]
        found = question in self._got
        self._got.discard(question)
        return found

    def checks(self, turn: int) -> Iterator[Check]:
        """Yield the recorded checks of the weights up to this turn of the loop. Call it after every turn."""
        while self._fill() and self._window[0].check is not None:
            self._open()
        while self._checks and self._checks[0].turn <= turn:
            yield self._checks.popleft()

    def _fill(self) -> bool:
        while len(self._window) < AHEAD and (line := next(self._lines, None)) is not None:
            self._window.append(line)
            self._seen(line)
        return bool(self._window)

    def _open(self) -> None:
        """Queue the answers of the next line."""
        if not self._fill():
            raise EndOfSchedule
        line = self._window.popleft()
        if line.empty:
            self._collected.append(line.empty)
        if line.deliveries is not None or line.chunks:
            self._collected.append(line)
        self._oldest.extend(line.oldest)
        for executor, count, got in line.polls:
            self._known[executor] = count
            self._got.update((executor, number) for number in got)
        if line.check is not None:
            self._checks.append(line.check)
        if line.end:
            self.end = line.end
