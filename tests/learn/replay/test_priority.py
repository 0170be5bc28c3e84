"""Rows are drawn as often as the closed forms say, and the weights take back in the loss what the draws have changed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.learn.replay.buffer import ReplayBuffer
from freewheel.learn.replay.priority import LEAST_ERROR, MOST_SUM, UNIT, WIDTH, ByError, Recent, SumTree, Uniform
from tests.support.numbered_rows import COLUMNS, assert_drawn_like, frequencies, numbered, restore


def by_error(capacity: int, *, alpha: float = 0.6, beta: float = 1.0) -> tuple[ReplayBuffer, ByError]:
    priority = ByError(capacity, "cpu", alpha=alpha, beta=beta)
    return ReplayBuffer(capacity, COLUMNS, "cpu", 0, priority=priority), priority


Puts = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**9)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(
    size=st.sampled_from([1, 2, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH, WIDTH**2 + 5]),
    moves=st.lists(st.one_of(Puts, st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**9)))),
    seed=st.integers(0, 99),
)
def test_a_tree_keeps_its_sums(size: int, moves: list[list[tuple[int, int]] | tuple[int, int, int]], seed: int) -> None:
    tree, plain = SumTree(size, "cpu"), np.zeros(size, np.int64)
    for move in moves:
        if isinstance(move, tuple):
            first, end = sorted(place % (size + 1) for place in move[:2])
            tree.fill(first, end, move[2])
            plain[first:end] = move[2]
        else:
            places, values = np.array([place % size for place, _ in move]), np.array([value for _, value in move])
            tree.put(torch.from_numpy(places), torch.from_numpy(values))
            plain[places] = 0
            np.maximum.at(plain, places, values)
    assert torch.equal(tree.leaves[:size], torch.from_numpy(plain))
    assert int(tree.total) == plain.sum()
    if plain.sum():
        sums = plain.cumsum()
        edges = np.concatenate([sums - plain, sums - 1])
        targets = np.concatenate([np.random.default_rng(seed).integers(0, sums[-1], 50), edges[(edges >= 0)][:200]])
        targets = targets[targets < sums[-1]]
        expected = np.searchsorted(sums, targets, side="right")
        assert tree.find(torch.from_numpy(targets)).tolist() == expected.tolist()
        assert (plain[expected] > 0).all()


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("capacity", "added"), [(300, 200), (200, 200), (200, 330)], ids=["part", "full", "wrapped"])
def test_rows_are_drawn_in_proportion_to_a_power_of_their_error(capacity: int, added: int, alpha: float) -> None:
    replay, priority = by_error(capacity, alpha=alpha)
    replay.add(numbered(0, added))
    place = torch.arange(added - replay.count, added) % capacity
    error = torch.linspace(0.1, 2.0, replay.count)[torch.randperm(replay.count, generator=torch.Generator())]
    for part in torch.arange(replay.count).split(64):
        priority.learned(place[part], error[part])
    expected = (error.double() + LEAST_ERROR).pow(alpha).numpy()
    assert_drawn_like(frequencies(replay, 40_000), expected / expected.sum())


def test_new_rows_have_the_largest_priority_so_far_and_replaced_ones_none() -> None:
    replay, priority = by_error(10, alpha=1.0)
    replay.add(numbered(0, 4))
    priority.learned(torch.tensor([0, 1, 2, 3]), torch.tensor([3.0, 0.5, 7.0, 1.0]))
    priority.learned(torch.tensor([2]), torch.tensor([0.25]))
    replay.add(numbered(4, 6))
    assert (priority.tree.leaves[:10] / UNIT).tolist() == pytest.approx([3, 0.5, 0.25, 1, 7, 7, 0, 0, 0, 0], abs=1e-5)
    replay.add(numbered(6, 11))  # number 10 replaces number 0
    assert (priority.tree.leaves[:10] / UNIT).tolist() == pytest.approx([7, 0.5, 0.25, 1, 7, 7, 7, 7, 7, 7], abs=1e-5)
    replay.add(numbered(11, 50), version=1)
    assert replay.expire(1) == 0
    assert int(priority.tree.total) == priority.tree.leaves[:10].sum() == 10 * int(priority.largest)


def test_rows_that_expire_are_not_drawn() -> None:
    replay, _ = by_error(10)
    for version, rows in enumerate((6, 3, 4)):
        replay.add(numbered(replay.added, replay.added + rows), version)
    assert replay.expire(2) == 6
    assert frequencies(replay, 500).min() > 0


def test_errors_of_all_sizes_keep_the_sums_exact_and_every_row_possible() -> None:
    replay, priority = by_error(1 << 20, alpha=1.0)
    replay.add(numbered(0, 6))
    priority.learned(torch.arange(2), torch.tensor([5.0, 0.0]))
    priority.learned(torch.arange(2, 6), torch.tensor([math.nan, math.inf, 0.0, 5.0]))
    assert (priority.tree.leaves[:6] / UNIT).tolist() == pytest.approx([5, 1e-6, 5, 5, 1e-6, 5], rel=0.2, abs=1e-7)
    priority.learned(torch.arange(1), torch.tensor([3e38]))
    assert int(priority.largest) == MOST_SUM >> 20
    priority.tree.fill(0, 1 << 20, priority.largest)
    assert int(priority.tree.total) == MOST_SUM, "the sum of the largest priorities has overflowed"


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_with_beta_1_the_expected_loss_is_that_of_uniform_draws(alpha: float) -> None:
    """Of all rows: sum of probability × weight × loss, over that of probability × weight, is the plain mean, exactly; and a
    large batch comes near to it."""
    replay, priority = by_error(500, alpha=alpha)
    replay.add(numbered(0, 500))
    error = torch.rand(500, generator=torch.Generator().manual_seed(3)) * 5 + 0.05
    priority.learned(torch.arange(500), error)
    loss = error.double().square()
    drawn = replay.draw(60_000)
    assert drawn.weight is not None
    assert drawn.places is not None
    assert float(drawn.weight.mean()) == pytest.approx(1.0)
    assert torch.equal(drawn.rows[:, 0].long(), drawn.places)
    weight = torch.zeros(500, dtype=torch.float64)
    weight[drawn.places] = drawn.weight.double()
    assert (weight > 0).all(), "not every row was drawn"
    probability = priority.tree.leaves[:500].double() / priority.tree.total
    exact = (probability * weight * loss).sum() / (probability * weight).sum()
    assert float(exact) == pytest.approx(float(loss.mean()), rel=1e-6)
    assert float((drawn.weight * loss[drawn.places]).mean()) == pytest.approx(float(loss.mean()), rel=0.03)
    assert float(loss[drawn.places].mean()) > 1.1 * float(loss.mean()), "large errors are not drawn more often"


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_beta_says_how_far_weights_correct(beta: float) -> None:
    replay, priority = by_error(2, alpha=1.0, beta=beta)
    replay.add(numbered(0, 2))
    priority.learned(torch.arange(2), torch.tensor([1.0, 4.0]))
    drawn = replay.draw(1_000)
    assert drawn.weight is not None
    assert drawn.places is not None
    often, seldom = (drawn.weight[drawn.places == place][0] for place in (1, 0))
    assert float(seldom / often) == pytest.approx(4**beta, rel=1e-4)


def test_a_batch_of_none_asks_nothing() -> None:
    replay, priority = by_error(5)
    replay.add(numbered(0, 3))
    drawn = replay.draw(0)
    assert drawn.places is not None
    before = priority.tree.flat.clone()
    priority.learned(drawn.places, torch.zeros(0))
    assert torch.equal(priority.tree.flat, before)


@pytest.mark.parametrize("ratio", [1.001, 10.0, 1e6])
@pytest.mark.parametrize(("capacity", "added"), [(60, 40), (40, 90)], ids=["part", "wrapped"])
def test_new_rows_are_drawn_more_often_by_the_stated_distribution(capacity: int, added: int, ratio: float) -> None:
    replay = ReplayBuffer(capacity, COLUMNS, "cpu", 0, priority=Recent(ratio))
    replay.add(numbered(0, added))
    below = (1 - ratio ** -(np.arange(41) / 40)) / (1 - 1 / ratio)
    probability = np.diff(below)[::-1]  # the oldest first
    assert probability[-1] / probability[0] == pytest.approx(ratio ** (39 / 40), rel=1e-6)
    assert_drawn_like(frequencies(replay, 60_000), probability)
    drawn = replay.draw(10)
    assert drawn.weight is None
    assert drawn.places is None


@pytest.mark.parametrize("priority", ["uniform", "td", "recent"])
@pytest.mark.parametrize(("before", "after"), [(10, 10), (10, 7), (7, 25)])
def test_a_restored_buffer_draws_the_same_rows(priority: str, before: int, after: int) -> None:
    def make(capacity: int, seed: int) -> ReplayBuffer:
        kinds = {"uniform": Uniform(), "td": ByError(capacity, "cpu", alpha=0.6, beta=0.4), "recent": Recent(5.0)}
        return ReplayBuffer(capacity, COLUMNS, "cpu", seed, priority=kinds[priority])

    ours, theirs = make(before, 0), make(after, 1)
    theirs.add(numbered(100, 110))
    ours.add(numbered(0, 12))
    for _ in range(3):
        drawn = ours.draw(4)
        if drawn.places is not None:
            ours.priority.learned(drawn.places, drawn.rows[:, 0] + 0.5)
        ours.add(numbered(ours.added, ours.added + 1))
    restore(theirs, ours)
    first = theirs.added - theirs.count
    assert (theirs.added, theirs.count) == (ours.added, min(before, after))
    if before == after:
        for replay in (ours, theirs):
            replay.add(numbered(15, 17))
        one, other = ours.draw(64), theirs.draw(64)
        assert torch.equal(one.rows, other.rows)
        assert (one.weight is None) == (other.weight is None)
        assert one.weight is None or other.weight is None or torch.equal(one.weight, other.weight)
    else:
        assert frequencies(theirs, 2_000).min() > 0
        if isinstance(ours.priority, ByError) and isinstance(theirs.priority, ByError):
            numbers = torch.arange(first, theirs.added)
            leaves = [one.priority.tree.leaves[numbers % one.capacity] for one in (ours, theirs)]  # type: ignore[attr-defined]
            assert torch.equal(*leaves)
            assert int(theirs.priority.tree.total) == int(leaves[0].sum())
