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

if TYPE_CHECKING:  # a process that evaluates does not need it
    from freewheel.run.plan import Plan

In = ParamSpec("In")
Out = TypeVar("Out")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LATE = 0.05  # of its minutes: so much later a run may end, if that lets it finish what it does
HOOK = 30.0  # seconds for a hook after the training, or as much later as a run may end
NICE = 5, 10  # how much lower the learner's priority is where it yields; the same when it has time to spare


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory: every update frees and allocates the same megabytes, and new pages are slow. Where
    the C library has no such option, nothing happens."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(option, 1 << 30)


def import_torch() -> float:
    """Import what takes longest to import; how many seconds it took."""
    began = time.monotonic()
    import torch  # noqa: F401

    return time.monotonic() - began


@contextmanager
def learner_threads(count: int) -> Iterator[None]:
    """So many CPU threads for torch and for numpy's BLAS, in this block, but no more than cores: they would wait for each other.
    BLAS reads environment variables only when numpy is imported, and a script may have done that long ago."""
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
    """A lower priority for the learner where it is to yield. Restored at the end, where the system allows it."""
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
    """An even lower priority for the learner, whose thread calls this: it has time to spare, and workers that wake should not
    have to wait for it, least of all beside another program. It could not be undone without privileges, so a learner that
    everybody waits for keeps what it has."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICE[1] - NICE[0]))


def executors(planned: Plan, while_waiting: Callable[[], None] = lambda: None) -> AbstractContextManager[MakeExecutor]:
    """Where parts of the learner run: in turn with it, or beside it in threads (on a GPU) or processes."""
    kind = planned.config.learner.executor
    if kind == "async" or (kind == "auto" and isinstance(planned.config.collector, WorkersConfig)):
        return Executors("process" if planned.device == "cpu" else "thread", planned.device)
    return nullcontext(partial(SerialExecutor, while_waiting=while_waiting))


def learner_stream(device: str) -> AbstractContextManager[object]:
    """On a GPU, a CUDA stream for the learner, which comes after what this thread has done there so far."""
    if device == "cpu":
        return nullcontext()
    import torch

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def beside(collector: Collector, work: Callable[[], Out], device: str) -> Out:
    """Work in a thread where the simulation has to run in the main thread and the collector can serve it there."""
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


PACKAGE = str(Path(__file__).parents[1])  # where our own code is


class Interrupted(BaseException):
    """A signal asked the run to end."""

    reason = "interrupted"  # of the end


class TimeUp(Interrupted):
    """The time of the run is over while something takes longer."""

    reason = "minutes"


#: Interrupt, end, and hang up: what a terminal, a job queue and a lost connection send.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ClosingError(EnvError):
    """An environment's close() does not return."""


class ExitCalled(SystemExit):
    """Code of the user's in this process called os._exit."""

    def __str__(self) -> str:
        return f"os._exit({self.code})"


class Endable(Protocol):
    """What the watchdog can do with a run that is stuck, from its own thread."""

    @property
    def saving(self) -> bool: ...  # a checkpoint is being written, and is waited for
    def log(self) -> None: ...  # write a row of metrics; from the run's own thread
    def emergency_end(self, reason: str, exit_code: int, *, save: bool) -> bool: ...
    def last_known(self) -> tuple[Path, Mapping[str, Any]]: ...  # where the summary will be, and what it would be now


def _nothing() -> None:
    """Nobody watches."""


class Stop:
    """The signal that asked the run to end. Until `begin` it ends everything at once, as nothing is worth keeping; from then on
    it interrupts calls of environments, where every row is counted, and nothing else."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._begun = False
        # When the time is over, a row of metrics due, and a look at others: by time.monotonic.
        self.time_up = self.row_due = self.look_due = math.inf
        self.look: Callable[[], None] = (
            _nothing  # whether learners beside this one want to end: what it raises ends the wait
        )
        self._looked, self._longest = time.monotonic(), 0.0  # the last look at the time, and the longest without one
        self.hook, self.hook_began = "", 0.0  # the user's hook that is being called, and since when
        self.hook_limit = math.inf  # seconds for each hook without a look at the time, when the training is over
        self.late: BaseException | None = None  # what is raised in the main thread, where something takes too long
        self.closing = 0.0  # since when an environment of this process is being closed, by time.monotonic; 0: none is
        self._close_hangs = False
        self.over = False  # the summary is being written, which must not be interrupted
        self.told: signal.Signals | None = None  # the signal that the summary speaks of
        self.cut = False  # a signal has interrupted something else than an environment, perhaps an update
        self.cuts = True  # an update that takes too long may be: no other learner is in it
        self.measured_s = 0.0  # seconds of the run's minutes that went by before it began
        self.run: Endable | None = None
        self.prepare: Callable[[], None] = _nothing  # set by a watchdog
        self.leftovers = Leftovers()

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: the first signal ends the run in good order, the second at once."""
        if self.late is not None:
            late, self.late = self.late, None
            self.cut, self._close_hangs = self.cut or isinstance(late, TimeUp), isinstance(late, ClosingError)
            raise late
        first, self.signal = self.signal is None, self.signal or signal.Signals(number)
        if not self.over and (cells[SINCE] or not first or not self._begun):
            self.cut = not cells[SINCE]
            raise Interrupted

    def pass_on(self) -> None:
        """After the run: a signal that came too late for its summary is for those who have started it, perhaps one of many."""
        if self.signal in (None, self.told):
            return
        if signal.getsignal(self.signal) == signal.SIG_DFL:
            raise SystemExit(SIGNALLED + self.signal)
        signal.raise_signal(self.signal)

    def begin(self) -> None:
        """The run directory is about to be made: from now on the run has to end in good order."""
        self._begun = True

    def attend(self, run: Endable) -> None:
        """From now on this run is ended if it is stuck."""
        self.run = run
        self.prepare()

    def check(self) -> None:
        """Whatever the run is doing: ends it if a signal has asked for that or its time is over, and writes rows when they are
        due. Call it in every wait, and between the steps of what takes long."""
        if self.signal is not None:
            raise Interrupted
        self.keep_time()
        if time.monotonic() >= self.look_due:
            self.look()

    def keep_time(self) -> None:
        """The same, and a signal waits: for what it should not cut short."""
        now = time.monotonic()
        self._look(now)
        if now > self.time_up:
            raise TimeUp
        self.report()

    def _look(self, now: float) -> None:
        self._longest, self._looked = max(self._longest, now - self._looked), now

    def training_over(self, minutes: float | None) -> None:
        """What comes now has limits of its own; so have hooks, where the run has a limit of minutes."""
        self.time_up = math.inf
        self.hook_limit = math.inf if minutes is None else max(HOOK, 60 * LATE * minutes)

    @property
    def hook_s(self) -> float:
        """Seconds for which the present hook has neither returned nor looked at the time, that no pause explains."""
        return clock.age(max(self._looked, self.hook_began)) if self.hook else 0.0

    def longest_gap(self) -> float:
        """Seconds that went by at most without a look at the time since this was last called: so late an end may be noticed."""
        self._look(time.monotonic())
        longest, self._longest = self._longest, 0.0
        return longest

    def report(self) -> None:
        """Write a row of metrics if one is due."""
        if time.monotonic() >= self.row_due and self.run is not None:
            self.run.log()

    def guard(self, phase: int) -> Wrap:
        """For calls of this kind of environments in this process: they are watched over, signals interrupt them, and none of them
        can end the process."""

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
        """Close an environment of this process, unless one of them has been given up in that."""
        if self._close_hangs:
            return
        self.closing = time.monotonic()
        try:
            call()
        finally:
            self.closing = 0.0

    def spare(self, call: Callable[In, Out]) -> Callable[In, Out]:
        """For hooks: processes that they start are not taken for an environment's, and one that does not return is named."""

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
        """Handle signals in this block; one that nothing else has dealt with ends this process, quietly."""
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
    """Makes a function that does something before and after a call."""

    def __call__(self, call: Callable[In, Out]) -> Callable[In, Out]: ...


Replay: TypeAlias = Callable[
    [Sequence[SeedStream], Sequence[EpisodePrefix | None], Callable[[str], None]], tuple[NDArray, list[str]] | None
]


def place_of(call: Callable[..., object]) -> str:
    """A function of the user's, and where it is written."""
    code = getattr(inspect.unwrap(getattr(call, "__func__", call)), "__code__", None)
    name = getattr(call, "__qualname__", repr(call))
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def wrapped(env: Env[Any], step: Wrap, reset: Wrap, stop: Stop) -> Env[Any]:
    """The same Env, with its steps and resets wrapped."""
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
    """Each call of the environment has its own time."""

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
    """Makes environments that run in this process and are watched over."""

    def make_watched(lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env[Any]:
        construct, reset, step = (stop.guard(ELSEWHERE if processes else phase) for phase in (CONSTRUCT, RESET, CALL))
        return wrapped(construct(make)(lanes, processes=processes, fault_tolerant=fault_tolerant), step, reset, stop)

    return make_watched


def lane_of(frame: FrameType | None) -> Lane | None:
    """The lane whose env is being called in this frame or below."""
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, Lane):
            return own
        frame = frame.f_back
    return None


def exit_called(error: SystemExit) -> SetupError:
    """The error for code of the user's, no environment, that wanted to end this process: 0 would say that all is well."""
    did = str(error) if isinstance(error, ExitCalled) else f"sys.exit({error.code!r})"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(PACKAGE)]
    # A package may have wrapped sys.exit.
    own = [one for one in frames if "site-packages" not in one.filename] or frames
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else "code of yours"
    return SetupError(
        f"{place} called {did}, which would have ended all without a word: a hook ends a run with run.stop()"
    )


def left(error: SystemExit | KeyboardInterrupt) -> EnvError:
    """The error for an environment in this process that wanted to end it."""
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
