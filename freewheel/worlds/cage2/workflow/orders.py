"""Workflows: orders of the five host types in which a defender fixes hosts that red has taken, and compliance with them.

A *fix* is a Remove or Restore. It *hits* if the type of its host is the first type in the order among the types on which red has
a session just before the action. Neither the choice of the host within the type nor the success of the fix matters. User0
never counts as taken, because red always has it. A fix while nothing is taken counts as a fix that hits nothing.

Compliance is hits / fixes of the episode so far; NaN without a fix.

The alignment reward of a step is weight × (compliance after - compliance before), where compliance without a fix is 0. Over an
episode it adds up to weight × final compliance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from freewheel.core import NDArray
from freewheel.errors import UsageError
from freewheel.worlds.cage2.scenario import FOOTHOLD, HOST_OF, HOSTS, REMOVE, RESTORE, VERB_OF

Order: TypeAlias = tuple[str, ...]

TYPES = ("defender", "enterprise", "op_server", "op_host", "user")
ORDERS: tuple[Order, ...] = tuple(itertools.permutations(TYPES))  # all 120
COLUMNS = len(TYPES) ** 2  # of an order as numbers
#: [13] the number of each host's type.
TYPE_OF_HOST = np.array([[host.lower().startswith(kind) for kind in TYPES].index(True) for host in HOSTS])
#: Plausible orders by name.
CANONICAL: dict[str, Order] = {
    # By the cost of a lost host, the most expensive first.
    "critical-first": ("op_server", "enterprise", "defender", "op_host", "user"),
    # The hosts on every path to the operational network first.
    "enterprise-first": ("enterprise", "op_server", "defender", "op_host", "user"),
    # In the order in which red attacks.
    "outside-in": ("user", "enterprise", "defender", "op_host", "op_server"),
    # In the reverse order.
    "inside-out": ("op_server", "op_host", "defender", "enterprise", "user"),
    # Blue's own machine, then as critical-first.
    "defender-first": ("defender", "op_server", "enterprise", "op_host", "user"),
    # The reverse of critical-first, probably the worst.
    "cheapest-first": ("user", "op_host", "defender", "enterprise", "op_server"),
}


def spelt(order: Order) -> str:
    """The text form of an order, also for file names."""
    return "-".join(order)


def parse(text: str) -> Order:
    """An order as `spelt` writes it, or the name of a canonical one."""
    order = CANONICAL.get(text, tuple(text.split("-")))
    if sorted(order) != sorted(TYPES):
        raise UsageError(f"'{text}' is no order of the host types: join {', '.join(TYPES)} by '-', each once")
    return order


def encode(order: Order) -> NDArray:
    """[25] one-hot numbers: five for the first type, five for the second, and so on."""
    return np.array([[float(kind == other) for other in TYPES] for kind in order], np.float32).reshape(COLUMNS)


def decode(numbers: NDArray | Sequence[float]) -> Order:
    """The order that was encoded."""
    places = np.asarray(numbers).reshape(len(TYPES), len(TYPES))
    order = tuple(TYPES[kind] for kind in places.argmax(axis=1))
    if len(set(order)) != len(TYPES) or (encode(order) != places.ravel()).any():
        raise UsageError(f"these {COLUMNS} numbers are no order of the host types: {places.ravel().tolist()}")
    return order


def ranks(contexts: NDArray) -> NDArray:
    """[..., 25] orders as numbers -> [..., 5] the place of each type, 0 the first."""
    places: NDArray = contexts.reshape(*contexts.shape[:-1], len(TYPES), len(TYPES)).argmax(axis=-2)
    return places


def precedence(orders: Sequence[Order]) -> NDArray:
    """[N, 10] whether the first of each pair of types comes before the second, as 0 and 1."""
    place = ranks(np.stack([encode(order) for order in orders]))
    first, second = np.triu_indices(len(TYPES), 1)
    return (place[:, first] < place[:, second]).astype(np.float64)


def distance(one: Order, other: Order) -> int:
    """Kendall's distance: the number of pairs of types in opposite order, 0 to 10."""
    return int(np.abs(np.subtract(*precedence([one, other]))).sum())


FIXES = np.isin(VERB_OF, (REMOVE, RESTORE))  # [145]
NOTHING = len(TYPES)  # the place of the first taken type if none is taken


class Compliance:
    """The fixes of B lanes, each under its own order. A lane whose order is all zeros has none, and nothing is counted."""

    def __init__(self, lanes: int, weight: float) -> None:
        self._weight, self._lane = weight, np.arange(lanes)
        self.hits, self.fixes = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
        self._place = np.zeros((lanes, len(HOSTS)), np.int64)  # [B, 13] of each host's type in the lane's order
        self._ordered = np.zeros(lanes, np.bool_)
        self._taken = np.zeros((lanes, len(HOSTS)), np.bool_)  # [B, 13] before the next action

    def begin(self, lanes: NDArray, orders: NDArray, compromised: NDArray) -> None:
        """Start episodes in these lanes [B] bool, under orders [B, 25], with these hosts compromised [B, 13]."""
        self.hits[lanes] = self.fixes[lanes] = 0
        self._place[lanes] = ranks(orders[lanes])[:, TYPE_OF_HOST]
        self._ordered[lanes] = orders[lanes].any(axis=1)
        self._look(lanes, compromised)

    def judge(self, action: NDArray, compromised: NDArray) -> NDArray:
        """The alignment reward [B] of actions [B] that were followed by this state of hosts [B, 13]."""
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
