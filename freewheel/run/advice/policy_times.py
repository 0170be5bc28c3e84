"""Measures the cost of the policy and its learner here, for the network, the batch and the algorithm of a plan.

The actor and the learner are the same as in a run. Their rows are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import numpy as np

from freewheel.core import WORKER_TIME, Actor, Chunk, EnvSpec, Learner, NDArray, Origin
from freewheel.learn.spec import ReplayConfig, Services, make_learner
from freewheel.policies.numpy_actor import make_actor
from freewheel.rollout.runner import empty_transitions
from freewheel.run.advice.throughput import PolicyTimes
from freewheel.seeding import generator

if TYPE_CHECKING:
    from freewheel.run.plan import Plan

PATIENCE, WARM_UP = 0.2, 2  # seconds of measuring a learner, and updates before that
#: Most seconds for one plan and for all plans; an update that takes longer is measured in part.
LONGEST, MOST = 2.0, 6.0
SHARE = 0.2  # share of --minutes that measuring the learner may take, at most
FEW = 64  # rows that show the cost of a row in a learner with a replay buffer
SHORT = 2  # minibatches that are measured instead of a whole update
_COSTS: dict[str, float] = {}  # seconds a row, by all that they depend on: many plans share an entry


class _Enough(Exception):  # noqa: N818 - not an error: the time for a measurement is over
    """Ends the update that is being measured."""


class _Steps:
    """Counts the gradient steps of a measured learner, and ends an update that takes too long."""

    def __init__(self) -> None:
        self.count, self.end = 0, inf

    def __call__(self) -> None:
        self.count += 1
        if perf_counter() > self.end:
            raise _Enough


class PolicyClock:
    """Measures acting and learning for one plan after the other, and reuses the results of earlier plans."""

    def __init__(self) -> None:
        self._acting: dict[int, float] = {}  # seconds a row, by the lanes that act together
        self._learning: dict[tuple[int, int | None, int], float] = {}  # seconds a row, by the kind of update
        self._spent = 0.0  # seconds

    def __call__(self, planned: Plan) -> PolicyTimes | None:
        """Return the times; None if the learner fits a model in parallel, because measuring that takes too long."""
        if planned.config.learner.executor != "serial":
            return None
        together, steps = max(1, planned.spec.lanes // planned.workers), 0
        if planned.batch.episodes is None:
            steps = planned.config.learner.gradient_steps(planned.learner_spec)
        update = planned.batch.steps * _lanes(planned), planned.batch.episodes, steps
        minutes, began = planned.config.run.budget.minutes, perf_counter()
        left = min(MOST, inf if minutes is None else SHARE * 60 * minutes) - self._spent
        if left <= 0 and self._learning:  # the time is over: use the most similar update
            update = min(self._learning, key=lambda known: abs(known[0] - update[0]))
        if together not in self._acting or update not in self._learning:
            counted, learner, actor = _ready(planned)
            if together not in self._acting:
                self._acting[together] = _acting(planned, actor, together)
            if update not in self._learning:
                self._learning[update] = _learning(planned, learner, actor, (counted, min(LONGEST, left)))
        self._spent += perf_counter() - began
        return PolicyTimes(act=self._acting[together], learn=self._learning[update])


def _lanes(planned: Plan) -> int:
    """Return the lanes of a chunk: all, one for an episode, or a few if more do not change the cost of a row."""
    if planned.batch.episodes is not None:
        return 1
    few = max(1, FEW // planned.batch.steps) if isinstance(planned.config.learner, ReplayConfig) else planned.spec.lanes
    return min(planned.spec.lanes, few)


def measure_policy(planned: Plan) -> PolicyTimes | None:
    """Return the cost of acting and learning on this machine; None if it is not measured."""
    return PolicyClock()(planned)


def update_cost(planned: Plan) -> float:
    """Return the seconds a row of learning in minibatches, from a few gradient steps: an update may take long."""
    learner: Any = planned.config.learner
    key = repr((planned.policy, learner, planned.device, planned.config.run.machine.threads, planned.batch.rows))
    if key not in _COSTS:
        size = -(-planned.batch.rows * learner.epochs // learner.gradient_steps(planned.learner_spec))
        run = replace(planned.config.run, num_steps_per_env=-(-SHORT * size // planned.spec.lanes))
        few = (replace(learner, epochs=passes, minibatch=size) for passes in (1, 2))
        once, twice = (_in_short(replace(planned, config=replace(planned.config, learner=one, run=run))) for one in few)
        _COSTS[key] = once + (learner.epochs - 1) * max(0.0, twice - once)
    return _COSTS[key]


def _in_short(planned: Plan) -> float:
    """Return the seconds a row of learning from a short measurement."""
    counted, learner, actor = _ready(planned)
    return _learning(planned, learner, actor, (counted, LONGEST), short=True)


def _ready(planned: Plan) -> tuple[_Steps, Learner, Actor]:
    """Return a learner with its step counter, and an actor with its weights."""
    steps = _Steps()
    services = Services(while_waiting=steps, between_steps=steps, report=steps)
    algorithm: Any = planned.config.learner
    if hasattr(algorithm, "learning_starts"):  # then learning begins with the first rows
        algorithm = replace(algorithm, learning_starts=1)
    learner = make_learner(algorithm, replace(planned.learner_spec, services=services))
    actor = make_actor(planned.policy)()
    actor.load(learner.snapshot())
    return steps, learner, actor


def _acting(planned: Plan, actor: Actor, together: int) -> float:
    """Return the seconds a row of choosing actions for `together` lanes at once."""
    obs, rng = _random_obs(planned.spec, together), generator(0, "measure")
    return _seconds(lambda: actor.act(obs, rng), PATIENCE / 5) / together


def _learning(
    planned: Plan, learner: Learner, actor: Actor, within: tuple[_Steps, float], *, short: bool = False
) -> float:
    """Return the seconds a row of observing, updating and making a snapshot, after a few updates as a warm-up. If the
    measurement takes longer than the limit in `within`, estimate them from the gradient steps that were made."""
    # Processor time does not depend on other programs, but with several threads or a GPU it differs from elapsed time.
    one_thread = planned.device == "cpu" and planned.config.run.machine.threads == 1
    clock = process_time if one_thread else perf_counter
    (steps, seconds), (patience, warm_up) = within, (PATIENCE / 10, 1) if short else (PATIENCE, WARM_UP)
    spent, rows, cycles, end = 0.0, 0, 0, perf_counter() + patience
    steps.end, first = perf_counter() + seconds, clock()
    try:
        while cycles <= warm_up or perf_counter() < end:
            chunk, began = _random_rows(planned, learner.version, actor), clock()
            while not learner.ready:
                learner.observe(chunk)
                rows += chunk.rows
            while learner.ready:
                learner.update()
            learner.snapshot()
            cycles, spent = cycles + 1, spent + clock() - began
            if cycles == warm_up and perf_counter() < steps.end:
                spent, rows, end = 0.0, 0, perf_counter() + patience
    except _Enough:
        config = planned.config.learner
        ratio = config.ratio if isinstance(config, ReplayConfig) else None
        each = ratio or config.gradient_steps(planned.learner_spec) / planned.batch.rows  # gradient steps for a row
        return (clock() - first) / steps.count * each
    return spent / rows


def _random_rows(planned: Plan, version: int, actor: Actor) -> Chunk:
    """Return a random chunk as this plan's learner receives it."""
    lanes, steps = _lanes(planned), planned.batch.steps
    spec = replace(planned.spec, lanes=lanes)
    rng = generator(version, "measure")
    obs = _random_obs(spec, steps * lanes)
    decision = actor.act(obs, rng)
    data = empty_transitions(steps, spec)
    over = rng.random((steps, lanes)) < 1 / 100
    data.obs[:], data.next_obs[:] = obs.reshape(data.obs.shape), obs.reshape(data.obs.shape)
    data.action[:], data.log_prob[:] = decision.action.reshape(data.action.shape), decision.log_prob.reshape(over.shape)
    data.reward[:], data.terminated[:], data.truncated[:], data.valid[:] = rng.random(over.shape), over, False, True
    state, time = np.zeros((lanes, actor.state_size), np.float32), np.zeros(len(WORKER_TIME), np.int64)
    old = version if planned.worker_config is None or planned.max_lag == 0 else max(0, version - 1)
    return Chunk(data, old, Origin(0, 0, version, 0), (), state, time, steps * lanes)


def _random_obs(spec: EnvSpec, rows: int) -> NDArray:
    """Return random observations [rows, D] with all actions allowed."""
    rng = generator(rows, "measure")
    shape = (rows, spec.obs_size)
    if spec.obs_dtype == "uint8":
        return rng.integers(256, size=shape, dtype=np.uint8)
    obs = rng.standard_normal(shape, np.float32)
    if mask := spec.slice("action_mask"):
        obs[:, mask.start : mask.stop] = 1.0
    return obs


def _seconds(call: Callable[[], object], limit: float) -> float:
    """Return the median time of a call over at least 3 calls and `limit` seconds."""
    taken, end = list[float](), perf_counter() + limit
    while len(taken) < 3 or perf_counter() < end:
        began = perf_counter()
        call()
        taken.append(perf_counter() - began)
    return median(taken)
