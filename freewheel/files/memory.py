"""Measures free memory, and checks that a plan fits into it before anything is read or started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from freewheel.errors import SetupError


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can still be used: of the machine, or of the container if it has less."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # memory.max is "max" without a limit
        cached = re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.MULTILINE)
        used = int((cgroup / "memory.current").read_text()) - int(cached[1] if cached else 0)
        free = min(free, max(0, int((cgroup / "memory.max").read_text()) - used))
    return free


def in_words(size: float) -> str:
    """Format a number of bytes in the unit that suits it: 0.4 MB, 391 GB."""
    for unit, name, least in ((2**40, "TB", 1.0), (2**30, "GB", 1.0), (2**20, "MB", 0.1), (2**10, "KB", 0.1)):
        if size >= least * unit:
            return f"{size / unit:,.0f} {name}" if size >= 10 * unit else f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} bytes"


@dataclass(frozen=True)
class Need:
    """A number of things that are in memory at the same time, and the size of each."""

    count: int
    what: str
    each: float  # bytes
    option: str  # the option that makes them fewer or smaller

    @property
    def total(self) -> float:
        return self.count * self.each

    def __str__(self) -> str:
        return f"{self.count:,} {self.what} x {in_words(self.each)} = {in_words(self.total)}"


def require_memory(needs: Sequence[Need]) -> None:
    """Raise SetupError, with the arithmetic, if the needs together do not fit into the free memory."""
    total, free = sum(need.total for need in needs), free_memory()
    if total <= free:
        return
    largest = max(needs, key=lambda need: need.total)
    rest = f", {in_words(total)} with all else" if largest.total <= free else ""
    raise SetupError(f"{largest}{rest}, but {in_words(free)} of memory are free: use a smaller {largest.option}")
