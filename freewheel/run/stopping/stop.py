"""What ends a run from outside: signals, the time limit and other learners; and the calls that they may interrupt."""

from __future__ import annotations

import inspect
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

from freewheel.errors import SIGNALLED, EnvError
from freewheel.rollout.call_state import PHASE, SINCE, cells
from freewheel.run.stopping.exits import left
from freewheel.transport.clock import clock
from freewheel.transport.forkserver import Leftovers

In = ParamSpec("In")
Out = TypeVar("Out")

LATE = 0.05  # share of its minutes by which a run may end late to finish the work in progress
HOOK = 30.0  # least time limit in seconds of a hook after the training; see Stop.training_over


class Interrupted(BaseException):
    """A signal asked the run to end."""

    reason = "interrupted"  # why the run ended


class TimeUp(Interrupted):
    """The run's time is up while an operation is still running."""

    reason = "minutes"


#: Interrupt, end, and hang up: what a terminal, a job queue and a lost connection send.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ClosingError(EnvError):
    """An environment's close() did not return."""


class Wrap(Protocol):
    """A decorator that acts before and after a call."""

    def __call__(self, call: Callable[In, Out]) -> Callable[In, Out]: ...


class Endable(Protocol):
    """The part of a run that the watchdog uses when the run is stuck, from the watchdog's thread."""

    @property
    def saving(self) -> bool: ...  # the run waits for a checkpoint to be written
    def log(self) -> None: ...  # write a row of metrics; called from the run's own thread
    def emergency_end(self, reason: str, exit_code: int, *, save: bool) -> bool: ...
    def last_known(self) -> tuple[Path, Mapping[str, Any]]: ...  # the path of the summary, and its present content


def _nothing() -> None:
    """Do nothing."""


class Stop:
    """The signal that asked the run to end. Until `begin`, it ends everything at once, because there is nothing to
    keep. After that, it interrupts only calls of environments, during which every row is accounted for."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._begun = False
        # By time.monotonic: when the time is up, and when a row of metrics and a look at other learners are due.
        self.time_up = self.row_due = self.look_due = math.inf
        self.look: Callable[[], None] = (
            _nothing  # checks whether other learners want to end; its exception ends the wait
        )
        self._looked, self._longest = time.monotonic(), 0.0  # the last time check, and the longest gap
        self.hook, self.hook_began = "", 0.0  # the user's hook that is being called, and when its call began
        self.hook_limit = math.inf  # after the training: seconds that a hook may run without a time check
        self.late: BaseException | None = None  # raised in the main thread if an operation takes too long
        self.closing = 0.0  # when a close() in this process began, by time.monotonic; 0: none is running
        self._close_hangs = False
        self.over = False  # the summary is being written, which must not be interrupted
        self.told: signal.Signals | None = None  # the signal that the summary reports
        self.cut = False  # a signal has interrupted something other than an environment, perhaps an update
        self.cuts = True  # a slow update may be interrupted: no other learner takes part in it
        self.measured_s = 0.0  # seconds of the run's minutes that were used before it began
        self.run: Endable | None = None
        self.prepare: Callable[[], None] = _nothing  # set by a watchdog
        self.leftovers = Leftovers()

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first signal ends the run cleanly, the second ends it at once."""
        if self.late is not None:
            late, self.late = self.late, None
            self.cut, self._close_hangs = self.cut or isinstance(late, TimeUp), isinstance(late, ClosingError)
            raise late
        first, self.signal = self.signal is None, self.signal or signal.Signals(number)
        if not self.over and (cells[SINCE] or not first or not self._begun):
            self.cut = not cells[SINCE]
            raise Interrupted

    def pass_on(self) -> None:
        """After the run: raise a signal that came too late for the summary again, for the caller of the run."""
        if self.signal in (None, self.told):
            return
        if signal.getsignal(self.signal) == signal.SIG_DFL:
            raise SystemExit(SIGNALLED + self.signal)
        signal.raise_signal(self.signal)

    def begin(self) -> None:
        """Note that the run directory is about to be created: from now on the run has to end cleanly."""
        self._begun = True

    def attend(self, run: Endable) -> None:
        """Let the watchdog end this run if it is stuck."""
        self.run = run
        self.prepare()

    def check(self) -> None:
        """End the run, whatever it is doing, if a signal requested that or its time is up; write a row of metrics if
        one is due. Call this in every wait, and between the steps of long operations."""
        if self.signal is not None:
            raise Interrupted
        self.keep_time()
        if time.monotonic() >= self.look_due:
            self.look()

    def keep_time(self) -> None:
        """Like `check`, but let signals and other learners wait: for operations that they must not cut short."""
        now = time.monotonic()
        self._look(now)
        if now > self.time_up:
            raise TimeUp
        self.report()

    def _look(self, now: float) -> None:
        self._longest, self._looked = max(self._longest, now - self._looked), now

    def training_over(self, minutes: float | None) -> None:
        """End the time limit of the training, and limit hooks from now on if the run has a limit of minutes."""
        self.time_up = math.inf
        self.hook_limit = math.inf if minutes is None else max(HOOK, 60 * LATE * minutes)

    @property
    def hook_s(self) -> float:
        """Seconds, without pauses, since the current hook began or last checked the time; 0: no hook is running."""
        return clock.age(max(self._looked, self.hook_began)) if self.hook else 0.0

    def longest_gap(self) -> float:
        """Return the longest gap between time checks since the last call: the delay in noticing an end."""
        self._look(time.monotonic())
        longest, self._longest = self._longest, 0.0
        return longest

    def report(self) -> None:
        """Write a row of metrics if one is due."""
        if time.monotonic() >= self.row_due and self.run is not None:
            self.run.log()

    def guard(self, phase: int) -> Wrap:
        """Return a wrapper for environment calls of this phase in this process: the watchdog times them, signals
        interrupt them, and they cannot end the process."""

        def wrap(call: Callable[In, Out]) -> Callable[In, Out]:
            def guarded(*args: In.args, **kwargs: In.kwargs) -> Out:
                try:
                    now = time.monotonic()
                    self._look(now)
                    if self.signal is not None or now > self.time_up or now >= min(self.row_due, self.look_due):
                        self.check()
                    cells[SINCE] = time.monotonic_ns()
                    cells[PHASE] = phase
                    return call(*args, **kwargs)
                except (SystemExit, KeyboardInterrupt) as error:
                    raise left(error) from None
                finally:
                    cells[SINCE] = 0

            return guarded

        return wrap

    def close(self, call: Callable[[], None]) -> None:
        """Close an environment of this process, unless an earlier close() did not return."""
        if self._close_hangs:
            return
        self.closing = time.monotonic()
        try:
            call()
        finally:
            self.closing = 0.0

    def spare(self, call: Callable[In, Out]) -> Callable[In, Out]:
        """Wrap a hook: its child processes are not attributed to an environment, and the watchdog can name it."""

        place = place_of(call)

        def spared(*args: In.args, **kwargs: In.kwargs) -> Out:
            with self.leftovers.spared():
                self.hook, self.hook_began = place, time.monotonic()
                try:
                    return call(*args, **kwargs)
                finally:
                    self.hook = ""

        return spared

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals in this block; a signal that nothing else handled ends this process quietly."""
        numbers = [
            number for number in END_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        ]
        try:  # a hang-up that is ignored (nohup) stays ignored
            before = {number: signal.signal(number, self.ask) for number in numbers}
        except ValueError:  # only the main thread may handle signals
            yield
            return
        try:
            yield
        except Interrupted:
            if self.signal == signal.SIGINT or self.signal is None:
                raise KeyboardInterrupt from None
            raise SystemExit(SIGNALLED + self.signal) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def place_of(call: Callable[..., object]) -> str:
    """Return the name of a user's function and its place in the source."""
    code = getattr(inspect.unwrap(getattr(call, "__func__", call)), "__code__", None)
    name = getattr(call, "__qualname__", repr(call))
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
