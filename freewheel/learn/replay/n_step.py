"""N-step returns, which are computed from the one-step rows of a replay buffer whenever rows are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freewheel.core import Array, Transitions, to_numpy
from freewheel.learn.replay.rows import Batch

NONE = -1  # no row


class NStepReturn(NamedTuple):
    """The return over consecutive rows from each of k places."""

    reward: Tensor  # [k] sum of the discounted rewards
    discount: Tensor  # [k] gamma to the power of the number of rows
    last: Tensor  # [k] place of the last row


class Successors:
    """Links every place of a ring of rows to the next row of the same episode. The newest row of a lane and an
    episode's last row have no link. Rows are numbered from 0, and row r is at place r modulo the capacity.

    A successor is newer than its row, so it is stored at least as long. Nothing here waits for the device.
    """

    def __init__(self, capacity: int, lanes: int, device: str, *, steps: int, gamma: float) -> None:
        self.capacity, self.steps, self.gamma = capacity, steps, gamma
        # The additional last place takes writes for rows without a place.
        self._next = torch.full((capacity + 1,), NONE, device=device)
        self._newest = torch.full((lanes,), NONE, device=device)  # number of a lane's last row, if its episode is open

    def add(self, data: Transitions[Any], lane0: int, rows: Batch, first: int, ring: Batch) -> None:
        """Link these [T, B] transitions, which are the rows from number `first` on. The ring holds those that fit.

        A row follows another one if its observation equals that row's next_obs: nothing was lost between them. No row
        links to a truncated row without a known successor, because a return had better end at that row's observation.
        """
        if not len(rows.obs):  # only gaps
            self._newest[lane0 : lane0 + data.reward.shape[1]] = NONE
            return
        device, end, lanes = self._next.device, first + len(rows.obs), slice(lane0, lane0 + data.reward.shape[1])
        number = _numbers(data, first).to(device)
        terminated, truncated = (torch.as_tensor(part).to(device) for part in (data.terminated, data.truncated))
        ended, stranded = terminated | truncated, truncated & ~terminated
        newest = self._newest[lanes]
        before = torch.cat([newest[None], number[:-1]])
        went_on = torch.cat([torch.ones_like(ended[:1]), ~ended[:-1]])
        cell = (number - first).clamp(min=0)
        led_to = torch.cat([ring.next_obs[newest.clamp(min=0) % self.capacity][None], rows.next_obs[cell[:-1]]])
        follows = (before >= max(0, end - self.capacity)) & (number >= 0) & went_on
        follows &= (led_to == rows.obs[cell]).all(-1) & ~(stranded & (rows.has_successor[cell] == 0))
        new = torch.arange(max(first, end - self.capacity), end, device=device) % self.capacity
        self._next.index_fill_(0, new, NONE)
        place = torch.where(follows, before % self.capacity, self.capacity)
        self._next.index_copy_(0, place.flatten(), (number % self.capacity).flatten())
        self._newest[lanes] = torch.where(ended[-1], NONE, number[-1])

    def walk(self, index: Tensor, rewards: Tensor) -> NStepReturn:
        """Return the returns from the rows at places `index`. `rewards` are by place."""
        reward = rewards.index_select(0, index)
        discount = torch.full_like(reward, self.gamma)
        for _ in range(self.steps - 1):
            following = self._next.index_select(0, index)
            goes_on = following >= 0
            index = torch.where(goes_on, following, index)
            reward = torch.where(goes_on, reward + discount * rewards.index_select(0, index), reward)
            discount = torch.where(goes_on, discount * self.gamma, discount)
        return NStepReturn(reward, discount, index)

    def state_dict(self, first: int, end: int) -> dict[str, Array]:
        """Return the distance of each row in [first, end) to its successor; 0 means that there is none."""
        place = torch.arange(first, end, device=self._next.device) % self.capacity
        following = self._next[place]
        further = torch.where(following >= 0, (following - place) % self.capacity, 0).int()
        return {"further": to_numpy(further), "newest": to_numpy(self._newest).copy()}

    def load_state_dict(self, state: Mapping[str, Array], first: int, end: int) -> None:
        device = self._next.device
        further = torch.as_tensor(np.array(state["further"])).to(device)[len(state["further"]) - (end - first) :]
        number = torch.arange(first, end, device=device)
        self._next.fill_(NONE)
        self._next[number % self.capacity] = torch.where(further > 0, (number + further) % self.capacity, NONE)
        newest = torch.as_tensor(np.array(state["newest"])).to(device)[: len(self._newest)]
        self._newest.fill_(NONE)
        self._newest[: len(newest)] = newest


def _numbers(data: Transitions[Any], first: int) -> Tensor:
    """Return the row numbers [T, B] of the transitions, NONE for gaps. A batched simulator has no gaps."""
    if isinstance(data.valid, Tensor):
        return first + torch.arange(data.valid.numel(), device=data.valid.device).view(data.valid.shape)
    valid = torch.from_numpy(data.valid)
    return torch.where(valid, first - 1 + valid.flatten().cumsum(0).view(valid.shape), NONE)
