"""Compliance: how far a defender's fixes follow an order of host types, and the reward for it.

A *fix* is a Remove or Restore. It *hits* if the type of its host is the first type in the order, of those on which red is
present just before the action. Which host of that type it is does not matter, nor whether the fix works. User0, red's permanent
foothold, never counts as taken. A fix while nothing is taken is a fix all the same, and there is nothing that it could hit.

Compliance is hits / fixes of the episode so far. Without a fix it is not applicable: NaN, never a number in between.

The alignment reward of a step is weight × (compliance after - compliance before), where compliance counts as 0 as long as it is
not applicable. So it sums to weight × final compliance over an episode, whatever came between.
"""

from __future__ import annotations

import numpy as np

from freewheel.core import NDArray
from freewheel.worlds.cage2.scenario import FOOTHOLD, HOST_OF, HOSTS, REMOVE, RESTORE, VERB_OF
from freewheel.worlds.cage2.workflow.orders import TYPE_OF_HOST, TYPES, ranks

FIXES = np.isin(VERB_OF, (REMOVE, RESTORE))  # [145]
NOTHING = len(TYPES)  # the place of the first taken type where none is taken


class Compliance:
    """The fixes of B lanes, each under its own order. A lane whose order is all zeros has none, and nothing is counted."""

    def __init__(self, lanes: int, weight: float) -> None:
        self._weight, self._lane = weight, np.arange(lanes)
        self.hits, self.fixes = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
        self._place = np.zeros((lanes, len(HOSTS)), np.int64)  # [B, 13] of each host's type in the lane's order
        self._ordered = np.zeros(lanes, np.bool_)
        self._taken = np.zeros((lanes, len(HOSTS)), np.bool_)  # [B, 13] before the next action

    def begin(self, lanes: NDArray, orders: NDArray, compromised: NDArray) -> None:
        """Episodes begin in these lanes [B] bool, under orders [B, 25], in a world as it is now [B, 13]."""
        self.hits[lanes] = self.fixes[lanes] = 0
        self._place[lanes] = ranks(orders[lanes])[:, TYPE_OF_HOST]
        self._ordered[lanes] = orders[lanes].any(axis=1)
        self._look(lanes, compromised)

    def judge(self, action: NDArray, compromised: NDArray) -> NDArray:
        """The alignment reward [B] of actions [B] that have left the world like this [B, 13]."""
        fixes = FIXES[action] & self._ordered
        first = np.where(self._taken, self._place, NOTHING).min(axis=1)
        before = self._potential()
        self.fixes += fixes
        self.hits += fixes & (self._place[self._lane, HOST_OF[action]] == first)
        self._look(slice(None), compromised)
        reward: NDArray = self._weight * (self._potential() - before)
        return reward

    @property
    def share(self) -> NDArray:
        """Hits / fixes [B], NaN where it is not applicable."""
        return np.where(self.fixes > 0, self._potential(), np.nan)

    def _potential(self) -> NDArray:
        return self.hits / np.maximum(self.fixes, 1)

    def _look(self, lanes: NDArray | slice, compromised: NDArray) -> None:
        self._taken[lanes] = compromised[lanes]
        self._taken[:, FOOTHOLD] = False
