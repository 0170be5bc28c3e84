"""Greedy episodes of a policy: scored for the record, or shown to a person."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from freewheel.core import Actor, Env, NDArray
from freewheel.errors import EnvError
from freewheel.seeding import evaluation_episodes, generator


@dataclass(frozen=True)
class Score:
    """What greedy play is worth."""

    returns: tuple[float, ...]  # by episode number
    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def spread(self) -> float:
        return float(np.std(self.returns))


def evaluate(env: Env, actor: Actor, episodes: int, seed: int) -> Score:
    """Episodes 0 .. episodes-1 of this evaluation seed: the same worlds for every mode, algorithm and number of lanes."""
    lanes = env.spec.lanes
    share = [len(range(lane, episodes, lanes)) for lane in range(lanes)]  # lane plays episodes lane, lane + lanes, ...
    played: list[list[tuple[float, int]]] = [[] for _ in range(lanes)]
    total, length = np.zeros(lanes), np.zeros(lanes, np.int64)
    rng = generator(seed, "greedy")
    obs = env.reset([evaluation_episodes(seed, lane, lanes) for lane in range(lanes)])
    while any(len(done) < quota for done, quota in zip(played, share, strict=True)):
        step = env.step(actor.act(obs, rng, greedy=True).action)
        obs = step.obs
        total += np.where(step.valid, step.reward, 0)
        length += step.valid
        for lane in (step.terminated | step.truncated).nonzero()[0]:
            played[lane].append((float(total[lane]), int(length[lane])))
            total[lane], length[lane] = 0, 0
    outcomes = [played[number % lanes][number // lanes] for number in range(episodes)]
    score = Score(tuple(ret for ret, _ in outcomes), tuple(steps for _, steps in outcomes))
    if not np.isfinite(score.returns).all():
        number = int(np.argmin(np.isfinite(score.returns)))
        who = f"evaluation episode {number} of {env.spec.name}, seed {evaluation_episodes(seed, number, 1).seed(0)},"
        raise EnvError(f"{who} has return {score.returns[number]}: check the env for NaN and inf")
    return score


Show = Callable[["NDArray | str | None"], None]


def play(env: Env, actor: Actor, episode: tuple[int, int], show: Show) -> Sequence[float]:
    """Episode (evaluation seed, number) in a one-lane env, every picture of it shown; returns the rewards."""
    seed, number = episode
    rng = generator(seed, "greedy")
    obs = env.reset([evaluation_episodes(seed, number, 1)])
    rewards: list[float] = []
    ended = False
    show(env.render())
    while not ended:
        step = env.step(actor.act(obs, rng, greedy=True).action)
        obs = step.obs
        rewards.append(float(step.reward[0]))
        ended = bool(step.terminated[0] or step.truncated[0])
        if not ended:  # afterwards the env already shows its next episode
            show(env.render())
    return rewards
