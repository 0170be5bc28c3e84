"""What each worker is doing at this moment, as others see it: for the status of a run, and to find out why one is stuck."""

from __future__ import annotations

import time
from dataclasses import dataclass

from freewheel.rollout.whereabouts import (
    ALL,
    CALL,
    CONSTRUCT,
    ELSEWHERE,
    LANE,
    LANES,
    LIMITS,
    PHASE,
    RESET,
    SEEDS,
    SINCE,
    STEP,
    cells,
)  # fmt: skip

#: What a worker may be doing; the waits are kinds of core.WORKER_TIME. down: its process has ended and another one takes its
#: place, or is not ready yet; lost: it was given up; pending: there is no room for its process yet (on a cluster).
STATES = ("construct", "reset", "step", "wait-credit", "wait-slot", "wait-gate", "down", "lost", "pending")
CALLS = {CONSTRUCT: "construct", RESET: "reset", CALL: "step"}


@dataclass(kw_only=True)  # not frozen: a hundred are made every second, and that would take three times as long
class WorkerState:
    """One worker, or the environments of the trainer's own process."""

    worker: int
    state: str  # one of STATES
    since_s: float  # seconds that it has been doing so; of a call of an environment: since that began
    steps: int  # of its environments so far
    restarts: int = 0
    deaths: int = 0
    died_s: float | None = None  # seconds since its process last ended unexpectedly
    why: str = ""  # it did
    pid: int | None = None
    lane: int | None = None  # which env of the run is being called, ...
    seed: int | None = None  # ... the seed of its episode, ...
    step: int | None = None  # ... and which step of that it makes
    limit_s: float | None = None  # seconds that the present call may take
    steps_per_s: float = 0.0  # of late; added for the status of a run, as is ...
    waits_for: str | None = None  # ... what it waits for, in words


def own_environments(steps: int = 0, idle_since_ns: int | None = None, pid: int | None = None) -> WorkerState:
    """The environments of this process, by what is written down before each call of them.

    idle_since_ns: since when (CLOCK_MONOTONIC) they wait for the learner; None: it waits for them.
    """
    now, since, phase, lane, step = time.monotonic_ns(), cells[SINCE], cells[PHASE], cells[LANE], cells[STEP]
    if not since:
        state = "step" if idle_since_ns is None else "wait-credit"
        return WorkerState(worker=0, state=state, since_s=_seconds(now, idle_since_ns or now), steps=steps, pid=pid)
    if phase == ELSEWHERE:  # processes do the work; the lane is known once it takes long
        phase = CALL if step or lane == ALL else RESET
    known, limit = 0 <= lane < LANES, cells[LIMITS + phase]
    return WorkerState(
        worker=0,
        state=CALLS[phase],
        since_s=_seconds(now, since),
        steps=steps,
        pid=pid,
        lane=lane if known else None,
        seed=cells[SEEDS + lane] if known and phase != CONSTRUCT else None,
        step=step if known and phase == CALL else None,
        limit_s=limit / 1000 if limit else None,
    )


def _seconds(now: int, since: int) -> float:
    return round(max(0, now - since) * 1e-9, 3)
