"""What a run uses of its machine: processor time, memory, GPUs."""

from __future__ import annotations

import sys
from typing import NamedTuple

import psutil

GPU_METRICS = "gpu_util", "simulator_gpu_util"  # of the learner's, and of a simulator's that is another one


class Usage(NamedTuple):
    """What this process and all its children use, as the operating system reports it."""

    cpu_s: float  # since they began; the time of a child that has ended is counted in its parent
    trainer_mb: float  # resident memory of this process
    workers_mb: float  # and of all others together


def usage() -> Usage:
    own = psutil.Process()
    cpu_s = workers = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            cpu_s += sum(process.cpu_times()[:4])  # user, system, and both of its ended children
            workers += 0.0 if process is own else process.memory_info().rss / 1e6
        except psutil.Error:  # it has ended meanwhile
            continue
    return Usage(cpu_s, own.memory_info().rss / 1e6, workers)


def gpu_util(device: str) -> float | None:
    """Busy share of this GPU, if this process uses one and can ask; torch is never imported for it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        return float(torch.cuda.utilization(device)) / 100
    except Exception:  # noqa: BLE001 - no NVML, no permission, a virtual device: for any reason, the figure is unknown
        return None
