"""This module describes the machine on which a measurement was made."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import psutil

from freewheel.rollout.probe import processor, usable_cores

PACKAGES = ("freewheel", "torch", "numpy", "gymnasium")


def hardware() -> dict[str, Any]:
    """Return the processor, cores, memory, GPU and versions of this machine, and how busy it is
    now."""
    return {
        "cpu": processor(),
        "cores": usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _gpu(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "load": round(os.getloadavg()[0], 2),  # processes that ran or wanted to run, averaged over the last minute
    }


def _gpu() -> str | None:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    kinds = [f"{names.count(name)} × {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    return ", ".join(kinds) or None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
