"""Real trainings to do harm to: `freewheel` commands in a session of their own, watched from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks._common import ONE_THREAD, ROOT

SHARED_MEMORY = Path("/dev/shm")
START_LIMIT = 90.0  # seconds until a command must have logged a row
RUN = "run"  # the name of every run here; each has a runs directory of its own


class StuckError(Exception):
    """A trainer did not do in time what it must."""


def wait_until(condition: Callable[[], bool], limit: float, what: str) -> float:
    """Returns how long it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit:
            raise StuckError(f"{what}: not within {limit:g} s")
        time.sleep(0.005)
    return time.monotonic() - began


class Trainer:
    """One `freewheel` command over a run directory, perhaps not the first one."""

    def __init__(
        self, folder: Path, *argv: str, module: str = "freewheel", env: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.path = folder, folder / "runs" / RUN
        self._output = (folder / "output.txt").open("ab")
        self._old = set(self._lines())  # of earlier sessions: a resumed run takes some of them back
        self.began = time.monotonic()
        self._family: dict[int, psutil.Process] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *argv, "--runs-dir", str(folder / "runs")],
            cwd=folder,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.note_family()
        self.process.kill()
        self.process.wait()
        for child in self._family.values():
            with suppress(psutil.Error):
                child.kill()
        self._output.close()

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def _lines(self) -> list[bytes]:
        with suppress(FileNotFoundError):
            return self.metrics.read_bytes().split(b"\n")[:-1]
        return []

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows of the run, of every session."""
        return [json.loads(line) for line in self._lines()]

    def new_rows(self) -> list[dict[str, Any]]:
        """Those that this command has written."""
        return [json.loads(line) for line in self._lines() if line not in self._old]

    def said(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return found

    def await_row(self, beyond: int = 0) -> float:
        """Until it has logged a row with more env steps than this; seconds since its start."""

        def logged() -> bool:
            if self.process.poll() is not None:
                raise StuckError(f"ended with {self.process.returncode} before it trained: {self.said()[-600:]}")
            rows = self.new_rows()
            return bool(rows) and rows[-1]["env_steps"] > beyond

        wait_until(logged, START_LIMIT, "no row was logged")
        return time.monotonic() - self.began

    def note_family(self) -> list[psutil.Process]:
        """All descendants that are or were there."""
        with suppress(psutil.Error):
            self._family |= {one.pid: one for one in psutil.Process(self.process.pid).children(recursive=True)}
        return list(self._family.values())

    def workers(self) -> list[psutil.Process]:
        """Processes of the run that act: children of the forkserver."""
        return [one for one in self.note_family() if alive(one) and parent_of(one) != self.process.pid]

    def kill(self) -> float:
        """SIGKILL to the trainer alone; seconds until none of its processes is left."""
        self.note_family()
        self.process.kill()
        self.process.wait()
        return wait_until(lambda: not self.left(), 10.0, "processes outlived their trainer")

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self, limit: float) -> float:
        """Until it has ended; how long that took."""
        began = time.monotonic()
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise StuckError(f"still running after {limit:g} s: {self.said()[-300:]}") from None
        return time.monotonic() - began

    def left(self) -> list[psutil.Process]:
        return [one for one in self._family.values() if alive(one)]


def usual_signals() -> None:
    """As in a terminal: what a shell has started in the background ignores interrupts, and so would all trainings."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    return False


def words_of(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def parent_of(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.ppid())
    return -1


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY))


def balanced(summary: Mapping[str, Any]) -> bool:
    """Whether every row is accounted for."""
    dropped: Sequence[int] = list(summary["dropped"].values())
    total = int(summary["trained"]) + sum(dropped) + int(summary["queued"]) + int(summary["open"])
    return bool(summary["produced"] == total)
