"""What a run uses of its machine: CPU time, memory and GPU."""

from __future__ import annotations

import sys
from typing import NamedTuple

import psutil

MB = 1e6


class Usage(NamedTuple):
    """What this process and all its children use."""

    cpu_s: float  # since they began; the time of a child that has ended is counted in its parent
    trainer_mb: float  # resident memory of this process
    workers_mb: float  # and of all others together


def usage() -> Usage:
    """As the operating system reports it now."""
    own = psutil.Process()
    cpu_s = workers = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            cpu_s += sum(process.cpu_times()[:4])  # user, system, and both of its ended children
            workers += 0.0 if process is own else process.memory_info().rss / MB
        except psutil.Error:  # it has ended meanwhile
            continue
    return Usage(cpu_s, own.memory_info().rss / MB, workers)


def gpu_util() -> float | None:
    """Busy share of the GPU, if this process uses one and can ask; torch is never imported for it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        return float(torch.cuda.utilization()) / 100
    except Exception:  # noqa: BLE001 - no NVML, no permission, a virtual device: for any reason, the figure is unknown
        return None
