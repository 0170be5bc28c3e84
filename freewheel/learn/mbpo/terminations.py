"""When episodes in the model end: the rules of Gymnasium's MuJoCo tasks (v5, default arguments), and users' functions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from freewheel.errors import SetupError

#: (obs [N, D], action [N, A], next_obs [N, D]) -> [N], bool for ends and float for rewards.
TaskFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

POLE = 0.6  # metres, each of the double pendulum's two


def never(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    return torch.zeros(len(next_obs), dtype=torch.bool, device=next_obs.device)


def hopper(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    """Columns: height, angle, joints, velocities (the task limits these to ±100, but shows them clipped to ±10)."""
    height, angle, state = next_obs[:, 0], next_obs[:, 1], next_obs[:, 1:]
    return ~((height > 0.7) & (height < torch.inf) & (angle.abs() < 0.2) & (state.abs() < 100).all(-1))


def walker2d(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    height, angle = next_obs[:, 0], next_obs[:, 1]
    return ~((height > 0.8) & (height < 2.0) & (angle.abs() < 1.0))


def inverted_pendulum(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    return ~next_obs.isfinite().all(-1) | (next_obs[:, 1].abs() > 0.2)


def inverted_double_pendulum(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    """Columns: cart, sines of both hinges, their cosines, ...; the second hinge turns relative to the first pole."""
    (sine, sine2), (cosine, cosine2) = next_obs[:, 1:3].unbind(-1), next_obs[:, 3:5].unbind(-1)
    tip = POLE * (cosine + cosine * cosine2 - sine * sine2)
    return tip <= 1


def ant(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    height = next_obs[:, 0]
    return ~(next_obs.isfinite().all(-1) & (height >= 0.2) & (height <= 1.0))


def humanoid(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    height = next_obs[:, 0]
    return ~((height > 1.0) & (height < 2.0))


RULES: Mapping[str, TaskFunction] = {
    "Ant-v5": ant,
    "HalfCheetah-v5": never,
    "Hopper-v5": hopper,
    "Humanoid-v5": humanoid,
    "HumanoidStandup-v5": never,
    "InvertedDoublePendulum-v5": inverted_double_pendulum,
    "InvertedPendulum-v5": inverted_pendulum,
    "Pendulum-v1": never,
    "Pusher-v5": never,
    "Reacher-v5": never,
    "Swimmer-v5": never,
    "Walker2d-v5": walker2d,
}


def rule(name: str, env: str) -> TaskFunction | None:
    """The function that mbpo.termination means for this env id; None: learn it."""
    if name == "auto":
        return RULES.get(env)
    if name == "learned":
        return None
    return never if name == "never" else task_function("mbpo.termination", name)


def task_function(option: str, place: str) -> TaskFunction:
    """The user's package.module:function."""
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(f"{option} '{place}' cannot be imported ({error}); write package.module:function") from None
    if not callable(found):
        raise SetupError(f"{option} '{place}' is a {type(found).__name__}; name a function of (obs, action, next_obs)")
    function: TaskFunction = found
    return function
