"""Greedy episodes of a policy, scored or shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from freewheel.core import NO_CONTEXT, Actor, Env, EnvSpec, NDArray, Step
from freewheel.errors import EnvError
from freewheel.seeding import drawn, evaluation_episodes, generator

if TYPE_CHECKING:  # evaluation processes do not need it
    from freewheel.envs.family import EnvConfig

Out = TypeVar("Out")
Show = Callable[["NDArray | str | None"], None]
Call: TypeAlias = tuple[
    Literal["reset", "step"], int, int
]  # a call of an environment: its phase, the number of the (first) episode, the step

LIMIT = 10_000  # steps of an episode: without a time limit a greedy policy may never reach an end
LANES = 8  # episodes played side by side if each lane costs as much as the first


@dataclass(frozen=True)
class Score:
    """The results of greedy episodes of one policy."""

    returns: tuple[float, ...]  # by episode number, without failed episodes
    lengths: tuple[int, ...]
    cut: int = 0  # episodes cut at the step limit; they count with their return so far
    measures: Mapping[str, float] = field(default_factory=dict)  # means over the ended episodes that have a value
    contexts: tuple[tuple[float, ...], ...] = ()  # of the same episodes as returns, in a run with contexts
    failed: int = 0  # episodes in which the environment failed
    failure: str = ""  # the first failure, in one line

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def spread(self) -> float:
        return float(np.std(self.returns))

    def named(self, step: int) -> dict[str, float]:
        """Return the fields of a metrics row under eval/: measures, the deviation, and the step of the weights."""
        about = {"return_std": self.spread, "step": float(step)}
        return {f"measure/{name}" if name in about else name: value for name, value in self.measures.items()} | about

    @property
    def warning(self) -> str:
        """Return a message about failed episodes; empty: none failed."""
        which = "evaluation episode failed and is" if self.failed == 1 else "evaluation episodes failed and are"
        return f"{self.failed} {which} left out: {self.failure}" if self.failed else ""


def playable(env: Env[Any]) -> Env:
    """Return the same environment with numpy arrays."""
    if not env.spec.batched_on_device:
        return env
    from freewheel.rollout.device_runner import as_numpy

    return as_numpy(env)


class EpisodeResult(NamedTuple):
    """The result of one greedy episode."""

    ret: float
    length: int
    ended: bool  # False: cut at the limit of steps
    measures: tuple[float, ...]
    failure: str = ""  # the report, if the environment failed; the episode does not count then


def evaluate(
    env: Env, actor: Actor, episodes: int, seed: int, limit: int = LIMIT, context: NDArray = NO_CONTEXT
) -> Score:
    """Score episodes 0 .. episodes-1 of this evaluation seed. Their seeds and their rows of this context table [K, C]
    are the same for every mode, algorithm and number of lanes."""
    env.set_context(context)
    played: list[EpisodeResult] = []
    for first in range(0, episodes, env.spec.lanes):
        wanted = min(env.spec.lanes, episodes - first)
        played += returned(play_round(env, actor, (seed, first), wanted, limit))
    return scored(played, env.spec, seed, context)


def scored(played: Sequence[EpisodeResult], spec: EnvSpec, seed: int, context: NDArray = NO_CONTEXT) -> Score:
    """Return the score of episodes 0, 1, 2, ... of a seed. EnvError: all have failed, or a return is not finite."""
    seeds = [evaluation_episodes(seed, number, 1).seed(0) for number in range(len(played))]
    failures = [one.failure for one in played if one.failure]
    if len(failures) == len(played):
        raise EnvError(f"all {len(played)} evaluation episodes of {spec.name} failed: {failures[0]}")
    for number, one in enumerate(played):
        if not math.isfinite(one.ret):
            which = f"evaluation episode {number} of {spec.name}, seed {seeds[number]},"
            raise EnvError(f"{which} has return {one.ret}: check the env for NaN and inf", "nan")
    seeds = [own for own, one in zip(seeds, played, strict=True) if not one.failure]
    played = [one for one in played if not one.failure]
    ended = [one.measures for one in played if one.ended]
    known = ([value for value in own if not math.isnan(value)] for own in zip(*ended, strict=True))
    means = [math.fsum(values) / len(values) if values else math.nan for values in known]
    contexts = tuple(tuple(drawn(context, own).tolist()) for own in seeds) if context.size else ()
    returns, lengths = tuple(one.ret for one in played), tuple(one.length for one in played)
    measures, first = dict(zip(spec.measures, means, strict=False)), next(iter(failures), "").partition("\n")[0]
    return Score(returns, lengths, len(played) - len(ended), measures, contexts, len(failures), first)


def play_round(
    env: Env, actor: Actor, start: tuple[int, int], wanted: int, limit: int
) -> Generator[Call, None, list[EpisodeResult]]:
    """Play one episode per lane until the first `wanted` have ended, failed or reached the limit; return these.
    EnvError: a lane has failed too often.

    Yields the next call of the environment before making it, so that the caller can stop here or time the call.
    """
    lanes, first = env.spec.lanes, start[1]
    total, length, playing = np.zeros(lanes), np.zeros(lanes, np.int64), np.ones(lanes, np.bool_)
    measures, failed = np.zeros((lanes, len(env.spec.measures)), np.float32), [""] * lanes
    yield "reset", first, 0
    for taken, step in enumerate(_greedy_steps(env, actor, start, limit)):
        if step is None:
            yield "step", first, 1
            continue
        counts = playing & step.valid
        np.add(total, step.reward, out=total, where=counts)
        length += counts
        over = step.terminated | step.truncated
        np.copyto(measures, step.measures, where=(playing & over)[:, None])
        for failure in step.failures:
            if failure.cause == "quarantine":
                raise EnvError(failure.report, failure.cause)
            if playing[failure.lane]:
                failed[failure.lane], playing[failure.lane] = failure.report, False
        playing &= ~over
        if not playing[:wanted].any():
            break
        yield "step", first, taken + 1
    columns = total.tolist(), length.tolist(), (~playing).tolist(), map(tuple, measures.tolist()), failed
    return [EpisodeResult(*one) for one in zip(*columns, strict=True)][:wanted]


def returned(steps: Generator[object, None, Out]) -> Out:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: Out = end.value
            return value


def _greedy_steps(env: Env, actor: Actor, start: tuple[int, int], limit: int) -> Iterator[Step | None]:
    """Yield None after the reset, then at most `limit` steps of one episode per lane. The episodes have the seed
    start[0] and are numbered from start[1]. The actor's memory of a lane is zero when an episode begins."""
    lanes, (seed, first) = env.spec.lanes, start
    rng, state = generator(seed, "greedy"), np.zeros((lanes, actor.state_size), np.float32)
    obs = env.reset([evaluation_episodes(seed, first + lane, lanes) for lane in range(lanes)])
    yield None
    for _ in range(limit):
        decision = actor.act(obs, rng, state=state, greedy=True)
        step = env.step(decision.action)
        yield step
        over, state = step.terminated | step.truncated | ~step.valid, decision.state
        if state.size and over.any():
            state = np.where(over[:, None], np.zeros_like(state), state)
        obs = env.autoreset()


def play(
    env: Env, actor: Actor, episode: tuple[int, int], show: Show, limit: int = LIMIT, context: NDArray = NO_CONTEXT
) -> Sequence[float]:
    """Play episode (evaluation seed, number) in a one-lane env, show its start and every step; return the rewards."""
    env.set_context(context)
    rewards: list[float] = []
    for step in _greedy_steps(env, actor, episode, limit):
        show(env.render())
        if step is None:
            continue
        rewards.append(float(step.reward[0]))
        if step.terminated[0] or step.truncated[0]:
            break
    return rewards


def eval_lanes(env: EnvConfig, episodes: int, usual: int = LANES) -> range:
    """Return the lanes to play on: one per episode if an additional lane costs almost nothing, else at most `usual`."""
    return range(episodes if env.batched else min(episodes, usual))
