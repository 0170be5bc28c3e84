"""What this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from freewheel.rollout.probe import usable_cores

REQUIRED = ("numpy", "torch", "gymnasium", "tyro", "rich", "safetensors", "psutil", "cloudpickle")
OPTIONAL = {
    "mujoco": "MuJoCo worlds (HalfCheetah-v5): pip install 'gymnasium[mujoco]'",
    "pygame": "windows and pictures of the classic worlds: pip install 'gymnasium[classic-control]'",
    "PIL": "animated pictures from `freewheel play`: pip install pillow",
    "stable_baselines3": "the comparison in `make bench`: pip install stable-baselines3",
}
SMALL_SHM = 256 * 2**20
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def examine() -> Iterator[tuple[bool, str, str]]:
    """(all is well, what, how it is) for everything worth knowing."""
    yield (
        sys.version_info >= (3, 11),
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.release()}",
    )
    yield True, "freewheel", _version("freewheel") or "not installed (run from source)"
    for name in REQUIRED:
        version = _version(name)
        yield version is not None, name, version or f"missing: pip install {name}"
    compiled = importlib.util.find_spec("freewheel.rollout._kernel") is not None
    hint = (
        "not compiled; workers with one slow env each cost more: install gcc and Python's headers, then freewheel anew"
    )
    yield True, "kernel", "compiled" if compiled else hint
    yield from _machine()
    for module, purpose in OPTIONAL.items():
        found = importlib.util.find_spec(module) is not None
        yield True, module, "installed" if found else f"not installed; for {purpose}"


def _machine() -> Iterator[tuple[bool, str, str]]:
    yield True, "cores", f"{usable_cores()} usable of {os.cpu_count()}{_quota()}"
    memory = psutil.virtual_memory()
    yield memory.available > 2**30, "memory", f"{_size(memory.available)} free of {_size(memory.total)}"
    yield True, "gpu", _gpu()
    shm = Path("/dev/shm")
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        enough = usage.free >= SMALL_SHM
        hint = "" if enough else "; worker processes need more: remount it larger (docker: --shm-size=1g)"
        yield enough, "/dev/shm", f"{_size(usage.free)} free of {_size(usage.total)}{hint}"
    else:
        yield False, "/dev/shm", "not there; worker processes need shared memory"


def _quota() -> str:
    """The container's CPU limit, where there is one."""
    if not CPU_LIMIT.is_file():
        return ""
    quota, period = CPU_LIMIT.read_text().split()
    return "" if quota == "max" else f", limited to {int(quota) / int(period):g} by the container"


def _gpu() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown (torch is missing)"
    import torch

    if not torch.cuda.is_available():
        return "none (the CPU is fine for small networks)"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"
