"""Heartbeats in shared memory: each worker's phase, since when, its progress, and its reports."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import numpy as np

from freewheel.core import NDArray
from freewheel.transport.shm.memory import SharedArrays

PHASES = ("construct", "reset", "step", "wait")
CONSTRUCT, RESET, STEP, WAIT = range(4)
TURN = 0.5  # seconds: the longest wait of a worker before it updates its heartbeat
NO_LANES_LEFT = 4  # exit code of a worker that has given up all its lanes
REPORT_BYTES = 16384  # of a report, which is often an environment's traceback; longer ones are cut
REPORTS = 8  # unread reports of a worker; then the oldest is lost
NUMBERS = re.compile(r"(?<!\S)(?<!lane )\S*\d\S*")


def kind(report: str) -> str:
    """The last line of a report without its numbers: reports of one kind are shown once."""
    return NUMBERS.sub("#", report.rstrip().rsplit("\n", 1)[-1])


class Heartbeats:
    """Each value is written only by its worker while it runs."""

    def __init__(self, workers: int, lanes: int) -> None:
        each = ((workers,), "i8")
        self.memory = SharedArrays(
            {
                "phase": each,
                "since": each,  # CLOCK_MONOTONIC ns
                "steps": each,  # of all incarnations
                "died": each,  # ns, when the previous incarnation died
                "peak": each,  # kB, the largest use of memory
                "begun": ((workers, lanes), "i8"),  # episodes begun by each lane, over all incarnations
                "reported": each,  # twice the number of reports; odd while one is being written
                "reports": ((workers, REPORTS, REPORT_BYTES), "u1"),
                "stop": ((1,), "i8"),
            }
        )

    def enter(self, worker: int, phase: int) -> None:
        self.memory.numbers["since"][worker] = time.monotonic_ns()
        self.memory.numbers["phase"][worker] = phase

    def report(self, worker: int, text: str) -> None:
        content = np.frombuffer(text.encode()[:REPORT_BYTES], np.uint8)
        reported = self.memory["reported"]
        reported[worker] |= 1  # already odd if the previous incarnation died while it wrote a report
        buffer = self.memory["reports"][worker, reported[worker] // 2 % REPORTS]
        buffer[:] = 0
        buffer[: len(content)] = content
        reported[worker] += 1

    def reports(self, worker: int, since: int) -> Iterator[str]:
        """The worker's reports from this number on that are not overwritten yet."""
        count = int(self.memory["reported"][worker]) // 2
        for number in range(max(since, count - REPORTS), count):
            yield bytes(self.memory["reports"][worker, number % REPORTS]).rstrip(b"\0").decode(errors="replace")

    def last_report(self, worker: int) -> str:
        return "".join(self.reports(worker, int(self.memory["reported"][worker]) // 2 - 1))

    def age(self) -> NDArray:
        """[W] seconds since each worker entered its phase."""
        return np.asarray((time.monotonic_ns() - self.memory["since"]) * 1e-9)

    @property
    def stopping(self) -> bool:
        return bool(self.memory.numbers["stop"][0])

    def stop(self) -> None:
        self.memory["stop"][0] = 1

    def close(self) -> None:
        self.memory.close()
