"""What a network is: resolved from a world, laid out in one flat vector, kept as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from freewheel.core import ActionSpec, EnvSpec, Slice
from freewheel.envs.spaces import layout_of
from freewheel.errors import SetupError, UsageError
from freewheel.policies.spec import (
    Columns,
    FlatParams,
    PolicyConfig,
    PolicySpec,
    actor_layout,
    full_layout,
    initialise,
    layers,
    network_inputs,
    select,
)

DISCRETE = ActionSpec("discrete", 3)
BOX = ActionSpec("box", 2, (-1.0, -1.0), (1.0, 1.0))
PLAIN = PolicySpec(5, "float32", ((0, 5),), ((0, 5),), (), None, "categorical", 3, (8, 4), "tanh", 0.0, "")


def world(action: ActionSpec, *names: str) -> EnvSpec:
    """Slices of these names, the first of one column, the next of two, and so on."""
    ends = np.cumsum(range(1, len(names) + 1)).tolist()
    parts = [
        Slice(name, end - width, end, (width,)) for width, (name, end) in enumerate(zip(names, ends, strict=True), 1)
    ]
    return EnvSpec("Toy-v0", 1, ends[-1], "float32", tuple(parts), action)


def test_a_picture_that_a_plain_network_reads_is_told_of() -> None:
    large, small, row = (Box(0, 255, shape, np.uint8) for shape in ((84, 84, 3), (8, 8), (512,)))
    spec = layout_of(Dict(a=large, b=small, c=row, d=Box(0, 1, (84, 84))), Discrete(2)).spec("Toy-v0", 1, ())
    (remark,) = PolicyConfig().remarks(spec)
    assert (
        PolicyConfig()
        .remarks(layout_of(Box(0, 1, (64, 64, 3)), Discrete(2)).spec("Toy-v0", 1, ()))[0]
        .startswith("IMAGES: the MLP sees the 12,288 numbers of a picture (64, 64, 3) ")
    )
    assert remark.startswith("IMAGES: the MLP sees the 21,168 numbers of a picture (84, 84, 3) one by one, ")
    assert PolicyConfig(module="my.nets:CNN").remarks(spec) == []


@pytest.mark.parametrize(
    ("given", "action", "head", "outputs"),
    [("auto", DISCRETE, "categorical", 3), ("auto", BOX, "gaussian", 2), ("squashed", BOX, "squashed", 4)],
)
def test_a_head_that_fits_the_actions(given: str, action: ActionSpec, head: str, outputs: int) -> None:
    spec = PolicyConfig(head=given).resolve(world(action, "obs"))
    assert (spec.head, spec.outputs, spec.action_size) == (head, outputs, action.size)


@pytest.mark.parametrize(
    ("head", "action", "complaint"),
    [
        ("gaussian", DISCRETE, "it needs box actions; use auto"),
        ("categorical", BOX, "it needs discrete actions; use auto"),
        ("squashed", DISCRETE, "it needs box actions; use auto"),
        (
            "squashed",
            replace(BOX, high=(1.0, math.inf)),
            "it needs finite action bounds: .*TransformAction.*--action-bounds",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused(head: str, action: ActionSpec, complaint: str) -> None:
    with pytest.raises(SetupError, match=f"^policy.head {head} does not fit the actions of Toy-v0: {complaint}$"):
        PolicyConfig(head=head).resolve(world(action, "obs"))


def test_empty_layers_and_unknown_heads_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--policy\.hidden must be positive, not 0"):
        PolicyConfig(hidden=(64, 0)).resolve(world(BOX, "obs"))
    with pytest.raises(UsageError, match="unknown head 'gausian'; did you mean 'gaussian'"):
        PolicyConfig(head="gausian").resolve(world(BOX, "obs"))


@pytest.mark.parametrize(
    ("names", "actor", "critic", "normalised"),
    [
        (["a", "b"], ((0, 3),), ((0, 3),), ((0, 3),)),
        (["policy", "critic"], ((0, 1),), ((1, 3),), ((0, 3),)),
        (["camera", "critic"], ((0, 1),), ((1, 3),), ((0, 3),)),
        (["policy", "other"], ((0, 1),), ((0, 3),), ((0, 3),)),
        (["critic", "policy", "context"], ((1, 6),), ((0, 1), (3, 6)), ((0, 3),)),
        (["a", "action_mask", "b"], ((0, 1), (3, 6)), ((0, 1), (3, 6)), ((0, 1), (3, 6))),
        (["context", "policy", "action_mask", "critic"], ((0, 3),), ((0, 1), (6, 10)), ((1, 3), (6, 10))),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_slices_say_who_reads_what(names: list[str], actor: Columns, critic: Columns, normalised: Columns) -> None:
    spec = PolicyConfig(normalize_obs=True).resolve(world(DISCRETE, *names))
    assert (spec.actor_columns, spec.critic_columns, spec.normalised) == (actor, critic, normalised)
    mask = world(DISCRETE, *names).slice("action_mask")
    assert spec.mask == ((mask.start, mask.stop) if mask else None)
    assert PolicyConfig().resolve(world(DISCRETE, *names)).normalised == ()


def test_a_spec_is_kept_as_json() -> None:
    config = PolicyConfig(hidden=(7,), activation="elu", log_std=-0.5, normalize_obs=True, module="a.b:C")
    for spec in (PLAIN, config.resolve(world(DISCRETE, "policy", "action_mask", "critic", "context"))):
        assert PolicySpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize("head", ["categorical", "gaussian", "squashed"])
def test_what_acting_needs_is_a_prefix_statistics_first(head: str) -> None:
    spec = replace(PLAIN, head=head, critic_columns=((0, 2), (4, 5)), hidden=(8,))
    acting, everything = list(actor_layout(spec)), list(full_layout(spec))
    assert everything[: len(acting)] == acting
    assert acting[:2] == ["norm.mean", "norm.scale"]
    assert ("actor.log_std" in acting) == (head == "gaussian")
    assert {name.partition(".")[0] for name in acting[2:]} == {"actor"}
    assert {name.partition(".")[0] for name in everything[len(acting) :]} == {"critic"}


def test_views_lie_end_to_end_in_the_vector() -> None:
    params = FlatParams({"a": (2, 3), "b": (), "c": (4,)})
    assert params.vector.dtype == np.float32
    params.vector[:] = np.arange(11)
    assert params.views["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert params.views["b"].item() == 6
    params.views["c"][:] = -1
    assert params.vector.tolist() == [0, 1, 2, 3, 4, 5, 6, -1, -1, -1, -1]
    given = np.zeros(6, np.float32)
    assert np.shares_memory(FlatParams({"a": (2, 3)}, given).views["a"], given)


def test_weights_start_orthogonal() -> None:
    spec = replace(PLAIN, head="gaussian", log_std=-0.7)
    params = FlatParams(full_layout(spec))
    initialise(spec, params, np.random.default_rng(0))
    for part, last_gain in (("actor", 0.01), ("critic", 1.0)):
        parts = layers(params.views, part)
        assert [weight.shape for weight, _ in parts][:2] == [(5, 8), (8, 4)]
        for (weight, bias), gain in zip(parts, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
            square = weight @ weight.T if weight.shape[0] < weight.shape[1] else weight.T @ weight
            np.testing.assert_allclose(square, gain**2 * np.eye(len(square)), atol=1e-6 * gain)
            assert not bias.any()
    assert (params.views["actor.log_std"] == np.float32(-0.7)).all()
    assert not params.views["norm.mean"].any()
    assert (params.views["norm.scale"] == 1).all()


def test_orthogonal_weights_prefer_no_sign() -> None:
    """QR alone gives a diagonal of one sign, whatever the draw."""
    spec = replace(PLAIN, hidden=(5,))
    firsts = []
    for seed in range(40):
        params = FlatParams(full_layout(spec))
        initialise(spec, params, np.random.default_rng(seed))
        firsts.append(params.views["actor.0.weight"][0, 0] > 0)
    assert 8 < sum(firsts) < 32


def test_plain_observations_are_fed_as_they_are_and_bytes_become_fractions() -> None:
    obs = np.ones((2, 5), np.float32)
    assert network_inputs(PLAIN, {}, obs) is obs
    spec = replace(PLAIN, obs_dtype="uint8")
    params = FlatParams(full_layout(spec))
    initialise(spec, params, np.random.default_rng(0))
    inputs = network_inputs(spec, params.views, np.array([[0, 51, 255, 1, 2]], np.uint8))
    assert inputs.dtype == np.float32
    np.testing.assert_allclose(inputs, [[0.0, 0.2, 1.0, 1 / 255, 2 / 255]], rtol=1e-6)


def test_only_normalised_columns_are_clipped() -> None:
    spec = replace(PLAIN, normalised=((1, 3),))
    statistics = {
        "norm.mean": np.array([0, 1, 2, 0, 0], np.float32),
        "norm.scale": np.array([1, 2, 5, 1, 1], np.float32),
    }
    obs = np.array([[[50, 3, 9, -50, 1]]], np.float32)
    assert network_inputs(spec, statistics, obs).tolist() == [[[50, 4, 10, -50, 1]]]
    assert obs.tolist() == [[[50, 3, 9, -50, 1]]]


def test_columns_are_selected_without_a_copy_where_possible() -> None:
    inputs = np.arange(10).reshape(2, 5)
    assert select(((0, 5),), inputs) is inputs
    assert np.shares_memory(select(((1, 3),), inputs), inputs)
    assert select(((1, 3),), inputs).tolist() == [[1, 2], [6, 7]]
    assert select(((0, 1), (3, 5)), inputs).tolist() == [[0, 3, 4], [5, 8, 9]]
