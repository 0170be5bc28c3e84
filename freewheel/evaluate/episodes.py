"""Greedy episodes of a policy: scored for the record, or shown to a person."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import numpy as np

from freewheel.core import NO_CONTEXT, Actor, Env, NDArray, Snapshot
from freewheel.errors import EnvError
from freewheel.rollout.factory import RunnerFactory
from freewheel.seeding import drawn, evaluation_episodes, generator

In = ParamSpec("In")
Out = TypeVar("Out")

LIMIT = 10_000  # steps: a greedy policy may go round in circles for ever in a world without a time limit


@dataclass(frozen=True)
class Score:
    """What greedy play is worth."""

    returns: tuple[float, ...]  # by episode number
    lengths: tuple[int, ...]
    cut: int = 0  # episodes that had not ended at the limit and count as far as they went
    measures: Mapping[str, float] = field(
        default_factory=dict
    )  # means over the episodes that ended and have them (NaN: not)
    contexts: tuple[tuple[float, ...], ...] = ()  # by episode number, where they were told any

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def spread(self) -> float:
        return float(np.std(self.returns))


def playable(env: Env[Any]) -> Env:
    """Whatever it computes with, as numpy."""
    if not env.spec.batched_on_device:
        return env
    from freewheel.rollout.device_runner import as_numpy

    return as_numpy(env)


def evaluate(
    env: Env, actor: Actor, episodes: int, seed: int, limit: int = LIMIT, context: NDArray = NO_CONTEXT
) -> Score:
    """Episodes 0 .. episodes-1 of this evaluation seed: the same worlds, and the same draws from these contexts [K, C], for
    every mode, algorithm and number of lanes."""
    env.set_context(context)
    returns: list[float] = []
    lengths: list[int] = []
    cut = 0
    measured: list[NDArray] = []
    for first in range(0, episodes, env.spec.lanes):
        wanted = min(env.spec.lanes, episodes - first)
        ret, length, playing, measures = _round(env, actor, (seed, first), wanted, limit)
        returns += ret[:wanted].tolist()
        lengths += length[:wanted].tolist()
        cut += int(np.count_nonzero(playing[:wanted]))
        measured += list(measures[:wanted][~playing[:wanted]])
    if not np.isfinite(returns).all():
        number = int(np.argmin(np.isfinite(returns)))
        who = f"evaluation episode {number} of {env.spec.name}, seed {evaluation_episodes(seed, number, 1).seed(0)},"
        raise EnvError(f"{who} has return {returns[number]}: check the env for NaN and inf", "nan")
    means = [_mean([value for value in own if not math.isnan(value)]) for own in np.transpose(measured).tolist()]
    seeds = [evaluation_episodes(seed, number, 1).seed(0) for number in range(episodes if context.size else 0)]
    told = tuple(tuple(drawn(context, episode).tolist()) for episode in seeds)
    return Score(tuple(returns), tuple(lengths), cut, dict(zip(env.spec.measures, means, strict=False)), told)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _round(env: Env, actor: Actor, start: tuple[int, int], wanted: int, limit: int) -> tuple[NDArray, ...]:
    """One episode a lane, from number start[1] of seed start[0] on, until the first `wanted` have ended or are at the limit.

    Returns [B] each: return, length, whether the episode still goes on, and its measures [B, M].
    """
    lanes, (seed, first) = env.spec.lanes, start
    total, length, playing = np.zeros(lanes), np.zeros(lanes, np.int64), np.ones(lanes, np.bool_)
    measures = np.zeros((lanes, len(env.spec.measures)), np.float32)
    rng = generator(seed, "greedy")
    obs = env.reset([evaluation_episodes(seed, first + lane, lanes) for lane in range(lanes)])
    for _ in range(limit):
        step = env.step(actor.act(obs, rng, greedy=True).action)
        counts = playing & step.valid
        np.add(total, step.reward, out=total, where=counts)
        length += counts
        over = step.terminated | step.truncated
        np.copyto(measures, step.measures, where=(playing & over)[:, None])
        playing &= ~over
        if not playing[:wanted].any():
            break
        obs = env.autoreset()
    return total, length, playing, measures


@dataclass(frozen=True)
class EvalSpec:
    """What an evaluation plays."""

    episodes: int
    seed: int
    limit: int = LIMIT
    lanes: int = 8
    patience: tuple[float, float] | None = (
        None  # seconds that a reset and a step may take; only where that may be deadly
    )


def evaluator(recipe: RunnerFactory, eval_spec: EvalSpec) -> Callable[[Snapshot], Score]:
    """Plays snapshots, in whatever process this is called in."""
    env, actor = recipe.make(range(min(eval_spec.episodes, eval_spec.lanes))), recipe.actor()
    if eval_spec.patience is not None:
        env = _Timed(env, *eval_spec.patience)

    def score(snapshot: Snapshot) -> Score:
        actor.load(snapshot)
        return evaluate(env, actor, eval_spec.episodes, eval_spec.seed, eval_spec.limit, snapshot.context)

    return score


class _Timed:
    """An Env that takes its process along when it hangs: the kernel's alarm ends it, whatever it is doing."""

    def __init__(self, env: Env, reset: float, step: float) -> None:
        self.spec, self.set_context, self.render, self.close = env.spec, env.set_context, env.render, env.close
        self.reset, self.autoreset = self._within(env.reset, reset), self._within(env.autoreset, reset)
        self.step = self._within(env.step, step)

    @staticmethod
    def _within(call: Callable[In, Out], seconds: float) -> Callable[In, Out]:
        def timed(*args: In.args, **kwargs: In.kwargs) -> Out:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                return call(*args, **kwargs)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

        return timed


Show = Callable[["NDArray | str | None"], None]


def play(
    env: Env, actor: Actor, episode: tuple[int, int], show: Show, limit: int = LIMIT, context: NDArray = NO_CONTEXT
) -> Sequence[float]:
    """Episode (evaluation seed, number) in a one-lane env, a picture shown at its start and after every action; the rewards."""
    env.set_context(context)
    seed, number = episode
    rng = generator(seed, "greedy")
    obs = env.reset([evaluation_episodes(seed, number, 1)])
    rewards: list[float] = []
    show(env.render())
    while len(rewards) < limit:
        step = env.step(actor.act(obs, rng, greedy=True).action)
        rewards.append(float(step.reward[0]))
        show(env.render())
        if step.terminated[0] or step.truncated[0]:
            break
        obs = step.next_obs
    return rewards
