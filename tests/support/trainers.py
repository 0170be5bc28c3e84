"""Trainings in separate processes: start them, wait for them, and find their children."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.warm import Command, Server

SEED = 5
LIMIT = 50.0  # seconds that any wait may take: the machine may be busy
SMALL_ARGV = ["--num-steps-per-env", "16", "--policy.hidden", "8", "--evals", "0", "--seed", str(SEED)]


def wait_until(
    condition: Callable[[], bool],
    limit: float = LIMIT,
    what: str = "the condition did not become true",
    every: float = 0.005,
) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(every)


def command(server: Server, runs: Path, *argv: str) -> AbstractContextManager[Command]:
    """`freewheel train` in its own session, as in a terminal; killed if it does not end."""
    words = ["train", *SMALL_ARGV, *argv, "--runs-dir", str(runs), "--run", "cut"]
    return server.command(runs.parent, *words, prefix=f"{runs.name}-")


@contextmanager
def commands(server: Server, folder: Path, modes: Sequence[str], *argv: str) -> Iterator[dict[str, Command]]:
    """A command for each of these modes, with three workers, all at the same time; returns when all are training."""
    options = ["--workers", "3", "--num-envs", "3", "--steps", "1000000000", "--log-every", "0.05"]
    with ExitStack() as stack:
        processes = {
            mode: stack.enter_context(command(server, folder / mode, *argv, *options, "--mode", mode)) for mode in modes
        }
        wait_until(lambda: all(has_logged(folder / mode) for mode in modes))
        yield processes


def has_logged(runs: Path, run: str = "cut") -> bool:
    log = runs / run / "metrics.jsonl"
    return log.is_file() and b"\n" in log.read_bytes()


def summary_of(folder: Path, run: str = "it") -> dict[str, Any]:
    """Of a run in the `runs` of this folder."""
    summary: dict[str, Any] = json.loads((folder / "runs" / run / "summary.json").read_text())
    return summary


def family(pid: int) -> list[psutil.Process]:
    """All descendants of a process."""
    return psutil.Process(pid).children(recursive=True)


def alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def workers_of(pid: int) -> list[psutil.Process]:
    """The children of the forkserver."""
    return [child for child in family(pid) if child.ppid() != pid]
