"""The process of a run: its threads, priority, memory, CUDA stream and executors, and the signals that end it."""

from __future__ import annotations

import ctypes
import inspect
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar

from threadpoolctl import threadpool_limits

from freewheel.collect.workers import WorkersConfig
from freewheel.core import Collector, Env, EpisodePrefix, MakeExecutor, NDArray, SeedStream
from freewheel.envs.lane import Lane
from freewheel.errors import SIGNALLED, EnvError, SetupError
from freewheel.registry import changed, with_defaults
from freewheel.rollout.factory import MakeEnv
from freewheel.rollout.probe import usable_cores
from freewheel.rollout.whereabouts import CALL, CONSTRUCT, ELSEWHERE, PHASE, RESET, SINCE, cells
from freewheel.transport.clock import clock
from freewheel.transport.executors import Executors, SerialExecutor
from freewheel.transport.forkserver import Leftovers

if TYPE_CHECKING:  # not needed by a process that only evaluates
    from freewheel.run.plan import Plan

In = ParamSpec("In")
Out = TypeVar("Out")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
LATE = 0.05  # share of its minutes by which a run may end late to finish the work in progress
HOOK = 30.0  # least time limit in seconds of a hook after the training; see Stop.training_over
NICE = 5, 10  # niceness added to a learner that yields: at first, and when it has time to spare


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory: every update frees and allocates the same megabytes, and new pages are slow.
    Do nothing if the C library has no such option."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(option, 1 << 30)


def import_torch() -> float:
    """Import torch, the slowest import; return the seconds that it took."""
    began = time.monotonic()
    import torch  # noqa: F401

    return time.monotonic() - began


@contextmanager
def learner_threads(count: int) -> Iterator[None]:
    """Limit torch and numpy's BLAS to `count` CPU threads in this block, and to the number of cores. Environment
    variables would be too late: BLAS reads them when numpy is imported, which a script may have done before."""
    import torch

    count = min(count, usable_cores())
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(count, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def lower_priority(planned: Plan) -> Iterator[None]:
    """Lower the priority of a learner that yields. It is restored at the end if the system allows that."""
    if planned.yields != "learner":
        yield
        return
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(19, before + NICE[0]))
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, thread, before)


def yield_further() -> None:
    """Lower the priority of the calling learner thread further: it has time to spare, and waking workers should not
    wait for it, above all if other programs run. Raising it again needs privileges, so a learner that others wait for
    must not call this."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICE[1] - NICE[0]))


def executors(planned: Plan, while_waiting: Callable[[], None] = lambda: None) -> AbstractContextManager[MakeExecutor]:
    """Return what runs parts of the learner: serially with it, or concurrently in threads (on a GPU) or processes."""
    kind = planned.config.learner.executor
    if kind == "async" or (kind == "auto" and isinstance(planned.config.collector, WorkersConfig)):
        return Executors("process" if planned.device == "cpu" else "thread", planned.device)
    return nullcontext(partial(SerialExecutor, while_waiting=while_waiting))


def learner_stream(device: str) -> AbstractContextManager[object]:
    """Return, on a GPU, a CUDA stream for the learner that first waits for this thread's earlier work there."""
    if device == "cpu":
        return nullcontext()
    import torch

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def beside(collector: Collector, work: Callable[[], Out], device: str) -> Out:
    """Do the work in this thread, or in another one if the collector needs the main thread for the simulation."""
    if not collector.main_thread:
        return work()

    def on_stream() -> Out:
        with learner_stream(device):
            return work()

    with ThreadPoolExecutor(1, "freewheel-loop") as pool:
        result = pool.submit(on_stream)
        result.add_done_callback(lambda _: collector.stop())
        collector.serve()
        return result.result()


PACKAGE = str(Path(__file__).parents[1])  # the folder of Freewheel's code


class Interrupted(BaseException):
    """A signal asked the run to end."""

    reason = "interrupted"  # why the run ended


class TimeUp(Interrupted):
    """The run's time is up while an operation is still running."""

    reason = "minutes"


#: Interrupt, end, and hang up: what a terminal, a job queue and a lost connection send.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ClosingError(EnvError):
    """An environment's close() did not return."""


class ExitCalled(SystemExit):
    """User code in this process called os._exit."""

    def __str__(self) -> str:
        return f"os._exit({self.code})"


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
            number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
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


class Wrap(Protocol):
    """A decorator that acts before and after a call."""

    def __call__(self, call: Callable[In, Out]) -> Callable[In, Out]: ...


Replay: TypeAlias = Callable[
    [Sequence[SeedStream], Sequence[EpisodePrefix | None], Callable[[str], None]], tuple[NDArray, list[str]] | None
]


def place_of(call: Callable[..., object]) -> str:
    """Return the name of a user's function and its place in the source."""
    code = getattr(inspect.unwrap(getattr(call, "__func__", call)), "__code__", None)
    name = getattr(call, "__qualname__", repr(call))
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def wrapped(env: Env[Any], step: Wrap, reset: Wrap, stop: Stop) -> Env[Any]:
    """Return the Env with its steps, resets and close wrapped."""
    env = with_defaults(env, Env)
    found: Env[Any] = changed(
        env,
        Env,
        step=step(env.step),
        reset=reset(env.reset),
        autoreset=reset(env.autoreset),
        replay=_watched_replay(reset(env.replay)),
        close=partial(stop.close, env.close),
    )
    return found


def _watched_replay(again: Replay) -> Replay:
    """Restart the watchdog's clock at each call of the environment during a replay."""

    def replay(
        seeds: Sequence[SeedStream], played: Sequence[EpisodePrefix | None], calling: Callable[[str], None]
    ) -> tuple[NDArray, list[str]] | None:
        def called(what: str) -> None:
            calling(what)
            cells[SINCE] = time.monotonic_ns()
            if cells[PHASE] != ELSEWHERE:
                cells[PHASE] = RESET if what == "reset" else CALL

        return again(seeds, played, called)

    return replay


def watched(make: MakeEnv, stop: Stop) -> MakeEnv:
    """Return a factory of environments that run in this process and are watched."""

    def make_watched(lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env[Any]:
        construct, reset, step = (stop.guard(ELSEWHERE if processes else phase) for phase in (CONSTRUCT, RESET, CALL))
        return wrapped(construct(make)(lanes, processes=processes, fault_tolerant=fault_tolerant), step, reset, stop)

    return make_watched


def lane_of(frame: FrameType | None) -> Lane | None:
    """Return the lane whose env is being called in this frame or in one of its callers."""
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, Lane):
            return own
        frame = frame.f_back
    return None


def exit_called(error: SystemExit) -> SetupError:
    """Return the error for user code outside an environment that called exit: code 0 would falsely report success."""
    did = str(error) if isinstance(error, ExitCalled) else f"sys.exit({error.code!r})"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(PACKAGE)]
    # A package may have wrapped sys.exit.
    own = [one for one in frames if "site-packages" not in one.filename] or frames
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else "code of yours"
    return SetupError(
        f"{place} called {did}, which would have ended the run without a message: a hook ends a run with run.stop()"
    )


def left(error: SystemExit | KeyboardInterrupt) -> EnvError:
    """Return the error for an environment that tried to end this process."""
    tb, lane = error.__traceback__, None
    while tb is not None and lane is None:
        lane, tb = lane_of(tb.tb_frame), tb.tb_next
    who, where = ("the environment", "in a call") if lane is None else (lane.who, lane.where)
    where = "in its constructor" if cells[PHASE] == CONSTRUCT else where
    did = "raised KeyboardInterrupt"
    if isinstance(error, SystemExit):
        did = f"called {error if isinstance(error, ExitCalled) else f'sys.exit({error.code!r})'}"
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_globals.get("__name__", "").startswith("freewheel."):
        tb = tb.tb_next
    trace = "".join(traceback.format_exception(type(error), error, tb)).rstrip()
    return EnvError(f"{who} {did}, which would have ended the run ({where})\n{trace}")
