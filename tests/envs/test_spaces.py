"""Spaces become columns, and values that do not belong are named."""

from __future__ import annotations

from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium.spaces as gs
import numpy as np
import pytest

from freewheel.core import Slice
from freewheel.envs.spaces import layout_of
from freewheel.errors import SetupError
from freewheel.policies.layout import BadObservationError

TWO, BYTE, KEYS = gs.Discrete(2), gs.Box(0, 9, (1,), np.uint8), gs.MultiDiscrete([2, 3])
MASKED = gs.Dict(action_mask=gs.MultiBinary(2))
RICH = gs.Dict(
    {
        "action_mask": gs.MultiBinary(2),
        "camera": gs.Dict({"depth": gs.Box(-1, 1, (2,), np.float64), "rgb": gs.Box(0, 255, (1, 2, 1), np.uint8)}),
        "gear": gs.Discrete(3, start=-1),
        "keys": gs.MultiDiscrete([2, 3]),
        "pair": gs.Tuple([gs.MultiBinary(2), gs.Box(0, 9, (), np.int64)]),
    }
)
RICH_VALUE = {
    "action_mask": np.array([0, 1], np.int8),
    "camera": {"depth": np.array([0.5, -0.5]), "rgb": np.array([[[7], [8]]], np.uint8)},
    "gear": 1,
    "keys": np.array([1, 2]),
    "pair": (np.array([1, 0], np.int8), np.array(5)),
}
RICH_ROW = [0.5, -0.5, 7, 8, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 5, 0, 1]


def written(space: gs.Space[Any], value: Any, *lanes: int) -> Any:
    columns = layout_of(space, TWO).observation
    out = np.full((*lanes, columns.size), 99, columns.dtype)
    columns.writer(out)(value)
    return out.tolist()


def stacked(values: list[Any]) -> Any:
    """FastCategorical values as a vector env hands them over."""
    if isinstance(values[0], dict):
        return {key: stacked([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], tuple):
        return tuple(map(stacked, map(list, zip(*values, strict=True))))
    return np.stack(values)


@pytest.mark.parametrize(
    ("space", "value", "row"),
    [
        (gs.Box(-1, 1, (2, 2)), np.array([[1, 2], [3, 4]], np.float32), [1, 2, 3, 4]),
        (gs.Box(-1, 1, (2,), np.float64), np.array([0.25, 1e-3]), [0.25, np.float32(1e-3)]),
        (gs.Box(0, 255, (2,), np.uint8), np.array([3, 255], np.uint8), [3, 255]),
        (gs.Box(-1, 1, ()), np.float32(0.5), [0.5]),
        (gs.Discrete(3), 2, [0, 0, 1]),
        (gs.Discrete(3, start=5), np.int64(5), [1, 0, 0]),
        (gs.MultiDiscrete([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0]),
        (gs.MultiDiscrete([2, 2], start=[4, 8]), np.array([5, 8]), [0, 1, 1, 0]),
        (gs.MultiDiscrete(np.array([[2], [2]])), np.array([[1], [0]]), [0, 1, 1, 0]),
        (gs.MultiBinary(3), np.array([1, 0, 1], np.int8), [1, 0, 1]),
        (RICH, RICH_VALUE, RICH_ROW),
    ],
    ids=str,
)
def test_a_value_fills_its_columns(space: gs.Space[Any], value: Any, row: list[float]) -> None:
    assert written(space, value) == row
    assert written(space, stacked([value, value]), 2) == [row, row], "the same for a batch of lanes"


def test_nested_spaces_become_named_slices_with_the_mask_last() -> None:
    assert layout_of(RICH, TWO).observation.slices == (
        Slice("camera/depth", 0, 2, (2,)),
        Slice("camera/rgb", 2, 4, (1, 2, 1)),
        Slice("gear", 4, 7, (3,)),
        Slice("keys", 7, 12, (5,)),
        Slice("pair/0", 12, 14, (2,)),
        Slice("pair/1", 14, 15, ()),
        Slice("action_mask", 15, 17, (2,)),
    )


def test_a_bare_space_is_one_slice_and_info_can_add_a_mask() -> None:
    layout = layout_of(gs.Box(0, 1, (3,)), gs.Discrete(4), info_mask=True)
    assert layout.observation.slices == (Slice("obs", 0, 3, (3,)), Slice("action_mask", 3, 7, (4,)))
    out = np.full(7, 99, np.float32)
    assert layout.observation.mask is not None
    layout.observation.mask.writer(out)(np.array([0, 1, 1, 0], np.int8))
    assert out.tolist() == [99, 99, 99, 0, 1, 1, 0]


def test_a_mask_means_nothing_where_actions_are_continuous() -> None:
    space = gs.Dict(action_mask=gs.MultiBinary(2), x=gs.Box(0, 1, (1,)))
    layout = layout_of(space, gs.Box(-1, 1, (1,)), info_mask=True)
    assert [part.name for part in layout.observation.slices] == ["action_mask", "x"]
    assert layout.observation.mask is None


@pytest.mark.parametrize(
    ("space", "dtype"),
    [
        (gs.Box(0, 255, (4,), np.uint8), "uint8"),
        (gs.Dict(a=gs.Box(0, 255, (1,), np.uint8), b=gs.Box(0, 255, (2,), np.uint8)), "uint8"),
        (gs.Dict(a=gs.Box(0, 255, (1,), np.uint8), action_mask=gs.MultiBinary(2)), "uint8"),
        (gs.Dict(a=gs.Box(0, 255, (1,), np.uint8), b=gs.Box(0, 1, (2,))), "float32"),
        (gs.Dict(a=gs.Box(0, 255, (1,), np.uint8), b=gs.Discrete(2)), "float32"),
        (gs.Box(-9, 9, (2,), np.int64), "float32"),
    ],
)
def test_only_pixels_stay_bytes(space: gs.Space[Any], dtype: str) -> None:
    assert layout_of(space, TWO).observation.dtype == dtype


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (gs.Box(-1, 1, (4,)), np.zeros(3, np.float32), "obs: expected shape (4,), got (3,)"),
        (gs.Box(-1, 1, (4,)), np.zeros(1, np.float32), "obs: expected shape (4,), got (1,)"),
        (gs.Box(-1, 1, (4,)), np.float32(1), "obs: expected shape (4,), got ()"),
        (gs.Box(-1, 1, (4,)), None, "obs: expected an array of shape (4,), got None"),
        (gs.Box(-1, 1, (2,)), [0.0, 0.0], "obs: expected an array of shape (2,), got list [0.0, 0.0]"),
        (gs.Box(0, 1, (1,)), np.array(["a"]), "obs: expected numbers of Box(0.0, 1.0, (1,), float32), got dtype <U1"),
        (BYTE, np.zeros(1), "obs: expected numbers of Box(0, 9, (1,), uint8), got dtype float64"),
        (gs.Discrete(3), 3, "obs: expected a value of Discrete(3), got int 3"),
        (gs.Discrete(3), None, "obs: expected an array of shape (), got None"),
        (KEYS, np.array([2, 0]), "obs: expected a value of MultiDiscrete([2 3]), got ndarray array([2, 0])"),
        (gs.Dict(a=gs.Box(0, 1, (1,))), {"b": 1}, "a: missing from the observation, which is dict {'b': 1}"),
        (gs.Tuple([gs.Discrete(2), gs.Discrete(2)]), (1,), "1: missing from the observation, which is tuple (1,)"),
        (MASKED, {"action_mask": np.ones(3)}, "action_mask: expected shape (2,), got (3,)"),
    ],
)
def test_a_value_that_does_not_belong_is_named(space: gs.Space[Any], value: Any, text: str) -> None:
    with pytest.raises(BadObservationError) as caught:
        written(space, value)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (gs.Text(5, charset="ab"), "observation space Text(1, 5, charset=ab) is not supported: "),
        (gs.Dict(a=gs.Tuple([TWO, gs.Sequence(TWO)])), "observation space Sequence(Discrete(2), stack=False) at 'a/1'"),
        (gs.Graph(gs.Box(0, 1, (1,)), None), "observation space Graph("),
        (gs.OneOf([TWO, TWO]), "observation space OneOf("),
        (gs.Dict(action_mask=gs.MultiBinary(3)), "'action_mask' has shape (3,), but there are 2 actions"),
    ],
)
def test_a_space_without_columns_is_refused_in_a_line(space: gs.Space[Any], text: str) -> None:
    with pytest.raises(SetupError) as caught:
        layout_of(space, TWO)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("space", [gs.MultiDiscrete([3, 2]), gs.MultiBinary(2), gs.Dict(a=TWO), gs.Tuple([TWO])])
def test_an_action_space_other_than_box_or_discrete_is_refused(space: gs.Space[Any]) -> None:
    with pytest.raises(SetupError) as caught:
        layout_of(TWO, space)
    expected = f"action space {space} is not supported: use Box or Discrete, e.g. gymnasium.wrappers.Tran"
    assert str(caught.value).startswith(expected)


def test_discrete_actions_begin_at_start() -> None:
    actions = layout_of(TWO, gs.Discrete(3, start=5)).action
    assert (actions.spec.kind, actions.spec.size, actions.spec.shape) == ("discrete", 3, ())
    assert actions.encoder()(np.array([0, 2])).tolist() == [5, 7]


def test_box_actions_are_scaled_where_bounded_clipped_and_shaped() -> None:
    low, high = np.array([[-2, 0, -np.inf], [10, -np.inf, 0]]), np.array([[2, 1, np.inf], [30, 5, np.inf]])
    actions = layout_of(TWO, gs.Box(low, high, dtype=np.float64)).action
    assert actions.spec.low == (-1, -1, -np.inf, -1, -np.inf, -np.inf)
    assert actions.spec.high == (1, 1, np.inf, 1, np.inf, np.inf)
    encoded = actions.encoder()(np.array([[0.5, -1, 7, 0, 9, -3], [-9, 9, -7, 1, -9, 3]], np.float32))
    assert encoded.dtype == np.float64
    assert encoded.tolist() == [[[1, 0, 7], [20, 5, 0]], [[-2, 1, -7], [30, -9, 3]]]


def test_box_actions_end_exactly_at_the_bounds() -> None:
    rng = np.random.default_rng(0)
    low = rng.uniform(-3, 0, 1000).astype(np.float32)
    space = gs.Box(low, low + rng.uniform(0, 3, 1000).astype(np.float32))
    encoded = layout_of(TWO, space).action.encoder()(np.array([[-1.0] * 1000, [1.0] * 1000], np.float32))
    assert np.array_equal(encoded, [space.low, space.high])


def test_box_actions_of_whole_numbers_are_rounded() -> None:
    encoded = layout_of(TWO, gs.Box(0, 10, (1,), np.int64)).action.encoder()(np.array([[0.15], [1.0]], np.float32))
    assert encoded.dtype == np.int64
    assert encoded.tolist() == [[6], [10]]


def test_bounds_too_wide_to_scale_are_none_and_an_env_may_keep_and_change_its_action() -> None:
    huge = np.finfo(np.float32).max
    actions = layout_of(TWO, gs.Box(-huge, huge, (1,))).action
    assert actions.spec.high == (np.inf,)
    mine = np.array([[3.0]], np.float32)
    kept = actions.encoder()(mine)
    kept *= 3
    assert (mine.tolist(), actions.encoder()(mine).tolist(), kept.tolist()) == ([[3.0]], [[3.0]], [[9.0]])


def test_layouts_travel_and_compare() -> None:
    layout = layout_of(RICH, TWO)
    assert cloudpickle.loads(cloudpickle.dumps(layout)) == layout == layout_of(RICH, TWO)
    assert layout != layout_of(RICH, gs.Discrete(2, start=1))
