"""Collectors whose settings change all the time: every promise holds, and the changes have their effect."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from freewheel.collect.continuous import ContinuousConfig
from freewheel.collect.episodes import EpisodesConfig
from freewheel.core import Chunk, Collector, RowCounts
from freewheel.ledger import balance
from freewheel.pacing.control import Settings
from freewheel.rollout.factory import RunnerFactory
from freewheel.testing.conformance import check_collector
from tests.support.collectors import Spec, Weights

MODES: dict[str, ContinuousConfig | EpisodesConfig] = {
    "continuous": ContinuousConfig(workers=4, envs_per_worker=1, num_envs=4, adapt=True),
    "continuous, two envs each": ContinuousConfig(workers=2, envs_per_worker=2, num_envs=4, adapt=True),
    "episodes": EpisodesConfig(workers=4, envs_per_worker=1, num_envs=4, adapt=True),
    "episodes, lag bounded": EpisodesConfig(workers=4, envs_per_worker=1, num_envs=4, max_lag=1, adapt=True),
}


def restless(collector: Collector, seed: int = 0) -> Collector:
    """It is given other settings before every look for rows."""
    settings = collector.plant()
    assert settings is not None
    least, _, most = settings
    rng, collect, adjust = random.Random(seed), collector.collect, collector.adjust

    def changing(wait: bool) -> Sequence[Chunk[Any]]:
        names = ("workers", "fragment", "slots")
        adjust(Settings(**{name: rng.randint(getattr(least, name), getattr(most, name)) for name in names}))
        return collect(wait)

    collector.collect = changing  # type: ignore[method-assign]
    return collector


@pytest.mark.parametrize("mode", MODES)
def test_the_contract_of_a_collector_holds_whatever_is_changed(
    factory: RunnerFactory, snapshot: Weights, spec: Spec, mode: str
) -> None:
    check_collector(lambda: restless(MODES[mode].build(factory, spec(7, lanes=4))), snapshot, turns=30, every=1)


def test_the_lag_stays_bounded_and_every_row_is_counted_whatever_is_changed(
    factory: RunnerFactory, snapshot: Weights, spec: Spec
) -> None:
    config = ContinuousConfig(workers=4, envs_per_worker=1, num_envs=4, max_lag=1, adapt=True)
    version = trained = 0
    held: list[tuple[int, int]] = []  # version and rows
    with restless(config.build(factory, spec(8, lanes=4)), seed=1) as collector:
        collector.publish(snapshot(0), 0)
        while version < 40:
            held += [(chunk.version, chunk.rows) for chunk in collector.collect(wait=True)]
            oldest = collector.oldest()
            if sum(rows for _, rows in held) < 32 or (oldest is not None and oldest <= version - 1):
                balance(collector.rows(), RowCounts(trained=trained, queued=sum(rows for _, rows in held)))
                continue
            each = [made for made, rows in sorted(held) for _ in range(rows)]
            assert version - each[0] <= 1
            held = [(made, len(list(rows))) for made, rows in itertools.groupby(each[32:])]
            version, trained = version + 1, trained + 32
            collector.publish(snapshot(version), trained)


def first_rows(collector: Collector, least: int) -> int:
    """Rows of the first chunk with at least so many."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:  # a wait may end without a chunk
        for chunk in collector.collect(wait=True):
            if chunk.rows >= least:
                return chunk.rows
    raise AssertionError(f"no chunk of {least} rows")


def test_parked_workers_rest_and_fragments_have_the_length_that_is_asked_for(
    factory: RunnerFactory, snapshot: Weights, spec: Spec
) -> None:
    config = ContinuousConfig(
        workers=4, envs_per_worker=1, num_envs=4, collection_batch_size=1, max_lag=100, adapt=True
    )
    with config.build(factory, spec(16, lanes=4)) as collector:
        settings = collector.plant()
        assert settings is not None
        least, present, most = settings
        assert (least.fragment, present.fragment, most.fragment) == (1, 1, 16)
        assert present.workers == most.workers == 4
        collector.publish(snapshot(0), 0)
        assert first_rows(collector, 1) == 1
        collector.adjust(Settings(1, 16, 2))
        collector.publish(snapshot(1), collector.rows().produced)  # they may have spent their credit
        assert first_rows(collector, 16) == 16
        stats = collector.stats()
    assert (stats["workers/turns"], stats["fragment/steps"], stats["queue/slots"]) == (1, 16, 2)
