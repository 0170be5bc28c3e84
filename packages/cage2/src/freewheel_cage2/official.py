"""The evaluation protocol of CAGE Challenge 2 (30, 50 and 100 steps against each red agent) and published scores."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from freewheel.config.resolve import Config
from freewheel.core import Actor, NDArray
from freewheel.envs.gym import GymConfig
from freewheel.envs.legacy import GlobalRandom
from freewheel.envs.loop import GymLoop
from freewheel.errors import UsageError
from freewheel.files.terminal import Terminal
from freewheel.seeding import evaluation_episodes, generator
from freewheel_cage2 import cyborg, family
from freewheel_cage2.agents import DEFENDERS, defender
from freewheel_cage2.env import Cage2Vector
from freewheel_cage2.scenario import RED_AGENTS, STEPS

if TYPE_CHECKING:
    from freewheel.envs.family import EvaluatedRun

SEED = 153
LENGTHS = (30, 50, 100)
THIS = "this run"
ATTACKERS = RED_AGENTS[:2]  # the third agent does nothing
SIMPLE_EPISODES = 500  # episodes of each simple defender
OLDER = "older code"  # the code before two fixes in August 2022, which changed the scores of the same agents

#: Means over 1000 episodes by author and code: three lengths against B_lineAgent, three against RedMeanderAgent, the total.
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
class ScoreCell:
    """The episodes of one length against one red agent."""

    steps: int
    red_agent: str
    returns: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.returns)

    @property
    def spread(self) -> float:
        """The standard deviation as the challenge computes it; 0 for a single episode."""
        return statistics.stdev(self.returns) if len(self.returns) > 1 else 0.0


@dataclass(frozen=True)
class ScoreBoard:
    """All cells of the table in the order of play."""

    cells: tuple[ScoreCell, ...]
    episodes: int
    seed: int
    simulator: str = ""

    @property
    def total(self) -> float:
        """The sum of all means; the leader board ranks by it."""
        return sum(cell.mean for cell in self.cells)

    def to_json(self) -> dict[str, Any]:
        cells = [{**asdict(cell), "mean": cell.mean, "standard_deviation": cell.spread} for cell in self.cells]
        about = {"simulator": self.simulator, "seed": self.seed, "episodes": self.episodes}
        return {**about, "total": self.total, "cells": cells}


def report(run: EvaluatedRun, actor: Actor, episodes: int, seed: int) -> tuple[dict[str, Any], Table]:
    """Evaluate a run. Returns the contents of official.json and a table with the published scores."""

    def show(cell: ScoreCell) -> None:
        text = f"{cell.red_agent:16} {cell.steps:3} steps: mean {cell.mean:8.2f}, standard deviation {cell.spread:7.2f}"
        Terminal().print(text, soft_wrap=True)

    board = evaluate(run.config, actor, episodes, seed, show)
    return board.to_json(), leader_board(board)


def evaluate(
    config: Config, actor: Actor, episodes: int, seed: int = SEED, show: Callable[[ScoreCell], object] = str
) -> ScoreBoard:
    """Play the challenge's evaluation script with the greedy policy. As in the script, one random stream serves all envs."""
    stream, cells = GlobalRandom(seed), list[ScoreCell]()
    gc.freeze()
    try:
        for steps in LENGTHS:
            for red_agent in RED_AGENTS:
                with closing(_opened(on_simulator(config, red_agent, steps, stream), stream)) as env:
                    env.set_context(config.run.contexts)
                    returns = _returns(env, actor, episodes, steps)
                cells.append(ScoreCell(steps, red_agent, returns))
                show(cells[-1])
    finally:
        gc.unfreeze()
    return ScoreBoard(tuple(cells), episodes, seed, cyborg.package().name)


def on_simulator(config: Config, red_agent: str, steps: int, stream: GlobalRandom) -> GymConfig:
    """Return the environment of the run on the real simulator, as the protocol prescribes."""
    if not isinstance(config.env, GymConfig) or not family.serves(config.env.id):
        raise UsageError(f"--official is for runs on {family.REAL} or {family.FAST}, not {config.env.name}")
    kept = {name: value for name, value in config.env.args.items() if name != "green"}  # green sleeps in the challenge
    args = {**kept, "red_agent": red_agent, "stream": stream}
    return family.real(replace(config.env, args=args, max_episode_steps=steps, measures=()))


def _opened(world: GymConfig, stream: GlobalRandom) -> GymLoop:
    """Open a loop of one lane. It resets once to find the spaces. The protocol does not, so the stream is restored."""
    env = world.open(0)
    kept = stream.state
    loop = GymLoop([env], world.name, range(1))
    stream.state = kept
    return loop


def _returns(env: GymLoop, actor: Actor, episodes: int, steps: int) -> tuple[float, ...]:
    """Play episodes and return their returns. A reset follows every episode, including the last one."""
    rng, returns = generator(SEED, "greedy"), list[float]()
    obs: NDArray = env.reset([evaluation_episodes(SEED, 0, 1)])
    for _ in range(episodes):
        rewards = []
        for _ in range(steps):
            rewards.append(float(env.step(actor.act(obs, rng, greedy=True).action).reward[0]))
            obs = env.autoreset()
        returns.append(round(sum(rewards), 3))
    return tuple(returns)


def comparison(board: ScoreBoard) -> Sequence[tuple[str, tuple[float, ...]]]:
    """Return the authors (* for older code) with their scores: six means and the total. The best total comes first."""
    ours = (*(cell.mean for red in ATTACKERS for cell in board.cells if cell.red_agent == red), board.total)
    theirs = [(who + "*" * (code == OLDER), scores) for (who, code), scores in PUBLISHED.items()]
    return sorted([(THIS, ours), *theirs], key=lambda row: -row[1][-1])


def leader_board(board: ScoreBoard) -> Table:
    """Return a table of this run and the published scores."""
    table = Table(box=None, padding=(0, 1, 0, 0), caption=f"published: 1000 episodes each; * on {OLDER}")
    table.add_column("steps", no_wrap=True)
    for red in ATTACKERS:
        for steps in LENGTHS:
            table.add_column(f"{red.removeprefix('Red').removesuffix('Agent')}\n{steps}", justify="right", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    for who, scores in comparison(board):
        table.add_row(Text(who), *(f"{score:.1f}" for score in scores), style="bold" if who == THIS else "")
    return table


def comparison_table(config: Config, mean: float) -> Table:
    """Return a table of a run's mean return, simple defenders that are measured now, and published scores."""
    assert isinstance(config.env, GymConfig), "the fast environment has this type of config"
    red, steps = str(config.env.args["red_agent"]), config.env.max_episode_steps or STEPS
    scores = [(mean, THIS)]
    for name, who in DEFENDERS.items():
        scores.append((float(_simple_returns(name, red, steps, SIMPLE_EPISODES).mean()), f"{who}, measured now"))
    if red in ATTACKERS and steps in LENGTHS:
        column = ATTACKERS.index(red) * len(LENGTHS) + LENGTHS.index(steps)
        scores += [(row[column], f"{who}, published ({code})") for (who, code), row in PUBLISHED.items()]
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    table.add_column(justify="right")
    for score, who in sorted(scores, reverse=True):
        table.add_row(f"{score:.1f}", Text(who), style="bold" if who == THIS else "")
    return table


def _simple_returns(name: str, red_agent: str, steps: int, episodes: int) -> NDArray:
    """Return [episodes] the returns of a defender on the fast environment."""
    games, blue = Cage2Vector(episodes, red_agent, steps), defender(name, episodes)
    obs, _ = games.reset(seed=0)
    blue.begin(np.ones(episodes, np.bool_))
    total = np.zeros(episodes)
    for _ in range(steps):
        obs, reward, _, _, _ = games.step(blue.act(obs))
        total += reward
    return total
