"""CAGE Challenge 2's own evaluation: 30, 50 and 100 steps against each red agent on the real simulator, all from one seed."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from freewheel.config.resolve import Config
from freewheel.core import Actor, NDArray
from freewheel.envs.gym import GymConfig
from freewheel.envs.loop import GymLoop
from freewheel.errors import UsageError
from freewheel.seeding import evaluation_episodes, generator
from freewheel.worlds.cage2 import cyborg
from freewheel.worlds.cage2.global_random import GlobalRandom
from freewheel.worlds.cage2.scenario import RED_AGENTS

SEED = 153
LENGTHS = (30, 50, 100)
THIS = "this run"
RIVALS = RED_AGENTS[:2]  # the third does nothing
OLDER = "older code"  # before two fixes of August 2022, after which the same agents score otherwise

#: 1000 episodes each, by who scored it and on which code: B_lineAgent at 30, 50 and 100 steps, RedMeanderAgent, the total.
PUBLISHED: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("CardiffUni, 1st", OLDER): (-3.47, -6.41, -13.76, -5.64, -8.69, -16.6, -54.57),
    ("Keeping it RL, 2nd", OLDER): (-3.48, -5.85, -11.39, -6.47, -10.33, -19.38, -56.9),
    ("Mindrake, 3rd", OLDER): (-3.53, -6.2, -12.78, -6.76, -10.13, -17.65, -57.05),
    ("Keeping it RL, PPO", OLDER): (-4.76, -8.13, -17.19, -8.03, -12.91, -22.94, -73.98),
    ("CardiffUni", "later code"): (-5.35, -12.96, -36.89, -5.54, -8.82, -16.47, -86.03),
    ("organisers' PPO", OLDER): (-8.75, -14.92, -30.19, -7.31, -12.04, -22.21, -95.47),
    ("React-Restore", OLDER): (-58.83, -93.05, -184.34, -44.29, -85.75, -192.63, -823.89),
    ("random", OLDER): (-154.06, -347.1, -726.92, -33.43, -171.49, -566.41, -2015.61),
    ("sleeping", OLDER): (-218.65, -480.17, -1134.03, -39.31, -267.6, -972.43, -3112.2),
}


@dataclass(frozen=True)
class Cell:
    """Episodes of one length against one red agent."""

    steps: int
    red_agent: str
    returns: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.returns)

    @property
    def spread(self) -> float:
        """Standard deviation, as the challenge computes it; 0 where there is one episode."""
        return statistics.stdev(self.returns) if len(self.returns) > 1 else 0.0


@dataclass(frozen=True)
class Board:
    """All cells, in the order in which they were played."""

    cells: tuple[Cell, ...]
    episodes: int
    seed: int
    simulator: str = ""

    @property
    def total(self) -> float:
        """What the leader board ranks by: the sum of all means."""
        return sum(cell.mean for cell in self.cells)

    def against(self, red_agent: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.red_agent == red_agent]

    def to_json(self) -> dict[str, Any]:
        cells = [{**asdict(cell), "mean": cell.mean, "standard_deviation": cell.spread} for cell in self.cells]
        about = {"simulator": self.simulator, "seed": self.seed, "episodes": self.episodes}
        return {**about, "total": self.total, "cells": cells}


def examine(
    config: Config, actor: Actor, episodes: int, seed: int = SEED, tell: Callable[[Cell], object] = str
) -> Board:
    """The challenge's script with this policy, greedy: one stream of numbers for all that is built, reset and stepped."""
    dice, cells = GlobalRandom(seed), list[Cell]()
    gc.freeze()
    try:
        for steps in LENGTHS:
            for red_agent in RED_AGENTS:
                env = _opened(real(config, red_agent, steps, dice), dice)
                with closing(env):
                    env.set_context(config.run.contexts)
                    returns = _returns(env, actor, episodes, steps)
                cells.append(Cell(steps, red_agent, returns))
                tell(cells[-1])
    finally:
        gc.unfreeze()
    return Board(tuple(cells), episodes, seed, cyborg.package().name)


def real(config: Config, red_agent: str, steps: int, dice: GlobalRandom) -> GymConfig:
    """The run's own world with the real simulator in it, and what else the protocol asks for."""
    if not isinstance(config.env, GymConfig) or not cyborg.plays(config.env.id):
        raise UsageError(f"--official is for runs on {cyborg.REAL} or {cyborg.FAST}, not {config.env.name}")
    kept = {name: value for name, value in config.env.args.items() if name != "green"}  # who is asleep in the challenge
    args = {**kept, "red_agent": red_agent, "dice": dice}
    world = replace(config.env, id=cyborg.REAL, factory=cyborg.UNLIMITED)
    return replace(world, args=args, max_episode_steps=steps, measures=())


def _opened(world: GymConfig, dice: GlobalRandom) -> GymLoop:
    """A loop of one lane, which has looked at a reset; the protocol has not, so that does not count."""
    env = world.open(0)
    kept = dice.state
    loop = GymLoop([env], world.name, range(1))
    dice.state = kept
    return loop


def _returns(env: GymLoop, actor: Actor, episodes: int, steps: int) -> tuple[float, ...]:
    """Of so many episodes one after the other; the last is followed by a reset like the others."""
    rng, returns = generator(SEED, "greedy"), list[float]()
    obs: NDArray = env.reset([evaluation_episodes(SEED, 0, 1)])
    for _ in range(episodes):
        rewards = []
        for _ in range(steps):
            rewards.append(float(env.step(actor.act(obs, rng, greedy=True).action).reward[0]))
            obs = env.autoreset()
        returns.append(round(sum(rewards), 3))
    return tuple(returns)


def comparison(board: Board) -> Sequence[tuple[str, tuple[float, ...]]]:
    """Who (on older code *), and what they scored: six means and the total, the best total first."""
    ours = (*(cell.mean for red in RIVALS for cell in board.against(red)), board.total)
    theirs = [(who + "*" * (code == OLDER), scores) for (who, code), scores in PUBLISHED.items()]
    return sorted([(THIS, ours), *theirs], key=lambda row: -row[1][-1])
