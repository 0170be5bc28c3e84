"""Returns over several steps: put together from the one-step rows of a replay buffer whenever they are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freewheel.core import Array, Transitions, to_numpy

if TYPE_CHECKING:
    from freewheel.learn.replay import Batch

NONE = -1  # no row


class NStepReturn(NamedTuple):
    """Of the consecutive rows that begin at each of k places."""

    reward: Tensor  # [k] the sum of their discounted rewards
    discount: Tensor  # [k] gamma to the power of how many they are
    last: Tensor  # [k] the place of the last of them


class Successors:
    """For every place of a ring of rows: where the next row of the same episode is. The newest row of a lane has none, nor has
    the last one of an episode. Rows are numbered from 0, and row r is at place r modulo the capacity.

    A successor is newer than its row, so it is stored as long as that one is. Nothing here waits for the device.
    """

    def __init__(self, capacity: int, lanes: int, device: str, *, steps: int, gamma: float) -> None:
        self.capacity, self.steps, self.gamma = capacity, steps, gamma
        # One place more than the ring has: it takes what has no place.
        self._next = torch.full((capacity + 1,), NONE, device=device)
        self._newest = torch.full((lanes,), NONE, device=device)  # number of a lane's last row, if its episode goes on

    def add(self, data: Transitions[Any], lane0: int, rows: Batch, first: int, ring: Batch) -> None:
        """These [T, B] transitions are the rows from number `first` on, and have been stored in the ring as far as they fit.

        A row follows another one if its observation is what that one led to, so nothing was lost between them. One that the
        time limit ended and whose true successor is not known is left out: its own observation is the better end.
        """
        if not len(rows.obs):  # gaps alone
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
        """From the rows at these places; rewards are by place."""
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
        """Of the rows with these numbers: how many numbers further the next one is; 0: there is none."""
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
    """Of the rows that the transitions [T, B] become, NONE for gaps; those of a batched simulator have none."""
    if isinstance(data.valid, Tensor):
        return first + torch.arange(data.valid.numel(), device=data.valid.device).view(data.valid.shape)
    valid = torch.from_numpy(data.valid)
    return torch.where(valid, first - 1 + valid.flatten().cumsum(0).view(valid.shape), NONE)
