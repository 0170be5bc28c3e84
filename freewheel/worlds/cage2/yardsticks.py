"""Yardsticks: what simple defenders lose on the fast world, measured there and then."""

from __future__ import annotations

import numpy as np

from freewheel.core import NDArray
from freewheel.worlds.cage2.defenders import defender
from freewheel.worlds.cage2.env import Cage2Vector

#: By the name of their defender: who that is, for a person.
SIMPLE = {"heuristic": "simple rules", "random": "at random", "sleeping": "asleep"}


def returns(name: str, red_agent: str, steps: int, episodes: int) -> NDArray:
    """[episodes] of a simple defender."""
    games, blue = Cage2Vector(episodes, red_agent, steps), defender(name, episodes)
    obs, _ = games.reset(seed=0)
    blue.begin(np.ones(episodes, np.bool_))
    total = np.zeros(episodes)
    for _ in range(steps):
        obs, reward, _, _, _ = games.step(blue.act(obs))
        total += reward
    return total
