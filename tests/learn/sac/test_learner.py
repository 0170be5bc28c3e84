"""SAC as a learner: when it updates and publishes, what it keeps waiting, what it refuses, and that it repeats itself."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.core import ActionSpec, Array, BatchSpec, EnvSpec, RowCounts, Slice, Transitions, to_numpy
from freewheel.errors import FreewheelError, SetupError
from freewheel.learn.replay.priority import UNIT, ByError
from freewheel.learn.replay.rows import ReplayMinibatch
from freewheel.learn.replay_learner import BURST, REPORT
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.sac.learner import SAC
from freewheel.learn.spec import LearnerSpec, WorldFacts
from freewheel.learn.update_ratio import UpdateRatio
from freewheel.policies.spec import PolicyConfig, PolicySpec
from freewheel.testing.conformance import check_learner
from tests.support.learning import play, sign, to_tensors
from tests.support.model_story import BOX_LANES, CHUNK, box_world

SPEC = PolicySpec(3, "float32", ((0, 3),), ((0, 3),), (), None, "squashed", 2, (8,), "tanh", 0.0, "")
LINEAR = replace(SPEC, hidden=())
NORMALISED = replace(SPEC, normalised=((0, 1), (2, 3)))
SMALL = SACConfig(batch=8, buffer=1_000, learning_starts=10)
S = 8  # rows a publication


def sac_for(config: SACConfig = SMALL, spec: PolicySpec = SPEC, **task: Any) -> SAC:
    given: dict[str, Any] = {"batch": BatchSpec(S // 2, 2), "seed": 0} | task
    return SAC(config, LearnerSpec(policy=spec, **given))


def settle(learner: SAC) -> list[Mapping[str, float]]:
    """Update as long as it may; what the publications said."""
    reported = []
    while learner.ready:
        version, metrics = learner.version, learner.update()
        assert learner.version <= version + 1
        if learner.version > version:
            reported.append(metrics)
        assert learner.ready or learner.hungry, "neither ready nor hungry"
    return reported


SWITCHES: dict[str, dict[str, Any]] = {
    "td": {"priority": "td"},
    "recent": {"priority": "recent"},
    "n-step": {"n_step": 3},
    "td and n-step": {"priority": "td", "priority_beta": 0.4, "n_step": 3},
}
KIT = SACConfig(batch=16, buffer=60, learning_starts=CHUNK)  # the buffer wraps within the kit


def kit_learner(kind: type[SAC], spec: PolicySpec, options: dict[str, Any]) -> SAC:
    task = LearnerSpec(policy=spec, batch=BatchSpec(CHUNK // BOX_LANES, BOX_LANES), seed=1)
    return kind(replace(KIT, **options), task)


OPTIONS: dict[str, dict[str, Any]] = SWITCHES | {
    "plain": {},
    "norm": {"critic_norm": True, "temperature": 0.1},
    "quarter": {"updates_per_row": 0.25},
    "early": {"learning_starts": 5},
}


@pytest.mark.parametrize(("case", "normalised"), [*((one, False) for one in OPTIONS), ("plain", True), ("early", True)])
def test_sac_keeps_the_promises_of_a_learner(case: str, normalised: bool) -> None:
    """Among them: restored from its state, it goes on bit for bit."""
    collect, spec = box_world(normalize_obs=normalised)
    check_learner(lambda: kit_learner(SAC, spec, OPTIONS[case]), collect)


@pytest.mark.parametrize("part", ["update.targets", "replay.rng", "replay.priorities", "replay.further"])
def test_one_that_forgets_a_part_of_its_state_is_caught(part: str) -> None:
    class Forgetful(SAC):
        def load_state_dict(self, state: Mapping[str, Array]) -> None:
            other = torch.Generator().manual_seed(9).get_state() if part == "replay.rng" else state[part] * 0
            super().load_state_dict({**state, part: np.asarray(other)})

    collect, spec = box_world()
    with pytest.raises(AssertionError, match="behaves differently"):
        check_learner(lambda: kit_learner(Forgetful, spec, SWITCHES["td and n-step"]), collect)


@settings(max_examples=25)
@given(
    steps=st.lists(st.integers(1, 14), min_size=1, max_size=8),
    ratio=st.sampled_from([0.3, 1.0, 2.5]),
    eager=st.booleans(),
)
def test_a_version_is_so_many_rows_and_the_updates_they_call_for(steps: list[int], ratio: float, eager: bool) -> None:
    learner = sac_for(replace(SMALL, updates_per_row=ratio))
    learner.updater.step = lambda: None  # type: ignore[method-assign]
    data, at, observed = play(SPEC, learner.snapshot(), (sum(steps), 2)), 0, 0
    for count in steps:
        learner.observe(sign(data, slice(at, at + count)))
        at, observed = at + count, observed + 2 * count
        while learner.ready:
            version = learner.version
            assert learner.update()["updates"] <= BURST
            if learner.version > version:
                assert learner.pace.updates == learner.pace.updates_for(learner.version * S)
            assert learner.ready or learner.hungry
            if eager and learner.hungry:
                break
        rows = learner.rows()
        assert rows.trained + rows.queued == observed
        assert learner.pace.updates <= ratio * max(0, learner.pace.rows - 10)
    settle(learner)
    assert learner.rows() == RowCounts(trained=observed)
    assert learner.version == observed // S
    assert learner.pace.updates == int(ratio * max(0, observed - 10) + 1e-9)


def test_versions_move_on_while_learning_has_not_begun() -> None:
    learner = sac_for(replace(SMALL, learning_starts=100))
    before = learner.snapshot()
    learner.observe(sign(play(SPEC, learner.snapshot(), (13, 2))))
    reported = settle(learner)
    assert (learner.version, learner.pace.updates) == (3, 0)
    assert [metrics["updates"] for metrics in reported] == [0, 0, 0]
    after = learner.snapshot()
    assert after.version == 3
    assert all(np.array_equal(value, after.params[name]) for name, value in before.params.items())


def test_rows_beyond_the_pace_wait_unpaid() -> None:
    learner = sac_for()
    data = play(SPEC, learner.snapshot(), (20, 2))
    learner.observe(sign(data, slice(0, 10)))  # 20 rows call for 10 updates: more than 8 rows' worth behind
    assert (learner.ready, learner.hungry) == (True, False)
    learner.observe(sign(data, slice(10, 20)))
    assert learner.rows() == RowCounts(trained=20, queued=20)
    assert (learner.replay.count, learner.pace.rows) == (20, 20)
    assert learner.update()["updates"] == 0  # the first 8 rows are not enough to learn from: version 1
    assert (learner.version, learner.rows().queued) == (1, 20)
    assert learner.update()["updates"] == 6  # up to row 16: version 2
    assert (learner.version, learner.rows()) == (2, RowCounts(trained=40))  # 4 updates behind: the others come in
    assert learner.update()["updates"] == 8
    assert learner.version == 3


def test_updates_come_in_bursts_so_that_rows_are_looked_for() -> None:
    learner = sac_for(replace(SMALL, updates_per_row=9.5, learning_starts=8))
    learner.observe(sign(play(SPEC, learner.snapshot(), (8, 2))))
    bursts = []
    while learner.ready:
        bursts.append((learner.update()["updates"], learner.version))
    assert bursts == [(0, 1), (BURST, 1), (BURST, 1), (76 - 2 * BURST, 2)]


def test_every_update_draws_a_minibatch_of_its_own() -> None:
    drawn = list[torch.Tensor]()

    def spied() -> ReplayMinibatch:
        batch = learner.draw()
        drawn.append(batch.obs)
        return batch

    learner = sac_for(replace(SMALL, learning_starts=50))
    learner.updater.draw = spied
    learner.observe(sign(play(SPEC, learner.snapshot(), (40, 2))))
    settle(learner)
    assert len(drawn) == learner.pace.updates == 30
    assert all(obs.shape == (SMALL.batch, 3) for obs in drawn)
    assert len({obs.numpy().tobytes() for obs in drawn}) == 30


def test_publications_say_how_old_rows_were() -> None:
    learner = sac_for(replace(SMALL, learning_starts=100))
    data = play(SPEC, learner.snapshot(), (12, 2))
    learner.observe(sign(data, slice(0, 4)))
    learner.update()
    learner.observe(sign(data, slice(4, 7), version=1))
    learner.observe(sign(data, slice(7, 8), version=0))
    reported = learner.update()
    assert (reported["replay/lag_mean"], reported["replay/lag_max"]) == (2 * 1 / 8, 1.0)
    assert learner.buffer_util == 16 / 1_000
    learner.observe(sign(data, slice(8, 12), version=2))
    assert learner.update()["replay/lag_max"] == 0.0


def test_what_was_achieved_is_told() -> None:
    learner = sac_for(replace(SMALL, updates_per_row=2.0, learning_starts=8))
    learner.observe(sign(play(SPEC, learner.snapshot(), (16, 2))))
    assert settle(learner)[-1]["replay/updates_per_row"] == 2.0


def one_row(*, terminated: bool = False, truncated: bool = False) -> Transitions:
    return Transitions(
        obs=np.zeros((1, 1, 3), np.float32),
        action=np.zeros((1, 1, 2), np.float32),
        log_prob=np.zeros((1, 1), np.float32),
        reward=np.full((1, 1), 2.0, np.float32),
        terminated=np.array([[terminated]]),
        truncated=np.array([[truncated]]),
        next_obs=np.array([[[1.0, 10.0, 100.0]]], np.float32),
        valid=np.array([[True]]),
    )


@pytest.mark.parametrize(
    ("ends", "goal"),
    [({}, 2 + 0.9 * 3210), ({"truncated": True}, 2 + 0.9 * 3210), ({"terminated": True}, 2.0)],
    ids=["goes on", "truncated", "terminated"],
)
def test_the_future_counts_unless_the_world_ended(ends: dict[str, bool], goal: float) -> None:
    """Linear critics that say 0, linear targets that say 6000 and 3210 of the successor, and hardly any entropy."""
    config = SACConfig(batch=4, buffer=10, learning_starts=1, gamma=0.9, temperature=1e-9)
    learner = sac_for(config, LINEAR, batch=BatchSpec(1, 1))
    critics = learner.updater.critics
    critics.vector.zero_()
    critics.target.zero_()
    weight, _ = critics.views(critics.target)
    weight[:, :3, 0] = torch.tensor([[1000.0, 200.0, 30.0], [10.0, 20.0, 30.0]])
    for _ in range(2):
        learner.observe(sign(one_row(**ends)))
        learner.update()
    assert learner.pace.updates == 1
    assert learner.updater.losses()["loss/critic"] == pytest.approx(goal**2, rel=1e-5)  # half the square, twice
    assert (critics.vector != 0).sum() == 2  # what is 0 in the row moves nothing but the two biases


def test_gaps_are_not_learned_from() -> None:
    learner = sac_for()
    data = play(SPEC, learner.snapshot(), (20, 2), gaps=True)
    chunk = sign(data)
    assert chunk.rows < 40
    learner.observe(chunk)
    batch = learner.replay.columns.split(learner.replay.newest(chunk.rows))
    np.testing.assert_array_equal(batch.obs.numpy(), data.obs[data.valid])
    assert learner.rows().trained == learner.pace.rows == chunk.rows


def test_a_chunk_that_miscounts_is_refused() -> None:
    learner = sac_for()
    chunk = sign(play(SPEC, learner.snapshot(), (3, 2)))
    with pytest.raises(FreewheelError, match=r"^a chunk of 5 rows holds 6: please report this$"):
        learner.observe(replace(chunk, rows=5))


def test_statistics_change_with_publications_alone() -> None:
    learner = sac_for(spec=NORMALISED)
    data = play(NORMALISED, learner.snapshot(), (20, 2), gaps=True)
    data.obs[...] = data.obs * (3.0, 2.0, 0.5) + (1.0, 5.0, -4.0)
    learner.observe(sign(data))
    assert np.asarray(learner.snapshot().params["norm.mean"]).tolist() == [0, 0, 0]
    learner.update()
    seen = data.obs[data.valid].astype(np.float64)
    published = learner.snapshot().params
    columns = [0, 2]
    np.testing.assert_allclose(np.asarray(published["norm.mean"])[columns], seen.mean(0)[columns], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(published["norm.scale"])[columns], 1 / seen.std(0)[columns], rtol=1e-5)
    assert (published["norm.mean"][1], published["norm.scale"][1]) == (0, 1)
    np.testing.assert_array_equal(learner.updater.policy.statistics["norm.mean"].numpy(), published["norm.mean"])


@pytest.mark.parametrize("bound", [1.0, math.inf])
def test_another_head_is_refused_in_a_line(bound: float) -> None:
    action = ActionSpec("box", 1, (-bound,), (bound,))
    spec = PolicyConfig().resolve(EnvSpec("Here-v0", 1, 3, "float32", (Slice("policy", 0, 3, (3,)),), action))
    with pytest.raises(SetupError) as caught:
        sac_for(spec=spec, world=WorldFacts(name="Here-v0"))
    assert str(caught.value) == (
        "sac needs a head whose actions are discrete or have a gradient; Here-v0 has the head gaussian: "
        "use policy.head auto, or another algorithm"
    )


def test_errors_of_the_critics_become_priorities() -> None:
    learner = sac_for(replace(SMALL, priority="td", learning_starts=39, priority_alpha=1.0))
    learner.observe(sign(play(SPEC, learner.snapshot(), (20, 2))))
    batch, told, priority = learner.draw(), dict[int, float](), learner.replay.priority
    learner.updater.draw = lambda: batch._replace(discount=torch.zeros(SMALL.batch))  # so that rewards are the targets
    assert isinstance(priority, ByError)
    assert batch.places is not None
    before = priority.tree.leaves.clone()
    values = learner.updater.values(learner.updater.policy.inputs(batch.obs), batch.action).detach()
    for place, error in zip(batch.places.tolist(), (values - batch.reward).abs().mean(0).tolist(), strict=True):
        told[place] = max(error, told.get(place, 0.0))
    assert settle(learner)
    assert learner.pace.updates == 1
    assert (priority.tree.leaves[:40] / UNIT)[[*told]].tolist() == pytest.approx([*told.values()], rel=1e-4, abs=1e-5)
    others = [place for place in range(40) if place not in told]
    assert torch.equal(priority.tree.leaves[others], before[others])


def test_several_steps_are_learned_from_by_lane() -> None:
    learner = sac_for(replace(SMALL, n_step=3, gamma=0.5, learning_starts=100))
    data = play(SPEC, learner.snapshot(), (20, 2))
    for start in range(0, 20, 4):
        learner.observe(sign(data, slice(start, start + 4)))
    batches = [learner.draw() for _ in range(50)]
    assert {*torch.cat([batch.discount for batch in batches]).tolist()} == {0.0, 0.5, 0.25, 0.125}
    ends = (data.terminated | data.truncated) | (np.arange(20) == 19)[:, None]
    for batch in batches:
        for obs, reward in zip(batch.obs.numpy(), batch.reward.tolist(), strict=True):
            (step,), (lane,) = np.nonzero((data.obs == obs).all(-1))
            stop = min(step + 3, step + 1 + int(np.argmax(ends[step:, lane])))
            assert reward == pytest.approx(float((data.reward[step:stop, lane] * 0.5 ** np.arange(stop - step)).sum()))


@pytest.mark.parametrize("case", ["plain", "normalised", *SWITCHES])
def test_it_repeats_itself_bit_for_bit_and_uses_only_its_own_generators(case: str) -> None:
    spec, switched = NORMALISED if case == "normalised" else SPEC, replace(SMALL, **SWITCHES.get(case, {}))

    def run(config: SACConfig, seed: int = 0) -> str:
        learner = sac_for(config, spec, seed=seed)
        data = play(spec, sac_for(spec=spec).snapshot(), (20, 2))
        for start in range(0, 20, 5):
            learner.observe(sign(data, slice(start, start + 5)))
            settle(learner)
        return hashlib.sha256(to_numpy(learner.updater.state_dict()["critics"]).tobytes()).hexdigest()

    before = torch.random.get_rng_state()
    once = run(switched)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.default_generator.manual_seed(4)
    assert run(switched) == once
    assert run(switched, seed=1) != once
    assert (run(SMALL) != once) == (case in SWITCHES)


def test_rows_on_tensors_teach_the_same() -> None:
    ours, theirs = sac_for(), sac_for(world=WorldFacts(batched_on_device=True))
    chunk = sign(play(SPEC, ours.snapshot(), (20, 2)))
    ours.observe(chunk)
    theirs.observe(to_tensors(chunk))
    for learner in (ours, theirs):
        settle(learner)
    mine, others = ours.state_dict(), theirs.state_dict()
    assert all(np.array_equal(to_numpy(mine[name]), to_numpy(others[name])) for name in mine)


@pytest.mark.parametrize(
    ("planted", "priority"), [(math.nan, "uniform"), (math.inf, "td"), (3e38, "uniform"), (3e38, "td")]
)
def test_updates_that_are_not_finite_are_undone_and_named(planted: float, priority: Any) -> None:
    learner = sac_for(replace(SMALL, updates_per_row=8.0, batch=64, priority=priority))
    data = play(SPEC, learner.snapshot(), (20, 2))
    data.reward[::3] = planted
    learner.observe(sign(data))
    first = learner.snapshot().params
    reported = settle(learner)
    assert learner.not_finite == "loss/critic"
    assert [one["update/skipped"] for one in reported[2:]] == [1.0] * 3  # the first ones came before 50 updates
    assert all(math.isfinite(value) for one in reported for value in one.values())
    for name, value in learner.snapshot().params.items():  # every update would have spoiled them
        np.testing.assert_array_equal(value, first[name])


def test_losses_are_looked_at_every_so_many_updates() -> None:
    learner = sac_for(replace(SMALL, learning_starts=8))
    learner.observe(sign(play(SPEC, learner.snapshot(), (80, 2))))
    seen = [(learner.pace.updates, "loss/critic" in learner.update()) for _ in iter(lambda: learner.ready, False)]
    looks = [updates + S for updates, looked in seen if looked]
    assert looks == [56, 112]
    assert all(there - here >= REPORT for here, there in zip([0, *looks], looks, strict=False))


@pytest.mark.parametrize(("slack", "rows", "behind"), [(8, 8, False), (8, 9, True), (1, 1, False), (1, 2, True)])
def test_more_than_the_slack_is_behind(slack: int, rows: int, behind: bool) -> None:
    pace = UpdateRatio(3.0, 100, slack)
    assert pace.achieved(pace.rows) == 0.0
    pace.rows = 100 + rows
    assert pace.due == 3 * rows
    assert pace.behind is behind
    pace.updates = pace.due
    assert not pace.behind
    assert pace.achieved(pace.rows) == 3.0, "it counts from where learning began"


#: Who comes next, and with how much: rows arrive, or updates are done as far as they are due.
Moves = st.lists(st.tuples(st.sampled_from(["rows", "updates"]), st.integers(1, 40)), max_size=60)
Ratios = st.sampled_from(
    [Fraction(1, 64), Fraction(1, 10), Fraction(1, 3), Fraction(1), Fraction(11, 10), Fraction(7, 4), Fraction(20)]
)


@given(ratio=Ratios, starts=st.integers(1, 60), slack=st.integers(1, 30), moves=Moves)
def test_no_side_gets_too_far_ahead(ratio: Fraction, starts: int, slack: int, moves: list[tuple[str, int]]) -> None:
    pace, largest = UpdateRatio(float(ratio), starts, slack), 0
    for who, count in moves:
        if who == "updates":
            pace.updates += min(count, pace.due)
        elif not pace.behind:
            pace.rows += count
            largest = max(largest, count)
        earned = ratio * max(0, pace.rows - starts)
        assert pace.updates <= earned, "updates ran ahead of the rows"
        assert earned - pace.updates <= ratio * (slack + largest) + 1, "rows ran ahead of the updates"
        assert pace.due == math.floor(earned) - pace.updates
        assert pace.due >= 1 or not pace.behind, "neither rows nor updates may go on"
