"""The clock of all time-outs: it does not advance while this process is stopped or the machine sleeps.

A child that was stopped together with this process cannot have answered meanwhile, so such a pause counts for no limit.
If only the child was stopped, this clock continues, and the child exceeds its time limit as if it hung.
"""

from __future__ import annotations

import os
import resource
import select
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from time import monotonic, sleep
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

Answer = TypeVar("Answer")

TICK = 0.1  # seconds between two ticks
GAP = 0.5  # seconds: with no tick for longer, this process was stopped
RETURN = 0.5  # seconds after a pause that do not count either, because other processes may wake up later
SETTLED = 100  # milliseconds within which the clock's thread runs after a pause
LOOK = 0.2  # seconds: the longest wait before a limit checks again how much time is left
NOTABLE = 2.0  # seconds of a pause worth a message; on a busy machine, shorter ones may be ordinary delays


class Pause(NamedTuple):
    """A time in which this process did not run, by time.monotonic()."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def __str__(self) -> str:
        what = f"the machine or this run was stopped for {self.seconds:.{self.seconds < 10:d}f} s"
        return f"{what}; time-outs did not count that time"


class Clock:
    """Notices pauses by a thread, which runs within `with` blocks. The process has one clock, `clock`."""

    def __init__(self) -> None:
        self.pauses: list[Pause] = []  # all that the thread has noticed so far
        self.chores: list[Callable[[], None]] = []  # calls made at every tick
        self._users, self._lock = 0, threading.Lock()
        self._ticked = 0.0
        self._thread: threading.Thread | None = None
        self._end = -1  # an eventfd that ends the thread

    def __enter__(self) -> Self:
        with self._lock:
            self._users += 1
            if self._thread is None:
                self._ticked = monotonic()
                self._end = os.eventfd(0, os.EFD_CLOEXEC)
                self._thread = threading.Thread(target=self._tick, name="freewheel-clock", daemon=True)
                self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._thread is not None:
                os.eventfd_write(self._end, 1)
                self._thread.join()
                os.close(self._end)
                self._thread = None

    def not_counted(self, now: float) -> Sequence[tuple[float, float]]:
        """Return the intervals (from, until) that do not count. The last one may turn out to be no pause: until the
        thread runs again, it is not known why it has not run."""
        pauses = [*self.pauses, (self._ticked, now)] if self.behind(now) else self.pauses
        return [(began, ended + RETURN) for began, ended in pauses]

    def age(self, moment: float) -> float:
        """Return the seconds since this moment of time.monotonic() that count."""
        now = monotonic()
        return now - moment - _overlap(self.not_counted(now), moment, now)

    def slept_since(self, moment: float) -> float:
        """Return the seconds of pauses since this moment. Wait a little if these are not known yet."""
        tries = SETTLED
        while self.behind(monotonic()) and (tries := tries - 1):
            sleep(0.001)
        return _overlap(self.pauses, moment, monotonic()) if self.pauses else 0.0

    def behind(self, now: float) -> bool:
        """Return whether the thread still has to find out if there was a pause until now."""
        return self._thread is not None and now - self._ticked > GAP

    def _tick(self) -> None:
        poller, switches = select.poll(), 0  # poll does not depend on the time of day
        poller.register(self._end, select.POLLIN)
        while not poller.poll(TICK * 1000):
            now, before = monotonic(), switches
            switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            # A thread that waits for the interpreter lock wakes up at every switch interval: then this process runs.
            waits = (switches - before) * sys.getswitchinterval()
            if now - self._ticked > GAP and waits < (now - self._ticked) / 4:
                self.pauses.append(Pause(self._ticked, now))
            self._ticked = now
            for chore in self.chores:
                chore()


def _overlap(times: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    return sum(max(0.0, min(ended, end) - max(began, begin)) for began, ended in times)


clock = Clock()


class Pauses:
    """Pauses of `clock` that are not reported to the user yet."""

    def __init__(self) -> None:
        self._told = len(clock.pauses)

    def new(self) -> list[str]:
        """Return the messages about notable pauses since the last call."""
        told, self._told = self._told, len(clock.pauses)
        return [str(pause) for pause in clock.pauses[told : self._told] if pause.seconds >= NOTABLE]


class Limit:
    """A time limit that starts now, in seconds of `clock`, which must be running."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, monotonic()

    @property
    def left(self) -> float:
        """The seconds left, never below 0."""
        return max(0.0, self._seconds - clock.age(self._began))

    def wait(self, ask: Callable[[float], Answer]) -> Answer:
        """Return the first true answer of `ask(seconds)`, which waits that long at most; the last one at the limit."""
        while True:
            left = self.left
            if (answer := ask(min(left, LOOK))) or not left:
                return answer

    def join(self, process: BaseProcess) -> bool:
        """Return whether the process ends before the limit."""

        def ended(seconds: float) -> bool:
            process.join(seconds)
            return process.exitcode is not None

        return self.wait(ended)
