"""The state of each worker, by its heartbeat and its slot."""

from __future__ import annotations

import time
from typing import Any

from freewheel.core import WORKER_TIME
from freewheel.metrics.workers import WorkerState
from freewheel.transport.workers.heartbeats import PHASES, STEP, UNKNOWN, WAIT
from freewheel.transport.workers.worker_slots import WorkerSlot, WorkerSlots


def worker_states(worker_slots: WorkerSlots[Any], lanes: int) -> list[WorkerState]:
    """Return the states of all workers. Any thread may call this; the values of one worker may be a moment apart."""
    heartbeats, memory, now = worker_slots.heartbeats, worker_slots.heartbeats.memory, time.monotonic_ns()
    names = ("phase", "kind", "steps", "died", "ready", "lane", "seed", "before")
    columns = zip(*(memory[name].tolist() for name in names), strict=True)
    ages, waited = heartbeats.call_age().tolist(), heartbeats.waited().tolist()
    limits = (worker_slots.limits.construct, worker_slots.limits.reset, worker_slots.limits.step)
    why = {loss.worker: loss.reason for loss in list(worker_slots.losses)}
    states = []
    for slot, cells, age, wait in zip(worker_slots.slots, columns, ages, waited, strict=True):
        phase, kind, steps, died, ready, lane, seeds, before = cells
        gone, process = _gone(slot, died, ready), slot.process
        waits, died_s = phase == WAIT, round(max(0, now - died) * 1e-9, 3) if died else None
        absent = age if gone == "pending" else died_s or 0.0
        calls = not gone and not waits
        states.append(
            WorkerState(
                worker=slot.worker,
                state=gone or (WORKER_TIME[kind] if waits else PHASES[phase]),
                since_s=round(max(0.0, absent if gone else wait if waits else age), 3),
                steps=steps * lanes,
                restarts=slot.restarts,
                deaths=slot.deaths,
                died_s=died_s,
                why=why.get(slot.worker, ""),
                pid=process.pid if process is not None else None,
                lane=slot.worker * lanes + lane if calls else None,
                seed=seeds[lane] if calls and seeds[lane] != UNKNOWN else None,
                step=steps - before[lane] + 1 if calls and phase == STEP else None,
                limit_s=limits[phase] if calls else None,
            )
        )
    return states


def _gone(slot: WorkerSlot[Any], died: int, ready: int) -> str:
    """Return why a worker is absent; empty if its process works, or if its first process still starts."""
    if slot.given_up:
        return "lost"
    if slot.pending:
        return "pending"
    return "down" if slot.deaths and (slot.process is None or ready < died) else ""
