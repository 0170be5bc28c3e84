"""What modes share whose workers act all the time, in fragments under a bound on the lag."""

from __future__ import annotations

from freewheel.core import BatchSpec
from freewheel.pacing.lag_bound import LagBound
from freewheel.rollout.factory import CollectSpec


def lag_bound(spec: CollectSpec, *, workers: int, steps: int, first_steps: int, max_lag: int) -> LagBound:
    """steps: of a fragment, at most; first_steps: of the first ones."""
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
    """Steps of each env that the bound on the lag lets be under way."""
    return (max_lag + 1) * batch.steps


def fragment_steps(batch: BatchSpec, max_lag: int, given: int | None, usual: int) -> int:
    """Steps of each env in a fragment."""
    return min(given or max(1, usual), under_way(batch, max_lag))


def slots(batch: BatchSpec, max_lag: int, steps: int) -> int:
    """Fragments of a worker, of so many steps, that can ever wait."""
    return -(-under_way(batch, max_lag) // steps) + 1
