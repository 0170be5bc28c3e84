"""The present state of each worker, for the status of a run and for finding out why a worker is stuck."""

from __future__ import annotations

import time
from dataclasses import dataclass

from freewheel.rollout.call_state import (
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

#: The states of a worker; the waits are kinds of core.WORKER_TIME. down: its process has ended and is being replaced,
#: or is not ready yet; lost: it was given up; pending: the cluster has no room for its process yet.
STATES = ("construct", "reset", "step", "wait-credit", "wait-slot", "wait-gate", "down", "lost", "pending")
CALLS = {CONSTRUCT: "construct", RESET: "reset", CALL: "step"}


@dataclass(kw_only=True)  # not frozen: that would triple the time of making one, and a hundred are made every second
class WorkerState:
    """The state of one worker, or of the environments in the trainer's process."""

    worker: int
    state: str  # one of STATES
    since_s: float  # seconds in this state; for an environment call, since the call began
    steps: int  # steps of its environments so far
    restarts: int = 0
    deaths: int = 0
    died_s: float | None = None  # seconds since its process last ended unexpectedly
    why: str = ""  # the reason for that end
    pid: int | None = None
    lane: int | None = None  # the lane of the run that is being called
    seed: int | None = None  # the seed of its episode
    step: int | None = None  # the step of the episode that is being made
    limit_s: float | None = None  # time limit of the present call in seconds
    steps_per_s: float = 0.0  # recent rate; run/live/reporter.py sets it
    waits_for: str | None = None  # description for people; run/live/reporter.py sets it


def own_environments(steps: int = 0, idle_since_ns: int | None = None, pid: int | None = None) -> WorkerState:
    """Return the state of the environments in this process, from the record before each call (whereabouts).

    idle_since_ns: when they began to wait for the learner (CLOCK_MONOTONIC); None: the learner waits for them.
    """
    now, since, phase, lane, step = time.monotonic_ns(), cells[SINCE], cells[PHASE], cells[LANE], cells[STEP]
    if not since:
        state = "step" if idle_since_ns is None else "wait-credit"
        return WorkerState(worker=0, state=state, since_s=_seconds(now, idle_since_ns or now), steps=steps, pid=pid)
    if phase == ELSEWHERE:  # separate processes step; the lane is known if the call takes long
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
