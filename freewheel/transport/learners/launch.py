"""Several learners on this machine: the first one starts the processes of the others, watches them and ends them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Self

from freewheel.transport import forkserver
from freewheel.transport.learners.group import JOIN, Group
from freewheel.transport.learners.rank import RankInfo, open_store

GRACE = 10.0  # seconds for learners to end after the first one has ended
KNOWN = 2.0  # seconds within which the exit code of an ended process is known
PRELOADED = ("freewheel.run.process", "freewheel.run.stopping.watched")


class Learners:
    """Starts learners 1 to count - 1 on this machine; `group` belongs to learner 0. They end with the `with` block, and
    with this process, however it ends."""

    def __init__(self, count: int, target: Callable[[RankInfo, bytes], None], message: bytes) -> None:
        """Each learner calls target(its place, message) in a separate process."""
        self._count, self._target, self._message = count, target, message
        self._processes: list[ForkServerProcess] = []
        self._held = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            store, port = open_store(JOIN)
            lifeline = forkserver.Lifeline()
            undo.callback(lifeline.close)
            forkserver.prepare(PRELOADED)
            undo.callback(self._end)
            for rank in range(1, self._count):
                place = RankInfo(rank, self._count, rank, self._count, port=port)
                name = f"freewheel-learner-{rank}"
                process = lifeline.process(self._target, place, self._message, name=name)
                forkserver.start(process)
                self._processes.append(process)
            self.group = Group(RankInfo(0, self._count, 0, self._count, port=port), store)
            self.group.why = self.lost
            undo.callback(self.group.close)
            self._held = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._held.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def gone(self) -> bool:
        """Return whether one of the learners has ended. This costs one system call."""
        return bool(connection.wait([process.sentinel for process in self._processes], 0))

    def lost(self) -> str:
        """Say which learners have ended, and how; empty if none ends within a short time."""
        if not connection.wait([process.sentinel for process in self._processes], KNOWN):
            return ""
        ended = [(rank, process.exitcode) for rank, process in enumerate(self._processes, 1)]
        return ", ".join(f"learner {rank} {how(code)}" for rank, code in ended if code is not None)

    def _end(self) -> None:
        forkserver.end(self._processes, GRACE)
        self._processes = []


def how(code: int) -> str:
    """Say how a process has ended, by its exit code."""
    if code >= 0:
        return f"has ended (exit code {code})"
    try:
        return f"was killed ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed (signal {-code})"
