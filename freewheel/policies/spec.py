"""Definition of a policy for numpy workers and torch learners: a network and a head that turns outputs into actions.

A head has a numpy form, a torch form and a gradient in numpy. It is one module of heads/ (or of a package with an entry
point in `freewheel.heads`) that ends with `HEAD = ...`. B lanes or N rows, K network outputs, A columns of an action.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.random import Generator

from freewheel.core import A, ActionSpec, Array, Auto, EnvSpec, NDArray, Slice, to_numpy
from freewheel.errors import FileError, Range, SetupError, check_ranges, nearest
from freewheel.files.read import record, show
from freewheel.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Layout = Mapping[str, tuple[int, ...]]  # shapes by name
Activation = Literal["tanh", "relu", "elu", "silu"]
Columns = tuple[tuple[int, int], ...]  # runs [start, stop) of observation columns
Views = Mapping[str, NDArray]  # parameters or their gradients by name
WIDTH = Range(least=1, most=10**6)  # of a layer
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
HEADS: Registry[Head] = Registry("head", "HEAD", "freewheel.policies.heads")
UNNORMALISED = ("action_mask", "context", "model_state")  # slices that are not normalised; no network reads model_state
CHANNELS = (1, 3, 4)  # of a picture: grey, colours, and with transparency
PICTURE = 256  # values of a picture from which on the user is advised to give a CNN
CLIP = 10.0  # normalised observations stay within ± CLIP


class NumpyForm(Protocol):
    """The head of a numpy actor: actions [B, ...] and their log-probabilities [B]; may overwrite the outputs [B, K]."""

    def choose(self, outputs: NDArray, obs: NDArray, rng: Generator, greedy: bool) -> tuple[NDArray, NDArray]: ...


@runtime_checkable
class OneLaneForm(NumpyForm, Protocol):
    """A NumpyForm that computes a single lane faster: from the actor's input columns and the whole observation [D]."""

    def choose_one(self, inputs: NDArray, obs: NDArray, rng: Generator | None) -> tuple[int, float]: ...  # None: greedy


class Distribution(Protocol):
    """The head in torch: the distribution that N rows of outputs describe."""

    def log_prob(self, action: Tensor) -> Tensor: ...  # [N]
    def entropy(self) -> Tensor: ...  # [N]
    def sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]: ...  # actions and log-probabilities
    def mode(self) -> Tensor: ...  # the greedy actions


@runtime_checkable
class Reparameterised(Distribution, Protocol):
    """A Distribution whose samples have a gradient."""

    def rsample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]: ...  # as `sample`, differentiable


@runtime_checkable
class Enumerated(Distribution, Protocol):
    """A Distribution over K discrete actions with a probability for each."""

    log_p: Tensor  # [N, K]; so low for an action that is not allowed that its exp is 0


class Slopes(Protocol):
    """The head with its gradient in numpy, for minibatches of N rows: first log_prob, then entropy, then slope."""

    def log_prob(self, outputs: NDArray, inputs: NDArray, action: NDArray) -> NDArray: ...  # [N]
    def entropy(self) -> NDArray: ...  # [N]
    # d loss / d outputs [N, K]; writes the gradient of the head's own parameters
    def slope(self, by_log_prob: NDArray, by_entropy: float) -> NDArray: ...


class Head(Protocol):
    """Everything about one head; a head derives from this class and defines at least the members without a default."""

    name: str
    analytic: bool = False  # whether `slopes` exists
    reparameterised: bool = False  # whether its distribution is Reparameterised
    discrete: bool = False  # actions are numbers 0 .. K - 1, and its distribution is Enumerated
    # The greedy action of outputs, for exported nets: the first largest output, the first A outputs or their tanh.
    greedy: Literal["argmax", "mean", "tanh", ""] = ""

    def misfit(self, action: ActionSpec) -> str: ...  # why it cannot serve these actions, and what to do; empty: it can
    def outputs(self, action_size: int) -> int:
        """Return K."""
        return action_size

    def parameters(self, spec: PolicySpec) -> dict[str, tuple[tuple[int, ...], float]]:
        """Return the parameters of the head itself: name -> shape and initial value."""
        return {}

    def actor(self, spec: PolicySpec, params: FlatParams) -> NumpyForm: ...
    # mask [N, K]: which actions are allowed; None: all
    def distribution(self, outputs: Tensor, mask: Tensor | None, parameters: Mapping[str, Tensor]) -> Distribution: ...
    def slopes(self, spec: PolicySpec, weights: Views, grads: Views) -> Slopes:
        raise SetupError(f"the {self.name} head has no analytic gradient; use autograd")


def _elu(x: NDArray, out: NDArray) -> None:
    np.copyto(out, np.where(x > 0, x, np.expm1(np.minimum(x, 0))))


def _silu(x: NDArray, out: NDArray) -> None:
    np.divide(x, 1 + np.exp(-np.maximum(x, -80)), out=out)  # below -80 the result is 0 anyway, and exp would overflow


def _relu(x: NDArray, out: NDArray) -> None:
    np.maximum(x, 0, out=out)


ACTIVATIONS: Mapping[str, Callable[..., object]] = {"tanh": np.tanh, "relu": _relu, "elu": _elu, "silu": _silu}


@dataclass(frozen=True)
class PolicyConfig:
    """The policy network."""

    hidden: Annotated[tuple[int, ...], WIDTH] = (64, 64)
    """Sizes of the hidden layers, the same for actor and critic."""
    activation: Activation = "tanh"
    """Non-linearity after each hidden layer."""
    head: str = "auto"
    """Distribution of the actions: categorical for discrete ones, gaussian or squashed (tanh) for boxes; auto: the
    first of these that fits."""
    log_std: Annotated[float, Range(least=-20, most=20)] = 0.0
    """Initial value of a gaussian head's log standard deviation."""
    normalize_obs: bool | Auto = "auto"
    """Scale observations by their running mean and deviation, and clip them at ±10 (statistics are weights: only the
    learner changes them). auto: on for SAC and MBPO, and for PPO with Box actions; off if all observations are images,
    or with a batched simulator."""
    module: str = ""
    """Your own network instead of the MLP: 'package.module:Factory', in Python also the class itself (see
    docs/algorithms.md). Actors then import torch."""

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    def resolve(self, env: EnvSpec) -> PolicySpec:
        """Return the network for this environment."""
        head = self._head(env)
        mask = env.slice("action_mask")
        plain = [part for part in env.slices if part.name not in UNNORMALISED]
        context = [part for part in env.slices if part.name == "context"]
        critic = [part for part in plain if part.name == "critic"] or plain
        public = [part for part in plain if part.name != "critic"]  # a critic may see what an actor must not
        actor = [part for part in public if part.name == "policy"] or public
        return PolicySpec(
            obs_size=env.obs_size,
            obs_dtype=env.obs_dtype,
            actor_columns=_runs(actor + context),
            critic_columns=_runs(critic + context),
            normalised=_runs(plain) if self.normalize_obs is True else (),
            mask=(mask.start, mask.stop) if mask else None,
            head=head.name,
            action_size=env.action.size,
            hidden=tuple(self.hidden),
            activation=self.activation,
            log_std=self.log_std,
            module=self.module,
        )

    def remarks(self, env: EnvSpec) -> list[str]:
        """Remarks on pictures, which a plain network reads pixel by pixel."""
        parts = [] if self.module or not env.layout else env.layout["observation"]["parts"]
        shapes = [tuple(part["shape"]) for part in parts if _is_picture(part["dtype"], part["shape"])]
        what = "one by one, and hardly learns from them: give a CNN with --policy.module (docs/algorithms.md), or resize it"
        large = [(shape, count) for shape in shapes if (count := math.prod(shape)) >= PICTURE]
        return [f"IMAGES: the MLP sees the {count:,} numbers of a picture {shape} {what}" for shape, count in large]

    def _head(self, env: EnvSpec) -> Head:
        if self.head == "auto":
            return next(head for head in HEADS.entries.values() if not head.misfit(env.action))
        if reason := HEADS[self.head].misfit(env.action):
            raise SetupError(f"policy.head {self.head} does not fit the actions of {env.name}: {reason}")
        return HEADS[self.head]


def _is_picture(dtype: str, shape: Sequence[int]) -> bool:
    """Return whether these are bytes in two or three dimensions, or floats in three with a dimension for channels."""
    channels = len(shape) == 3 and (shape[0] in CHANNELS or shape[-1] in CHANNELS)
    return len(shape) in (2, 3) if dtype == "uint8" else channels and dtype.startswith("float")


@dataclass(frozen=True)
class PolicySpec:
    """A network resolved for one environment; plain data, stored as JSON next to the weights."""

    obs_size: int
    obs_dtype: Literal["float32", "uint8"]
    actor_columns: Columns
    critic_columns: Columns
    normalised: Columns
    mask: tuple[int, int] | None
    head: str
    action_size: int
    hidden: tuple[int, ...]
    activation: Activation
    log_std: float
    module: str

    @property
    def outputs(self) -> int:
        """K: width of the actor's last layer."""
        return HEADS[self.head].outputs(self.action_size)

    @property
    def discrete(self) -> bool:
        """Return whether an action is a number 0 .. action_size - 1 instead of action_size columns."""
        return HEADS[self.head].discrete

    @property
    def action_columns(self) -> int:
        """A: columns of an action in a table of rows; a discrete one is its number."""
        return 1 if self.discrete else self.action_size

    @property
    def rescales(self) -> bool:
        """Return whether observations differ from the network's inputs."""
        return bool(self.normalised) or self.obs_dtype != "float32"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object, where: str = "policy") -> PolicySpec:
        """Rebuild a spec from `to_json` data, also read from a file (`where`); raises FileError if it is invalid."""
        spec = record(cls, data, where)
        runs = [*spec.actor_columns, *spec.critic_columns, *spec.normalised, *([spec.mask] if spec.mask else [])]
        if spec.head not in HEADS:
            raise FileError(f"head of {where} is unknown: {show(spec.head)}{nearest(spec.head, HEADS, '')}")
        if wrong := next((run for run in runs if not 0 <= run[0] < run[1] <= spec.obs_size), None):
            raise FileError(f"{where} reads columns {wrong[0]} to {wrong[1]} of {spec.obs_size}")
        if min(spec.obs_size, spec.action_size, *spec.hidden) < 1 or not (spec.actor_columns and spec.critic_columns):
            raise FileError(f"{where} has an empty layer, no observation or no action")
        return spec


@dataclass(frozen=True)
class StartWeights:
    """Initial weights from an earlier run."""

    params: Mapping[str, Array]
    rows: int  # rows that the statistics among the weights are computed from


def statistics_layout(spec: PolicySpec) -> dict[str, tuple[int, ...]]:
    """The normaliser: inputs = clip((obs - mean) × scale)."""
    return {"norm.mean": (spec.obs_size,), "norm.scale": (spec.obs_size,)}


def actor_layout(spec: PolicySpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what acting needs, statistics first: the published prefix of the flat vector."""
    shapes = statistics_layout(spec)
    return shapes | _mlp("actor", _width(spec.actor_columns), spec.hidden, spec.outputs) | head_layout(spec)


def head_layout(spec: PolicySpec) -> dict[str, tuple[int, ...]]:
    """The parameters of the head itself."""
    return {name: shape for name, (shape, _) in HEADS[spec.head].parameters(spec).items()}


def full_layout(spec: PolicySpec) -> dict[str, tuple[int, ...]]:
    """Return the layout of the actor, then of the critic."""
    return actor_layout(spec) | _mlp("critic", _width(spec.critic_columns), spec.hidden, 1)


def check_weights(layout: Layout, weights: Mapping[str, NDArray], where: str) -> None:
    """Raise FileError unless a file's weights include finite float32 arrays with these names and shapes."""
    for name, shape in layout.items():
        if name not in weights:
            raise FileError(f"{where} has no weights '{name}'")
        array = weights[name]
        if array.shape != shape:
            raise FileError(f"'{name}' of {where} has the shape {array.shape}, and its policy.json says {shape}")
        if array.dtype != np.float32:
            raise FileError(f"'{name}' of {where} should be float32, not {array.dtype}")
        if not np.isfinite(array).all():
            raise FileError(f"'{name}' of {where} has values that are not finite: the run had diverged")


def views(vector: A, layout: Layout) -> dict[str, A]:
    """Named parts of a flat vector, end to end in the order of the layout."""
    found, end = dict[str, Any](), 0
    for name, shape in layout.items():
        start, end = end, end + math.prod(shape)
        found[name] = vector[start:end].reshape(shape)
    return found


class NamedWeights(Mapping[str, A]):
    """Named parts of one flat vector. The views are made at the first access, because a simulator on the learner's
    device reads only the vector itself."""

    def __init__(self, vector: A, layout: Layout) -> None:
        self.vector, self.layout = vector, layout

    @functools.cached_property
    def _views(self) -> dict[str, A]:
        return views(self.vector, self.layout)

    def __getitem__(self, name: str) -> A:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


class FlatParams:
    """One flat float32 vector with a named view for every parameter."""

    def __init__(self, layout: Layout, vector: NDArray | None = None) -> None:
        size = sum(math.prod(shape) for shape in layout.values())
        self.vector = np.zeros(size, np.float32) if vector is None else vector
        self.views = views(self.vector, layout)

    def load(self, params: Mapping[str, Array]) -> None:
        """Copy these values in."""
        for name, view in self.views.items():
            view[...] = to_numpy(params[name])


def initialise(spec: PolicySpec, params: FlatParams, rng: Generator) -> None:
    """Set identity statistics; MLP: orthogonal weights of gain √2 (last layers: actor 0.01, critic 1), zero biases."""
    params.views["norm.scale"][...] = 1.0 / 255.0 if spec.obs_dtype == "uint8" else 1.0
    for name, (_, value) in HEADS[spec.head].parameters(spec).items():
        params.views[name][...] = value
    if spec.module:
        return
    for part, last_gain in (("actor", 0.01), ("critic", 1.0)):
        *hidden, (last, _) = layers(params.views, part)
        for weight, _ in hidden:
            weight[...] = math.sqrt(2) * _orthogonal(weight.shape, rng)
        last[...] = last_gain * _orthogonal(last.shape, rng)


def layers(params: Mapping[str, NDArray], part: str) -> list[tuple[NDArray, NDArray]]:
    """(weight [in, out], bias [out]) of "actor" or "critic", in order."""
    count = sum(name.startswith(f"{part}.") and name.endswith(".weight") for name in params)
    return [(params[f"{part}.{i}.weight"], params[f"{part}.{i}.bias"]) for i in range(count)]


def namespace(array: Array) -> Any:
    """The module whose functions take this array: numpy or torch, which agree on many names and arguments."""
    return np if isinstance(array, np.ndarray) else importlib.import_module("torch")


def network_inputs(spec: PolicySpec, params: Mapping[str, A], obs: A) -> A:
    """obs [..., D] as the network reads it: float32, normalised with these parameters' statistics."""
    if not spec.rescales:
        return obs
    values: Any = obs
    scaled: A = (values - params["norm.mean"]) * params["norm.scale"]
    for start, stop in spec.normalised:
        namespace(scaled).clip(scaled[..., start:stop], -CLIP, CLIP, out=scaled[..., start:stop])
    return scaled


def select(columns: Columns, inputs: Any) -> Any:
    """The columns that a part of the network reads; a view wherever they are contiguous."""
    if len(columns) == 1:
        start, stop = columns[0]
        return inputs if (start, stop) == (0, inputs.shape[-1]) else inputs[..., start:stop]
    return namespace(inputs).concatenate([inputs[..., start:stop] for start, stop in columns], axis=-1)


def _width(columns: Columns) -> int:
    return sum(stop - start for start, stop in columns)


def _runs(parts: Iterable[Slice]) -> Columns:
    """The columns of these slices as the fewest runs."""
    runs: list[tuple[int, int]] = []
    for part in sorted(parts, key=lambda part: part.start):
        if runs and runs[-1][1] == part.start:
            runs[-1] = (runs[-1][0], part.stop)
        else:
            runs.append((part.start, part.stop))
    return tuple(runs)


def _mlp(part: str, inputs: int, hidden: tuple[int, ...], outputs: int) -> dict[str, tuple[int, ...]]:
    sizes = (inputs, *hidden, outputs)
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        shapes[f"{part}.{i}.weight"] = (fan_in, fan_out)
        shapes[f"{part}.{i}.bias"] = (fan_out,)
    return shapes


def _orthogonal(shape: tuple[int, ...], rng: Generator) -> NDArray:
    rows, columns = shape
    q, r = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))
    q *= np.sign(np.diag(r))
    return np.asarray(q if rows >= columns else q.T)
