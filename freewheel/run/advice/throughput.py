"""How many env steps a second a way of collecting would make here: one model, from measured times.

A way is limited by the first of these that it meets: its environments one after the other, the slowest environment at every
barrier, the cores, or the learner. What is measured where it is needed: the environment (rollout/probe.py), the policy and the
learner (`measure_policy`). What is not, because it takes workers to see it, are the constants below; benchmarks/first_day.py
holds the model to what is then measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from freewheel.core import WORKER_TIME, Actor, Chunk, EnvSpec, Learner, NDArray, Origin
from freewheel.policies.numpy_actor import make_actor
from freewheel.rollout.probe import EnvCost
from freewheel.rollout.runner import empty_transitions
from freewheel.seeding import generator

if TYPE_CHECKING:
    from freewheel.run.plan import Plan

#: Processor seconds of a row in a process of its own behind a barrier, beside the environment: Gymnasium's pipe both ways; and of
#: the process that waits there, for one lane after the other (2 cores, AMD EPYC, 5 ms sleeps). A worker's own part is in the
#: measurement already: the probe checks and copies rows as well, and wakes up on caches as cold.
LANE_ROW, BARRIER_ROW = 210e-6, 100e-6
#: How sharply one limit takes over from another: two equal ones leave 2 ** (-1 / SHARPNESS) of each.
SHARPNESS = 4.0
PATIENCE, WARM_UP = 0.2, 2  # seconds to measure the learner of a way, after so many updates

Limit: TypeAlias = Literal["envs", "barrier", "cores", "learner"]
Kind: TypeAlias = Literal["serial", "barrier", "batch", "free"]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one environment."""

    times: tuple[float, ...]  # of steps, each as likely as the next, in any order
    reset: float = 0.0  # of resets, for each step
    cpu: float = 0.0  # of the processor, for a step and its part of a reset
    ends_together: bool = False  # whether all episodes have the same length

    @classmethod
    def of(cls, cost: EnvCost) -> StepTimes:
        """As it was measured, without the time that other processes took."""
        alone = cost.own / cost.row if cost.row > 0 else 1.0
        equal = len(cost.lengths) > 1 and len(set(cost.lengths)) == 1
        measured = cls(times=cost.times or (cost.wall,), reset=cost.row - cost.wall, ends_together=equal)
        return replace(measured.scaled(alone), cpu=cost.cpu)

    @property
    def row(self) -> float:
        """The mean time of a step and its part of a reset."""
        return float(np.mean(self.times)) + self.reset

    def slowest_of(self, count: int) -> float:
        """The mean time of the slowest of so many independent steps."""
        ranked = np.sort(self.times)
        below = np.arange(len(ranked) + 1) / len(ranked)
        return float(ranked @ np.diff(below**count))

    def scaled(self, factor: float) -> StepTimes:
        """Everything takes so many times as long."""
        times = tuple(factor * time for time in self.times)
        return replace(self, times=times, reset=factor * self.reset, cpu=factor * self.cpu)


@dataclass(frozen=True, kw_only=True)
class PolicyTimes:
    """Seconds of the policy and its learner, for each row."""

    act: float  # choosing an action, with as many lanes at once as the way has in one process
    learn: float  # all that the learner does


@dataclass(frozen=True, kw_only=True)
class Way:
    """How rows are collected."""

    kind: Kind  # serial: lanes in turn; barrier: a process each; batch, free: workers
    workers: int  # processes that act
    lanes: int
    steps: int  # of each lane in one update


@dataclass(frozen=True)
class Forecast:
    """What a way would make."""

    rate: float  # env steps/s
    limit: Limit  # what it waits for


def forecast(way: Way, env: StepTimes, policy: PolicyTimes, cores: int, barrier: float = 1.0) -> Forecast:
    """The env steps/s of a way; `barrier`: it costs so many times what it usually does."""
    if way.kind == "serial":
        each = env.row + policy.act
        return Forecast(1.0 / (each + policy.learn), "envs" if each >= policy.learn else "learner")
    if way.kind == "barrier":
        return _behind_a_barrier(way, env, policy, cores, barrier)
    lanes = way.lanes // way.workers
    each = env.row + policy.act
    if way.kind == "batch":  # the slowest worker ends it; half of that is made up for, because others go on meanwhile
        each += float(np.std(env.times)) / math.sqrt(way.steps * lanes) * _greatest_of_normal(way.workers) / 2
    limits: dict[Limit, float] = {
        "envs": way.workers / each,
        "cores": _rate(cores, env.cpu + policy.act + policy.learn),
        "learner": _rate(1, policy.learn),
    }
    return _first_met(limits)


def _behind_a_barrier(way: Way, env: StepTimes, policy: PolicyTimes, cores: int, barrier: float) -> Forecast:
    """Every round waits for the slowest lane, or for the cores; then the learner has its turn."""
    lanes, lane_row = way.lanes, barrier * LANE_ROW
    resets = env.reset if env.ends_together else lanes * env.reset  # a lane that begins anew holds up the others
    waits = env.slowest_of(lanes) + resets + lane_row
    works = lanes * (env.cpu + lane_row) / cores
    rounds = _first_met({"barrier": _rate(1, waits), "cores": _rate(1, works)})
    each = 1.0 / (rounds.rate * lanes) + barrier * BARRIER_ROW + policy.act
    return Forecast(1.0 / (each + policy.learn), rounds.limit if each >= policy.learn else "learner")


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.inf


def _first_met(limits: dict[Limit, float]) -> Forecast:
    """Limits that lie close together are both felt."""
    felt = sum(rate**-SHARPNESS for rate in limits.values()) ** (-1.0 / SHARPNESS)
    return Forecast(felt, min(limits, key=lambda limit: limits[limit]))


def _greatest_of_normal(count: int) -> float:
    """The mean of the greatest of so many standard normal numbers, nearly."""
    return math.sqrt(2.0 * math.log(count)) if count > 1 else 0.0


# --------------------------------------------------------------------------------------------- the policy and its learner


def measure_policy(planned: Plan) -> PolicyTimes | None:
    """What acting and learning cost on this machine, for the network, the batch and the algorithm of a plan; rows are random.
    None where a part of the learner runs beside it (a model is fitted), which takes too long to try."""
    if planned.config.learner.executor != "serial":
        return None
    learner = _sooner_ready(planned).build(planned.learner_spec)
    actor = make_actor(planned.policy)()
    actor.load(learner.snapshot())
    together = max(1, planned.spec.lanes // planned.workers)
    obs = _random_obs(planned.spec, together)
    rng = generator(0, "measure")
    act = _seconds(lambda: actor.act(obs, rng), PATIENCE / 5) / together
    # Processor time does not grow with what else the machine is doing; with several threads or a GPU it is not what passes.
    one_thread = planned.device == "cpu" and planned.config.run.machine.threads == 1
    return PolicyTimes(act=act, learn=_learning(planned, learner, actor, process_time if one_thread else perf_counter))


def _sooner_ready(planned: Plan) -> Any:
    """The options of the algorithm, with learning from the first rows."""
    learner: Any = planned.config.learner
    return replace(learner, learning_starts=1) if hasattr(learner, "learning_starts") else learner


def _learning(planned: Plan, learner: Learner, actor: Actor, clock: Callable[[], float]) -> float:
    """Seconds a row of observing, updating and making a snapshot, after WARM_UP updates that load and allocate."""
    spent, rows, cycles, end = 0.0, 0, 0, perf_counter() + PATIENCE
    while cycles <= WARM_UP or perf_counter() < end:
        chunk, began = _random_rows(planned, learner.version, actor), clock()
        while not learner.ready:
            learner.observe(chunk)
            rows += chunk.rows
        while learner.ready:
            learner.update()
        learner.snapshot()
        cycles, spent = cycles + 1, spent + clock() - began
        if cycles == WARM_UP:
            spent, rows, end = 0.0, 0, perf_counter() + PATIENCE
    return spent / rows


def _random_rows(planned: Plan, version: int, actor: Actor) -> Chunk:
    """A chunk as this plan's learner gets them: of all lanes, or of one episode."""
    lanes = planned.spec.lanes if planned.batch.episodes is None else 1
    spec, steps = replace(planned.spec, lanes=lanes), planned.batch.steps
    rng = generator(version, "measure")
    obs = _random_obs(spec, steps * lanes)
    decision = actor.act(obs, rng)
    data = empty_transitions(steps, spec)
    over = rng.random((steps, lanes)) < 1 / 100
    data.obs[:], data.next_obs[:] = obs.reshape(data.obs.shape), obs.reshape(data.obs.shape)
    data.action[:], data.log_prob[:] = decision.action.reshape(data.action.shape), decision.log_prob.reshape(over.shape)
    data.reward[:], data.terminated[:], data.truncated[:], data.valid[:] = rng.random(over.shape), over, False, True
    state, time = np.zeros((lanes, actor.state_size), np.float32), np.zeros(len(WORKER_TIME), np.int64)
    old = max(0, version - 1) if planned.worker_config is not None else version
    return Chunk(data, old, Origin(0, 0, version, 0), (), state, time, steps * lanes)


def _random_obs(spec: EnvSpec, rows: int) -> NDArray:
    """[rows, D], every action allowed."""
    rng = generator(rows, "measure")
    shape = (rows, spec.obs_size)
    if spec.obs_dtype == "uint8":
        return rng.integers(256, size=shape, dtype=np.uint8)
    obs = rng.standard_normal(shape, np.float32)
    if mask := spec.slice("action_mask"):
        obs[:, mask.start : mask.stop] = 1.0
    return obs


def _seconds(call: Callable[[], object], limit: float) -> float:
    """The median time of a call, of so many as fit in `limit` seconds."""
    taken, end = list[float](), perf_counter() + limit
    while len(taken) < 3 or perf_counter() < end:
        began = perf_counter()
        call()
        taken.append(perf_counter() - began)
    return median(taken)
