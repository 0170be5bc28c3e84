"""The policy on tensors draws by its own generator, and is loaded in place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import NDArray, Snapshot
from freewheel.policies.nets import PolicyNet, TensorActor, TensorPolicy
from freewheel.policies.spec import FlatParams, PolicySpec, full_layout, initialise

PLAIN = PolicySpec(5, "float32", ((0, 5),), ((0, 5),), (), None, "categorical", 3, (16, 16), "tanh", 0.0, "")
SPECS = {
    "categorical": PLAIN,
    "masked": replace(PLAIN, actor_columns=((0, 2),), critic_columns=((0, 2),), mask=(2, 5)),
    "masked and normalised": replace(
        PLAIN, actor_columns=((0, 2),), critic_columns=((0, 2),), mask=(2, 5), normalised=((0, 2),)
    ),
    "bytes": replace(PLAIN, obs_dtype="uint8"),
    "gaussian": replace(PLAIN, head="gaussian", action_size=2, log_std=-0.7),
    "gaussian and normalised": replace(PLAIN, head="gaussian", action_size=2, normalised=((0, 3), (4, 5))),
    "squashed": replace(PLAIN, head="squashed", action_size=2),
    "squashed and normalised": replace(
        PLAIN, head="squashed", action_size=2, normalised=((1, 5),), actor_columns=((0, 1), (2, 5)), activation="relu"
    ),
}


def weights(spec: PolicySpec, seed: int = 0) -> Snapshot:
    """Large enough that actions differ; with statistics wherever the spec has them."""
    rng, params = np.random.default_rng(seed), FlatParams(full_layout(spec))
    initialise(spec, params, rng)
    last = f"actor.{len(spec.hidden)}"
    params.views[f"{last}.weight"][...] *= 40
    params.views[f"{last}.bias"][...] = rng.normal(size=spec.outputs) * 0.3
    for start, stop in spec.normalised:
        params.views["norm.mean"][start:stop] = rng.normal(size=stop - start)
        params.views["norm.scale"][start:stop] = rng.uniform(0.5, 30.0, stop - start)
    return Snapshot(seed, {name: view.copy() for name, view in params.views.items()})


def observations(spec: PolicySpec, count: int, seed: int = 1) -> NDArray:
    rng = np.random.default_rng(seed)
    if spec.obs_dtype == "uint8":
        return rng.integers(0, 256, (count, spec.obs_size)).astype(np.uint8)
    obs = rng.normal(size=(count, spec.obs_size)).astype(np.float32)
    if spec.mask is not None:
        allowed = rng.random((count, spec.action_size)) < 0.6
        allowed[:, 0] |= ~allowed.any(1)
        obs[:, slice(*spec.mask)] = allowed
    return obs


@pytest.mark.parametrize("case", ["categorical", "gaussian", "squashed"])
def test_lanes_are_drawn_apart_by_a_generator_of_its_own(case: str) -> None:
    spec = SPECS[case]
    one, same = (TensorActor(spec, "cpu", 7) for _ in range(2))
    for actor in (one, same):
        actor.load(weights(spec))
    obs = torch.from_numpy(np.tile(observations(spec, 1), (400, 1)))
    before = torch.random.get_rng_state()
    first, second = one.policy.act(obs)[0], one.policy.act(obs)[0]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(first, second)
    assert len({str(row) for row in first.tolist()}) > 1
    assert torch.equal(same.policy.act(obs)[0], first)
    assert one.generators == [one.policy.generator]


def test_statistics_clip_what_they_normalise_and_nothing_else() -> None:
    spec = replace(PLAIN, normalised=((1, 3),))
    policy = TensorPolicy(spec, np.random.default_rng(0), "cpu", 0)
    policy.normalise(np.array([9.0, 2.0, -1.0, 9.0, 9.0]), np.array([9.0, 0.5, 100.0, 9.0, 9.0]))
    obs = torch.tensor([[50.0, 4.0, 3.0, -50.0, 2.0]])
    assert policy.inputs(obs).tolist() == [[50.0, 1.0, 10.0, -50.0, 2.0]]
    assert obs.tolist() == [[50.0, 4.0, 3.0, -50.0, 2.0]]
    assert policy.weights(on_device=False)["norm.mean"].tolist() == [0, 2, -1, 0, 0]
    plain = TensorPolicy(PLAIN, np.random.default_rng(0), "cpu", 0)
    assert plain.inputs(obs) is obs


@pytest.mark.parametrize("case", SPECS)
def test_weights_are_loaded_in_place_and_handed_out_as_copies(case: str) -> None:
    spec = SPECS[case]
    policy = TensorPolicy(spec, np.random.default_rng(0), "cpu", 0)

    def held() -> list[Tensor]:
        return [policy.net.vector, *policy.statistics.values(), *policy.net.parameters]

    addresses = [tensor.data_ptr() for tensor in held()]
    wanted = weights(spec, seed=4)
    policy.load(wanted)
    assert [tensor.data_ptr() for tensor in held()] == addresses
    copies = policy.weights(on_device=False)
    assert copies.keys() == wanted.params.keys()
    for name, value in wanted.params.items():
        np.testing.assert_array_equal(copies[name], value, name)
    with torch.no_grad():
        for tensor in held()[:3]:
            tensor.add_(1)
    for name, value in wanted.params.items():
        np.testing.assert_array_equal(copies[name], value, name)
    other = TensorPolicy(spec, np.random.default_rng(9), "cpu", 0)
    other.load(Snapshot(1, copies))
    obs = torch.from_numpy(observations(spec, 20))
    again = TensorPolicy(spec, np.random.default_rng(8), "cpu", 0)
    again.load(wanted)
    assert torch.equal(other.greedy(obs), again.greedy(obs))


def test_what_it_starts_with_is_what_a_network_of_that_seed_has() -> None:
    spec = SPECS["squashed"]
    policy = TensorPolicy(spec, np.random.default_rng(3), "cpu", 0)
    net = PolicyNet(spec, np.random.default_rng(3))
    for name, value in policy.weights(on_device=True).items():
        np.testing.assert_array_equal(np.asarray(value), net.params.views[name], name)
