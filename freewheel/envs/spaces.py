"""Converts Gymnasium spaces to a Layout: plain data that maps observations to columns, and columns to actions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces

from freewheel.core import ActionSpec, NDArray
from freewheel.errors import SetupError
from freewheel.policies.layout import MASK, Actions, Key, Layout, Observations, SpaceLeaf

UNBOUNDED = 1e30  # a larger bound is only the largest number of its type, and counts as none


def layout_of(observation: Space[Any], action: Space[Any], *, info_mask: bool = False) -> Layout:
    """Return the layout of these spaces. `info_mask`: the env puts an action mask into its info."""
    actions = _actions(action)
    choices = actions.spec.size if actions.spec.kind == "discrete" else None
    columns = _observations(observation, choices, info_mask=info_mask)
    return Layout(columns, actions, bounds=_bounds(observation, columns))


def _bounds(space: Space[Any], columns: Observations) -> NDArray | None:
    """Return the lowest and highest value of each column [2, D], infinite where there is no bound; None without any
    bound. Pictures need none, because every byte is in their space."""
    if columns.dtype == "uint8":
        return None
    leaves, bounds = dict(_leaves(space, ())), np.full((2, columns.size), np.inf)
    bounds[0] = -np.inf
    for part in columns.parts:
        if part.kind == "copy":
            leaf = leaves[part.path]
            own = (leaf.low, leaf.high) if isinstance(leaf, spaces.Box) else (0, 1)
            for row, values in zip(bounds, own, strict=True):
                row[part.start : part.stop] = np.asarray(values, np.float64).reshape(-1)
    bounded = np.abs(bounds) < UNBOUNDED
    return np.where(bounded, bounds, [[-np.inf], [np.inf]]).astype(np.float32) if bounded.any() else None


def _leaves(space: Space[Any], path: tuple[Key, ...]) -> Iterator[tuple[tuple[Key, ...], Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, space


def _part(path: tuple[Key, ...], space: Space[Any], start: int) -> SpaceLeaf:
    text = " ".join(str(space).split())
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        shape = tuple(map(int, space.shape))
        return SpaceLeaf(path, "copy", text, shape, start, start + int(np.prod(shape)), str(space.dtype))
    if isinstance(space, spaces.Discrete):
        sizes, first, shape = np.array([space.n]), np.array([space.start]), ()
    elif isinstance(space, spaces.MultiDiscrete):
        sizes, first, shape = space.nvec.reshape(-1), space.start.reshape(-1), space.nvec.shape
    else:
        where = f" at '{'/'.join(map(str, path))}'" if path else ""
        known = "Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of these"
        raise SetupError(f"observation space {text}{where} is not supported: use {known} (wrap the env to convert it)")
    components = tuple(sizes.tolist()), tuple(first.tolist())
    return SpaceLeaf(path, "one-hot", text, shape, start, start + int(sizes.sum()), str(space.dtype), *components)


def _observations(space: Space[Any], choices: int | None, *, info_mask: bool) -> Observations:
    """`choices`: the number of discrete actions; None: actions are continuous and have no mask."""
    leaves = dict(_leaves(space, ()))
    mask_space = leaves.pop((MASK,), None) if choices is not None else None
    pixels = all(isinstance(leaf, spaces.Box) and leaf.dtype == np.uint8 for leaf in leaves.values())
    dtype: Literal["float32", "uint8"] = "uint8" if pixels and leaves else "float32"
    parts: list[SpaceLeaf] = []
    stop = 0
    for path, leaf in leaves.items():
        parts.append(_part(path, leaf, stop))
        stop = parts[-1].stop
    if choices is None or (mask_space is None and not info_mask):
        return Observations(dtype, tuple(parts))
    mask = SpaceLeaf((MASK,), "mask", f"{choices} zeros and ones", (choices,), stop, stop + choices)
    if mask_space is None:
        return Observations(dtype, tuple(parts), mask)
    if mask_space.shape != (choices,):
        wanted = f"there are {choices} actions: make it ({choices},)"
        raise SetupError(f"'{MASK}' has shape {mask_space.shape}, but {wanted}")
    return Observations(dtype, (*parts, mask))


def _actions(space: Space[Any]) -> Actions:
    if isinstance(space, spaces.Discrete):
        first, choices = float(space.start), int(space.n)
        return Actions(ActionSpec("discrete", choices), (), "int64", (first,), (first + choices - 1,))
    if not isinstance(space, spaces.Box):
        text = " ".join(str(space).split())
        sizes = tuple(space.nvec.flat) if isinstance(space, spaces.MultiDiscrete) else (3, 4)
        way = f"lambda n: np.unravel_index(n, {tuple(map(int, sizes))}), gymnasium.spaces.Discrete({np.prod(sizes)})"
        remedy = f"use Box or Discrete, e.g. gymnasium.wrappers.TransformAction(env, {way})"
        raise SetupError(f"action space {text} is not supported: {remedy}")
    low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (space.low, space.high))
    with np.errstate(over="ignore"):  # a range too wide for float32 counts as unbounded
        scaled = np.isfinite((high - low).astype(np.float32))
    inside = np.where(scaled, 1.0, np.inf)
    spec = ActionSpec("box", low.size, tuple((-inside).tolist()), tuple(inside.tolist()))
    return Actions(spec, tuple(map(int, space.shape)), str(space.dtype), tuple(low.tolist()), tuple(high.tolist()))
