"""The arithmetic of learners that train together, against that of one with all rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.core import BatchSpec, NDArray
from freewheel.errors import FreewheelError
from freewheel.learn import data_parallel as together
from freewheel.learn.moments import RunningMoments
from freewheel.learn.spec import ALONE, LearnerSpec
from freewheel.policies.spec import PolicySpec
from tests.support.peers import ThreadPeers, in_threads, with_peers

SPEC = PolicySpec(3, "float32", ((0, 3),), ((0, 3),), (), None, "gaussian", 2, (4,), "tanh", 0.0, "")


def test_every_learner_has_the_numbers_of_all_with_the_same_bits() -> None:
    numbers = np.random.default_rng(0).normal(size=(3, 5))
    numbers[1, 2] = math.nan
    for table in in_threads(3, lambda peers: together.gathered(peers, numbers[peers.rank])):
        np.testing.assert_array_equal(table, numbers)
    np.testing.assert_array_equal(together.gathered(ALONE, numbers[0]), numbers[:1])


@pytest.mark.parametrize(("total", "count"), [(256, 2), (256, 3), (5, 3), (1, 2), (0, 2)])
def test_shares_add_up_and_differ_by_one_at_most(total: int, count: int) -> None:
    shares = in_threads(count, lambda peers: together.share(total, peers))
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert together.share(total, ALONE) == total


def test_the_first_learner_draws_as_it_would_alone_and_others_otherwise() -> None:
    spec = LearnerSpec(policy=SPEC, batch=BatchSpec(4, 2), seed=7)
    first, second, third = in_threads(3, lambda peers: together.own_seed(with_peers(spec, peers)))
    assert first == together.own_seed(spec) == 7
    assert len({first, second, third}) == 3


@given(
    counts=st.lists(st.integers(1, 400), min_size=1, max_size=4), rows=st.integers(1, 500), even=st.booleans()
)  # fmt: skip
def test_minibatches_are_made_of_a_part_of_every_learners_rows(counts: list[int], rows: int, even: bool) -> None:
    splits = [together.Split.of(counts, rank, rows, even=even) for rank in range(len(counts))]
    assert len({tuple(split.totals) for split in splits}) == 1
    for count, split in zip(counts, splits, strict=True):
        assert len(split.sizes) == max(1, sum(counts) // rows)
        assert max(split.sizes) - min(split.sizes) <= 1
        left = count - sum(split.sizes)
        assert left == 0 or (even and left < len(split.sizes))
    assert [sum(sizes) for sizes in zip(*(split.sizes for split in splits), strict=True)] == splits[0].totals


def test_advantages_have_the_mean_and_deviation_of_all_rows() -> None:
    rng = np.random.default_rng(1)
    values = [[(1e4 + rng.normal(size=size)).astype(np.float32) for size in sizes] for sizes in ((5, 0, 1), (2, 7, 0))]
    totals = [7, 7, 1]

    def body(peers: ThreadPeers) -> list[tuple[float, float]]:
        return together.standards(peers, values[peers.rank], totals)

    found = in_threads(2, body)
    assert found[0] == found[1]
    for part in (0, 1):
        whole = np.concatenate([values[0][part], values[1][part]]).astype(np.float64)
        assert found[0][part] == pytest.approx((whole.mean(), whole.std(ddof=1)), rel=1e-6)
    assert found[0][2] == (0.0, 1.0)


def test_gradients_and_means_are_weighted_by_rows_and_parameters_without_a_gradient_stay() -> None:
    grads, means = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([[1.0], [5.0]])

    def body(peers: ThreadPeers) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        parameters = [torch.zeros(2, 2, requires_grad=True), torch.zeros(3), torch.zeros(2, requires_grad=True)]
        parameters[0].grad, parameters[2].grad = grads[peers.rank, :4].view(2, 2).clone(), grads[peers.rank, 4:].clone()
        found = together.sum_gradients(peers, parameters, means[peers.rank], (0.25, 0.75)[peers.rank])
        assert peers.sums == 1
        return [parameter.grad for parameter in parameters], found

    for (first, none, last), mean in in_threads(2, body):
        assert none is None
        assert first is not None
        assert last is not None
        torch.testing.assert_close(torch.cat([first.flatten(), last]), 0.25 * grads[0] + 0.75 * grads[1])
        assert mean.item() == 4.0


def test_the_term_that_comes_first_counts() -> None:
    assert in_threads(3, lambda peers: together.first_of(peers, ("a", "b", "c"), "cab"[peers.rank])) == ["a"] * 3
    assert together.first_of(ALONE, ("a", "b"), "b") == "b"


def test_other_weights_are_an_error_that_says_whose() -> None:
    vector = torch.linspace(-1, 1, 100)
    other = vector.clone()
    other[3] += 1e-7
    together.require_same(np.array([together.checksum(vector), together.checksum(vector.clone())]))
    with pytest.raises(FreewheelError, match="learners 0 and 2 train together but have different weights"):
        together.require_same(np.array([together.checksum(one) for one in (vector, vector, other)]))


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 3), on_tensors=st.booleans())
def test_pooled_statistics_are_those_of_all_rows(seed: int, count: int, on_tensors: bool) -> None:
    """In turns, of any number of rows each; a learner that goes on from its state between two of them has the same."""
    rng, device = np.random.default_rng(seed), "cpu" if on_tensors else None
    one = RunningMoments[NDArray](2)
    learners = [RunningMoments[NDArray](2, device=device, shared=True) for _ in range(count)]
    for _ in range(3):
        for rank in range(count):
            for size in rng.integers(0, 5, 2):
                rows = (1e3 + rng.normal(size=(size, 2))).astype(np.float32)
                given: NDArray = torch.from_numpy(rows) if on_tensors else rows  # type: ignore[assignment]
                learners[rank].add(given)
                one.add(rows)
        for rank, learner in enumerate(learners):
            again = RunningMoments[NDArray](2, device=device, shared=True)
            again.restore(learner.state())
            np.testing.assert_allclose(np.asarray(again.mean), np.asarray(learner.mean), rtol=1e-12)
            assert again.count == learner.count
            learners[rank] = again
        parts = np.stack([learner.since for learner in learners])
        for learner in learners:
            learner.pool(parts)
        states = [learner.state() for learner in learners]
        assert all(np.array_equal(state, states[0]) for state in states)
        np.testing.assert_allclose(states[0][:5], one.state(), rtol=1e-9, atol=1e-9)
        assert not states[0][5:].any()


def test_statistics_that_are_not_shared_have_the_state_that_they_always_had() -> None:
    moments = RunningMoments[NDArray](2)
    moments.add(np.ones((3, 2), np.float32))
    assert moments.state().tolist() == [1, 1, 0, 0, 3]
    assert moments.since.size == 0
    shared = RunningMoments[NDArray](2, shared=True)
    shared.restore(moments.state())
    assert shared.state().tolist() == [1, 1, 0, 0, 3, 0, 0, 0, 0, 0]
