"""Both engines of PPO: gradients by the formula, and the same updates from the same rows, with the same accounts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel.core import BatchSpec, Chunk, NDArray, RowCounts, Snapshot, Transitions
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.learner import PPO
from freewheel.learn.ppo.numpy_engine import NumpyEngine
from freewheel.learn.ppo.rollout_buffer import join
from freewheel.learn.ppo.targets import Coefficients, Minibatch, prepare
from freewheel.learn.ppo.torch_engine import TorchEngine
from freewheel.learn.spec import LearnerSpec, WorldFacts
from freewheel.policies.numpy_actor import NumpyActor
from freewheel.policies.spec import FlatParams, PolicySpec
from freewheel.testing.conformance import check_learner
from tests.support.learning import play, sign, to_tensors

GAUSSIAN = PolicySpec(4, "float32", ((0, 4),), ((0, 4),), (), None, "gaussian", 2, (16, 8), "tanh", -0.2, "")
MASKED = replace(GAUSSIAN, obs_size=7, mask=(4, 7), head="categorical", action_size=3)
SQUASHED = replace(GAUSSIAN, head="squashed")
NORMALISED = replace(GAUSSIAN, normalised=((0, 4),))
HEADS = {"gaussian": GAUSSIAN, "categorical": MASKED, "squashed": SQUASHED}
STEPS, LANES = 24, 3
ROWS = STEPS * LANES
BATCH = BatchSpec(STEPS, LANES)
WHOLE = PPOConfig(epochs=1, minibatch=ROWS, entropy=0.02, max_grad_norm=0.3)  # one gradient step, clipped
COEFFICIENTS = Coefficients(lr=1e-3, clip=0.1, entropy=0.2)
Kind = Literal["numpy", "torch", "simulator"]
Numbers = dict[str, NDArray]


def learner_for(
    kind: Kind, spec: PolicySpec, config: PPOConfig = WHOLE, *, total: int | None = None, batch: BatchSpec = BATCH
) -> PPO:
    """With weights that are no longer the first ones. simulator: a torch engine whose rows come as tensors."""
    gradient: Literal["auto", "autograd"] = "autograd" if kind == "torch" else "auto"
    world = WorldFacts(batched_on_device=kind == "simulator")
    given = LearnerSpec(policy=spec, batch=batch, seed=5, total_steps=total, world=world)
    learner = PPO(replace(config, gradient=gradient), given)
    weights = learner.engine.net.array
    weights += np.random.default_rng(9).normal(0, 0.2, weights.shape).astype(np.float32)
    return learner


def kinds(spec: PolicySpec) -> list[Kind]:
    """The engines that serve this network; the first is the reference."""
    return ["torch", "simulator"] if spec.head == "squashed" else ["numpy", "torch", "simulator"]


def numbers(learner: PPO) -> Numbers:
    return {name: np.array(value) for name, value in learner.snapshot().params.items()}


def assert_close(ours: Mapping[str, Any], theirs: Mapping[str, Any], atol: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=atol, err_msg=name)


def moved(before: Numbers, after: Numbers) -> float:
    return max(float(np.abs(before[name] - after[name]).max()) for name in before)


def engines(spec: PolicySpec, config: PPOConfig = WHOLE) -> tuple[NumpyEngine | None, TorchEngine]:
    """Over the same weights."""
    torch_engine = learner_for("torch", spec, config).engine
    assert isinstance(torch_engine, TorchEngine)
    numpy_engine = learner_for("numpy", spec, config).engine
    return numpy_engine if isinstance(numpy_engine, NumpyEngine) else None, torch_engine


def gradient_of(engine: NumpyEngine | TorchEngine, batch: Minibatch) -> tuple[list[float], Numbers]:
    """Losses, and gradients by parameter."""
    if isinstance(engine, NumpyEngine):
        engine.grad.fill_(99.0)  # every element has to be written
        losses = list(engine.gradient(batch, COEFFICIENTS))
        return losses, FlatParams(engine.net.trainable_layout, engine.grad.numpy()).views
    parts: Any = [None if part is None else torch.from_numpy(part) for part in batch]
    tensors: Minibatch[Tensor] = Minibatch(*parts)
    engine._clip.fill_(COEFFICIENTS.clip)
    found = engine.losses(tensors)
    engine._adam.forget()
    (found[0] + engine.config.value * found[1] - COEFFICIENTS.entropy * found[2]).backward()
    named = {**dict(engine.net.module.named_parameters()), **engine.net._head_parameters}
    grads = {name: np.zeros(value.shape) if value.grad is None else value.grad.numpy() for name, value in named.items()}
    return found.tolist(), grads


def batch_for(engine: TorchEngine, rng: np.random.Generator, rows: int, *, weighted: bool, drift: float) -> Minibatch:
    """Rows that the policy itself chose; their ratios are spread around 1 by `drift`."""
    spec, actor = engine.net.spec, NumpyActor(engine.net.spec)
    actor.load(Snapshot(0, engine.net.params.views))
    inputs = rng.normal(size=(rows, spec.obs_size)).astype(np.float32)
    if spec.mask is not None:
        allowed = rng.random((rows, spec.action_size)) < 0.6
        allowed[:, 0] |= ~allowed.any(axis=1)
        inputs[:, slice(*spec.mask)] = allowed
    action = actor.act(inputs, rng).action
    with torch.no_grad():
        _, log_prob = engine.evaluate(torch.from_numpy(inputs), torch.from_numpy(action))
    noise, advantage, value = rng.normal(size=(3, rows)).astype(np.float32)
    weight = rng.random(rows).astype(np.float32) if weighted else None
    return Minibatch(inputs, action, log_prob.numpy() + np.float32(drift) * noise, weight, advantage, value)


@st.composite
def specs(draw: st.DrawFn) -> PolicySpec:
    spec = replace(
        GAUSSIAN,
        obs_size=6,
        head=draw(st.sampled_from(["categorical", "gaussian"])),
        activation=draw(st.sampled_from(["tanh", "relu", "elu"])),
        hidden=tuple(draw(st.lists(st.sampled_from([1, 7, 64]), max_size=3))),
        action_size=draw(st.integers(1, 5)),
        actor_columns=draw(st.sampled_from([((0, 6),), ((1, 3),), ((0, 2), (4, 6))])),
        critic_columns=draw(st.sampled_from([((0, 6),), ((2, 6),), ((0, 1), (3, 5))])),
    )
    masked = spec.head == "categorical" and draw(st.booleans())
    return replace(spec, obs_size=6 + spec.action_size, mask=(6, 6 + spec.action_size)) if masked else spec


@settings(max_examples=60)
@given(
    spec=specs(), seed=st.integers(0, 2**32 - 1), weighted=st.booleans(),
    drift=st.sampled_from([0.0, 0.05, 0.5]), rows=st.sampled_from([3, 128]),
)  # fmt: skip
def test_numpy_gradients_are_autograds(spec: PolicySpec, seed: int, weighted: bool, drift: float, rows: int) -> None:
    numpy_engine, torch_engine = engines(spec)
    assert numpy_engine is not None
    batch = batch_for(torch_engine, np.random.default_rng(seed), rows, weighted=weighted, drift=drift)
    kept = batch.inputs.copy()
    losses, grads = gradient_of(numpy_engine, batch)
    expected, wanted = gradient_of(torch_engine, batch)
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
    assert grads.keys() == wanted.keys()
    largest = max(np.abs(value).max() for value in wanted.values())
    for name, value in wanted.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-5, atol=1e-5 * largest, err_msg=name)
    assert np.array_equal(batch.inputs, kept)


#: Options of an update whose rows an earlier version chose.
LAGGED: dict[str, dict[str, Any]] = {
    "lagged": {"surrogate": "decoupled", "targets": "corrected"},
    "lagged, behaviour": {"surrogate": "behaviour", "targets": "corrected"},
    "lagged, plain": {"surrogate": "decoupled", "targets": "plain", "normalize_advantage": False},
}


@pytest.mark.parametrize("case", [*HEADS, "normalised", "scaled rewards", "target_kl", "gaps", *LAGGED])
def test_several_updates_go_the_same_way(case: str) -> None:
    """Whole batches, so that their order does not matter; step size, clip and entropy fade to a quarter."""
    spec = HEADS.get(case, NORMALISED if case == "normalised" else GAUSSIAN)
    faded = replace(WHOLE, lr_schedule="linear", clip_schedule="linear", entropy_schedule="linear", lr=1e-3)
    config = replace(faded, epochs=4, clip=0.01, entropy=0.1)  # small enough to be felt
    if case == "scaled rewards":
        config = replace(config, reward_scale="returns")
    if case == "target_kl":
        config = replace(config, target_kl=2e-5)
    config = replace(config, **LAGGED.get(case, {}))
    served = ["numpy", "torch"] if case == "gaps" else kinds(spec)
    learners = {kind: learner_for(kind, spec, config, total=4 * ROWS) for kind in kinds(spec) if kind in served}
    first, *others = learners.values()
    sequence = itertools.count(step=2)  # as if a chunk were missing: these do not continue each other
    snapshots = list[Snapshot]()
    for number in range(5):
        snapshots.append(first.snapshot())
        author = snapshots[max(0, number - 2) if case in LAGGED else number]
        while not first.ready:
            data = play(spec, author, (STEPS, LANES), seed=number, gaps=case == "gaps")
            chunk = sign(replace(data, reward=3 * data.reward), version=author.version, sequence=next(sequence))
            for kind, learner in learners.items():
                learner.observe(to_tensors(chunk) if kind == "simulator" else chunk)
        before, reported = numbers(first), dict(first.update())
        for learner in others:
            found = dict(learner.update())
            if number < 4:  # then the clip is 0, and rounding decides which rows are beyond it
                assert_close(found, reported, 1e-4)
            assert_close(numbers(learner), numbers(first))
            assert learner.rows() == first.rows()
        same = moved({name: before[name] for name in before if "norm" not in name}, numbers(first))
        assert (same == 0) == (number == 4)  # the step size is at its end
    if case == "normalised":
        assert np.abs(numbers(first)["norm.mean"]).min() > 1e-3
        assert np.abs(numbers(first)["norm.scale"] - 1).max() > 1e-3


@pytest.mark.parametrize("kind", ["numpy", "torch", "simulator"])
def test_scaled_rewards_stay_within_ten(kind: Kind) -> None:
    """Without a future the value target is the reward."""
    learner = learner_for(kind, GAUSSIAN, replace(WHOLE, gamma=0.0))
    data = play(GAUSSIAN, learner.snapshot(), (STEPS, LANES))
    reward = np.linspace(-3, 3, ROWS, dtype=np.float32).reshape(STEPS, LANES)
    chunk = sign(replace(data, reward=reward))
    batch = join([chunk if kind == "numpy" else to_tensors(chunk)])
    engine: Any = learner.engine
    with torch.no_grad():
        for factor in (1.0, 5.0):
            prepared, _, _ = prepare(engine, batch, learner.config, recompute=False, reward_factor=factor)
            expected = np.clip(factor * reward, -10, 10).ravel()
            np.testing.assert_allclose(np.asarray(prepared.value), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [*HEADS, "normalised"])
def test_ppo_keeps_the_promises_of_a_learner(case: str) -> None:
    """With minibatches, statistics and a schedule: a restored learner shuffles, scales and fades as the other does."""
    spec = HEADS.get(case, NORMALISED)
    for kind in kinds(spec):
        check_learner(partial(learner_for, kind, spec, KIT, total=20 * ROWS), playing(spec, kind))


KIT = PPOConfig(epochs=2, minibatch=20, reward_scale="returns", lr_schedule="linear", lr=1e-2)


def playing(spec: PolicySpec, kind: Kind) -> Callable[[Snapshot], Chunk]:
    seeds = itertools.count()

    def collect(snapshot: Snapshot) -> Chunk:
        chunk = sign(play(spec, snapshot, (STEPS, LANES), seed=next(seeds)), version=snapshot.version)
        return to_tensors(chunk) if kind == "simulator" else chunk

    return collect


@pytest.mark.parametrize("kind", ["numpy", "torch", "simulator"])
@pytest.mark.parametrize("poison", [np.nan, -np.inf, 3e38])
def test_an_update_that_stops_being_finite_changes_nothing(kind: Kind, poison: float) -> None:
    """Weights and optimiser are as before; the next update is that of a learner which was spared."""
    config = replace(WHOLE, normalize_advantage=False, minibatch=ROWS // 2)
    learner, spared = (learner_for(kind, GAUSSIAN, config) for _ in range(2))
    data = play(GAUSSIAN, learner.snapshot(), (STEPS, LANES))
    reward = data.reward.copy()
    reward[7, 1] = poison

    def observe(one: PPO, data: Transitions) -> None:
        chunk = sign(data, version=one.version, sequence=one.version)
        one.observe(to_tensors(chunk) if kind == "simulator" else chunk)

    for one in (learner, spared):
        observe(one, data)
        one.update()
    state = learner.state_dict()
    before = {name: np.array(value) for name, value in state.items()}
    observe(learner, replace(data, reward=reward))
    reported = learner.update()
    assert reported["update/skipped"] == 1.0
    assert "loss/policy" not in reported
    assert all(np.isfinite(value) for value in reported.values())
    assert (learner.version, learner.rows()) == (2, RowCounts(trained=ROWS, dropped={"nan": ROWS}))
    after = learner.state_dict()
    for name in ("params", *(name for name in before if name.startswith("adam"))):
        np.testing.assert_array_equal(before[name], np.asarray(after[name]), name)
    spared.load_state_dict({**spared.state_dict(), **{key: after[key] for key in after if key in ("rng", "generator")}})
    spared.version = 2
    for one in (learner, spared):
        observe(one, data)
        assert one.update()["update/skipped"] == 0.0
    assert_close(numbers(learner), numbers(spared))
    assert not np.array_equal(np.asarray(learner.state_dict()["params"]), before["params"])
    assert all(np.array_equal(np.asarray(state[name]), before[name]) for name in before), "a state is not a copy"
    assert learner.rows() == RowCounts(trained=2 * ROWS, dropped={"nan": ROWS})
