"""Executors: run a function in the caller's thread, in a thread with its own CUDA stream, or in a process.

A function may be a generator: it can be interrupted where it yields, and its return value is the result.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from freewheel.core import Executor
from freewheel.errors import EnvError, FreewheelError
from freewheel.transport import forkserver
from freewheel.transport.clock import Limit, clock
from freewheel.transport.workers.call_tracker import CallTracker

Argument = TypeVar("Argument")
Value = TypeVar("Value")
Function: TypeAlias = Callable[[Argument], Value]

NICE = 10  # by default, a process only uses processor time that the training leaves
GRACE = 1.0  # seconds for a process to end by itself
THREAD_GRACE = 30.0  # seconds for a thread to finish its call


def _go_on() -> None:
    """Let the call continue."""


class SerialExecutor:
    """Calls the function in `submit`, in the caller's thread. Implements core.Executor."""

    busy = False

    def __init__(
        self, build: Callable[[], Function[Any, Any]], what: str, while_waiting: Callable[[], None] = _go_on
    ) -> None:
        """while_waiting: called where the function yields; an exception from it ends the call."""
        self._build, self._while_waiting = build, while_waiting
        self._function: Function[Any, Any] | None = None
        self._results: deque[Any] = deque()

    def submit(self, argument: Any) -> None:
        if self._function is None:
            self._function = self._build()
        self._results.append(returned(self._function(argument), lambda _: self._while_waiting()))

    def result(self, wait: float = 0.0) -> Any:
        return self._results.popleft() if self._results else None


class _OverError(Exception):
    """The executor ends, and so must its call."""


class ThreadExecutor:
    """Calls in a thread, on a separate CUDA stream; a returned result is complete. Implements core.Executor."""

    def __init__(self, build: Callable[[], Function[Any, Any]], what: str, device: str) -> None:
        self._arguments: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls = 0
        self._device = device
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(build, device), name=f"freewheel-{what}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._calls > 0

    def submit(self, argument: Any) -> None:
        import torch

        ready = None
        if self._device.startswith("cuda"):
            ready = torch.cuda.Event()  # the argument is complete when the caller's stream has reached this point
            ready.record(torch.cuda.current_stream(self._device))
        self._calls += 1
        self._arguments.put((argument, ready))

    def result(self, wait: float = 0.0) -> Any:
        try:
            result = self._results.get(timeout=wait) if wait > 0 else self._results.get_nowait()
        except queue.Empty:
            return None
        self._calls -= 1
        return result

    def _go_on(self) -> None:
        if self._over.is_set():
            raise _OverError

    def close(self) -> None:
        """End a generator where it yields; wait for any other call."""
        self._over.set()
        self._arguments.put(None)
        self._thread.join(THREAD_GRACE)

    def _serve(self, build: Callable[[], Function[Any, Any]], device: str) -> None:
        import torch

        stream = torch.cuda.Stream(device) if device.startswith("cuda") else None
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            function: Function[Any, Any] | None = None
            while (item := self._arguments.get()) is not None and not self._over.is_set():
                argument, ready = item
                if stream is not None and ready is not None:
                    stream.wait_event(ready)
                try:
                    function = function or build()
                    result = returned(function(argument), lambda _: self._go_on())
                except _OverError:
                    return
                except FreewheelError as error:
                    result = error
                except Exception as error:  # noqa: BLE001 - the result of the call, for the caller to raise
                    result = FreewheelError(
                        f"{threading.current_thread().name} failed with {error!r}; please report this"
                    )
                if stream is not None:
                    stream.synchronize()
                self._results.put(result)


class ProcessExecutor(Generic[Argument, Value]):
    """Calls in a process, started by `start` or the first call and replaced if it dies. Implements core.Executor.

    A generator may yield the environment call that it makes next; `place` shows this call until it has returned. A
    function that has `close` is closed when the executor ends normally.
    """

    def __init__(
        self,
        build: Callable[[], Function[Argument, Value | Generator[Any, None, Value]]],
        what: str,
        *,
        nice: int = NICE,
        modules: Sequence[str] = (),
    ) -> None:
        self._build = forkserver.pickled(build, what)
        self._what, self._nice, self._modules = what, nice, modules
        self._lifeline = forkserver.Lifeline()
        self._process: ForkServerProcess | None = None
        self._pipe: Any = None
        self._waiting: deque[Argument] = deque()
        self._running = False
        self._leaving: Limit | None = None  # the time for the process to end after `hang_up`
        self.place = CallTracker()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()
        self._lifeline.close()
        self.place.close()

    def submit(self, argument: Argument) -> None:
        self._waiting.append(argument)
        self._send()

    @property
    def pipe(self) -> Any:
        """The pipe, for a wait on many processes at once."""
        return self._pipe

    @property
    def busy(self) -> bool:
        return self._running or bool(self._waiting)

    def result(self, wait: float = 0.0) -> Value | FreewheelError | None:
        """Return the result of the oldest call, or its error; None if there is none yet."""
        if not self._running or not self._pipe.poll(wait):
            return None
        try:
            result: Value | FreewheelError = cloudpickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._running = False
            result = EnvError(f"{self._what} ended its process ({self._end()})")
        self._running = False
        self._send()
        return result

    def stop(self) -> None:
        """Kill the process and forget its calls; a later call starts another."""
        self._waiting.clear()
        self._end()
        self._running = False

    def hang_up(self) -> None:
        """Let the process end by itself, without waiting for it. To end many, hang up on all of them first."""
        if self._process is not None and not self._running:
            self._pipe.close()
            self._leaving = Limit(GRACE)

    def _send(self) -> None:
        if self._running or not self._waiting:
            return
        if self._process is None:
            self.start()
        with suppress(BrokenPipeError):  # the process is dead: `result` will find the end of the pipe
            self._pipe.send_bytes(cloudpickle.dumps(self._waiting.popleft()))
        self._running = True

    def start(self) -> None:
        """Start the process before the first call, which then finds it ready."""
        forkserver.prepare(self._modules)
        self._pipe, theirs = multiprocessing.get_context("forkserver").Pipe()
        process = self._lifeline.process(_serve, self._build, theirs, self._nice, self.place, name="freewheel-executor")
        forkserver.start(process)
        self._process = process
        theirs.close()

    def _end(self) -> str:
        """End the process and return how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "never started"
        if self._running and process.pid is not None:
            forkserver.kill_tree(process.pid)
        self._pipe.close()
        leaving, self._leaving = self._leaving or Limit(0.0 if self._running else GRACE), None
        (code,) = forkserver.end([process], leaving.left)
        return f"exit code {code}"


def _serve(build: bytes, pipe: Any, nice: int, place: CallTracker) -> None:
    os.nice(nice)
    make = cloudpickle.loads(build)  # imports what it needs before the first call comes
    function: Function[Any, Any] | None = None
    with suppress(EOFError, ConnectionError):  # the executor no longer waits for results
        while True:
            argument = cloudpickle.loads(pipe.recv_bytes())
            try:
                if function is None:
                    function = make()
                    forkserver.freeze_heap()
                result = returned(function(argument), lambda call: None if call is None else place(*call))
            except FreewheelError as error:
                result = error
            pipe.send_bytes(cloudpickle.dumps(result))
    close: Callable[[], None] | None = getattr(function, "close", None)
    if close is not None:
        close()


def returned(result: Any, each: Callable[[Any], None] = lambda _: None) -> Any:
    """Return the result itself, or the return value of a generator; `each` receives the values that it yields."""
    while isinstance(result, Generator):
        try:
            each(next(result))
        except StopIteration as end:
            return end.value
    return result


def wait_for_any(executors: Sequence[ProcessExecutor[Any, Any]], seconds: float) -> None:
    """Wait until one of these has a result, but not longer than this."""
    pipes = [executor.pipe for executor in executors if executor.busy]
    if pipes:
        connection.wait(pipes, seconds)


def call_in_process(call: Callable[[], Value], what: str, limit: float, modules: Sequence[str] = ()) -> Value:
    """Return the result of `call` in a separate process within `limit` seconds; `what` names it in errors."""
    executor = ProcessExecutor[None, tuple[Value]](lambda: lambda _: (call(),), what, nice=0, modules=modules)
    with clock, executor:
        executor.submit(None)
        result = Limit(limit).wait(executor.result)
        if result is None:
            raise EnvError(f"{what} did not return within {limit:g} s; is it waiting for something?")
        if isinstance(result, FreewheelError):
            raise result
        return result[0]


class Executors:
    """Makes executors of one kind and ends them all on exit. Implements core.MakeExecutor."""

    def __init__(self, kind: Literal["thread", "process"], device: str) -> None:
        self._kind, self._device = kind, device
        self._made = ExitStack()

    def __call__(self, build: Callable[[], Function[Any, Any]], what: str) -> Executor:
        if self._kind == "process":
            process = self._made.enter_context(ProcessExecutor[Any, Any](build, what, nice=0))
            process.start()
            return process
        executor = ThreadExecutor(build, what, self._device)
        self._made.callback(executor.close)
        return executor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._made.close()
