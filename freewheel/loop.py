"""The only training loop: a generator over any Collector and any Learner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from freewheel.core import NO_CONTEXT, Chunk, Learner, Metrics, NDArray, Snapshot, Tick, to_numpy
from freewheel.errors import DivergedError
from freewheel.metrics.meter import Meter


class Source(Protocol):
    """The part of core.Collector that the loop uses."""

    def publish(self, snapshot: Snapshot, done: int) -> None: ...
    def collect(self, wait: bool) -> Sequence[Chunk[Any]]: ...
    def oldest(self) -> int | None: ...


def loop(
    collector: Source,
    learner: Learner,
    meter: Meter,
    *,
    max_lag: int | None = None,
    contexts: Callable[[], NDArray] = lambda: NO_CONTEXT,
    before_update: Callable[[], None] = lambda: None,
    before_publishing: Callable[[], None] = lambda: None,
) -> Iterator[Tick]:
    """Collect if the learner is hungry or may not update, update if it may, publish new versions, yield. Never ends.

    max_lag None: no gate (sequential modes have no lag, and off-policy learners are paced by their replay ratio).
    contexts: the present table [K, C] of contexts for episodes, published with the weights.
    before_update: called just before each update.
    before_publishing: called after an update that made a new version; it may change the weights.
    """
    rows = learner.rows()
    env_steps = rows.trained + rows.queued + sum(rows.dropped.values())  # includes earlier sessions of the run

    def may_update() -> bool:
        """Update v waits until nothing of version ≤ v - max_lag is open or queued."""
        if not learner.ready or max_lag is None:
            return learner.ready
        oldest = collector.oldest()
        return oldest is None or oldest > learner.version - max_lag

    checks_itself = learner.not_finite is not None

    def publish() -> int:
        snapshot = learner.snapshot()
        if not checks_itself:
            _require_finite(snapshot)
        collector.publish(replace(snapshot, context=contexts()), learner.rows().done)
        return learner.version

    published = publish()
    while True:
        chunks: Sequence[Chunk[Any]] = ()
        metrics: Metrics | None = None
        updating = may_update()
        if learner.hungry or not updating:
            with meter.span("wait-data"):
                chunks = collector.collect(wait=not updating)
        with meter.span("observe"):
            for chunk in chunks:
                learner.observe(chunk)
                env_steps += chunk.rows
        if may_update():
            before_update()
            with meter.span("update"):
                metrics = learner.update()
            if learner.version != published:
                before_publishing()
                with meter.span("publish"):
                    published = publish()
        yield Tick(chunks, env_steps, learner.version, metrics)


def _require_finite(snapshot: Snapshot) -> None:
    for name, value in snapshot.params.items():
        if not np.isfinite(to_numpy(value)).all():
            problem = f"the weights '{name}' of version {snapshot.version} are not finite"
            raise DivergedError(f"{problem}: the learner has diverged; lower its learning rate, or scale rewards")
