"""The process of a run: its threads, priority, memory, CUDA stream and executors, and the signals that end it."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from threadpoolctl import threadpool_limits

from freewheel.collect.workers import WorkersConfig
from freewheel.core import Collector, MakeExecutor
from freewheel.rollout.probe import usable_cores
from freewheel.transport.executors import Executors, SerialExecutor

if TYPE_CHECKING:  # not needed by a process that only evaluates
    from freewheel.config.resolve import Config

In = ParamSpec("In")
Out = TypeVar("Out")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
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
def lower_priority(yields: bool) -> Iterator[None]:
    """Lower the priority of a learner that yields. It is restored at the end if the system allows that."""
    if not yields:
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


def executors(
    config: Config, device: str, while_waiting: Callable[[], None] = lambda: None
) -> AbstractContextManager[MakeExecutor]:
    """Return what runs parts of the learner: serially with it, or concurrently in threads (on a GPU) or processes."""
    kind = config.learner.executor
    if kind == "async" or (kind == "auto" and isinstance(config.collector, WorkersConfig)):
        return Executors("process" if device == "cpu" else "thread", device)
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
