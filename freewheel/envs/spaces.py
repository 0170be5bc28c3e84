"""Gymnasium's spaces as flat columns, and functions that write values into them without reading the space again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from gymnasium import Space, spaces

from freewheel.core import ActionSpec, EnvSpec, NDArray, Slice
from freewheel.errors import SetupError

Write: TypeAlias = Callable[[Any], None]
Key: TypeAlias = str | int

MASK = "action_mask"
CONTEXT = "context"


class BadObservationError(ValueError):
    """An observation does not fit its space."""


@dataclass(frozen=True)
class Part:
    """One leaf of an observation space and the columns it fills."""

    path: tuple[Key, ...]
    kind: Literal["copy", "one-hot", "mask"]
    space: str  # its text, for error messages
    shape: tuple[int, ...]  # of one lane's value, before it is flattened
    start: int
    stop: int
    dtype: str = "float32"  # that the space declares
    component: tuple[int, ...] = ()  # one-hot: a column is 1 where this component of the value ...
    label: tuple[int, ...] = ()  # ... has this label

    @property
    def name(self) -> str:
        return "/".join(map(str, self.path)) or "obs"

    @property
    def slice(self) -> Slice:
        shape = (self.stop - self.start,) if self.kind == "one-hot" else self.shape
        return Slice(self.name, self.start, self.stop, shape)

    def writer(self, out: NDArray) -> Write:
        """A function that puts a value into its columns of `out` [..., D]; leading dimensions are lanes."""
        columns = out[..., self.start : self.stop]
        shape = columns.shape[:-1] + self.shape
        if self.kind == "copy":
            return self._copier(columns.reshape(shape))
        if self.kind == "mask":
            return lambda value: np.copyto(columns, self._checked(value, shape) != 0)
        return self._one_hotter(columns, shape)

    def _copier(self, view: NDArray) -> Write:
        shape, dtype = view.shape, np.dtype(self.dtype)

        def write(value: Any) -> None:
            # numpy has one object per dtype: comparing identity first avoids the slower check of casting rules.
            if getattr(value, "shape", None) != shape:
                raise self._wrong(value, shape)
            if value.dtype is not dtype and not np.can_cast(value.dtype, view.dtype, "same_kind"):
                raise self._wrong(value, shape)
            view[...] = value

        return write

    def _one_hotter(self, columns: NDArray, shape: tuple[int, ...]) -> Write:
        lead, component, label = columns.shape[:-1], np.array(self.component, np.intp), np.array(self.label)

        def write(value: Any) -> None:
            values = self._checked(value, shape)
            hot = values.reshape(*lead, -1)[..., component] == label
            if np.count_nonzero(hot) != values.size:
                raise BadObservationError(f"{self.name}: expected a value of {self.space}, got {_short(value)}")
            np.copyto(columns, hot)

        return write

    def _checked(self, value: Any, shape: tuple[int, ...]) -> NDArray:
        array = np.asarray(value)
        if array.shape != shape or array.dtype == object:
            raise self._wrong(value, shape)
        return array

    def _wrong(self, value: Any, shape: tuple[int, ...]) -> BadObservationError:
        if not isinstance(value, np.ndarray | np.generic):
            return BadObservationError(f"{self.name}: expected an array of shape {shape}, got {_short(value)}")
        if value.shape != shape:
            return BadObservationError(f"{self.name}: expected shape {shape}, got {value.shape}")
        return BadObservationError(f"{self.name}: expected numbers of {self.space}, got dtype {value.dtype}")


@dataclass(frozen=True)
class Observations:
    """The columns of an observation: leaves of the space in order, the action mask last."""

    slices: tuple[Slice, ...]
    dtype: Literal["float32", "uint8"]
    parts: tuple[Part, ...]  # read from the observation
    mask: Part | None = None  # read from info["action_mask"]

    @property
    def size(self) -> int:
        return self.slices[-1].stop if self.slices else 0

    def writer(self, out: NDArray) -> Write:
        """A function that writes an observation into `out` [..., D]; a bare Box costs one check and one copy."""
        writes = [(part, part.writer(out)) for part in self.parts]
        if len(writes) == 1 and not self.parts[0].path:
            return writes[0][1]

        def write(value: Any) -> None:
            for part, write_part in writes:
                write_part(_leaf(value, part))

        return write


def _leaf(value: Any, part: Part) -> Any:
    try:
        for key in part.path:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        raise BadObservationError(f"{part.name}: missing from the observation, which is {_short(value)}") from None
    return value


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}" if value is not None else "None"


def _leaves(space: Space[Any], path: tuple[Key, ...]) -> Iterator[tuple[tuple[Key, ...], Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, space


def _part(path: tuple[Key, ...], space: Space[Any], start: int) -> Part:
    text = " ".join(str(space).split())
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        shape = tuple(map(int, space.shape))
        return Part(path, "copy", text, shape, start, start + int(np.prod(shape)), str(space.dtype))
    if isinstance(space, spaces.Discrete):
        sizes, first, shape = np.array([space.n]), np.array([space.start]), ()
    elif isinstance(space, spaces.MultiDiscrete):
        sizes, first, shape = space.nvec.reshape(-1), space.start.reshape(-1), space.nvec.shape
    else:
        where = f" at '{'/'.join(map(str, path))}'" if path else ""
        known = "Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of these"
        raise SetupError(f"observation space {text}{where} is not supported: use {known} (wrap the env to convert it)")
    component = np.repeat(np.arange(sizes.size), sizes)
    label = np.concatenate([np.arange(low, low + size) for low, size in zip(first, sizes, strict=True)])
    columns = tuple(component.tolist()), tuple(label.tolist())
    return Part(path, "one-hot", text, shape, start, start + int(sizes.sum()), str(space.dtype), *columns)


def _observations(space: Space[Any], choices: int | None, *, info_mask: bool) -> Observations:
    """`choices`: the number of discrete actions; None: actions are continuous and have no mask."""
    leaves = dict(_leaves(space, ()))
    mask_space = leaves.pop((MASK,), None) if choices is not None else None
    pixels = all(isinstance(leaf, spaces.Box) and leaf.dtype == np.uint8 for leaf in leaves.values())
    dtype: Literal["float32", "uint8"] = "uint8" if pixels and leaves else "float32"
    parts: list[Part] = []
    stop = 0
    for path, leaf in leaves.items():
        parts.append(_part(path, leaf, stop))
        stop = parts[-1].stop
    slices = tuple(part.slice for part in parts)
    if choices is None or (mask_space is None and not info_mask):
        return Observations(slices, dtype, tuple(parts))
    mask = Part((MASK,), "mask", f"{choices} zeros and ones", (choices,), stop, stop + choices)
    if mask_space is None:
        return Observations((*slices, mask.slice), dtype, tuple(parts), mask)
    if mask_space.shape != (choices,):
        wanted = f"there are {choices} actions: make it ({choices},)"
        raise SetupError(f"'{MASK}' has shape {mask_space.shape}, but {wanted}")
    return Observations((*slices, mask.slice), dtype, (*parts, mask))


@dataclass(frozen=True)
class Actions:
    """How an action of the policy becomes an action of the environment."""

    spec: ActionSpec
    shape: tuple[int, ...]
    dtype: str
    low: tuple[float, ...]  # the bounds of the env by column; discrete: the first label
    high: tuple[float, ...]

    def encoder(self) -> Callable[[NDArray], NDArray]:
        """A function from [B] int64 or [B, A] float32 to [B, ...]. The rows of a Box are new arrays: an env may change them."""
        if self.spec.kind == "discrete":
            start = int(self.low[0])
            return (lambda action: action + start) if start else (lambda action: action)
        scaled = np.isfinite(self.spec.low)
        low, high = np.array(self.low), np.array(self.high)
        centre, half = np.zeros(low.size), np.ones(low.size)
        centre[scaled] = (low[scaled] + high[scaled]) / 2
        half[scaled] = (high[scaled] - low[scaled]) / 2
        whole = np.issubdtype(self.dtype, np.integer)

        def encode(action: NDArray) -> NDArray:
            value = half * action
            value += centre
            np.maximum(value, low, out=value)
            np.minimum(value, high, out=value)
            if whole:
                np.rint(value, out=value)
            return value.astype(self.dtype).reshape(len(action), *self.shape)

        return encode


def _actions(space: Space[Any]) -> Actions:
    if isinstance(space, spaces.Discrete):
        first, choices = float(space.start), int(space.n)
        return Actions(ActionSpec("discrete", choices), (), "int64", (first,), (first + choices - 1,))
    if not isinstance(space, spaces.Box):
        text = " ".join(str(space).split())
        raise SetupError(f"action space {text} is not supported: use Box or Discrete (wrap the env to flatten it)")
    low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (space.low, space.high))
    with np.errstate(over="ignore"):  # a range too wide for float32 counts as unbounded
        scaled = np.isfinite((high - low).astype(np.float32))
    inside = np.where(scaled, 1.0, np.inf)
    spec = ActionSpec("box", low.size, tuple((-inside).tolist()), tuple(inside.tolist()))
    return Actions(spec, tuple(map(int, space.shape)), str(space.dtype), tuple(low.tolist()), tuple(high.tolist()))


@dataclass(frozen=True)
class Layout:
    """An env's spaces as plain data: small, comparable, and picklable where the spaces themselves may not be."""

    observation: Observations
    action: Actions

    @classmethod
    def of(cls, observation: Space[Any], action: Space[Any], *, info_mask: bool = False) -> Layout:
        actions = _actions(action)
        choices = actions.spec.size if actions.spec.kind == "discrete" else None
        return cls(_observations(observation, choices, info_mask=info_mask), actions)

    def spec(self, name: str, lanes: int, measures: tuple[str, ...]) -> EnvSpec:
        columns = self.observation
        context = next((part for part in columns.slices if part.name == CONTEXT), None)
        shown = context.stop - context.start if context else 0
        size, dtype, slices = columns.size, columns.dtype, columns.slices
        return EnvSpec(name, lanes, size, dtype, slices, self.action.spec, measures=measures, context=shown)

    def flattened(self) -> Layout:
        """The same columns for observations that are flat already."""
        columns = self.observation
        flat = Part((), "copy", f"{columns.size} columns", (columns.size,), 0, columns.size, columns.dtype)
        return replace(self, observation=replace(columns, parts=(flat,), mask=None))
