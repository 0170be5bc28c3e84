"""The process of a run: its threads, priority, memory, CUDA stream and executors, and the signals that end it."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from threadpoolctl import threadpool_limits

from freewheel.collect.mode import WorkersConfig
from freewheel.core import Collector, Env, MainThreadCollector, MakeExecutor
from freewheel.transport.executors import Executors, SerialExecutor

if TYPE_CHECKING:  # a process that evaluates does not need it
    from freewheel.run.plan import Plan

In = ParamSpec("In")
Out = TypeVar("Out")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
NICE = 5  # how much lower the learner's priority is where it yields


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory: every update frees and allocates the same megabytes, and new pages are slow. Where
    the C library has no such option, nothing happens."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(option, 1 << 30)


def import_torch() -> None:
    """Import what takes longest to import."""
    import torch  # noqa: F401


@contextmanager
def learner_threads(count: int) -> Iterator[None]:
    """So many CPU threads for torch and for numpy's BLAS, in this block. BLAS reads environment variables only when numpy is
    imported, and a script may have done that long ago."""
    import torch

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
    os.setpriority(os.PRIO_PROCESS, thread, min(19, before + NICE))
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, thread, before)


def executors(planned: Plan) -> AbstractContextManager[MakeExecutor]:
    """Where parts of the learner run: in turn with it, or beside it in threads (on a GPU) or processes."""
    kind = planned.config.learner.executor
    if kind == "async" or (kind == "auto" and isinstance(planned.config.collector, WorkersConfig)):
        return Executors("process" if planned.device == "cpu" else "thread", planned.device)
    return nullcontext(SerialExecutor)


def learner_stream(device: str) -> AbstractContextManager[object]:
    """On a GPU, a CUDA stream for the learner."""
    if device == "cpu":
        return nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream())


def beside(collector: Collector, work: Callable[[], Out], device: str) -> Out:
    """Work in a thread where the simulation has to run in the main thread and the collector can serve it there."""
    if not isinstance(collector, MainThreadCollector):
        return work()

    def on_stream() -> Out:
        with learner_stream(device):
            return work()

    with ThreadPoolExecutor(1, "freewheel-loop") as pool:
        result = pool.submit(on_stream)
        result.add_done_callback(lambda _: collector.stop())
        collector.serve()
        return result.result()


class Interrupted(BaseException):
    """A signal asked the run to end."""


class TimeUp(Interrupted):
    """The time of the run is over while something takes longer."""


#: Interrupt, end, and hang up: what a terminal, a job queue and a lost connection send.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """The signal that asked the run to end. Until `begin` it ends everything at once, as nothing is worth keeping; from then on
    it interrupts calls of environments, where every row is counted, and nothing else."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._begun = False
        self.time_up = math.inf  # when the time is over, as time.monotonic counts it
        self.over = False  # the summary is being written, which must not be interrupted
        self._in_env = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: the first signal ends the run in good order, the second at once."""
        first, self.signal = self.signal is None, self.signal or signal.Signals(number)
        if not self.over and (self._in_env or not first or not self._begun):
            raise Interrupted

    def begin(self) -> None:
        """The run directory is about to be made: from now on the run has to end in good order."""
        self._begun = True

    def check(self) -> None:
        if self.signal is not None:
            raise Interrupted
        if time.monotonic() > self.time_up:
            raise TimeUp

    def guard(self, call: Callable[In, Out]) -> Callable[In, Out]:
        def guarded(*args: In.args, **kwargs: In.kwargs) -> Out:
            self._in_env = True
            try:
                self.check()
                return call(*args, **kwargs)
            finally:
                self._in_env = False

        return guarded

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
            raise SystemExit(128 + self.signal) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Wrap(Protocol):
    """Makes a function that does something before and after a call."""

    def __call__(self, call: Callable[In, Out]) -> Callable[In, Out]: ...


class WrappedEnv:
    """An Env whose steps and resets are wrapped."""

    def __init__(self, env: Env[Any], step: Wrap, reset: Wrap) -> None:
        self.step, self.reset, self.autoreset = step(env.step), reset(env.reset), reset(env.autoreset)
        self.spec, self.set_context, self.render, self.close = env.spec, env.set_context, env.render, env.close
