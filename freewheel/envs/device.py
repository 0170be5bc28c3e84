"""Presents a simulator that is batched on its device (Isaac Lab, mjlab, our own) as an Env of torch tensors."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from freewheel.core import ActionSpec, Env, EnvSpec, NDArray, SeedStream, Slice, Step
from freewheel.envs.lane import raised
from freewheel.errors import EnvError, FreewheelError, SetupError
from freewheel.policies.layout import Actions, BadObservationError, Layout, Observations, SpaceLeaf

Path: TypeAlias = tuple[str, ...]

POLICY_GROUPS = ("policy", "actor")  # names of the policy's observations in Isaac Lab and mjlab


class DeviceEnv(Env[Tensor]):
    """An Env over a simulator with the interface of Isaac Lab: all lanes are one simulation, `step` takes and returns tensors,
    lanes that end are reset in the same step, and returned tensors may be overwritten by the next step.

    All results are copied into our tensors with fixed addresses, and only `reset` waits for the device. A simulator
    with `"capturable": True` in its metadata can therefore be captured in a CUDA graph together with this code.

    `bounds` sets the range of unbounded action columns to ±bounds; `clip` leaves them unbounded for the policy and clips the
    simulator's actions to ±clip.
    """

    def __init__(
        self,
        simulator: Any,
        name: str,
        bounds: float | None = None,
        clip: float | None = None,
        *,
        one_per_process: bool = False,
    ) -> None:
        self._simulator, self._bare, self._name = simulator, getattr(simulator, "unwrapped", simulator), name
        lanes, self._device = int(self._bare.num_envs), _numbered(torch.device(self._bare.device))
        self._columns = _Columns(_space(self._bare, "observation"), name)
        self._actions = _Actions(_space(self._bare, "action"), name, bounds, clip, self._device)
        self._finals = bool(getattr(getattr(self._bare, "cfg", self._bare), "compute_final_obs", False))
        # Isaac Lab's first reset after creation differs from every later one with the same seed.
        with self._errors_in("its first reset"):
            _, extras = simulator.reset(seed=0)
        self._spec = EnvSpec(
            name=name,
            lanes=lanes,
            obs_size=self._columns.size,
            obs_dtype="float32",
            slices=self._columns.slices,
            action=self._actions.spec,
            device=str(self._device),
            measures=tuple(extras.get("measures", ())),
            one_per_process=one_per_process,
            batched_on_device=True,
            has_final_obs=self._finals,
            layout=Layout(Observations("float32", self._columns.parts), self._actions.layout).to_json(),
            model_task=getattr(self._bare, "model_task", None),
        )
        self._step = _blank_step(self._spec)
        self._obs = torch.zeros_like(self._step.next_obs)  # [B, D] what to act on next

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    @property
    def capturable(self) -> bool:
        return bool(getattr(self._bare, "metadata", {}).get("capturable"))

    @property
    def generators(self) -> list[torch.Generator]:
        """The simulator's generators, which a CUDA graph must register."""
        return [self._bare.generator] if hasattr(self._bare, "generator") else []

    def state_tensors(self) -> list[Tensor]:
        """Return every tensor that a step changes: ours, and the tensors that the simulator lists."""
        step = self._step
        ours = [step.reward, step.terminated, step.truncated, step.next_obs, step.measures, self._obs]
        return [*ours, *self._bare.state_tensors()] if hasattr(self._bare, "state_tensors") else ours

    def set_context(self, context: NDArray) -> None:
        """Accept only an empty table, because all episodes share one seed."""
        self._spec.check_context(context)

    def reset(self, seeds: Sequence[SeedStream]) -> Tensor:
        """Reset all lanes with one seed, the first lane's; later episodes take no seed."""
        with self._errors_in("reset()"):
            seen, _ = self._simulator.reset(seed=seeds[0].seed(0))
            self._columns.write(self._columns.read(seen), self._obs)
        return self._obs

    def step(self, action: Tensor) -> Step[Tensor]:
        with self._errors_in("step()"):
            self._convert(*self._simulator.step(self._actions.encode(action)))
        return self._step

    def autoreset(self) -> Tensor:
        return self._obs

    def _convert(
        self, seen: Any, reward: Tensor, terminated: Tensor, truncated: Tensor, extras: Mapping[str, Any]
    ) -> None:
        step = self._step
        _copy("reward", reward, step.reward)
        _copy("terminated", terminated, step.terminated)
        _copy("truncated", truncated, step.truncated)
        step.truncated.logical_and_(~step.terminated)
        for column, name in enumerate(self._spec.measures):
            _copy(f"measure {name}", extras["measures"][name], step.measures[:, column])
        # A final observation stays in extras after its step, so it is used only where an episode ended in this step. Without
        # one, the observation that was acted on replaces it, never an observation of the next episode.
        leaves = self._columns.read(seen)
        if self._finals and "final_obs" in extras:
            final = self._columns.read(extras["final_obs"])
            if any(here.data_ptr() == there.data_ptr() != 0 for here, there in zip(leaves, final, strict=True)):
                raise BadObservationError(
                    "final_obs uses the same memory as the observation after the reset: return separate tensors"
                )
            self._columns.write(final, step.next_obs)
        else:
            step.next_obs.copy_(self._obs)
        self._columns.write(leaves, self._obs)
        over = (step.terminated | step.truncated)[:, None]  # [B, 1]
        torch.where(over, step.next_obs, self._obs, out=step.next_obs)

    @contextmanager
    def _errors_in(self, where: str) -> Iterator[None]:
        try:
            yield
        except FreewheelError:
            raise
        except BadObservationError as error:
            raise EnvError(f"{self._name} gave a wrong answer in {where}: {error}", "shape") from error
        except Exception as error:
            if self.capturable:  # the code that captures it needs the original error
                raise
            raise raised(self._name, error, f"in {where}") from error

    def render(self) -> Any:
        return self._simulator.render() if getattr(self._bare, "render_mode", None) else None

    def close(self) -> None:
        self._simulator.close()


def _blank_step(spec: EnvSpec) -> Step[Tensor]:
    """Allocate the tensors of a Step, which are reused at every step."""
    lanes, device = spec.lanes, spec.device
    return Step(
        reward=torch.zeros(lanes, device=device),
        terminated=torch.zeros(lanes, dtype=torch.bool, device=device),
        truncated=torch.zeros(lanes, dtype=torch.bool, device=device),
        next_obs=torch.zeros(lanes, spec.obs_size, device=device),
        valid=torch.ones(lanes, dtype=torch.bool, device=device),
        measures=torch.zeros(lanes, len(spec.measures), device=device),
    )


def _space(simulator: Any, kind: str) -> Any:
    """Return the space of one lane. Only its attributes are used, because mjlab has its own classes of spaces."""
    space = getattr(simulator, f"single_{kind}_space", None)
    return getattr(simulator, f"{kind}_space") if space is None else space


def _copy(what: str, value: object, out: Tensor) -> None:
    """Copy into one of our tensors, without broadcasting."""
    if not isinstance(value, Tensor) or value.shape != out.shape:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise BadObservationError(f"{what}: expected a tensor of shape {tuple(out.shape)}, got {got}")
    out.copy_(value)


class _Columns:
    """The groups of an observation as columns: the policy's first, the critic's second, then the others in their order."""

    def __init__(self, space: Any, name: str) -> None:
        groups: Mapping[str, Any] = getattr(space, "spaces", {})
        named = {"policy" if key in POLICY_GROUPS else key: key for key in groups}
        if groups and "policy" not in named:
            raise SetupError(f"{name} observes {', '.join(groups)}: one group must be named {POLICY_GROUPS[0]}")
        first = {"policy": 0, "critic": 1}
        order = sorted(named, key=lambda group: first.get(group, len(first)))
        self.parts: tuple[SpaceLeaf, ...] = ()
        slices: list[Slice] = []
        for group in order or ["policy"]:
            start = self.size
            path: Path = (named[group],) if groups else ()
            leaves = list(_leaves(groups[path[0]] if path else space, path))
            for leaf, shape in leaves:
                text, stop = f"an array {shape}", self.size + math.prod(shape)
                self.parts = (*self.parts, SpaceLeaf(leaf, "copy", text, shape, self.size, stop))
            whole = leaves[0][1] if len(leaves) == 1 else (self.size - start,)
            slices.append(Slice(group, start, self.size, whole))
        self.slices = tuple(slices)

    @property
    def size(self) -> int:
        return self.parts[-1].stop if self.parts else 0

    def read(self, observation: Any) -> list[Tensor]:
        """Return the tensors of an observation of all lanes, in the order of their columns."""
        try:
            return [functools.reduce(operator.getitem, part.path, observation) for part in self.parts]
        except (KeyError, TypeError) as error:
            raise BadObservationError(f"{error} is missing from the observation") from None

    def write(self, leaves: Sequence[Tensor], out: Tensor) -> None:
        """Copy the tensors into `out` [B, D]."""
        for leaf, part in zip(leaves, self.parts, strict=True):
            columns = out[:, part.start : part.stop].view(-1, *part.shape)
            _copy(part.name if part.path else "observation", leaf, columns)


def _leaves(space: Any, path: Path) -> Iterator[tuple[Path, tuple[int, ...]]]:
    inner = getattr(space, "spaces", None)
    if inner is None:
        yield path, tuple(map(int, space.shape))
    else:
        for key, part in inner.items():
            yield from _leaves(part, (*path, key))


class _Actions:
    """Our actions, and their conversion to the simulator's."""

    def __init__(self, space: Any, name: str, bounds: float | None, clip: float | None, device: torch.device) -> None:
        if not hasattr(space, "low"):
            raise SetupError(f"{name} has the action space {space}: only Box is supported for simulators on a device")
        self._shape, self._device = tuple(map(int, space.shape)), device
        low, high = (np.broadcast_to(side, self._shape).reshape(-1) for side in (space.low, space.high))
        low, high = _filled(low, high, bounds)
        bounded = np.isfinite(low) & np.isfinite(high)
        inside = np.where(bounded, 1.0, np.inf)
        self.spec = ActionSpec("box", low.size, tuple((-inside).tolist()), tuple(inside.tolist()))
        limits = _filled(low, high, clip)
        self.layout = Actions(self.spec, self._shape, "float32", *(tuple(map(float, side)) for side in limits))
        columns = (*self.layout.affine, *limits)
        self._half, self._centre, self._low, self._high = (
            torch.tensor(column, dtype=torch.float32, device=device) for column in columns
        )

    def encode(self, action: Tensor) -> Tensor:
        """Convert [B, A] to a new tensor [B, ...]. The simulator may keep it, except in a CUDA graph."""
        value = action.detach().to(self._device, torch.float32) * self._half + self._centre
        return value.clamp_(self._low, self._high).view(-1, *self._shape)


def _numbered(device: torch.device) -> torch.device:
    """Return the device with its GPU number, because "cuda" may mean another GPU in another thread."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _filled(low: NDArray, high: NDArray, limit: float | None) -> tuple[NDArray, NDArray]:
    """Replace infinite bounds with ±limit."""
    if limit is None:
        return low, high
    return np.where(np.isfinite(low), low, -limit), np.where(np.isfinite(high), high, limit)
