"""An env's spaces as plain data: how observations become flat columns, and policy actions become env actions. They are
stored as JSON with the weights, so that a policy works without its env. envs/spaces.py makes them from Gymnasium's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from freewheel.core import ActionSpec, EnvSpec, NDArray, Slice
from freewheel.errors import FileError
from freewheel.files.read import record, show

Write: TypeAlias = Callable[[Any], None]
Key: TypeAlias = str | int

MASK = "action_mask"
CONTEXT = "context"


class BadObservationError(ValueError):
    """An observation does not fit its space."""


@dataclass(frozen=True)
class SpaceLeaf:
    """One leaf of an observation space and the columns it fills."""

    path: tuple[Key, ...]
    kind: Literal["copy", "one-hot", "mask"]
    space: str  # text of the space, for error messages
    shape: tuple[int, ...]  # of one lane's value, before it is flattened
    start: int
    stop: int
    dtype: str = "float32"  # declared by the space
    sizes: tuple[int, ...] = ()  # one-hot: the number of labels of every component of the value ...
    first: tuple[int, ...] = ()  # ... and its first label

    @property
    def name(self) -> str:
        return "/".join(map(str, self.path)) or "obs"

    @property
    def slice(self) -> Slice:
        shape = (self.stop - self.start,) if self.kind == "one-hot" else self.shape
        return Slice(self.name, self.start, self.stop, shape)

    @property
    def content(self) -> tuple[object, ...]:
        """The fields that decide how a value becomes columns."""
        return self.kind, self.shape, self.sizes, self.first

    def leaf(self, observation: Any) -> Any:
        """This part of an observation."""
        value = observation
        try:
            for key in self.path:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            raise BadObservationError(f"{self.name}: missing from the observation, which is {short(value)}") from None
        return value

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
        lead, component = columns.shape[:-1], np.repeat(np.arange(len(self.sizes)), self.sizes)
        label = np.concatenate([np.arange(size) + first for size, first in zip(self.sizes, self.first, strict=True)])

        def write(value: Any) -> None:
            values = self._checked(value, shape)
            hot = values.reshape(*lead, -1)[..., component] == label
            if np.count_nonzero(hot) != values.size:
                raise BadObservationError(f"{self.name}: expected a value of {self.space}, got {short(value)}")
            np.copyto(columns, hot)

        return write

    def _checked(self, value: Any, shape: tuple[int, ...]) -> NDArray:
        array = np.asarray(value)
        if array.shape != shape or array.dtype == object:
            raise self._wrong(value, shape)
        return array

    def _wrong(self, value: Any, shape: tuple[int, ...]) -> BadObservationError:
        if not isinstance(value, np.ndarray | np.generic):
            return BadObservationError(f"{self.name}: expected an array of shape {shape}, got {short(value)}")
        if value.shape != shape:
            return BadObservationError(f"{self.name}: expected shape {shape}, got {value.shape}")
        return BadObservationError(f"{self.name}: expected numbers of {self.space}, got dtype {value.dtype}")


@dataclass(frozen=True)
class Observations:
    """The columns of an observation: leaves of the space in order, the action mask last."""

    dtype: Literal["float32", "uint8"]
    parts: tuple[SpaceLeaf, ...]  # read from the observation
    mask: SpaceLeaf | None = None  # read from info["action_mask"]

    @property
    def slices(self) -> tuple[Slice, ...]:
        return tuple(part.slice for part in (self.parts if self.mask is None else (*self.parts, self.mask)))

    @property
    def size(self) -> int:
        return max((part.stop for part in self.slices), default=0)

    def writer(self, out: NDArray) -> Write:
        """A function that writes an observation into `out` [..., D]; a bare Box costs one check and one copy."""
        writes = [(part, part.writer(out)) for part in self.parts]
        if len(writes) == 1 and not self.parts[0].path:
            return writes[0][1]

        def write(value: Any) -> None:
            for part, write_part in writes:
                write_part(part.leaf(value))

        return write


def short(value: object) -> str:
    """A value for an error message: its type and the beginning of its text."""
    if value is None:
        return "None"
    try:
        text = " ".join(repr(value).split()).encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001 - a user's object
        text = "(no text: repr() raised an error)"
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


@dataclass(frozen=True)
class Actions:
    """The conversion of policy actions to environment actions."""

    spec: ActionSpec
    shape: tuple[int, ...]
    dtype: str
    low: tuple[float, ...]  # the bounds of the env by column; discrete: the first label
    high: tuple[float, ...]

    @property
    def affine(self) -> tuple[NDArray, NDArray]:
        """(half, centre) by column of a Box: the env's action is half × ours + centre, clipped to low and high."""
        scaled = np.isfinite(self.spec.low)
        low, high = np.array(self.low), np.array(self.high)
        half, centre = np.ones(low.size), np.zeros(low.size)
        half[scaled] = (high[scaled] - low[scaled]) / 2
        centre[scaled] = (low[scaled] + high[scaled]) / 2
        return half, centre

    def encoder(self) -> Callable[[NDArray], NDArray]:
        """A function from [B] int64 or [B, A] float32 to [B, ...]. A Box gets new arrays: an env may change them."""
        if self.spec.kind == "discrete":
            start = int(self.low[0])
            return (lambda action: action + start) if start else (lambda action: action)
        (half, centre), low, high = self.affine, np.array(self.low), np.array(self.high)
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

    def __str__(self) -> str:
        if self.spec.kind == "discrete":
            return f"Discrete({self.spec.size}, start={int(self.low[0])})"
        return f"Box({_bounds(self.low)}, {_bounds(self.high)}, {self.shape}, {self.dtype})"


def _bounds(values: Iterable[float]) -> str:
    texts = [f"{value:g}" for value in values]
    return texts[0] if len(set(texts)) == 1 else f"[{', '.join(texts)}]"


@dataclass(frozen=True)
class Layout:
    """An env's spaces as plain data: small, comparable, and picklable where the spaces themselves may not be."""

    observation: Observations
    action: Actions
    #: EnvSpec.bounds; not stored with the weights
    bounds: NDArray | None = field(default=None, compare=False, repr=False)

    def spec(self, name: str, lanes: int, measures: tuple[str, ...]) -> EnvSpec:
        columns = self.observation
        context = next((part for part in columns.slices if part.name == CONTEXT), None)
        return EnvSpec(
            name=name,
            lanes=lanes,
            obs_size=columns.size,
            obs_dtype=columns.dtype,
            slices=columns.slices,
            action=self.action.spec,
            measures=measures,
            context=context.stop - context.start if context else 0,
            layout=self.to_json(),
            bounds=self.bounds,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; empty where a key of a Dict space is neither text nor a whole number."""
        columns, action = self.observation, self.action
        if not all(isinstance(key, str | int) for part in columns.parts for key in part.path):
            return {}
        mask = None if columns.mask is None else asdict(columns.mask)
        return {
            "observation": {"dtype": columns.dtype, "parts": [asdict(part) for part in columns.parts], "mask": mask},
            "action": {
                "kind": action.spec.kind,
                "size": action.spec.size,
                "shape": list(action.shape),
                "dtype": action.dtype,
                "low": _finite(action.low),
                "high": _finite(action.high),
                "scaled": [math.isfinite(bound) for bound in action.spec.low],
            },
        }

    @classmethod
    def from_json(cls, data: object, where: str = "layout") -> Layout:
        """Rebuild a layout from `to_json` data, also read from a file (`where`); raises FileError if it is invalid."""
        kept = record(_LayoutData, data, where)
        columns, action = kept.observation, kept.action
        _check_columns(columns, where)
        inside = [1.0 if scaled else math.inf for scaled in action.scaled]
        spec = ActionSpec(action.kind, action.size, tuple(-bound for bound in inside), tuple(inside))
        low = tuple(-math.inf if bound is None else bound for bound in action.low)
        high = tuple(math.inf if bound is None else bound for bound in action.high)
        bounds = (1, 1, 0) if action.kind == "discrete" else (action.size,) * 3
        fits = action.kind == "discrete" or (
            all(side >= 0 for side in action.shape) and math.prod(action.shape) == action.size
        )
        if action.size < 1 or (len(low), len(high), len(inside)) != bounds or not fits or not _is_numeric(action.dtype):
            raise FileError(
                f"action of {where} is not a space: {show(data['action'] if isinstance(data, Mapping) else data)}"
            )
        return cls(columns, Actions(spec, action.shape, action.dtype, low, high))

    def misfit(self, env: Layout) -> str:
        """Describe the first difference of an environment from the one the policy was trained on; empty: it fits."""
        ours, theirs = ({part.name: part for part in own.observation.parts} for own in (self, env))
        for name in ours | theirs:
            mine, other = ours.get(name), theirs.get(name)
            if mine is None or other is None or mine.content != other.content:
                return f"the policy reads {_text(name, mine)}, the environment has {_text(name, other)}"
        if list(ours) != list(theirs):
            order = [", ".join(own) for own in (ours, theirs)]
            return f"the policy reads the parts {order[0]} in this order, the environment has {order[1]}"
        kinds = [own.observation.dtype for own in (self, env)]
        if kinds[0] != kinds[1]:
            return f"the policy reads observations as {kinds[0]}, those of the environment become {kinds[1]}"
        masks = [own.observation.mask is not None for own in (self, env)]
        if masks[0] != masks[1]:
            which = "with" if masks[0] else "without"
            return f"the policy was trained {which} info['{MASK}'], the environment differs"
        return "" if self.action == env.action else f"the policy acts in {self.action}, the environment in {env.action}"


def _text(name: str, part: SpaceLeaf | None) -> str:
    return f"no '{name}'" if part is None else f"'{name}' {part.space}"


def _finite(bounds: Iterable[float]) -> list[float | None]:
    """JSON has no infinity."""
    return [bound if math.isfinite(bound) else None for bound in bounds]


@dataclass(frozen=True)
class _ActionData:
    """Actions as stored in a file."""

    kind: Literal["discrete", "box"]
    size: int
    shape: tuple[int, ...]
    dtype: str
    low: tuple[float | None, ...]  # JSON has no infinity
    high: tuple[float | None, ...]
    scaled: tuple[bool, ...]


@dataclass(frozen=True)
class _LayoutData:
    """A layout as stored in a file."""

    observation: Observations
    action: _ActionData


def _check_columns(columns: Observations, where: str) -> None:
    """Raise FileError unless the parts fill their columns, one after the other."""
    end = 0
    for part in (*columns.parts, *([columns.mask] if columns.mask else [])):
        ahead = min(part.shape, default=1) >= 0 and part.start == end and _is_numeric(part.dtype)
        one_hot = part.kind == "one-hot"
        labels = len(part.sizes) == len(part.first) == math.prod(part.shape) and min(part.sizes, default=1) > 0
        width = sum(part.sizes) if one_hot else math.prod(part.shape)
        if not ahead or (one_hot and not labels) or part.stop - part.start != width:
            raise FileError(f"observation of {where} is not a space: part {show(part.name)} does not fill its columns")
        end = part.stop


def _is_numeric(dtype: str) -> bool:
    """Return whether a text from a file names a numeric type."""
    try:
        return np.dtype(dtype).kind in "biuf"
    except TypeError:
        return False
