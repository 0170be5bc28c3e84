"""SAC in several learners: a gradient step is that of all rows drawn, and all agree on how many of them there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel.core import BatchSpec, Chunk
from freewheel.errors import UsageError
from freewheel.learn.data_parallel import NO_GRAPH, share
from freewheel.learn.moments import RunningMoments
from freewheel.learn.replay.rows import ReplayMinibatch
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.sac.continuous import ContinuousUpdate
from freewheel.learn.sac.discrete import DiscreteUpdate
from freewheel.learn.sac.learner import SAC
from freewheel.learn.sac.update import SACUpdate
from freewheel.learn.spec import Compute, LearnerSpec, Peers
from freewheel.policies.heads.squashed import squash
from freewheel.policies.nets import TensorPolicy
from freewheel.policies.spec import PolicySpec
from tests.support.learning import play, sign
from tests.support.peers import ThreadPeers, in_threads, with_peers
from tests.support.places import LONG

BOX = PolicySpec(4, "float32", ((0, 3),), ((1, 4),), (), None, "squashed", 2, (12, 8), "tanh", 0.0, "")
DISCRETE = replace(BOX, head="categorical", action_size=3)
KINDS: dict[str, tuple[PolicySpec, type[SACUpdate]]] = {
    "box": (BOX, ContinuousUpdate),
    "discrete": (DISCRETE, DiscreteUpdate),
}
STATE = ("params", "critics", "targets", "temperature")
ADAM = ("adam.0.0", "adam.1.0")  # means of gradients


def batch_of(rows: int, seed: int, *, discrete: bool) -> ReplayMinibatch:
    rng = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, rows, 4, generator=rng)
    box, choice = torch.rand(rows, 2, generator=rng) * 2 - 1, torch.randint(3, (rows, 1), generator=rng).float()
    discount = 0.95 * (torch.rand(rows, generator=rng) > 0.3).float()
    reward, weight = torch.randn(rows, generator=rng), 2 * torch.rand(rows, generator=rng)
    return ReplayMinibatch(obs, choice if discrete else box, reward, discount, next_obs, weight)


def rows_of(batch: ReplayMinibatch, rows: slice) -> ReplayMinibatch:
    return ReplayMinibatch(*(None if part is None else part[rows] for part in batch))  # type: ignore[arg-type]


def without_chance(policy: TensorPolicy) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Actions that depend on the observation alone, as if its noise were a part of it: the same in any division of rows."""

    def rsample(inputs: Tensor) -> tuple[Tensor, Tensor]:
        distribution: Any = policy.distribution(inputs)
        return squash()(distribution._outputs, torch.sin(99 * inputs[:, :2]))

    return rsample


def learned(kind: str, config: SACConfig, steps: int, peers: Peers | None = None) -> dict[str, Any]:
    """The state after so many steps, of one learner or of one of several, on the same batches; and the losses."""
    policy, update = KINDS[kind]
    spec = LearnerSpec(policy=policy, batch=BatchSpec(4, 2), seed=0)
    spec = spec if peers is None else with_peers(spec, peers)
    mine = slice(0, config.batch)
    if peers is not None:
        start = config.batch * peers.rank // peers.count
        mine = slice(start, start + share(config.batch, peers))
    batches = iter(batch_of(config.batch, seed, discrete=kind == "discrete") for seed in range(steps))
    updater = update(config, spec, lambda: rows_of(next(batches), mine), generators=[])
    updater.policy.rsample = without_chance(updater.policy)  # type: ignore[method-assign, assignment]
    for _ in range(steps):
        updater.step()
    assert not isinstance(peers, ThreadPeers) or peers.sums == 2 * steps
    return updater.state_dict() | {"means": np.array(list(updater.losses().values()))}


OPTIONS: dict[str, dict[str, Any]] = {
    "learned temperature": {},
    "fixed temperature": {"temperature": 0.2},
    "subset": {"critics": 4, "critic_subset": 2},
    "uneven": {"batch": 25},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("count", [2, 3])
def test_a_step_is_that_of_all_rows(kind: str, options: str, count: int) -> None:
    config = SACConfig(**{"batch": 24, "lr": 1e-3} | OPTIONS[options])
    first, later = learned(kind, config, 1), learned(kind, config, 6)
    for steps, one in ((1, first), (6, later)):
        found = in_threads(count, lambda peers, steps=steps: learned(kind, config, steps, peers))  # type: ignore[misc]
        for name in (*STATE, *ADAM, "means"):
            assert all(np.array_equal(other[name], found[0][name]) for other in found), name
        for name in ADAM if steps == 1 else ():
            assert np.abs(one[name]).max() > 1e-3
            np.testing.assert_allclose(10 * found[0][name], 10 * one[name], rtol=0, atol=1e-5, err_msg=name)
        for name in STATE:
            np.testing.assert_allclose(found[0][name], one[name], rtol=0, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(found[0]["means"], one["means"], rtol=1e-4, atol=1e-5)


SMALL = SACConfig(batch=8, buffer=400, learning_starts=20)
S = 4  # rows of a learner between two publications
TINY = replace(BOX, hidden=(4,), actor_columns=((0, 4),), critic_columns=((0, 4),))


def sac_for(config: SACConfig, peers: ThreadPeers | None, spec: PolicySpec = TINY, **task: Any) -> SAC:
    given = LearnerSpec(policy=spec, batch=BatchSpec(S // 2, 2), seed=3, **task)
    return SAC(config, given if peers is None else with_peers(given, peers))


def chunks(learner: SAC, steps: Iterator[int], seed: int, spec: PolicySpec = TINY) -> Iterator[Chunk]:
    """One after the other, of so many steps each."""
    for sequence, size in enumerate(steps):
        data = play(spec, learner.snapshot(), (size, 2), seed=1_000 * seed + sequence)
        yield sign(data, sequence=sequence, version=learner.version)


def cycle(sizes: list[int]) -> Iterator[int]:
    while True:
        yield from sizes


def train(
    learner: SAC, rows: Iterator[Chunk], versions: int, after: Callable[[], object] = lambda: None
) -> list[Mapping[str, float]]:
    """As the loop does it; what publications said."""
    said = []
    while learner.version < versions:
        if learner.hungry or not learner.ready:
            learner.observe(next(rows))
        if learner.ready:
            version, metrics = learner.version, learner.update()
            assert learner.pace.due >= 0, "updates have run ahead of this learner's rows"
            after()
            said += [metrics] if learner.version > version else []
    return said


def assert_same(learners: list[SAC]) -> None:
    states = [learner.updater.state_dict() for learner in learners]
    for state in states[1:]:
        for name in (*STATE, *ADAM, "losses"):
            assert np.array_equal(state[name], states[0][name]), name


@settings(max_examples=60 if LONG else 4, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=2, max_size=3),
    ratio=st.sampled_from([0.1, 0.5, 1.0, 2.3]),
    bursts=st.lists(st.integers(1, 40), min_size=3, max_size=3),
)
def test_rows_at_any_time_make_the_same_updates(sizes: list[list[int]], ratio: float, bursts: list[int]) -> None:
    """Nobody waits for ever, updates stay within the bound of every learner, and the weights are the same."""
    count = len(sizes)
    config = replace(SMALL, updates_per_row=ratio)

    def body(peers: ThreadPeers) -> SAC:
        learner = sac_for(config, peers)
        learner.burst = bursts[peers.rank]
        assert len(train(learner, chunks(learner, cycle(sizes[peers.rank]), peers.rank), 7)) == 7
        return learner

    learners = in_threads(count, body)
    assert_same(learners)
    assert len({learner.pace.updates for learner in learners}) == 1
    for learner in learners:
        starts = -(-config.learning_starts // count)
        assert learner.pace.updates <= ratio * count * (learner.pace.rows - starts) + 1e-6
        assert learner.pace.updates >= int(ratio * count * (7 * S - starts) + 1e-9)


def test_options_are_those_of_all_learners() -> None:
    config = SACConfig(batch=25, buffer=101, learning_starts=11, updates_per_row=0.5, publish_every=9)
    found = in_threads(2, lambda peers: sac_for(config, peers))
    assert [learner.batch for learner in found] == [12, 13]
    for learner in found:
        assert learner.replay.capacity == 51
        assert (learner.pace.starts, learner.pace.ratio, learner.pace.slack) == (6, 1.0, 5)
        assert len(learner.updater.policy.generator.get_state()) > 0
    states = [learner.updater.policy.generator.get_state() for learner in found]
    assert not torch.equal(*states)
    assert torch.equal(states[0], sac_for(config, None).updater.policy.generator.get_state())
    assert not torch.equal(found[0].replay.generator.get_state(), found[1].replay.generator.get_state())
    assert torch.equal(found[0].updater.critics.generator.get_state(), found[1].updater.critics.generator.get_state())
    assert_same(found)


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^sac\.batch 2 cannot be divided among 3 learners"):
        in_threads(3, lambda peers: sac_for(SACConfig(batch=2), peers))


@pytest.mark.parametrize("options", [{"priority": "td"}, {"priority": "recent"}, {"n_step": 3}], ids=str)
def test_every_way_to_draw_keeps_learners_together(options: dict[str, Any]) -> None:
    def body(peers: ThreadPeers) -> SAC:
        learner = sac_for(replace(SMALL, **options), peers)
        train(learner, chunks(learner, cycle([1, 3]), peers.rank), 9)
        return learner

    learners = in_threads(2, body)
    assert_same(learners)
    assert learners[0].pace.updates > 10


def test_statistics_lags_and_losses_are_those_of_all() -> None:
    spec = replace(TINY, normalised=((0, 2),))
    seen: dict[int, list[Chunk]] = {0: [], 1: []}

    def body(peers: ThreadPeers) -> tuple[SAC, list[Mapping[str, float]]]:
        learner = sac_for(SMALL, peers, spec)

        def kept() -> Iterator[Chunk]:
            for chunk in chunks(learner, cycle([2, 1 + peers.rank]), peers.rank, spec):
                late = replace(chunk, version=max(0, chunk.version - 2 * peers.rank))
                seen[peers.rank].append(late)
                yield late

        return learner, train(learner, kept(), 20)

    (one, said), (other, said_by_other) = in_threads(2, body)
    assert_same([one, other])
    assert said == said_by_other
    assert one._moments is not None
    assert other._moments is not None
    assert np.array_equal(one._moments.state()[:9], other._moments.state()[:9])
    stored: RunningMoments[Any] = RunningMoments(4)
    for rank, learner in enumerate((one, other)):
        stored.add(np.concatenate([chunk.data.obs.reshape(-1, 4) for chunk in seen[rank]])[: learner.pace.rows])
    assert one._moments.count == one.pace.rows + other.pace.rows
    np.testing.assert_allclose(one._moments.state()[:9], stored.state(), rtol=1e-9, atol=1e-9)
    last = said[-1]
    assert last["replay/lag_max"] == 2
    assert 0.5 <= last["replay/lag_mean"] <= 1.5
    assert last["replay/updates_per_row"] == one.pace.updates / (one.pace.rows + other.pace.rows - 20)
    assert 0.8 < last["replay/updates_per_row"] <= 1.0
    assert last["replay/drawn"] == 8 * one.pace.updates
    assert any("loss/critic" in metrics for metrics in said)


def test_all_read_observations_by_the_same_statistics_before_a_publication() -> None:
    spec, config = replace(TINY, normalised=((0, 2),)), replace(SMALL, publish_every=200)

    def body(peers: ThreadPeers) -> tuple[SAC, Any]:
        learner = sac_for(config, peers, spec)
        data = play(spec, learner.snapshot(), (7 + peers.rank, 2), seed=peers.rank)
        learner.observe(sign(data))
        learner.update()
        assert (learner.version, learner.pace.updates) == (0, 8)
        return learner, data.obs.reshape(-1, 4)

    (one, seen), (other, seen_by_other) = in_threads(2, body)
    assert_same([one, other])
    mean = np.concatenate([seen, seen_by_other]).mean(0)[:2]
    for learner in (one, other):
        assert np.asarray(learner.snapshot().params["norm.mean"])[:2] == pytest.approx(mean, rel=1e-4, abs=1e-5)


def test_a_number_that_is_not_finite_in_one_learner_is_put_back_by_all() -> None:
    def body(peers: ThreadPeers) -> tuple[SAC, list[str]]:
        learner, found = sac_for(replace(SMALL, buffer=40), peers), []
        rows = chunks(learner, cycle([2]), peers.rank)
        train(learner, rows, 8)
        broken = next(rows)
        if peers.rank:
            broken.data.reward[...] = math.nan
        learner.observe(broken)
        learner.burst = 1
        for versions in range(9, 20):
            train(learner, rows, versions, learner.state_dict if peers.rank else lambda: None)  # nobody puts back alone
            found.append(learner.not_finite)
        return learner, found

    (one, found), (other, found_by_other) = in_threads(2, body)
    assert_same([one, other])
    assert found == found_by_other
    assert any(found)
    assert found[-1] == ""  # the row has left the buffer
    assert bool(torch.isfinite(one.updater.critics.vector).all())


def test_all_have_the_learning_rate_of_the_first() -> None:
    def body(peers: ThreadPeers) -> SAC:
        learner = sac_for(SMALL, peers)
        rows = chunks(learner, cycle([2]), peers.rank)
        train(learner, rows, 6)
        if peers.rank == 0:
            learner.learning_rate = 0.01
        train(learner, rows, 9)
        return learner

    learners = in_threads(2, body)
    assert [learner.learning_rate for learner in learners] == [0.01, 0.01]
    assert_same(learners)


def test_learners_go_on_from_their_states() -> None:
    spec = replace(TINY, normalised=((0, 2),))

    def body(again: bool) -> list[SAC]:
        def learn(peers: ThreadPeers) -> SAC:
            learner = sac_for(SMALL, peers, spec)
            first = learner.snapshot()
            rows = [sign(play(spec, first, (2, 2), seed=peers.rank + 7 * i), sequence=i) for i in range(30)]
            train(learner, iter(rows[:15]), 6)
            if again:
                saved, stored = learner.state_dict(), learner.replay.read(0, learner.replay.added)
                learner = sac_for(SMALL, peers, spec)
                learner.load_state_dict(saved)
                learner.replay.write(0, stored)
            train(learner, iter(rows[15:]), 11)
            return learner

        return in_threads(2, learn)

    straight, resumed = body(False), body(True)
    assert_same(resumed)
    assert_same([straight[0], resumed[0]])


def test_graphs_are_left_out_and_it_is_told() -> None:
    found = in_threads(2, lambda peers: sac_for(SMALL, peers, compute=Compute(compile="graphs")).fallback)
    assert found == [NO_GRAPH] * 2
    assert in_threads(2, lambda peers: sac_for(SMALL, peers).fallback) == ["", ""]
