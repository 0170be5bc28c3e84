"""What a run takes of its own process while it trains: threads, priority, memory, a CUDA stream, executors."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TypeVar

from freewheel.core import Collector, MainThreadCollector, MakeExecutor
from freewheel.rollout.probe import usable_cores
from freewheel.run.plan import Plan
from freewheel.transport.executors import Executors, SerialExecutor

Out = TypeVar("Out")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
NICE = 5  # how much lower the learner's priority is where more workers than cores run


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory: every update frees and allocates the same megabytes, and new pages are slow. Where
    the C library has no such option, nothing happens."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(option, 1 << 30)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many CPU threads for torch, in this block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def lower_priority(planned: Plan) -> Iterator[None]:
    """A lower priority for the learner where more workers than cores run, so that sleeping workers wake in time; a few workers
    that never sleep would leave it no time at all. Restored at the end, where the system allows it."""
    if not planned.in_processes or planned.workers <= usable_cores():
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


@contextmanager
def executors(planned: Plan) -> Iterator[MakeExecutor]:
    """Where parts of the learner run: in turn with it, or beside it in threads (on a GPU) or processes."""
    if not planned.overlaps:
        yield SerialExecutor
        return
    with Executors("process" if planned.device == "cpu" else "thread", planned.device) as room:
        yield room


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
