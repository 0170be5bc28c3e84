"""A trained policy as an object that maps raw observations to raw actions, without its environment."""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from freewheel.core import Actor, NDArray, Snapshot
from freewheel.errors import FileError, ObservationError, SetupError
from freewheel.files import signatures
from freewheel.files.read import show, value_of
from freewheel.policies.layout import MASK, BadObservationError, Layout, SpaceLeaf, short
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import PolicySpec, actor_layout, check_weights, head_layout, statistics_layout
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.checkpoint import Checkpoint
from freewheel.run.naming import Result, locate
from freewheel.seeding import generator


class Policy:
    """A trained policy. It can be used from several threads, copied and pickled."""

    def __init__(self, saved: Checkpoint, layout: Layout, *, trust: bool = False) -> None:
        self._saved, self.layout, self._trust = saved, layout, trust
        self.spec = spec = read_spec(saved)
        self._actor = actor_of(saved, trust=trust)
        if (spec.obs_size, spec.action_size) != (layout.observation.size, layout.action.spec.size):
            raise FileError(f"{saved.path / checkpoint.POLICY} has a policy and a layout of different sizes")
        self._encode = layout.action.encoder()
        self._rng = np.random.default_rng()
        self._lock = threading.Lock()
        self.inputs, self._mask = _inputs(spec, layout)
        self._nested = any(part.path for part in layout.observation.parts)
        size, dtype = layout.observation.size, layout.observation.dtype
        self._row = np.zeros((1, size), dtype)  # the buffer for a single observation
        parts = self.inputs if self._mask is None else (*self.inputs, self._mask)
        self._writers = [part.writer(self._row[0]) for part in parts]
        # The usual case, a bare Box without a mask, skips the lookup of parts.
        bare = len(parts) == 1 and not self._nested and parts[0].kind == "copy"
        self._bare = (parts[0].shape, self._row.dtype.kind) if bare else None

    @property
    def env(self) -> str:
        """The name of the training environment."""
        return str(self._saved.about.get("env", ""))

    @property
    def step(self) -> int:
        """The number of environment steps of its training."""
        return self._saved.step

    @property
    def path(self) -> Path:
        """The folder of its checkpoint."""
        return self._saved.path

    @property
    def saved(self) -> Checkpoint:
        """The checkpoint: weights by name, and metadata."""
        return self._saved

    @property
    def state_size(self) -> int:
        """The size of a recurrent policy's memory; 0: it has none."""
        return self._actor.state_size

    def seed(self, seed: int) -> None:
        """Make the actions sampled from now on repeatable."""
        self._rng = generator(seed, "predict")

    def predict(self, obs: Any, mask: Any = None, state: Any = None, deterministic: bool = True) -> tuple[Any, Any]:
        """Return the action for an observation of the environment, and the state to pass with the next observation.

        `obs` is one observation or several: arrays with one more dimension in front (a Dict is then a dict of such
        arrays), or a list of observations. `mask` gives the allowed actions if the observation does not contain them.
        `state` is the memory of a recurrent policy (None at the start of an episode). The action is what the
        environment's `step` takes, one or [N, ...]; for torch tensors, it is a tensor on their device.
        """
        with self._lock:
            try:
                rows, one = self._rows(obs, mask)
                memory = self._memory(state, len(rows), one) if self.state_size else None
            except BadObservationError as error:
                raise ObservationError(str(error)) from None
            decision = self._actor.act(rows, self._rng, state=memory, greedy=deterministic)
            action = self._encode(decision.action)
            if self.state_size:
                state = decision.state[0] if one else decision.state
        if one:
            return (int(action[0]) if self.layout.action.spec.kind == "discrete" else _like(obs, action[0])), state
        return _like(obs, action), state

    def columns(self, obs: Any) -> NDArray:
        """Return the input of an exported network: `inputs` concatenated, [D] or, for several observations, [N, D]."""
        with self._lock:
            try:
                arrays = self._arrays(obs, self.inputs)
                rows, one = self._written(self.inputs, arrays)
            except BadObservationError as error:
                raise ObservationError(str(error)) from None
            flat = np.concatenate([rows[:, part.start : part.stop] for part in self.inputs], axis=1)
        return flat[0] if one else flat

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Policy, trust=self._trust), (self._saved, self.layout)

    def __repr__(self) -> str:
        return f"Policy({self.env}, step {self.step}, {self.layout.action})"

    def _rows(self, obs: Any, mask: Any) -> tuple[NDArray, bool]:
        """Return the columns [N, D] that the actor reads, and whether `obs` is a single observation."""
        if mask is None and type(obs) is np.ndarray and (obs.shape, obs.dtype.kind) == self._bare:
            self._writers[0](obs)
            return self._row, True
        arrays = self._arrays(obs, self.inputs)
        if self._mask is None:
            if mask is not None:
                raise BadObservationError("mask: this policy was trained without action masks; leave it out")
            return self._written(self.inputs, arrays)
        allowed = _array(self._mask, self._find_mask(obs) if mask is None else mask)
        if allowed.size and allowed.ndim and not allowed.any(-1).all():
            raise BadObservationError(f"{MASK}: allows no action at all, it is {short(allowed)}")
        return self._written((*self.inputs, self._mask), [*arrays, allowed])

    def _find_mask(self, obs: Any) -> Any:
        assert self._mask is not None, "only called for policies with a mask"
        if self._mask in self.layout.observation.parts:
            try:
                return self._values(obs, (self._mask,))[0]
            except BadObservationError:
                pass
        remedy = (
            f"pass mask=info['{MASK}']" if self.layout.observation.mask else f"pass mask=, or put '{MASK}' into obs"
        )
        raise BadObservationError(f"{MASK}: this policy was trained with action masks; {remedy}")

    def _arrays(self, obs: Any, parts: Sequence[SpaceLeaf]) -> list[NDArray]:
        values = self._values(obs, parts)
        return [_array(part, value) for part, value in zip(parts, values, strict=True)]

    def _values(self, obs: Any, parts: Sequence[SpaceLeaf]) -> list[Any]:
        """Return the parts of an observation, or of a list of observations."""
        if not self._nested:
            return [obs]
        if isinstance(obs, list):
            return [[part.leaf(one) for one in obs] for part in parts]
        if _is_array(obs):
            if len(parts) == 1:  # the only group that the policy reads
                return [obs]
            names = ", ".join(part.name for part in parts)
            raise BadObservationError(f"obs: expected the parts {names}, got {short(obs)}")
        return [part.leaf(obs) for part in parts]

    def _written(self, parts: Sequence[SpaceLeaf], arrays: Sequence[NDArray]) -> tuple[NDArray, bool]:
        leads = [_lead(part, array) for part, array in zip(parts, arrays, strict=True)]
        for part, lead in zip(parts, leads, strict=True):
            if lead != leads[0]:
                counts = ["one observation" if count is None else f"{count} observations" for count in (leads[0], lead)]
                raise BadObservationError(f"{part.name}: {counts[1]}, but {counts[0]} of {parts[0].name}")
        if not leads or leads[0] is None:
            for write, array in zip(self._writers, arrays, strict=False):
                write(array)
            return self._row, True
        rows = np.zeros((leads[0], self._row.shape[1]), self._row.dtype)
        for part, array in zip(parts, arrays, strict=True):
            part.writer(rows)(array)
        return rows, False

    def _memory(self, state: Any, lanes: int, one: bool) -> NDArray:
        if state is None:
            return np.zeros((lanes, self.state_size), np.float32)
        shape, array = (self.state_size,) if one else (lanes, self.state_size), np.asarray(state, np.float32)
        if array.shape != shape:
            raise BadObservationError(f"state: expected shape {shape}, got {array.shape}")
        return array.reshape(lanes, self.state_size)


def load(
    run: str | os.PathLike[str] | Result,
    which: str | int = "",
    *,
    env: Any = None,
    runs_dir: str = "runs",
    trust: bool = False,
) -> Policy:
    """Load the policy of a run (a name under runs/, a path or a train() result), a checkpoint or an export.

    `which` selects the weights: best (default, unless `run` is RUN@STEP or the path of a checkpoint), latest or a step.
    The only code that the files can import is a user's network (--policy.module), and only if this user saved it on
    this machine, or with `trust`. `env`, the training environment, is needed only for runs that were saved without
    their spaces.
    """
    saved = find(run, which, runs_dir)
    for text in saved.warnings:
        warnings.warn(text, stacklevel=3)
    if layout := saved.about.get("layout"):
        return Policy(saved, Layout.from_json(layout, f"layout of {saved.path / checkpoint.POLICY}"), trust=trust)
    if env is None:
        name = saved.about.get("env") or "the environment"
        remedy = f"pass the environment it was trained on: freewheel.load(run, env={name!r})"
        raise SetupError(f"{saved.path} was saved without its spaces; {remedy}")
    from freewheel.run.saved import layout_of_env

    return Policy(saved, layout_of_env(env, saved), trust=trust)


def find(run: str | os.PathLike[str] | Result, which: str | int = "", runs_dir: str = "runs") -> Checkpoint:
    """Find the checkpoint that `run` and `which` name."""
    path = Path(run if isinstance(run, str | os.PathLike) else run.path)
    folder = (path.parent if path.is_file() else path).resolve()  # `latest` is a link to a step
    if (folder / checkpoint.MANIFEST).is_file():
        return checkpoint.read(folder)
    place = locate(str(path), runs_dir, str(which))
    return checkpoint.load(place.checkpoints, place.which)


def read_spec(saved: Checkpoint) -> PolicySpec:
    """Return the network of a checkpoint; FileError if its description is invalid."""
    return PolicySpec.from_json(saved.about.get("policy"), f"policy of {saved.path / checkpoint.POLICY}")


def actor_of(saved: Checkpoint, *, trust: bool = False) -> Actor:
    """Return the policy of a checkpoint, ready to act. FileError unless its weights are finite and fit its network;
    ConsentError if it names a module that this user has neither saved nor agreed to import."""
    spec, about = read_spec(saved), saved.about
    if spec.module and not trust and not signatures.made_here("policy", about["policy"], about.get(signatures.FIELD)):
        raise signatures.refusal(str(saved.path / checkpoint.POLICY), f"policy.module {show(spec.module)}")
    version = value_of(int, saved.about.get("version"), f"version of {saved.path / checkpoint.POLICY}")
    weights = str(saved.path / checkpoint.WEIGHTS)
    layout = statistics_layout(spec) | head_layout(spec) if spec.module else actor_layout(spec)
    check_weights(layout, saved.params, weights)  # before memory of these sizes is allocated
    actor = make_actor(spec)()
    if spec.module:
        check_weights(own_layout(actor), saved.params, weights)
    actor.load(Snapshot(version, saved.params))
    return actor


def own_layout(actor: Actor) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights of a user's module."""
    from freewheel.policies.nets import TorchActor

    assert isinstance(actor, TorchActor), "only these have modules"
    return {name: view.shape for name, view in actor.policy.net.params.views.items()}


def _inputs(spec: PolicySpec, layout: Layout) -> tuple[tuple[SpaceLeaf, ...], SpaceLeaf | None]:
    """Return the observation's parts that the policy reads, and its action mask. A user's module reads all parts."""
    parts, mask = layout.observation.parts, layout.observation.mask
    mask = mask or next((part for part in parts if part.kind == "mask"), None)
    read = ((0, spec.obs_size),) if spec.module else spec.actor_columns
    seen = [part for part in parts if any(part.start < stop and start < part.stop for start, stop in read)]
    return tuple(part for part in seen if part.kind != "mask"), mask


def _is_array(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _array(part: SpaceLeaf, value: Any) -> NDArray:
    if _is_array(value) and not isinstance(value, np.ndarray):
        value = value.detach().cpu()
    elif isinstance(value, list) and any(_is_array(one) for one in value):
        value = [_array(part, one) for one in value]
    try:
        array = np.asarray(value)
    except ValueError:
        raise BadObservationError(f"{part.name}: observations of different shapes in {short(value)}") from None
    if array.dtype.kind not in "biuf":
        raise BadObservationError(f"{part.name}: expected numbers of {part.space}, got {short(value)}")
    # The bytes of an image may arrive as another integer type, for example from a JSON message.
    whole = part.dtype == "uint8" and array.dtype.kind in "iu" and array.dtype != np.uint8
    return array.astype(np.uint8) if whole and array.size and array.min() >= 0 and array.max() <= 255 else array


def _lead(part: SpaceLeaf, array: NDArray) -> int | None:
    """Return the number of observations in an array; None for a single one."""
    if array.shape == part.shape:
        return None
    if array.ndim == len(part.shape) + 1 and array.shape[1:] == part.shape:
        return len(array)
    many = ", ".join(map(str, ("N", *part.shape)))
    wanted = f"{part.shape} or ({many}{',' if not part.shape else ''})"
    raise BadObservationError(f"{part.name}: expected shape {wanted}, got {array.shape}")


def _like(obs: Any, action: NDArray) -> Any:
    """Return the action, as a tensor on the observation's device if the observation is a tensor."""
    while isinstance(obs, Mapping | list | tuple) and obs:
        obs = next(iter(obs.values())) if isinstance(obs, Mapping) else obs[0]
    if isinstance(obs, np.ndarray) or not _is_array(obs):
        return action
    return sys.modules["torch"].as_tensor(action, device=obs.device)
