"""Greedy episodes of a policy, scored or shown, and the evaluators that play them during training."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from freewheel.collect.serial import SerialConfig
from freewheel.core import NO_CONTEXT, Actor, Collector, Env, Episode, EvaluatingCollector, Executor, NDArray, Snapshot
from freewheel.errors import EnvError, FreewheelError, SetupError
from freewheel.policies.numpy_actor import make_actor
from freewheel.rollout.factory import CollectSpec, MakeActor, RunnerFactory, Timeouts
from freewheel.seeding import drawn, evaluation_episodes, generator
from freewheel.transport.executors import ProcessExecutor

if TYPE_CHECKING:  # a process that evaluates needs neither
    from freewheel.envs.family import EnvConfig
    from freewheel.run.plan import Plan

In = ParamSpec("In")
Out = TypeVar("Out")
Show = Callable[["NDArray | str | None"], None]

LIMIT = 10_000  # steps: in an environment without a time limit a greedy policy may never reach an end
LANES = 8  # episodes played side by side where each lane costs as much as the first


# ---------------------------------------------------------------------------------------------------------- greedy episodes


@dataclass(frozen=True)
class Score:
    """Greedy episodes of one policy."""

    returns: tuple[float, ...]  # by episode number
    lengths: tuple[int, ...]
    cut: int = 0  # episodes that had not ended at the limit; they count as far as they went
    measures: Mapping[str, float] = field(default_factory=dict)  # means over the episodes that ended and have them
    contexts: tuple[tuple[float, ...], ...] = ()  # by episode number, in a run with contexts

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def spread(self) -> float:
        return float(np.std(self.returns))


class _Greedy:
    """Greedy actions of an actor for B lanes; it carries the actor's memory of each lane."""

    def __init__(self, actor: Actor, lanes: int, seed: int) -> None:
        self._actor, self._rng = actor, generator(seed, "greedy")
        self._state: NDArray = np.zeros((lanes, actor.state_size), np.float32)

    def act(self, obs: NDArray) -> NDArray:
        decision = self._actor.act(obs, self._rng, state=self._state, greedy=True)
        self._state = decision.state
        return decision.action

    def forget(self, lanes: NDArray) -> None:
        """Zero the memory of these lanes [B]: their episode has ended."""
        if self._state.size and lanes.any():
            self._state = np.where(lanes[:, None], np.zeros_like(self._state), self._state)


def playable(env: Env[Any]) -> Env:
    """The same environment with numpy arrays."""
    if not env.spec.batched_on_device:
        return env
    from freewheel.rollout.device_runner import as_numpy

    return as_numpy(env)


def evaluate(
    env: Env, actor: Actor, episodes: int, seed: int, limit: int = LIMIT, context: NDArray = NO_CONTEXT
) -> Score:
    """Episodes 0 .. episodes-1 of this evaluation seed: the same seeds, and the same rows of this context table [K, C], for
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
    seeds = [evaluation_episodes(seed, number, 1).seed(0) for number in range(episodes)]
    if not np.isfinite(returns).all():
        number = int(np.argmin(np.isfinite(returns)))
        which = f"evaluation episode {number} of {env.spec.name}, seed {seeds[number]},"
        raise EnvError(f"{which} has return {returns[number]}: check the env for NaN and inf", "nan")
    means = [_mean([value for value in own if not math.isnan(value)]) for own in np.transpose(measured).tolist()]
    contexts = tuple(tuple(drawn(context, own).tolist()) for own in seeds) if context.size else ()
    return Score(tuple(returns), tuple(lengths), cut, dict(zip(env.spec.measures, means, strict=False)), contexts)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _round(env: Env, actor: Actor, start: tuple[int, int], wanted: int, limit: int) -> tuple[NDArray, ...]:
    """One episode per lane, numbered from start[1] of seed start[0], until the first `wanted` have ended or reach the limit.

    Returns [B] each: return, length, whether the episode has not ended, and its measures [B, M].
    """
    lanes, (seed, first) = env.spec.lanes, start
    total, length, playing = np.zeros(lanes), np.zeros(lanes, np.int64), np.ones(lanes, np.bool_)
    measures = np.zeros((lanes, len(env.spec.measures)), np.float32)
    greedy = _Greedy(actor, lanes, seed)
    obs = env.reset([evaluation_episodes(seed, first + lane, lanes) for lane in range(lanes)])
    for _ in range(limit):
        step = env.step(greedy.act(obs))
        counts = playing & step.valid
        np.add(total, step.reward, out=total, where=counts)
        length += counts
        over = step.terminated | step.truncated
        np.copyto(measures, step.measures, where=(playing & over)[:, None])
        playing &= ~over
        if not playing[:wanted].any():
            break
        greedy.forget(over | ~step.valid)
        obs = env.autoreset()
    return total, length, playing, measures


def play(
    env: Env, actor: Actor, episode: tuple[int, int], show: Show, limit: int = LIMIT, context: NDArray = NO_CONTEXT
) -> Sequence[float]:
    """Rewards of episode (evaluation seed, number) in a one-lane env; an image is shown at its start and after every action."""
    env.set_context(context)
    seed, number = episode
    greedy = _Greedy(actor, 1, seed)
    obs = env.reset([evaluation_episodes(seed, number, 1)])
    rewards: list[float] = []
    show(env.render())
    while len(rewards) < limit:
        step = env.step(greedy.act(obs))
        rewards.append(float(step.reward[0]))
        show(env.render())
        if step.terminated[0] or step.truncated[0]:
            break
        obs = step.next_obs
    return rewards


# --------------------------------------------------------------------------------------------------------------- evaluators


@dataclass(frozen=True)
class EvalSpec:
    """What an evaluation plays."""

    episodes: int
    seed: int
    limit: int = LIMIT


class Scorer:
    """Scores snapshots, one after the other, in one environment."""

    def __init__(self, env: Env, actor: Actor, spec: EvalSpec) -> None:
        self._env, self._actor, self._spec = env, actor, spec

    def __call__(self, snapshot: Snapshot) -> Score:
        self._actor.load(snapshot)
        spec = self._spec
        return evaluate(self._env, self._actor, spec.episodes, spec.seed, spec.limit, snapshot.context)


class Evaluation(NamedTuple):
    """The result for the weights that were submitted at this step."""

    step: int
    snapshot: Snapshot
    score: Score | FreewheelError


class Evaluator(Protocol):
    """Takes weights and scores them, at once or later."""

    def submit(self, step: int, snapshot: Snapshot) -> None: ...
    def results(self, wait: bool) -> Iterator[Evaluation]: ...  # each once; wait: until there is one for each submit


class InlineEvaluator:
    """Plays in this process, in turn with training."""

    def __init__(self, score: Callable[[Snapshot], Score]) -> None:
        self._score = score
        self._done: list[Evaluation] = []

    def submit(self, step: int, snapshot: Snapshot) -> None:
        self._done.append(Evaluation(step, snapshot, self._score(snapshot)))

    def results(self, wait: bool) -> Iterator[Evaluation]:
        while self._done:
            yield self._done.pop(0)


class ProcessEvaluator:
    """Plays in another process, while training goes on. `check` may raise to end a wait."""

    def __init__(self, executor: Executor, check: Callable[[], None]) -> None:
        self._executor, self._check = executor, check
        self._waiting: deque[tuple[int, Snapshot]] = deque()

    def submit(self, step: int, snapshot: Snapshot) -> None:
        self._waiting.append((step, snapshot))
        self._executor.submit(snapshot)

    def results(self, wait: bool) -> Iterator[Evaluation]:
        while self._waiting:
            self._check()
            score = self._executor.result(0.1 if wait else 0.0)
            if score is not None:
                yield Evaluation(*self._waiting.popleft(), score)
            elif not wait:
                return


class ReservedLanesEvaluator:
    """Scores the latest episodes of reserved lanes, whose weights may be a little older than those submitted."""

    def __init__(self, collector: EvaluatingCollector, episodes: int, measures: Sequence[str]) -> None:
        self._collector, self._measures = collector, measures
        self._latest: deque[Episode] = deque(maxlen=episodes)
        self._waiting: list[tuple[int, Snapshot]] = []

    def submit(self, step: int, snapshot: Snapshot) -> None:
        self._waiting.append((step, snapshot))

    def results(self, wait: bool) -> Iterator[Evaluation]:
        """What is submitted before the first episode has ended is scored when one has; `wait` does not wait for it."""
        self._latest.extend(self._collector.eval_episodes())
        while self._latest and self._waiting:
            yield Evaluation(*self._waiting.pop(0), self._score())

    def _score(self) -> Score:
        means = np.mean([episode.measures for episode in self._latest], axis=0).tolist()
        returns, lengths = zip(*((one.ret, one.length) for one in self._latest), strict=True)
        return Score(returns, lengths, measures=dict(zip(self._measures, means, strict=True)))


@contextmanager
def open_evaluator(
    plan: Plan, factory: RunnerFactory, collector: Collector, spec: CollectSpec
) -> Iterator[Evaluator | None]:
    """Reserved lanes where only one simulation can live in a process, another process where workers act, else inline."""
    options, actor = plan.config.run.evaluation, make_actor(plan.policy)
    eval_spec = EvalSpec(options.eval_episodes, options.eval_seed, options.eval_max_steps)
    if not options.evals:
        yield None
    elif plan.spec.one_per_process:
        if not isinstance(collector, EvaluatingCollector):
            raise SetupError(f"{plan.spec.name} cannot be evaluated in mode {plan.config.mode}: use --evals 0")
        yield ReservedLanesEvaluator(collector, eval_spec.episodes, plan.spec.measures)
    elif plan.in_processes:
        lanes = eval_lanes(plan.config.env, eval_spec.episodes, 1)
        build = partial(_limited_scorer, partial(factory.make, lanes), actor, eval_spec, spec.workers.timeouts)
        with ProcessExecutor[Snapshot, Score](build, "evaluation") as executor:
            yield ProcessEvaluator(executor, spec.while_waiting)
    else:
        lanes = eval_lanes(plan.config.env, eval_spec.episodes)
        with closing(_inline_env(plan, factory, lanes)) as env:
            yield InlineEvaluator(Scorer(env, actor(), eval_spec))


def eval_lanes(env: EnvConfig, episodes: int, usual: int = LANES) -> range:
    """How many episodes are played side by side: all where one more lane costs almost nothing."""
    return range(episodes if env.batched else min(episodes, usual))


def _inline_env(plan: Plan, factory: RunnerFactory, lanes: range) -> Env:
    mode = plan.config.collector
    if isinstance(mode, SerialConfig) and not plan.spec.batched_on_device:
        return mode.place(factory.make, lanes)
    return playable(factory.make(lanes))


def _limited_scorer(make: Callable[[], Env], actor: MakeActor, spec: EvalSpec, timeouts: Timeouts) -> Scorer:
    """For a process of its own, which ends if the environment takes too long."""
    return Scorer(_TimeLimited(make(), timeouts), actor(), spec)


class _TimeLimited:
    """An Env that ends its process when a call takes too long: the kernel's alarm does it, even if the call hangs."""

    def __init__(self, env: Env, timeouts: Timeouts) -> None:
        self.spec, self.set_context, self.render, self.close = env.spec, env.set_context, env.render, env.close
        self.step = self._within(env.step, timeouts.step)
        self.reset, self.autoreset = (
            self._within(env.reset, timeouts.reset),
            self._within(env.autoreset, timeouts.reset),
        )

    @staticmethod
    def _within(call: Callable[In, Out], seconds: float) -> Callable[In, Out]:
        def timed(*args: In.args, **kwargs: In.kwargs) -> Out:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                return call(*args, **kwargs)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

        return timed
