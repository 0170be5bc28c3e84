"""The ledger: it adds, it balances, and it sees a single row that is lost or counted twice."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.core import CAUSES, RowCounts
from freewheel.errors import LedgerError
from freewheel.ledger import Drops, balance, settle

COLLECTOR = RowCounts(produced=100, queued=7, open=5, dropped={"stale": 2, "worker_death": 1})
LEARNER = RowCounts(trained=80, queued=4, dropped={"nan": 0, "stale": 1})

counts = st.integers(0, 10**12)
drops = st.dictionaries(st.sampled_from(CAUSES), counts)


def test_it_adds_the_accounts_and_at_the_end_unused_rows_are_dropped() -> None:
    dropped = {"stale": 3, "worker_death": 1}
    assert balance(COLLECTOR, LEARNER) == RowCounts(produced=100, trained=80, queued=11, open=5, dropped=dropped)
    assert settle(COLLECTOR, LEARNER) == RowCounts(produced=100, trained=80, dropped={**dropped, "shutdown": 16})
    earlier = RowCounts(produced=9, dropped={"shutdown": 9})  # a session before this one
    assert settle(COLLECTOR, LEARNER, earlier).dropped["shutdown"] == 9 + 16
    assert balance() == balance(RowCounts(), RowCounts()) == settle() == RowCounts()


@pytest.mark.parametrize(("trained", "verdict"), [(79, "1 rows were lost"), (81, "1 rows were doubled")])
def test_one_row_is_seen_and_every_term_is_listed(trained: int, verdict: str) -> None:
    learner = RowCounts(trained=trained, queued=4, dropped={"stale": 1})
    with pytest.raises(LedgerError) as caught:
        balance(COLLECTOR, learner)
    first, terms, *parties = str(caught.value).splitlines()
    assert verdict in first
    expected = f"produced 100 : trained {trained} + queued 11 + open 5 + dropped[stale] 3 + dropped[worker_death] 1"
    assert terms.strip() == f"{expected} = {trained + 20} found"
    assert [line.strip() for line in parties] == [
        "account 1: produced 100 : trained 0 + queued 7 + open 5 + dropped[stale] 2 + dropped[worker_death] 1",
        f"account 2: produced 0 : trained {trained} + queued 4 + open 0 + dropped[stale] 1",
    ]


def test_a_negative_count_cannot_hide_a_doubled_row() -> None:
    with pytest.raises(LedgerError, match="a count is negative"):
        balance(RowCounts(produced=10, queued=-2), RowCounts(trained=12))


def test_unknown_cause_is_an_error() -> None:
    with pytest.raises(LedgerError, match="unknown cause 'stael'; did you mean 'stale'"):
        balance(RowCounts(produced=1, dropped={"stael": 1}))
    with pytest.raises(LedgerError, match="unknown cause"):
        Drops().add("bored", 0)


def test_drops_keep_only_causes_that_took_rows() -> None:
    lost = Drops()
    assert lost.by_cause == {}
    lost.add("shutdown", 3)
    lost.add("stale", 2)
    lost.add("stale", 5)
    lost.add("nan", 0)
    assert lost.by_cause == {"stale": 7, "shutdown": 3}
    with pytest.raises(LedgerError, match="cannot shrink"):
        lost.add("stale", -1)
    lost.by_cause["stale"] = 99  # a copy
    assert lost.by_cause == {"stale": 7, "shutdown": 3}


def test_numpy_counts_become_plain_numbers() -> None:
    total = balance(RowCounts(produced=np.int64(3), dropped={"nan": np.int64(1)}), RowCounts(trained=np.int64(2)))  # type: ignore[arg-type, dict-item] # shared counters
    assert json.dumps(total.__dict__) == '{"produced": 3, "trained": 2, "queued": 0, "open": 0, "dropped": {"nan": 1}}'


@given(trained=counts, queued=counts, still_open=counts, dropped=drops, planted=st.integers(-3, 3))
def test_balances_if_and_only_if_exact(
    trained: int, queued: int, still_open: int, dropped: dict[str, int], planted: int
) -> None:
    produced = trained + queued + still_open + sum(dropped.values()) + planted
    collector = RowCounts(produced=produced, open=still_open, dropped=dropped)
    learner = RowCounts(trained=trained, queued=queued)
    if planted == 0:
        assert balance(collector, learner).produced == produced
    else:
        with pytest.raises(LedgerError):
            balance(collector, learner)
