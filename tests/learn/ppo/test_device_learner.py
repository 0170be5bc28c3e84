"""PPO on tensors is PPO: the same rows give the same targets and the same weights as learn/ppo.py, and the same accounts."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import Chunk, NDArray, Snapshot, Transitions
from freewheel.errors import SetupError
from freewheel.learn.ppo.device_learner import DevicePPO
from freewheel.learn.ppo.learner import PPO
from freewheel.learn.settings import LearnerSpec, PPOConfig
from freewheel.policies.spec import PolicySpec
from freewheel.testing.conformance import check_learner

if TYPE_CHECKING:
    from tests.learn.conftest import Play, Sign

GAUSSIAN = PolicySpec(4, "float32", ((0, 4),), ((0, 4),), (), None, "gaussian", 2, (16, 8), "tanh", -0.2, "")
MASKED = replace(GAUSSIAN, obs_size=7, mask=(4, 7), head="categorical", action_size=3)
SQUASHED = replace(GAUSSIAN, head="squashed")
HEADS = {"gaussian": GAUSSIAN, "categorical": MASKED, "squashed": SQUASHED}
STEPS, LANES = 24, 3
ROWS = STEPS * LANES
WHOLE = PPOConfig(epochs=1, minibatch=ROWS, entropy=0.02, max_grad_norm=0.3)  # one gradient step, clipped
Numbers = dict[str, NDArray]


def task_of(spec: PolicySpec, max_lag: int | None = None, total_steps: int | None = None) -> LearnerSpec:
    return LearnerSpec(spec, ROWS, LANES, seed=5, total_steps=total_steps, max_lag=max_lag)


def pair(spec: PolicySpec, config: PPOConfig = WHOLE, total_steps: int | None = None) -> tuple[PPO, DevicePPO]:
    """Both kinds, with the same weights, which are no longer the first ones."""
    task = task_of(spec, total_steps=total_steps)
    learners = PPO(config, task), DevicePPO(config, task)
    for learner in learners:
        learner.net.host += np.random.default_rng(9).normal(0, 0.2, learner.net.host.shape).astype(np.float32)
    return learners


def on_tensors(chunk: Chunk) -> Chunk[Tensor]:
    data = Transitions(**{f.name: torch.from_numpy(getattr(chunk.data, f.name).copy()) for f in fields(Transitions)})
    return Chunk(
        data, chunk.version, chunk.origin, chunk.episodes, torch.from_numpy(chunk.state), chunk.time, chunk.rows
    )


def split(chunk: Chunk[Tensor], parts: int) -> list[Chunk[Tensor]]:
    width = chunk.data.reward.shape[1] // parts
    found = []
    for part in range(parts):
        lanes = slice(part * width, (part + 1) * width)
        data = Transitions(**{f.name: getattr(chunk.data, f.name)[:, lanes] for f in fields(Transitions)})
        origin = replace(chunk.origin, worker=part, lane0=part * width)
        found.append(replace(chunk, data=data, origin=origin, rows=data.reward.numel()))
    return found


def numbers(learner: PPO | DevicePPO) -> Numbers:
    return {name: np.array(value) for name, value in learner.snapshot().params.items()}


def assert_close(ours: Numbers, theirs: Numbers) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=1e-5, err_msg=name)


def moved(before: Numbers, after: Numbers) -> float:
    return max(float(np.abs(before[name] - after[name]).max()) for name in before)


def rows_for(play: Play, spec: PolicySpec, learner: PPO, *, lagged: bool, steps: int = STEPS) -> Transitions:
    """Chosen by the learner's own policy, or by another that is not far from it."""
    params = numbers(learner)
    if lagged:
        rng = np.random.default_rng(4)
        for name, value in params.items():
            if name.startswith("actor"):
                value += rng.normal(0, 0.1, value.shape).astype(np.float32)
    return play(spec, Snapshot(0, params), (steps, LANES), seed=2)


# -------------------------------------------------------------------------------------------------------- the same updates


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("lagged", [False, True], ids=["fresh", "lagged"])
@pytest.mark.parametrize("normalised", [False, True], ids=["raw", "standardised"])
@pytest.mark.parametrize("surrogate", ["decoupled", "behaviour"])
@pytest.mark.parametrize("targets", ["corrected", "plain"])
def test_targets_and_weights_are_those_of_the_other_ppo(
    play: Play,
    sign: Sign,
    head: str,
    lagged: bool,
    normalised: bool,
    surrogate: Literal["decoupled", "behaviour"],
    targets: Literal["corrected", "plain"],
) -> None:
    spec = HEADS[head]
    config = replace(WHOLE, normalize_advantage=normalised, surrogate=surrogate, targets=targets)
    here, there = pair(spec, config)
    data = rows_for(play, spec, here, lagged=lagged)
    assert data.terminated.any()
    assert data.truncated.any()
    before = numbers(here)
    assert_close(before, numbers(there))
    for learner in (here, there):
        learner.version = int(lagged)
    here.observe(sign(data))
    there.observe(on_tensors(sign(data)))
    wanted, _ = here._prepare(here._held.seal(ROWS))
    here.observe(sign(data))
    told = here.update(), there.update()

    reference, weight, advantage, value = there._scalars.numpy().T
    np.testing.assert_allclose(reference, wanted.reference, rtol=0, atol=1e-5)
    np.testing.assert_allclose(weight, np.ones(ROWS) if wanted.weight is None else wanted.weight, rtol=0, atol=1e-5)
    np.testing.assert_allclose(advantage, wanted.advantage, rtol=0, atol=1e-5)
    np.testing.assert_allclose(value, wanted.value, rtol=0, atol=1e-5)
    assert_close(numbers(here), numbers(there))
    assert moved(before, numbers(there)) > 1e-4
    for name in ("loss/policy", "loss/value", "loss/entropy", "loss/kl", "loss/grad_norm", "loss/ess", "lag_max"):
        assert told[1][name] == pytest.approx(told[0][name], abs=2e-5), name
    assert there.rows() == here.rows()


@pytest.mark.parametrize("head", HEADS)
def test_several_updates_with_schedules_go_the_same_way(play: Play, sign: Sign, head: str) -> None:
    """Whole batches, so that their order does not matter; step size, clip and entropy fade to a quarter."""
    spec = HEADS[head]
    faded = replace(WHOLE, lr_schedule="linear", clip_schedule="linear", entropy_schedule="linear")
    config = replace(faded, epochs=4, clip=0.01, entropy=0.1)  # small enough to be felt
    here, there = pair(spec, config, total_steps=4 * ROWS)
    for number in range(4):
        data = play(spec, here.snapshot(), (STEPS, LANES), seed=number)
        here.observe(sign(data, version=number))
        there.observe(on_tensors(sign(data, version=number)))
        here.update()
        there.update()
        assert_close(numbers(here), numbers(there))
    here.observe(sign(data, version=4))
    there.observe(on_tensors(sign(data, version=4)))
    before = numbers(there)
    there.update()
    assert moved(before, numbers(there)) == 0  # the step size is at its end


def test_normalised_observations_go_the_same_way(play: Play, sign: Sign) -> None:
    spec = replace(GAUSSIAN, normalised=((0, 4),))
    here, there = pair(spec)
    for number in range(3):
        data = play(spec, here.snapshot(), (STEPS, LANES), seed=number)
        here.observe(sign(data, version=number))
        there.observe(on_tensors(sign(data, version=number)))
        here.update()
        there.update()
        assert_close(numbers(here), numbers(there))
    seen = numbers(there)
    assert np.abs(seen["norm.mean"]).min() > 1e-3
    assert np.abs(seen["norm.scale"] - 1).min() > 1e-3


def test_fragments_across_versions_are_sealed_in_the_same_way(play: Play, sign: Sign) -> None:
    """Three fragments of ten steps are one batch of 24 and six steps of the next."""
    here, there = pair(GAUSSIAN)
    for learner in (here, there):
        learner.version = 2
    data = rows_for(play, GAUSSIAN, here, lagged=True, steps=50)
    for number, version in enumerate((0, 1, 1, 2, 2)):
        chunk = sign(data, slice(10 * number, 10 * number + 10), version=version, sequence=number)
        here.observe(chunk)
        there.observe(on_tensors(chunk))
        if here.ready:
            told = here.update(), there.update()
            assert told[1]["lag_mean"] == pytest.approx(told[0]["lag_mean"])
            assert_close(numbers(here), numbers(there))
        assert there.ready is here.ready
        assert there.rows() == here.rows()
    assert (here.version, there.version) == (4, 4)
    assert there.rows().queued == 2 * LANES


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_by_lanes_are_joined_again(play: Play, sign: Sign, parts: int) -> None:
    _, whole = pair(GAUSSIAN)
    here, there = pair(GAUSSIAN)
    chunk = on_tensors(sign(play(GAUSSIAN, here.snapshot(), (STEPS, LANES))))
    whole.observe(chunk)
    for part in split(chunk, parts):
        assert not there.ready
        there.observe(part)
        assert there.rows().queued == (LANES * (part.origin.worker + 1) // parts) * STEPS
    assert there.ready
    assert whole.update() == there.update()
    assert all(np.array_equal(value, numbers(there)[name]) for name, value in numbers(whole).items())


# ----------------------------------------------------------------------------------------------------------------- promises


@pytest.mark.parametrize(
    "spec", [*HEADS.values(), replace(GAUSSIAN, normalised=((0, 4),))], ids=[*HEADS, "normalised observations"]
)
def test_it_keeps_the_promises_of_a_learner(play: Play, sign: Sign, spec: PolicySpec) -> None:
    """With minibatches: a learner that was restored shuffles as the other does."""
    seeds = itertools.count()

    def collect(snapshot: Snapshot) -> Chunk:
        chunk = sign(play(spec, snapshot, (STEPS, LANES), seed=next(seeds)), version=snapshot.version)
        return on_tensors(chunk)  # type: ignore[return-value]

    check_learner(lambda: DevicePPO(PPOConfig(epochs=2, minibatch=20), task_of(spec)), collect)


def test_a_state_holds_counts_and_moments(play: Play, sign: Sign) -> None:
    spec = replace(GAUSSIAN, normalised=((0, 4),))
    learner, twin = (DevicePPO(WHOLE, task_of(spec, max_lag=1)) for _ in range(2))
    data = play(spec, learner.snapshot(), (STEPS, LANES))
    bad = replace(data, reward=data.reward * np.float32(np.inf))
    for rows in (data, bad):
        learner.observe(on_tensors(sign(rows, version=learner.version)))
        learner.update()
    learner.observe(on_tensors(sign(data, version=0)))  # too old
    twin.load_state_dict(learner.state_dict())
    assert twin.rows() == learner.rows()
    assert learner.rows().dropped == {"stale": ROWS, "nan": ROWS}
    assert twin.version == 2
    for name, value in learner.state_dict().items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(twin.state_dict()[name]), name)


def test_a_state_is_a_copy(play: Play, sign: Sign) -> None:
    learner = DevicePPO(WHOLE, task_of(GAUSSIAN))
    state = learner.state_dict()
    copies = {name: np.array(value) for name, value in state.items()}
    learner.observe(on_tensors(sign(play(GAUSSIAN, learner.snapshot(), (STEPS, LANES)))))
    learner.update()
    assert all(np.array_equal(np.asarray(state[name]), value) for name, value in copies.items())


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_rewards_that_are_not_finite_change_nothing(play: Play, sign: Sign, poison: float) -> None:
    _, learner = pair(GAUSSIAN)
    _, spared = pair(GAUSSIAN)
    data = play(GAUSSIAN, learner.snapshot(), (STEPS, LANES))
    reward = data.reward.copy()
    reward[7, 1] = poison
    before = learner.state_dict()
    learner.observe(on_tensors(sign(replace(data, reward=reward))))
    told = learner.update()
    assert told["loss/skipped"] == 1.0
    assert all(np.isfinite(value) for value in told.values())
    assert (learner.version, learner.rows().trained, learner.rows().dropped) == (1, 0, {"nan": ROWS})
    after = learner.state_dict()
    for name in ("params", *(name for name in before if name.startswith("adam"))):
        np.testing.assert_array_equal(np.asarray(before[name]), np.asarray(after[name]), name)

    spared.version = 1
    for one in (learner, spared):
        one.observe(on_tensors(sign(data, version=1)))
        assert one.update()["loss/skipped"] == 0.0
    assert_close(numbers(learner), numbers(spared))
    assert learner.rows().trained == ROWS


def test_rows_beyond_the_bound_are_dropped_and_counted(play: Play, sign: Sign) -> None:
    learner = DevicePPO(WHOLE, task_of(GAUSSIAN, max_lag=1))
    data = play(GAUSSIAN, learner.snapshot(), (STEPS + 6, LANES))
    learner.observe(on_tensors(sign(data, version=0)))
    for version in (1, 2):
        learner.update()
        assert learner.version == version
        left = 6 * LANES if version == 1 else 0  # six steps of version 0 stay good for one more update
        assert learner.rows().queued == left
        learner.observe(on_tensors(sign(data, slice(STEPS - 6), version=version)))
        assert learner.ready is (version == 1)
    assert learner.rows().dropped == {}
    learner.version = 4
    learner.observe(on_tensors(sign(data, slice(6), version=2)))
    assert learner.rows().dropped == {"stale": STEPS * LANES}  # what came and what has grown too old meanwhile
    learner.observe(on_tensors(sign(data, version=3)))
    assert learner.rows().dropped == {"stale": STEPS * LANES}
    assert learner.rows().queued == (STEPS + 6) * LANES


def test_epochs_end_when_the_policy_has_moved_too_far(play: Play, sign: Sign) -> None:
    """The first epoch begins at no distance, so it is the second that goes too far."""
    results = []
    for config in (replace(WHOLE, epochs=9, target_kl=1e-9), replace(WHOLE, epochs=2), replace(WHOLE, epochs=9)):
        _, learner = pair(GAUSSIAN, config)
        learner.observe(on_tensors(sign(play(GAUSSIAN, learner.snapshot(), (STEPS, LANES)))))
        learner.update()
        results.append(numbers(learner))
    assert_close(results[0], results[1])
    assert moved(results[0], results[2]) > 1e-4


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(SetupError, match=r"ppo\.reward_scale"):
        DevicePPO(replace(WHOLE, reward_scale="returns"), task_of(GAUSSIAN))


def test_an_update_that_fails_keeps_its_rows_in_the_books(
    play: Play, sign: Sign, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no room")

    host, learner = pair(GAUSSIAN)
    learner.observe(on_tensors(sign(rows_for(play, GAUSSIAN, host, lagged=False))))
    rows = learner.rows().queued
    monkeypatch.setattr(learner, "_improve", broken)
    with pytest.raises(MemoryError):
        learner.update()
    assert learner.rows().queued == rows > 0
