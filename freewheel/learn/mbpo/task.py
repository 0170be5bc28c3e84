"""The facts that a simulator can declare to help the model, and the model's view of observations."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from freewheel.core import Slice
from freewheel.errors import SetupError, UsageError, nearest
from freewheel.learn.replay.rows import Columns, pack
from freewheel.policies.spec import Columns as Runs
from freewheel.policies.spec import select

MODEL_STATE = "model_state"  # a group of observations that neither actor nor critic reads
#: (obs [N, D], action [N, A] or discrete int64 [N], next_obs [N, D]) -> [N], bool for ends and float for rewards.
TaskFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class ModelTask:
    """The description of a simulator's observation group `model_state` [N, S], as its attribute `model_task`.

    A state must determine what happens next. By default, the model predicts the first `predicted` columns and reads the
    next `read` columns; columns that are not predicted stay constant in an episode. A subclass can define other
    coordinates (`encode` and `successor`), sensors that are computed instead of predicted (`observe`), and the task
    itself (`reward` and `termination`; the model learns those that are None). Actions are the policy's, between -1 and
    1. All functions run on the learner's device, which gets a copy if the simulator has another. They must not wait for
    it, and must accept any finite numbers.
    """

    predicted: int
    read: int = 0
    #: (state, action, next_state) -> [N], float for the reward and bool for the termination
    reward: TaskFunction | None = None
    termination: TaskFunction | None = None

    def encode(self, state: Tensor, frame: Tensor) -> Tensor:
        """Return a state in the model's coordinates [N, predicted + read], relative to `frame`: the state itself if it
        is an input, or the state before if it is a successor."""
        return state[:, : self.predicted + self.read]

    def successor(self, state: Tensor, action: Tensor, predicted: Tensor) -> Tensor:
        """Return the next state from its predicted coordinates [N, predicted], which are relative to this state."""
        return torch.cat((predicted, state[:, self.predicted :]), 1)

    def observe(self, state: Tensor) -> Mapping[str, Tensor]:
        """Return all other groups of an observation, [N, ...] by name."""
        raise NotImplementedError(f"{type(self).__name__} has no observe(state)")


def task_on(device: str, task: ModelTask) -> ModelTask:
    """Return a copy with all tensors on this device, for a learner on another device than the simulator."""
    try:
        with _MadeOn(device):
            return copy.deepcopy(task)
    except Exception as error:
        what = f"{type(task).__name__} cannot be copied to {device} ({error})"
        raise SetupError(f"{what}: give learner and simulator the same --device") from error


class _MadeOn(TorchFunctionMode):
    """Creates every tensor on this device, copies included."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.to(self._device) if isinstance(made, Tensor) else made


class View(Protocol):
    """The model's view of observations [N, D]: numbers [N, size], of which it predicts the first `predicted`."""

    @property
    def width(self) -> int: ...  # D
    @property
    def size(self) -> int: ...
    @property
    def predicted(self) -> int: ...
    # The view of an observation, relative to `frame`: itself for an input, the observation before for a successor.
    def encode(self, obs: Tensor, frame: Tensor) -> Tensor: ...
    def successor(self, obs: Tensor, action: Tensor, predicted: Tensor) -> Tensor: ...  # the next observation [N, D]


class NamedColumns:
    """Unchanged columns of an observation. The model predicts some, only reads others, and never sees the rest. Columns
    that are not predicted stay constant in a rollout. Columns of an action mask become 0 or 1: an action is allowed if
    its prediction is above 0.5 or the highest. Implements View."""

    def __init__(self, width: int, predicted: Runs, read: Runs = (), mask: tuple[int, int] | None = None) -> None:
        self.width, self._all, self._mask = width, predicted == ((0, width),), mask
        self._predicted, self._seen = predicted, (*predicted, *read)
        self.predicted, self.size = (sum(stop - start for start, stop in runs) for runs in (predicted, self._seen))

    def encode(self, obs: Tensor, frame: Tensor) -> Tensor:
        seen: Tensor = select(self._seen, obs)
        return seen

    def successor(self, obs: Tensor, action: Tensor, predicted: Tensor) -> Tensor:
        if self._all and self._mask is None:
            return predicted
        following = obs.clone()
        parts = predicted.split([stop - start for start, stop in self._predicted], -1)
        for (start, stop), part in zip(self._predicted, parts, strict=True):
            following[:, start:stop] = part
        if self._mask is not None:
            mask = following[:, slice(*self._mask)]
            mask.copy_((mask > 0.5) | (mask == mask.amax(-1, keepdim=True)))
        return following


def whole(width: int, mask: tuple[int, int] | None = None) -> NamedColumns:
    """Return a view in which all columns are predicted."""
    return NamedColumns(width, ((0, width),), mask=mask)


class StateColumns:
    """The state that a simulator's ModelTask describes. All other columns are computed from it. Implements View."""

    def __init__(self, task: ModelTask, slices: Sequence[Slice]) -> None:
        self._task, self._groups, self.width = task, [part.name for part in slices], slices[-1].stop
        self.predicted, self.size = task.predicted, task.predicted + task.read
        where = next((part for part in slices if part.name == MODEL_STATE), None)
        if where is None:
            known = ", ".join(self._groups)
            raise SetupError(f"the simulator has a model_task but observes no group '{MODEL_STATE}', only {known}")
        if type(task).observe is ModelTask.observe:
            missing = "observe(state), which computes the other groups of its observations"
            raise SetupError(f"{type(task).__name__} has no {missing}")
        self._state = slice(where.start, where.stop)

    def encode(self, obs: Tensor, frame: Tensor) -> Tensor:
        return self._task.encode(obs[:, self._state], frame[:, self._state])

    def successor(self, obs: Tensor, action: Tensor, predicted: Tensor) -> Tensor:
        state = self._task.successor(obs[:, self._state], action, predicted)
        groups = {**self._task.observe(state), MODEL_STATE: state}
        return torch.cat([groups[name].flatten(1) for name in self._groups], 1)

    def function(self, name: str) -> TaskFunction | None:
        """Return the task's reward or termination as a function of observations; None: the model learns it."""
        of_states: TaskFunction | None = getattr(self._task, name)
        if of_states is None:
            return None
        columns = self._state
        return lambda obs, action, next_obs: of_states(obs[:, columns], action, next_obs[:, columns])


def model_rows(view: View, columns: Columns, rows: Tensor) -> Tensor:
    """Return packed rows as the model sees them, as rows of Columns(view.size, columns.action_size)."""
    row = columns.split(rows)
    seen = view.encode(row.obs, row.obs)
    if seen is row.obs:
        return rows
    following = view.encode(row.next_obs, row.obs)
    return pack(seen, row.action, row.reward, row.terminated, row.has_successor, following)


def find_columns(option: str, names: Sequence[str], slices: Sequence[Slice]) -> Runs:
    """Return the columns of these names: a group of observations, or some of its columns as group[START:STOP]."""
    found = [_find(option, name, {part.name: part for part in slices}) for name in names]
    for (_, before), (after, _) in pairwise(sorted(found)):
        if after < before:
            raise UsageError(f"{option}: a column is named twice in {' '.join(names)}")
    return tuple(found)


def _find(option: str, name: str, groups: Mapping[str, Slice]) -> tuple[int, int]:
    ranged = re.fullmatch(r"(.+)\[(\d*):(\d*)\]", name)
    group, start, stop = ranged.groups() if ranged else (name, "", "")
    if group not in groups:
        raise UsageError(f"{option}: no observation is called '{group}'{nearest(group, groups)}")
    part = groups[group]
    width = part.stop - part.start
    first, end = int(start or 0), int(stop or width)
    if not 0 <= first < end <= width:
        raise UsageError(f"{option}: {name} is not a part of the {width} columns of {group}")
    return part.start + first, part.start + end
