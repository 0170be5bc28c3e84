"""OneAhead: one batch ahead, batch k with version k - 1, and the others produce the rows of a worker that is gone."""

from __future__ import annotations

import pytest

from freewheel.pacing.one_ahead import OneAhead
from freewheel.pacing.pacing import Grant, Tally
from tests.pacing.conftest import Place, woken


def ahead(workers: int, lanes: int = 2, steps: int = 7) -> OneAhead:
    return OneAhead(workers=workers, lanes=lanes, steps=steps, batch_steps=7)


def tally(rows: int, failed: int = 0) -> Tally:
    return Tally(rows, failed, ended=True)


def test_batch_k_uses_version_k_minus_one(place: Place) -> None:
    permits = place(ahead(1, steps=4))
    assert permits.take(0, tally(0)) is None, "nothing was published"
    permits.publish(0, 0)
    assert woken(permits, 1) == [0]
    assert permits.take(0, tally(0)) == Grant(4, 0, exact=True)
    assert permits.take(0, tally(8)) == Grant(3, 0, exact=True), "a fragment ends with its batch"
    assert permits.take(0, tally(14)) == Grant(4, 0, exact=True), "batch 1, with version 0"
    assert permits.take(0, tally(28)) is None, "one batch ahead and no more"
    permits.publish(1, 14)
    assert permits.take(0, tally(28)) == Grant(4, 1, exact=True)


def test_the_others_produce_the_rows_of_a_worker_that_is_gone(place: Place) -> None:
    """Three workers of two lanes, seven steps: 14 rows each a batch."""
    pacing = ahead(3)
    permits = place(pacing)
    permits.publish(0, 0)
    assert list(pacing.cells["target"]) == [28, 28, 28]
    permits.settle(1, Tally(produced=13, failed=1, ended=False), for_good=True)
    assert pacing.broken
    assert list(pacing.cells["target"]) == [36, 12, 36]
    permits.publish(1, 0)
    assert sum(pacing.cells["target"]) == 3 * 42
    assert pacing.cells["target"][1] == 12
    grant = permits.take(0, tally(20))
    assert grant is not None
    assert (grant.version, grant.exact) == (1, False), "versions are not exact any more"


def test_rows_lost_to_failures_are_produced_again(place: Place) -> None:
    permits = place(ahead(1))
    permits.publish(0, 0)
    expected = Grant(2, 0, exact=True)  # three rows short of batch 0: two steps of two lanes
    assert permits.take(0, tally(14, failed=3)) == expected
    assert permits.take(0, tally(31, failed=3)) is None


@pytest.mark.parametrize(("delivered", "versions"), [(5, [4, 5]), (6, [5])])
def test_a_restored_run_continues_with_its_version(place: Place, delivered: int, versions: list[int]) -> None:
    """6: as where updates are spread over many turns, and a run is saved amid one: the batch is here, its version is not yet."""
    first, later = ahead(1), ahead(1)
    first.publish(5, 0)
    first.delivered = delivered
    permits = place(later)
    later.restore(first.state())
    permits.publish(5, 0)
    grants = [permits.take(0, tally(14 * batch)) for batch in range(len(versions) + 1)]
    assert grants == [*(Grant(7, version, exact=True) for version in versions), None]
    assert later.state() == first.state(), "nothing was delivered since"
    permits.publish(6, 0)
    assert permits.take(0, tally(14 * len(versions))) == Grant(7, 6, exact=True)


def test_without_exact_versions_the_newest_counts_the_batches(place: Place) -> None:
    first = ahead(2)
    permits = place(first)
    permits.publish(3, 0)
    permits.settle(0, tally(0), for_good=True)
    assert first.state() == {"batches": [3]}


def test_no_batch_is_acted_that_the_run_does_not_need(place: Place) -> None:
    pacing = ahead(1)
    pacing.last = 2
    permits = place(pacing)
    targets = list[int]()
    for version in range(4):
        permits.publish(version, 0)
        targets.append(pacing.cells["target"][0] // pacing.quota)
    assert targets == [2, 2, 3, 4], "two batches; a learner that goes on all the same gets what it needs"
