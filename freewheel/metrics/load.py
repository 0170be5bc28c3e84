"""The load of a run on its machine: processor time, memory, GPUs."""

from __future__ import annotations

import sys
from typing import NamedTuple

import psutil

GPU_METRICS = "gpu_util", "simulator_gpu_util"  # of the learner's GPU, and of the simulator's GPU if it has another


class Usage(NamedTuple):
    """The resources of this process and all its children, as the operating system reports them."""

    cpu_s: float  # since they began; a parent contains the time of its ended children
    trainer_mb: float  # resident memory of this process
    workers_mb: float  # resident memory of all children together


def usage() -> Usage:
    own = psutil.Process()
    cpu_s = workers = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            cpu_s += sum(process.cpu_times()[:4])  # user and system, of the process and of its ended children
            workers += 0.0 if process is own else process.memory_info().rss / 1e6
        except psutil.Error:  # it has ended meanwhile
            continue
    return Usage(cpu_s, own.memory_info().rss / 1e6, workers)


def gpu_util(device: str) -> float | None:
    """Return the busy share of this GPU, if this process uses CUDA and can read it. This never imports torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        return float(torch.cuda.utilization(device)) / 100
    except Exception:  # noqa: BLE001 - no NVML, no permission, a virtual device: the value is unknown
        return None
