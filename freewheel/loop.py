"""The one training loop: a generator over any Collector and any Learner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from freewheel.core import Chunk, Collector, Learner, Metrics, Tick
from freewheel.meter import Meter


def loop(collector: Collector, learner: Learner, meter: Meter, *, max_lag: int | None = None) -> Iterator[Tick]:
    """Collect when the learner is hungry or may not go on, update when it may; publish what is new; tell. For ever.

    max_lag None: no gate (lockstep modes have no lag, off-policy learners bound it by pace).
    """
    env_steps = 0

    def go() -> bool:
        """Sealing update v waits until nothing of version ≤ v - max_lag is still open or queued."""
        if not learner.ready or max_lag is None:
            return learner.ready
        oldest = collector.oldest()
        return oldest is None or oldest > learner.version - max_lag

    collector.publish(learner.snapshot(), learner.rows().done)
    published = learner.version
    while True:
        chunks: Sequence[Chunk[Any]] = ()
        metrics: Metrics | None = None
        going = go()
        if learner.hungry or not going:
            with meter.span("wait-data"):
                chunks = collector.collect(wait=not going)
        with meter.span("observe"):
            for chunk in chunks:
                learner.observe(chunk)
                env_steps += chunk.rows
        if go():
            with meter.span("update"):
                metrics = learner.update()
            if learner.version != published:
                with meter.span("publish"):
                    collector.publish(learner.snapshot(), learner.rows().done)
                published = learner.version
        yield Tick(chunks, env_steps, learner.version, metrics)
