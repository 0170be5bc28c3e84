"""Shared by modes whose workers act without pause: fragments under a bound on the lag."""

from __future__ import annotations

from freewheel.core import BatchSpec
from freewheel.pacing.lag_bound import LagBound
from freewheel.rollout.factory import CollectSpec


def lag_bound(spec: CollectSpec, *, workers: int, steps: int, first_steps: int, max_lag: int) -> LagBound:
    """steps: the most that a fragment can have; first_steps: of the first fragments."""
    return LagBound(
        workers=workers,
        lanes=spec.env.lanes // workers,
        steps=steps,
        batch_rows=spec.batch.rows,
        whole=spec.whole,
        ahead=max_lag,
        max_lag=max_lag if spec.on_policy else None,
        close_on_new=spec.on_policy,
        turns=spec.workers.turns,
        first_steps=first_steps,
        whole_fragments=spec.env.batched_on_device,
    )


def under_way(batch: BatchSpec, max_lag: int) -> int:
    """Return how many steps of each env the lag bound allows to be under way."""
    return (max_lag + 1) * batch.steps


def fragment_steps(batch: BatchSpec, max_lag: int, given: int | None, usual: int) -> int:
    """Steps of each env in a fragment."""
    return min(given or max(1, usual), under_way(batch, max_lag))


def slots(batch: BatchSpec, max_lag: int, steps: int) -> int:
    """Return how many fragments of one worker, of this many steps, can wait."""
    return -(-under_way(batch, max_lag) // steps) + 1
