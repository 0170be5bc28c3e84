"""How many env steps a second a way of collecting would make here, and how old its rows would be: one model, from measured times.

It is a small closed queueing network. Every worker goes round: its environment waits (which others do not feel), then it computes
on the cores, which it shares with the other workers and with the learner. The learner is one more server, which the rows pass;
behind a barrier every round takes as long as its slowest lane. Lag follows by Little's law from the rows that are under way.

What is measured where it is needed: the environment (rollout/probe.py), the policy and the learner (policy_times.py), and in
`freewheel tune` what handing rows over costs (tune/probe.py). What is not measured are the constants below;
benchmarks/first_day.py and benchmarks/tune_error.py hold the model to what is then measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from freewheel.rollout.probe import EnvCost

#: Processor seconds of a row in a process of its own behind a barrier, beside the environment: Gymnasium's pipe both ways; and of
#: the process that waits there, for one lane after the other (2 cores, AMD EPYC, 5 ms sleeps). A worker's own part is in the
#: measurement already: the probe checks and copies rows as well, and wakes up on caches as cold.
LANE_ROW, BARRIER_ROW = 210e-6, 100e-6
#: How sharply one limit of a barrier takes over from another: two equal ones leave 2 ** (-1 / SHARPNESS) of each.
SHARPNESS = 4.0
FULL = 0.97  # of the time: a learner that is busy so much lets rows pile up
HALVINGS = 40  # of the interval in which a rate is looked for

Limit: TypeAlias = Literal["envs", "barrier", "cores", "learner"]
Kind: TypeAlias = Literal["serial", "barrier", "batch", "free"]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one environment."""

    times: tuple[float, ...]  # of steps, each as likely as the next, in any order
    reset: float = 0.0  # of resets, for each step
    cpu: float = 0.0  # of the processor, for a step and its part of a reset
    ends_together: bool = False  # whether all episodes have the same length
    #: (lanes, what one step of all of them takes, in steps of one alone), rising; empty: every lane takes as long as one alone
    together: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, cost: EnvCost, many: EnvCost | None = None) -> StepTimes:
        """As it was measured, without the time that other processes took; `many`: several lanes in one process."""
        alone = cost.own / cost.row if cost.row > 0 else 1.0
        equal = len(cost.lengths) > 1 and len(set(cost.lengths)) == 1
        measured = cls(times=cost.times or (cost.wall,), reset=cost.row - cost.wall, ends_together=equal)
        found = replace(measured.scaled(alone), cpu=cost.cpu)
        if many is None or many.spec.lanes <= 1 or found.row <= 0:
            return found
        return replace(found, together=((1, 1.0), (many.spec.lanes, many.own / found.row)))

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

    def beside(self, lanes: int) -> StepTimes:
        """Of a row where so many lanes share a process."""
        if not self.together or lanes == 1:
            return self
        return self.scaled(along(self.together, lanes) / lanes)


def along(points: tuple[tuple[int, float], ...], at: int) -> float:
    """The value at a place, on straight lines through these points, the last of which goes on."""
    if len(points) == 1:
        return points[0][1] * at / points[0][0]
    after = next((index for index, (place, _) in enumerate(points) if index and place >= at), len(points) - 1)
    (left, low), (right, high) = points[after - 1], points[after]
    return low + (high - low) * (at - left) / (right - left)


@dataclass(frozen=True, kw_only=True)
class PolicyTimes:
    """Seconds of the policy and its learner, for each row."""

    act: float  # choosing an action, with as many lanes at once as the way has in one process
    learn: float  # all that the learner does


@dataclass(frozen=True, kw_only=True)
class WireTimes:
    """Processor seconds of handing rows over from a worker, where they are not part of the other measurements."""

    row: float = 0.0  # of the worker, for each row
    fragment: float = 0.0  # of the worker, for each fragment
    taken_row: float = 0.0  # of the learner's process, for each row
    taken_fragment: float = 0.0  # of the learner's process, for each fragment

    def sent(self, rows: float) -> float:
        """Of the worker, for a row in fragments of so many."""
        return self.row + self.fragment / rows

    def taken(self, rows: float) -> float:
        """Of the learner's process, for a row in fragments of so many."""
        return self.taken_row + self.taken_fragment / rows


NO_WIRE = WireTimes()


@dataclass(frozen=True, kw_only=True)
class Way:
    """How rows are collected."""

    kind: Kind  # serial: lanes in turn; barrier: a process each; batch, free: workers
    workers: int  # processes that act
    lanes: int
    steps: int  # of each lane in one update
    fragment: int = 0  # steps of each lane that a worker hands over at once; 0: not known
    max_lag: int | None = None  # the bound on the lag, which bounds the rows under way; None: there is none
    episode: float = 0.0  # steps of a lane that act on one version whatever happens: those of an episode; 0: none
    yields: bool = False  # the learner leaves the cores to the workers

    @property
    def rows(self) -> int:
        """Of one update."""
        return self.steps * self.lanes


@dataclass(frozen=True)
class Forecast:
    """What a way would make."""

    rate: float  # env steps/s
    limit: Limit  # what it waits for
    lag: float = 0.0  # updates between choosing an action and learning from it, in the mean
    busy: float = 0.0  # share of the time that the learner works


def forecast(
    way: Way, env: StepTimes, policy: PolicyTimes, cores: int, wire: WireTimes = NO_WIRE, barrier: float = 1.0
) -> Forecast:
    """The env steps/s of a way, and the lag of its rows; `barrier`: it costs so many times what it usually does."""
    if way.kind == "serial":
        each = env.beside(way.lanes).row + policy.act
        rate = 1.0 / (each + policy.learn)
        return Forecast(rate, "envs" if each >= policy.learn else "learner", busy=rate * policy.learn)
    if way.kind == "barrier":
        return _behind_a_barrier(way, env, policy, cores, barrier)
    return _workers(way, env.beside(way.lanes // way.workers), policy, cores, wire)


def _workers(way: Way, env: StepTimes, policy: PolicyTimes, cores: int, wire: WireTimes) -> Forecast:
    """Workers beside a learner."""
    each = way.lanes // way.workers
    together = float(max(way.fragment or way.steps, 1) * each)  # rows of a fragment
    works = env.cpu + policy.act + wire.sent(together)
    waits = max(0.0, env.row - env.cpu)
    if way.kind == "batch":  # the slowest worker ends it; half of that is made up for, because others go on meanwhile
        waits += float(np.std(env.times)) / math.sqrt(way.steps * each) * _greatest_of_normal(way.workers) / 2
    learns = policy.learn + wire.taken(together)
    rate = _shared(way, waits, works, learns, cores)
    limits: dict[Limit, float] = {
        "learner": _rate(1, learns),
        "envs": _rate(way.workers, waits + works),
        "cores": _rate(cores, works + learns),
    }
    if way.max_lag == 0:  # nothing is under way during an update
        rate = _rate(1, 1 / _shared(way, waits, works, 0.0, cores) + learns)
    busy = rate * learns
    return Forecast(rate, min(limits, key=lambda limit: limits[limit]), _lag(way, busy), busy)


def _shared(way: Way, waits: float, works: float, learns: float, cores: int) -> float:
    """The rate at which workers and learner share the cores: what the learner uses at that rate is not there for them, unless it
    yields. No more than the learner can take, and no more than all cores can do."""
    most = min(_rate(1, learns), _rate(cores, works + learns), _rate(way.workers, waits + works))
    if math.isinf(most):
        return most
    low, high = 0.0, most
    for _ in range(HALVINGS):
        rate = (low + high) / 2
        left = cores if way.yields else max(cores - rate * learns, 1e-9)
        low, high = (rate, high) if cycle_rate(way.workers, waits, works, left) >= rate else (low, rate)
    return high


def cycle_rate(count: int, waits: float, works: float, servers: float) -> float:
    """How often a second so many go round, each waiting and then working at one of the servers, which all share: the machine
    repair model, exact for any law of these times where the servers divide their time evenly."""
    if works <= 0:
        return _rate(count, waits)
    if waits <= 0 or count <= servers:
        return min(count / (waits + works), servers / works)
    working = np.arange(1, count + 1)
    odds = np.log((count - working + 1) * works / waits) - np.log(np.minimum(working, servers))
    weights = np.concatenate([[0.0], np.cumsum(odds)])
    shares = np.exp(weights - weights.max())
    return float(shares[1:] @ np.minimum(working, servers) / shares.sum() / works)


def _lag(way: Way, busy: float) -> float:
    """The mean lag. A batch is one version old. Where workers run free, rows that are acted during an update are one older; those
    in fragments under way, and episodes that keep their version, add their part of a batch; and in front of a learner that is
    always busy rows pile up as far as the bound lets them."""
    if way.kind == "batch":
        return 1.0
    if busy >= FULL and way.max_lag is not None:
        return float(way.max_lag)
    under_way = way.lanes * (way.episode or way.fragment / 2)
    lag = min(busy, 1.0) + under_way / way.rows
    return lag if way.max_lag is None else min(lag, float(way.max_lag))


def _behind_a_barrier(way: Way, env: StepTimes, policy: PolicyTimes, cores: int, barrier: float) -> Forecast:
    """Every round waits for the slowest lane, or for the cores; then the learner has its turn."""
    lanes, lane_row = way.lanes, barrier * LANE_ROW
    resets = env.reset if env.ends_together else lanes * env.reset  # a lane that begins anew holds up the others
    waits = env.slowest_of(lanes) + resets + lane_row
    works = lanes * (env.cpu + lane_row) / cores
    limits: dict[Limit, float] = {"barrier": _rate(1, waits), "cores": _rate(1, works)}
    # Limits that lie close together are both felt.
    rounds = sum(rate**-SHARPNESS for rate in limits.values()) ** (-1.0 / SHARPNESS)
    each = 1.0 / (rounds * lanes) + barrier * BARRIER_ROW + policy.act
    rate = 1.0 / (each + policy.learn)
    limit: Limit = min(limits, key=lambda limit: limits[limit]) if each >= policy.learn else "learner"
    return Forecast(rate, limit, busy=rate * policy.learn)


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.inf


def _greatest_of_normal(count: int) -> float:
    """The mean of the greatest of so many standard normal numbers, nearly."""
    return math.sqrt(2.0 * math.log(count)) if count > 1 else 0.0
