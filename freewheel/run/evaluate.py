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
from freewheel.core import (
    NO_CONTEXT,
    Actor,
    Collector,
    Env,
    Episode,
    EvaluatingCollector,
    Executor,
    NDArray,
    Snapshot,
    Step,
)
from freewheel.errors import EnvError, FreewheelError, SetupError
from freewheel.policies.numpy_actor import make_actor
from freewheel.rollout.factory import CollectSpec, MakeActor, RunnerFactory, Timeouts
from freewheel.run.process import Wrap, WrappedEnv
from freewheel.seeding import drawn, evaluation_episodes, generator
from freewheel.transport.executors import ProcessExecutor, SerialExecutor

if TYPE_CHECKING:  # a process that evaluates needs neither
    from freewheel.envs.family import EnvConfig
    from freewheel.run.plan import Plan

In = ParamSpec("In")
Out = TypeVar("Out")
Show = Callable[["NDArray | str | None"], None]

LIMIT = 10_000  # steps: in an environment without a time limit a greedy policy may never reach an end
LANES = 8  # episodes played side by side where each lane costs as much as the first


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
    rounds = []
    for first in range(0, episodes, env.spec.lanes):
        wanted = min(env.spec.lanes, episodes - first)
        rounds.append([part[:wanted] for part in _round(env, actor, (seed, first), wanted, limit)])
    returns, lengths, playing, measures = map(np.concatenate, zip(*rounds, strict=True))
    seeds = [evaluation_episodes(seed, number, 1).seed(0) for number in range(episodes)]
    if not np.isfinite(returns).all():
        number = int(np.argmin(np.isfinite(returns)))
        which = f"evaluation episode {number} of {env.spec.name}, seed {seeds[number]},"
        raise EnvError(f"{which} has return {returns[number]}: check the env for NaN and inf", "nan")
    known = ([value for value in own if not math.isnan(value)] for own in measures[~playing].T.tolist())
    means = [math.fsum(values) / len(values) if values else math.nan for values in known]
    contexts = tuple(tuple(drawn(context, own).tolist()) for own in seeds) if context.size else ()
    measured = {} if playing.all() else dict(zip(env.spec.measures, means, strict=True))
    return Score(tuple(returns.tolist()), tuple(lengths.tolist()), int(playing.sum()), measured, contexts)


def _round(env: Env, actor: Actor, start: tuple[int, int], wanted: int, limit: int) -> tuple[NDArray, ...]:
    """One episode per lane, until the first `wanted` have ended or reach the limit.

    Returns [B] each: return, length, whether the episode has not ended, and its measures [B, M].
    """
    lanes = env.spec.lanes
    total, length, playing = np.zeros(lanes), np.zeros(lanes, np.int64), np.ones(lanes, np.bool_)
    measures = np.zeros((lanes, len(env.spec.measures)), np.float32)
    for step in _greedy_steps(env, actor, start, limit):
        counts = playing & step.valid
        np.add(total, step.reward, out=total, where=counts)
        length += counts
        over = step.terminated | step.truncated
        np.copyto(measures, step.measures, where=(playing & over)[:, None])
        playing &= ~over
        if not playing[:wanted].any():
            break
    return total, length, playing, measures


def _greedy_steps(
    env: Env, actor: Actor, start: tuple[int, int], limit: int, begun: Callable[[], None] = lambda: None
) -> Iterator[Step]:
    """At most `limit` steps of episodes of seed start[0], one per lane, numbered from start[1]; `begun` is called after the
    reset. The actor's memory of a lane is zero when an episode begins."""
    lanes, (seed, first) = env.spec.lanes, start
    rng, state = generator(seed, "greedy"), np.zeros((lanes, actor.state_size), np.float32)
    obs = env.reset([evaluation_episodes(seed, first + lane, lanes) for lane in range(lanes)])
    begun()
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
    """Rewards of episode (evaluation seed, number) in a one-lane env; an image is shown at its start and after every action."""
    env.set_context(context)
    rewards: list[float] = []
    for step in _greedy_steps(env, actor, episode, limit, lambda: show(env.render())):
        rewards.append(float(step.reward[0]))
        show(env.render())
        if step.terminated[0] or step.truncated[0]:
            break
    return rewards


class Evaluation(NamedTuple):
    """The result for the weights that were submitted at this step."""

    step: int
    snapshot: Snapshot
    score: Score | FreewheelError


class Evaluator(Protocol):
    """Takes weights and scores them, at once or later."""

    def submit(self, step: int, snapshot: Snapshot) -> None: ...
    def results(self, wait: bool) -> Iterator[Evaluation]: ...  # each once; wait: until there is one for each submit


class ExecutorEvaluator:
    """Plays where an executor does: in turn with training, or beside it. `check` may raise to end a wait."""

    def __init__(self, executor: Executor, check: Callable[[], None]) -> None:
        self._executor, self._check = executor, check
        self._waiting: deque[tuple[int, Snapshot]] = deque()

    def submit(self, step: int, snapshot: Snapshot) -> None:
        self._waiting.append((step, snapshot))
        self._executor.submit(snapshot)

    def results(self, wait: bool) -> Iterator[Evaluation]:
        while self._waiting:
            score = self._executor.result(0.1 if wait else 0.0)
            if score is not None:
                yield Evaluation(*self._waiting.popleft(), score)
            elif wait:
                self._check()
            else:
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
    which = (options.eval_episodes, options.eval_seed, options.eval_max_steps)
    if not options.evals:
        yield None
    elif plan.spec.one_per_process:
        if not isinstance(collector, EvaluatingCollector):
            raise SetupError(f"{plan.spec.name} cannot be evaluated in mode {plan.config.mode}: use --evals 0")
        yield ReservedLanesEvaluator(collector, options.eval_episodes, plan.spec.measures)
    elif plan.worker_config is not None:
        make = partial(factory.make, eval_lanes(plan.config.env, options.eval_episodes, 1))
        build = partial(_limited_scorer, make, actor, which, spec.workers.timeouts)
        with ProcessExecutor[Snapshot, Score](build, "evaluation") as process:
            yield ExecutorEvaluator(process, spec.while_waiting)
    else:
        lanes, mode = eval_lanes(plan.config.env, options.eval_episodes), plan.config.collector
        build_env: Callable[[range], Env] = factory.make
        if isinstance(mode, SerialConfig) and not plan.spec.batched_on_device:
            build_env = partial(mode.place, factory.make)
        with closing(playable(build_env(lanes))) as env:
            serial = SerialExecutor(lambda: _scorer(env, actor(), which), "evaluation")
            yield ExecutorEvaluator(serial, spec.while_waiting)


def eval_lanes(env: EnvConfig, episodes: int, usual: int = LANES) -> range:
    """How many episodes are played side by side: all where one more lane costs almost nothing."""
    return range(episodes if env.batched else min(episodes, usual))


def _scorer(env: Env, actor: Actor, which: tuple[int, int, int]) -> Callable[[Snapshot], Score]:
    """Scores snapshots in one environment; `which`: the number of episodes, their seed, and the limit of their steps."""

    def score(snapshot: Snapshot) -> Score:
        actor.load(snapshot)
        return evaluate(env, actor, *which, snapshot.context)

    return score


def _limited_scorer(
    make: Callable[[], Env], actor: MakeActor, which: tuple[int, int, int], timeouts: Timeouts
) -> Callable[[Snapshot], Score]:
    """For a process of its own, which ends if the environment takes too long."""
    return _scorer(WrappedEnv(make(), _limit(timeouts.step), _limit(timeouts.reset)), actor(), which)


def _limit(seconds: float) -> Wrap:
    """The kernel's alarm ends the process when a call takes longer, even if the call hangs."""

    def limited(call: Callable[In, Out]) -> Callable[In, Out]:
        def timed(*args: In.args, **kwargs: In.kwargs) -> Out:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                return call(*args, **kwargs)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

        return timed

    return limited
