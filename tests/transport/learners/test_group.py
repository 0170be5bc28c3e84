"""Learners of one group, each in a thread of this process: sums, agreements, notes, and one that is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from freewheel.errors import PeerLostError, SetupError, UsageError
from freewheel.transport.learners import group as module
from freewheel.transport.learners.group import Group
from freewheel.transport.learners.launch import how
from freewheel.transport.learners.rank import RankInfo, of_torchrun, open_store, receive, send

LIMIT = 20.0


@contextmanager
def groups(count: int) -> Iterator[list[Group]]:
    """Of `count` learners that have met."""
    store, port = open_store(LIMIT)
    places = [RankInfo(rank, count, rank, count, port=port) for rank in range(count)]
    stores = [store, *(place.meet(LIMIT) for place in places[1:])]
    with ThreadPoolExecutor(count) as pool:
        met = list(pool.map(Group, places, stores, timeout=LIMIT))
        yield met
        for one in met:
            one.close()


def in_all(groups: list[Group], work: Callable[[Group], Any]) -> list[Any]:
    """What each learner returns, or the error that it raises; all work at the same time."""

    def tried(one: Group) -> Any:
        try:
            return work(one)
        except PeerLostError as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(tried, groups, timeout=LIMIT))


@pytest.mark.parametrize("count", [2, 3])
def test_sums_are_those_of_all_and_the_same_bits_in_each(count: int) -> None:
    def add(one: Group) -> tuple[Any, ...]:
        rng = np.random.default_rng(one.rank)
        array, tensor = rng.normal(size=1000).astype(np.float32), torch.full((4, 6), float(one.rank + 1))
        one.sum(array)
        columns = torch.arange(6.0).reshape(2, 3).T  # not contiguous
        one.sum(columns)
        one.sum(tensor[1])
        return array, tensor.numpy(), columns.numpy()

    with groups(count) as met:
        found = in_all(met, add)
    expected = sum(np.random.default_rng(rank).normal(size=1000).astype(np.float32) for rank in range(count))
    for rank, (array, tensor, columns) in enumerate(found):
        np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-6)
        assert array.tobytes() == found[0][0].tobytes()
        assert (tensor[1] == count * (count + 1) / 2).all()
        assert (tensor[0] == rank + 1).all(), "only the part that was given"
        np.testing.assert_array_equal(columns, count * np.arange(6.0).reshape(2, 3).T)


def test_an_agreement_gives_all_words_to_each_and_waits_for_the_last() -> None:
    waited = threading.Event()

    def agree(one: Group) -> Any:
        if one.rank == 1:
            assert waited.wait(LIMIT)
        return one.agree(np.array([one.rank, 10.0 * one.rank]), waited.set)

    with groups(3) as met:
        for words in in_all(met, agree):
            np.testing.assert_array_equal(words, [[0, 0], [1, 10], [2, 20]])
        assert met[0].waited_s > 0


def test_notes_are_for_all_and_the_first_reason_to_end_counts() -> None:
    with groups(2) as (first, second):
        assert first.noted("nothing", 0.0) is None
        assert first.ending is None
        second.note("x", {"a": [1, 2.5]})
        assert first.noted("x", 1.0) == {"a": [1, 2.5]}
        assert second.end({"reason": "minutes"}) == {"reason": "minutes"}
        assert first.end({"reason": "failed"}) == {"reason": "minutes"}
        assert first.ending == second.ending == {"reason": "minutes"}


def test_the_first_learner_sends_its_plan_to_all() -> None:
    store, port = open_store(LIMIT)
    other = RankInfo(1, 2, 1, 2, port=port).meet(LIMIT)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive, other)  # waits
        send(store, b"\x80plan")
        assert received.result(LIMIT) == b"\x80plan"


@pytest.mark.parametrize("what", ["sum", "agree"])
def test_a_learner_that_is_gone_is_noticed_at_once(what: str) -> None:
    def work(one: Group) -> Any:
        one.sum(np.ones(3))
        if one.rank == 1:
            one.close()
            return None
        one.why = lambda: "learner 1 was killed (SIGKILL)"
        return one.sum(np.ones(3)) if what == "sum" else one.agree(np.ones(3))

    with groups(2) as met:
        lost, _ = in_all(met, work)
    assert isinstance(lost, PeerLostError)
    assert str(lost) == "learner 1 was killed (SIGKILL)"


def test_a_learner_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT", 0.3)
    with groups(2) as (first, _), pytest.raises(PeerLostError, match="another learner is gone, or cannot be reached"):
        first.sum(np.ones(3))


def test_nobody_answers_where_no_learner_is() -> None:
    with pytest.raises(SetupError, match=r"learner 1 cannot reach 127\.0\.0\.1:9"):
        RankInfo(1, 2, 1, 2, port=9).meet(0.2)


def test_torchrun_says_who_a_process_is() -> None:
    words = "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=7"
    said = dict(word.split("=") for word in words.split())
    assert of_torchrun(said) == RankInfo(3, 4, 1, 2, "h", 7, by_torchrun=True)
    assert of_torchrun({}) is None
    assert of_torchrun({**said, "RANK": "0", "WORLD_SIZE": "1"}) is None, "one learner is alone"
    assert of_torchrun({name: word for name, word in said.items() if name != "MASTER_PORT"}) is None
    with pytest.raises(UsageError, match=r"RANK=x, WORLD_SIZE=4, .* are not what torchrun sets"):
        of_torchrun({**said, "RANK": "x"})


def test_how_a_process_has_ended() -> None:
    assert [how(code) for code in (1, -9, -64)] == [
        "has ended (exit code 1)",
        "was killed (SIGKILL)",
        "was killed (SIGRTMAX)",
    ]
