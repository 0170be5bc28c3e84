"""Rows of a replay buffer: one packed row is one float32 vector, and a draw of rows is a minibatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from freewheel.core import TRANSITION_FIELDS, Transitions


class Batch(NamedTuple):
    """The parts of packed rows [..., width], in this order, float32."""

    obs: Tensor  # [..., D]
    action: Tensor  # [..., A]; a discrete action is its index, with A = 1
    reward: Tensor  # [...]
    terminated: Tensor  # [...]
    has_successor: Tensor  # [...] 1 where next_obs is the true successor, 0 where next_obs has no meaning
    next_obs: Tensor  # [..., D]


class ReplayMinibatch(NamedTuple):
    """The rows of one gradient step. The target of a row is reward + discount × the value of next_obs."""

    obs: Tensor  # [N, D]
    action: Tensor  # [N, A]
    reward: Tensor  # [N]
    discount: Tensor  # [N] the factor of the future value; 0 where the episode terminated
    next_obs: Tensor  # [N, D]
    weight: Tensor | None = None  # [N] weight of each row in the critics' loss, 1 on average; None: all are 1
    places: Tensor | None = None  # [k] replay buffer places of the first k rows, if their errors are needed

    @classmethod
    def of(cls, rows: Batch, gamma: float) -> ReplayMinibatch:
        """Return a minibatch of one-step rows."""
        discount = torch.rsub(rows.terminated, gamma, alpha=gamma)  # gamma × (1 - terminated)
        return cls(rows.obs, rows.action, rows.reward, discount, rows.next_obs)


class Drawn(NamedTuple):
    """Packed rows of a draw. A row over several steps holds the sum of their rewards and the end of the last step."""

    rows: Tensor  # [n, width]
    discount: Tensor | None = None  # [n] gamma to the power of the steps; None: every row is one step
    weight: Tensor | None = None  # see ReplayMinibatch
    places: Tensor | None = None

    def and_also(self, rows: Tensor, gamma: float) -> Drawn:
        """Return this draw with these one-step rows of weight 1 appended."""
        count = len(rows)
        discount = None if self.discount is None else functional.pad(self.discount, (0, count), value=gamma)
        weight = None if self.weight is None else functional.pad(self.weight, (0, count), value=1.0)
        return Drawn(torch.cat([self.rows, rows]), discount, weight, self.places)

    def minibatch(self, columns: Columns, gamma: float) -> ReplayMinibatch:
        rows = columns.split(self.rows)
        batch = ReplayMinibatch.of(rows, gamma)._replace(weight=self.weight, places=self.places)
        return batch if self.discount is None else batch._replace(discount=self.discount * (1 - rows.terminated))


def pack(
    obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, has_successor: Tensor, next_obs: Tensor
) -> Tensor:
    """Return packed rows [..., width]. Scalars and discrete actions are [...], of any dtype."""
    action = action if action.dim() == obs.dim() else action[..., None]
    scalars = torch.stack([part.float() for part in (reward, terminated, has_successor)], dim=-1)
    return torch.cat([obs.float(), action.float(), scalars, next_obs.float()], dim=-1)


@dataclass(frozen=True)
class Columns:
    """The layout of a packed row. Packing lets one gather draw all parts of a row."""

    obs_size: int  # D
    action_size: int  # A

    @property
    def width(self) -> int:
        return 2 * self.obs_size + self.action_size + 3

    def split(self, rows: Tensor) -> Batch:
        """Return named views of packed rows."""
        sizes = [self.obs_size, self.action_size, 1, 1, 1, self.obs_size]
        obs, action, reward, terminated, has_successor, next_obs = rows.split(sizes, dim=-1)
        return Batch(obs, action, reward.squeeze(-1), terminated.squeeze(-1), has_successor.squeeze(-1), next_obs)

    def pack(self, data: Transitions[Any], device: torch.device | str, *, has_final_obs: bool = True) -> Tensor:
        """Return the valid rows [n, width] of [T, B] transitions. has_final_obs: last rows have a successor."""
        host = isinstance(data.obs, np.ndarray)
        if host:  # tensors need no as_tensor call, and each call could hand the interpreter to another thread
            data = Transitions(*(torch.as_tensor(getattr(data, name)) for name in TRANSITION_FIELDS))
        known = torch.ones_like(data.reward) if has_final_obs else ~(data.terminated | data.truncated)
        rows = pack(data.obs, data.action, data.reward, data.terminated, known, data.next_obs).flatten(0, 1)
        if host and not data.valid.all():  # a batched simulator has no gaps, and a check would wait for the device
            rows = rows[data.valid.flatten()]
        return rows.to(device, non_blocking=True)
