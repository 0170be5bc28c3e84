"""Heartbeats in shared memory: what each worker does, since when, how far its lanes have come, and what it says."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import numpy as np

from freewheel.core import NDArray
from freewheel.transport.shm.memory import SharedArrays

PHASES = ("construct", "reset", "step", "wait")
CONSTRUCT, RESET, STEP, WAIT = range(4)
TURN = 0.5  # seconds: no wait is longer, after which a worker looks around and shows that it lives
HOPELESS = 4  # exit code of a worker whose every lane was given up, however many steps that took
REPORT = 16384  # bytes of what a worker says: an env's traceback
SAYINGS = 8  # what a worker can say before it is heard; then the oldest is lost
NUMBERS = re.compile(r"(?<!\S)(?<!lane )\S*\d\S*")


def kind(report: str) -> str:
    """What a report is about, whatever its numbers: the error of a traceback, or one lane's complaint."""
    return NUMBERS.sub("#", report.rstrip().rsplit("\n", 1)[-1])


class Heartbeats:
    """Each cell is written by its worker alone while it lives."""

    def __init__(self, workers: int, lanes: int) -> None:
        each = ((workers,), "i8")
        self.memory = SharedArrays(
            {
                "phase": each,
                "since": each,  # CLOCK_MONOTONIC ns
                "steps": each,  # of all incarnations
                "died": each,  # ns, when the incarnation before this one did
                "peak": each,  # kB of memory at most
                "begun": ((workers, lanes), "i8"),  # episodes begun by each lane, over all incarnations
                "said": each,  # how often it has said something; odd while it is speaking
                "report": ((workers, SAYINGS, REPORT), "u1"),
                "stop": ((1,), "i8"),
            }
        )

    def enter(self, worker: int, phase: int) -> None:
        self.memory.numbers["since"][worker] = time.monotonic_ns()
        self.memory.numbers["phase"][worker] = phase

    def say(self, worker: int, text: str) -> None:
        words = np.frombuffer(text.encode()[:REPORT], np.uint8)
        said = self.memory["said"]
        said[worker] |= 1  # odd already if the incarnation before this one died speaking
        page = self.memory["report"][worker, said[worker] // 2 % SAYINGS]
        page[:] = 0
        page[: len(words)] = words
        said[worker] += 1

    def heard(self, worker: int, since: int) -> Iterator[str]:
        """All that it has said, from this number on, as far as it can still be heard."""
        said = int(self.memory["said"][worker]) // 2
        for number in range(max(since, said - SAYINGS), said):
            yield bytes(self.memory["report"][worker, number % SAYINGS]).rstrip(b"\0").decode(errors="replace")

    def last_words(self, worker: int) -> str:
        return "".join(self.heard(worker, int(self.memory["said"][worker]) // 2 - 1))

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
