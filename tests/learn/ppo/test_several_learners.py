"""PPO in several learners, each with its share of the rows, does what one learner with all rows does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import pytest

from freewheel.core import BatchSpec, Chunk, NDArray, Transitions
from freewheel.errors import FreewheelError, PeerLostError
from freewheel.learn.data_parallel import NO_GRAPH
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.learner import PPO
from freewheel.learn.ppo.torch_engine import TorchEngine
from freewheel.learn.spec import Compute, LearnerSpec, Peers, WorldFacts
from freewheel.policies.spec import PolicySpec
from tests.support.learning import play, sign, to_tensors
from tests.support.peers import ThreadPeers, in_threads, with_peers

GAUSSIAN = PolicySpec(4, "float32", ((0, 4),), ((0, 4),), (), None, "gaussian", 2, (16, 8), "tanh", -0.2, "")
MASKED = replace(GAUSSIAN, obs_size=7, mask=(4, 7), head="categorical", action_size=3)
NORMALISED = replace(GAUSSIAN, normalised=((0, 4),))
Kind = Literal["numpy", "torch", "simulator"]
KINDS: tuple[Kind, ...] = ("numpy", "torch", "simulator")
WHOLE = PPOConfig(epochs=1, minibatch=10**6, entropy=0.02, max_grad_norm=1e9)  # one gradient step, not clipped
STEPS = 12


@dataclass(frozen=True)
class Case:
    """Rows of some lanes, divided among learners by their lanes."""

    kind: Kind = "numpy"
    spec: PolicySpec = GAUSSIAN
    config: PPOConfig = WHOLE
    shares: tuple[int, ...] = (2, 2)  # lanes of each learner
    gaps: bool = False
    total: int | None = None

    def learner(self, lanes: int, peers: Peers | None = None) -> PPO:
        world = WorldFacts(batched_on_device=self.kind == "simulator")
        total = None if self.total is None else self.total * lanes // sum(self.shares)
        batch = BatchSpec(STEPS, lanes)
        if self.gaps:  # any number of rows: whole episodes, one in each lane
            batch = replace(batch, episodes=lanes)
        given = LearnerSpec(policy=self.spec, batch=batch, seed=5, world=world, total_steps=total)
        gradient: Literal["autograd", "auto"] = "autograd" if self.kind == "torch" else "auto"
        return PPO(replace(self.config, gradient=gradient), given if peers is None else with_peers(given, peers))

    def rows(self, one: PPO, update: int) -> Transitions:
        return play(self.spec, one.snapshot(), (STEPS, sum(self.shares)), seed=update, gaps=self.gaps)

    def chunk(self, data: Transitions, lanes: slice, version: int) -> Chunk[Any]:
        parts = (np.ascontiguousarray(getattr(data, field.name)[:, lanes]) for field in fields(Transitions))
        chunk = sign(Transitions(*parts), version=version)
        return to_tensors(chunk) if self.kind == "simulator" else chunk

    def lanes(self, rank: int) -> slice:
        return slice(sum(self.shares[:rank]), sum(self.shares[: rank + 1]))


#: Of each update: all rows, and how far behind the version of each share is.
Story = list[tuple[Transitions, Sequence[int]]]


@dataclass
class Outcome:
    """What a learner has become."""

    metrics: list[Mapping[str, float]]
    state: Mapping[str, Any]
    learner: PPO
    sums: int = 0


def alone(case: Case, updates: int = 3, lags: Sequence[Sequence[int]] = ()) -> tuple[Outcome, Story]:
    """One learner with all rows, and these rows; lags: of each update's shares."""
    one, story, metrics = case.learner(sum(case.shares)), Story(), []
    for update in range(updates):
        late = lags[update] if update < len(lags) else [0] * len(case.shares)
        data = case.rows(one, update)
        for rank in range(len(case.shares)):
            chunk = case.chunk(data, case.lanes(rank), one.version - late[rank])
            author = replace(chunk.origin, worker=rank, sequence=update, lane0=case.lanes(rank).start)
            one.observe(replace(chunk, origin=author))
        metrics.append(one.update())
        story.append((data, late))
    return Outcome(metrics, one.state_dict(), one), story


def of_share(case: Case, story: Story, peers: Peers) -> Outcome:
    """What becomes of one of as many learners as there are shares, with the same rows."""
    learner, metrics = case.learner(case.shares[peers.rank], peers), []
    for update, (data, late) in enumerate(story):
        chunk = case.chunk(data, case.lanes(peers.rank), learner.version - late[peers.rank])
        learner.observe(replace(chunk, origin=replace(chunk.origin, sequence=update)))
        assert learner.ready
        metrics.append(learner.update())
    return Outcome(metrics, learner.state_dict(), learner, getattr(peers, "sums", 0))


def together(case: Case, story: Story) -> list[Outcome]:
    return in_threads(len(case.shares), lambda peers: of_share(case, story, peers))


def assert_same_in_all(outcomes: Sequence[Outcome]) -> None:
    """Weights, optimiser and metrics, bit for bit."""
    for outcome in outcomes[1:]:
        for name in ("params", "adam.mean", "adam.square", "adam.steps"):
            assert np.array_equal(outcome.state[name], outcomes[0].state[name]), name
        assert outcome.metrics == outcomes[0].metrics


def assert_near(found: Outcome, one: Outcome, tolerance: float) -> None:
    np.testing.assert_allclose(found.state["params"], one.state["params"], rtol=0, atol=tolerance)
    assert int(found.state["adam.steps"]) == int(one.state["adam.steps"])
    for mine, theirs in zip(found.metrics, one.metrics, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name


def compared(
    case: Case, updates: int, lags: Sequence[Sequence[int]] = (), tolerance: float = 2e-5
) -> tuple[list[Outcome], Outcome]:
    """Several learners, and the one with all rows that they are near to."""
    one, story = alone(case, updates, lags)
    found = together(case, story)
    assert_same_in_all(found)
    assert_near(found[0], one, tolerance)
    return found, one


def first_gradient(outcome: Outcome) -> NDArray:
    """Of the first step, from Adam's mean."""
    return np.asarray(outcome.state["adam.mean"]) / np.float32(0.1)


CASES: dict[str, dict[str, Any]] = {
    "two": {},
    "three": {"shares": (1, 2, 1)},
    "masked": {"spec": MASKED},
    "normalised": {"spec": NORMALISED, "config": replace(WHOLE, reward_scale="returns")},
    "plain advantages": {"config": replace(WHOLE, normalize_advantage=False)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", CASES)
def test_the_gradient_is_that_of_all_rows(kind: Kind, given: str) -> None:
    case = Case(kind, **CASES[given])
    one, story = alone(case, updates=1)
    found = together(case, story)
    assert_same_in_all(found)
    gradient = first_gradient(one)
    assert np.abs(gradient).max() > 0.01
    np.testing.assert_allclose(first_gradient(found[0]), gradient, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_stay_together_and_near_those_of_one_learner(kind: Kind) -> None:
    """Through updates of several epochs, with clipping, statistics of observations and returns, and a schedule; lag and
    metrics are those of all."""
    config = replace(
        WHOLE, epochs=4, max_grad_norm=0.3, lr=1e-3, lr_schedule="linear", reward_scale="returns", entropy=0.01
    )
    found, one = compared(Case(kind, NORMALISED, config, shares=(1, 3), total=10 * STEPS * 4), 4)
    np.testing.assert_allclose(found[0].state["obs_moments"][:9], one.state["obs_moments"], rtol=1e-9)
    np.testing.assert_allclose(found[1].state["return_moments"][:3], one.state["return_moments"], rtol=1e-9)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_rows_of_older_versions_in_one_learner_are_corrected_in_all(kind: Kind) -> None:
    case = Case(kind, config=replace(WHOLE, epochs=3, lr=1e-3))
    last = compared(case, 3, [(0, 0), (0, 0), (0, 2)])[0][0].metrics[2]
    assert (last["lag/share_2"], last["lag_max"], last["lag_mean"]) == (0.5, 2, 1)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_unequal_numbers_of_rows_are_weighted(kind: Kind) -> None:
    """Whole episodes of any length: one learner may have several times the rows of another."""
    found, one = compared(Case(kind, config=replace(WHOLE, epochs=3, lr=1e-3), shares=(1, 4), gaps=True), 3)
    trained = [outcome.learner.rows().trained for outcome in found]
    assert trained[1] > 2 * trained[0]
    assert sum(trained) == one.learner.rows().trained


class Composed:
    """The order in which one learner has to take rows so that its minibatches are those of several."""

    def __init__(self, orders: Sequence[np.random.Generator], case: Case, parts: int) -> None:
        self._orders, self._case, self._parts = orders, case, parts

    def permutation(self, rows: int) -> NDArray:
        lanes, pieces = sum(self._case.shares), []
        for rank, rng in enumerate(self._orders):
            width, first = self._case.shares[rank], self._case.lanes(rank).start
            order = rng.permutation(STEPS * width)
            pieces.append(np.split(order // width * lanes + first + order % width, self._parts))
        whole = np.concatenate([np.concatenate(part) for part in zip(*pieces, strict=True)])
        assert sorted(whole) == list(range(rows))
        return whole


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_minibatches_of_several_are_those_of_one_that_takes_the_same_rows(kind: Kind) -> None:
    case = Case(kind, config=PPOConfig(epochs=2, minibatch=16, lr=1e-3), shares=(1, 3))
    orders = in_threads(2, lambda peers: case.learner(1, peers).engine._rng)
    first, second = (order.bit_generator.state["state"]["state"].tolist() for order in orders)
    assert first != second
    one = case.learner(4)
    story, metrics = Story(), []
    one.engine._rng = Composed(orders, case, 3)  # type: ignore[assignment]
    for update in range(2):
        data = case.rows(one, update)
        one.observe(case.chunk(data, slice(None), one.version))
        metrics.append(one.update())
        story.append((data, (0, 0)))
    one.engine._rng = orders[0]
    found = together(case, story)
    assert_same_in_all(found)
    assert int(found[0].state["adam.steps"]) == 2 * 2 * 3
    assert_near(found[0], Outcome(metrics, one.state_dict(), one), 2e-5)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_all_make_as_many_steps_where_one_has_fewer_rows_than_there_are_minibatches(kind: Kind) -> None:
    case = Case(kind, config=PPOConfig(epochs=2, minibatch=6), shares=(1, 12))
    _, story = alone(case, updates=2)
    found = together(case, story)
    assert_same_in_all(found)
    assert int(found[0].state["adam.steps"]) == 2 * 2 * (STEPS * 13 // 6)
    assert all(math.isfinite(value) for value in found[0].metrics[1].values())


@pytest.mark.parametrize("kind", KINDS)
def test_all_end_an_update_where_the_policy_of_all_has_moved_too_far(kind: Kind) -> None:
    found, _ = compared(Case(kind, config=replace(WHOLE, epochs=50, lr=3e-3, target_kl=0.01)), 2, tolerance=5e-5)
    assert 2 < int(found[0].state["adam.steps"]) < 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_not_finite_in_one_learner_is_skipped_by_all(kind: Kind) -> None:
    case = Case(kind, config=replace(WHOLE, epochs=2))
    _, story = alone(case, updates=2)
    story[1][0].reward[3, 3] = math.nan  # of the second learner
    before = together(case, story[:1])
    found = together(case, story)
    for outcome in found:
        assert np.array_equal(outcome.state["params"], before[0].state["params"])
        assert np.array_equal(outcome.state["adam.mean"], before[0].state["adam.mean"])
        assert outcome.metrics[1]["update/skipped"] == 1
        assert outcome.learner.not_finite == "value target"
        assert outcome.learner.rows().dropped == {"nan": 2 * STEPS}
    assert found[0].learner.version == 2


def test_sums_are_few() -> None:
    """Two to agree, one for what is shown of targets; in each epoch one for advantages and one for each minibatch."""
    case = Case(config=PPOConfig(epochs=3, minibatch=24), shares=(2, 2))
    _, story = alone(case, updates=2)
    assert [outcome.sums for outcome in together(case, story)] == [2 * (3 + 3 * (1 + 2))] * 2


def with_rows(peers: Peers) -> PPO:
    """One of two learners, with its rows of an update."""
    case = Case()
    learner = case.learner(2, peers)
    learner.observe(case.chunk(case.rows(case.learner(4), 0), case.lanes(peers.rank), 0))
    return learner


def test_all_have_the_learning_rate_that_the_first_was_assigned() -> None:
    def body(peers: ThreadPeers) -> tuple[float, float]:
        learner = with_rows(peers)
        learner.learning_rate = 0.5 if peers.rank == 0 else 0.1
        learner.update()
        return learner.learning_rate, float(np.abs(learner.engine.net.array).max())

    (rate, weight), other = in_threads(2, body)
    assert (rate, weight) == other
    assert rate == 0.5
    assert weight > 0.4


def test_a_learner_with_other_weights_is_found_before_it_learns() -> None:
    def body(peers: ThreadPeers) -> None:
        learner = with_rows(peers)
        learner.engine.net.array[0] += 1e-6 * peers.rank
        learner.update()

    with pytest.raises(FreewheelError, match="learners 0 and 1 train together but have different weights"):
        in_threads(2, body)


def test_a_learner_that_is_gone_is_an_error_in_the_others() -> None:
    lost: list[BaseException] = []

    def body(peers: ThreadPeers) -> None:
        learner = with_rows(peers)
        if peers.rank:
            raise KeyError("gone")
        try:
            learner.update()
        except PeerLostError as error:
            lost.append(error)
            assert learner.rows().queued == 2 * STEPS

    with pytest.raises(KeyError):
        in_threads(2, body)
    assert len(lost) == 1


def test_a_learner_goes_on_from_its_state_with_statistics_that_are_not_pooled_yet() -> None:
    case = Case(spec=NORMALISED, config=replace(WHOLE, reward_scale="returns", epochs=2))
    _, story = alone(case, updates=2)

    def body(again: bool) -> list[Mapping[str, Any]]:
        def learn(peers: ThreadPeers) -> Mapping[str, Any]:
            learner = case.learner(2, peers)
            for data, _ in story:
                learner.observe(case.chunk(data, case.lanes(peers.rank), learner.version))
                if again:
                    saved, learner = learner.state_dict(), case.learner(2, peers)
                    learner.load_state_dict(saved)
                learner.update()
            return learner.state_dict()

        return in_threads(2, learn)

    for straight, resumed in zip(body(False), body(True), strict=True):
        for name in ("params", "adam.square", "obs_moments", "return_moments"):
            np.testing.assert_allclose(resumed[name], straight[name], rtol=1e-6, atol=1e-9, err_msg=name)


def test_graphs_are_left_out_and_it_is_told() -> None:
    spec = LearnerSpec(policy=GAUSSIAN, batch=BatchSpec(4, 2), seed=0, world=WorldFacts(batched_on_device=True))
    spec = replace(spec, compute=Compute(compile="graphs"))
    engines = in_threads(2, lambda peers: PPO(PPOConfig(), with_peers(spec, peers)).engine)
    for engine in (*engines, PPO(PPOConfig(), spec).engine):
        assert isinstance(engine, TorchEngine)
        assert engine.fallback == (NO_GRAPH if engine in engines else "")
