"""What continuous, batch and episodes share: the contract of a collector, over real processes."""

from __future__ import annotations

from typing import Any

import pytest

from freewheel.collect.batch import BatchConfig
from freewheel.collect.continuous import ContinuousConfig
from freewheel.collect.episodes import EpisodesConfig
from freewheel.collect.serial import SerialConfig
from freewheel.collect.workers import WorkersConfig
from freewheel.core import Collector
from freewheel.errors import SetupError, UsageError
from freewheel.policies.spec import PolicySpec
from freewheel.rollout.factory import RunnerFactory
from freewheel.testing.conformance import check_collector
from tests.support.collectors import Spec, Weights, train_and_check

TWO: dict[str, Any] = {"workers": 2, "envs_per_worker": 2, "num_envs": 4}
SLOW = TWO | {"patience": 1e6}  # the learner waits for every step, however slow the machine is
MODES: dict[str, ContinuousConfig | BatchConfig | EpisodesConfig] = {
    "continuous": ContinuousConfig(**SLOW),
    "continuous, lag 0": ContinuousConfig(**SLOW, max_lag=0),
    "continuous, odd fragments": ContinuousConfig(**SLOW, collection_batch_size=3),
    "continuous, dropping": ContinuousConfig(**SLOW, overflow="drop-oldest"),
    "batch": BatchConfig(**TWO),
    "batch, in fragments": BatchConfig(**TWO, collection_batch_size=3),
    "episodes": EpisodesConfig(workers=4, num_envs=4),
    "episodes, in fragments": EpisodesConfig(workers=4, num_envs=4, collection_batch_size=2),
    "episodes, lag 1": EpisodesConfig(workers=4, num_envs=4, collection_batch_size=2, max_lag=1, patience=1e6),
    "episodes, in waves": EpisodesConfig(workers=4, num_envs=4, wave=True),
}


@pytest.mark.parametrize("mode", MODES)
def test_it_satisfies_the_contract_of_a_collector(
    factory: RunnerFactory, snapshot: Weights, spec: Spec, mode: str
) -> None:
    check_collector(lambda: MODES[mode].build(factory, spec(7, lanes=4)), snapshot, turns=30, every=1)


@pytest.mark.parametrize("mode", MODES)
def test_every_row_is_correct_and_every_update_has_its_rows(
    factory: RunnerFactory, policy: PolicySpec, spec: Spec, mode: str
) -> None:
    assert set(train_and_check(MODES[mode], factory, policy, spec(7, lanes=4)).rows().dropped) <= {"overflow"}


def test_a_queue_that_is_too_large_is_refused_before_anything_starts(factory: RunnerFactory, spec: Spec) -> None:
    config = ContinuousConfig(**TWO, max_queue_size=10**5, collection_batch_size=10**4)
    with pytest.raises(SetupError, match=r"a queue of 2 x 50000 fragments needs .* GB of memory"):
        config.build(factory, spec(10**4, lanes=4))


def test_a_factory_that_cannot_be_pickled_is_refused(factory: RunnerFactory, spec: Spec) -> None:
    class NotPicklable:
        def __reduce__(self) -> Any:
            raise TypeError("cannot pickle this")

        def __call__(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Any: ...

    with pytest.raises(SetupError, match="cannot be pickled for another process"):
        MODES["batch"].build(RunnerFactory(NotPicklable(), factory.actor, 0), spec(7, lanes=4))


@pytest.mark.parametrize("mode", [ContinuousConfig, BatchConfig, EpisodesConfig])
def test_sizes_must_be_positive(mode: type[Any]) -> None:
    with pytest.raises(UsageError, match="--collection-batch-size must be positive"):
        mode(collection_batch_size=0)


def test_every_mode_is_serial_or_has_workers() -> None:
    from freewheel.collect.mode import MODES as ALL

    for mode in ALL.values():
        assert issubclass(mode.config, WorkersConfig) != issubclass(mode.config, SerialConfig)


def test_leaving_before_the_first_publication(factory: RunnerFactory, spec: Spec) -> None:
    """Nothing is produced before the first publication, and the counts are available after the end."""
    collector: Collector = MODES["continuous"].build(factory, spec(7, lanes=4))
    with collector:
        assert collector.collect(wait=False) == []
    assert collector.rows().produced == 0
    assert collector.summary()["worker_restarts"] == 0
