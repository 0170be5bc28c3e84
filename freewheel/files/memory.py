"""How much memory is free: nothing larger is read or planned."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be used: of the machine, or of the container if it has less."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no limit reads "max"
        cached = re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.MULTILINE)
        used = int((cgroup / "memory.current").read_text()) - int(cached[1] if cached else 0)
        free = min(free, max(0, int((cgroup / "memory.max").read_text()) - used))
    return free


def gigabytes(size: float) -> str:
    """A number of bytes for people: 40.0 GB."""
    return f"{size / 2**30:,.1f} GB"
