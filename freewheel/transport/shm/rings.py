"""Rings of spans in shared memory. Each worker has one, which outlives it and which the trainer reads meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

from freewheel.core import WORKER_TIME
from freewheel.timeline.recording import Doing
from freewheel.timeline.track import CAPACITY, NUMBERS, WIDTH, Ring, TurnTrack
from freewheel.transport.shm.memory import SharedArrays
from freewheel.transport.workers.heartbeats import CONSTRUCT, RESET, STEP, WAIT, Heartbeats

#: The kind of span of each phase other than a wait.
KINDS = {CONSTRUCT: "down", RESET: "reset", STEP: "step"}


def row_name(worker: int) -> str:
    return f"worker {worker}"


class Rings:
    """The memory of all workers' tracks."""

    def __init__(self, workers: int) -> None:
        self._workers, self._began = workers, perf_counter_ns()
        self._memory = SharedArrays({"spans": ((workers, CAPACITY * WIDTH), "i8"), "written": ((workers,), "i8")})

    def ring(self, worker: int) -> Ring:
        return Ring(self._memory.cells("spans", worker), self._memory.cells("written", worker))

    def by_name(self) -> dict[str, Ring]:
        """Return the ring of each worker, by the name of its row."""
        return {row_name(worker): self.ring(worker) for worker in range(self._workers)}

    def begin(self, worker: int, heartbeats: Heartbeats) -> TurnTrack:
        """Return the track of a worker that starts. First write the span in which its previous incarnation died."""
        ring, names = self.ring(worker), ("died", "died_in", "kind")
        died, phase, kind = (int(heartbeats.memory[name][worker]) for name in names)
        track = TurnTrack(ring, max(died, self._began))
        if died and (last := ring.last_end() or self._began) < died:
            track.put(NUMBERS[_kind(phase, kind)], last, died)
        return track

    def close(self) -> None:
        self._memory.close()


def doing(heartbeats: Heartbeats, alive: Sequence[bool], now: int) -> Doing:
    """Return what each worker does now, or did when it died. A span is written only after its end."""
    memory = heartbeats.memory
    names = ("phase", "since", "kind", "idle", "died", "died_in")
    columns = zip(*(memory[name].tolist() for name in names), strict=True)
    found = {}
    for worker, ((phase, since, kind, idle, died, died_in), lives) in enumerate(zip(columns, alive, strict=True)):
        if died and not lives:
            found[row_name(worker)] = [(_kind(died_in, kind), 0, died), ("down", died, now)]
        else:
            found[row_name(worker)] = [(_kind(phase, kind), idle if phase == WAIT else since, now)]
    return found


def _kind(phase: int, wait: int) -> str:
    """Return the kind of span of a phase. `wait`: the kind of a wait, as an index of WORKER_TIME."""
    return WORKER_TIME[wait] if phase == WAIT else KINDS[phase]
