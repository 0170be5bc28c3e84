"""Predicts the env steps per second and the policy lag of a way of collecting, with one model from measured times.

The model is a small closed queueing network. Each worker repeats a cycle: its environment waits, which does not affect
others, and then computes on the cores, which all workers and the learner share. The learner is one more server, which
the rows pass. Behind a barrier every round takes as long as its slowest lane. Little's law gives the lag.

Measured inputs are the environment (rollout/probe.py), the policy and the learner (policy_times.py), and in
`freewheel tune` the cost of handing rows over (tune/probe.py). The constants below are fixed.
benchmarks/first_day.py and benchmarks/tune_error.py compare the predictions with measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from freewheel.rollout.probe import EnvCost

#: Processor seconds of a row behind a barrier without the environment: LANE_ROW in the lane's process (Gymnasium's pipe
#: both ways), BARRIER_ROW in the process that waits for the lanes in turn (2 cores, AMD EPYC, 5 ms sleeps). For workers
#: the measurement contains this part: the probe also checks and copies rows, and wakes up with cold caches.
LANE_ROW, BARRIER_ROW = 210e-6, 100e-6
#: The sharpness of the transition between two limits of a barrier: two equal rates give 2 ** (-1 / SHARPNESS) of one.
SHARPNESS = 4.0
FULL = 0.97  # busy share of the time from which on rows pile up in front of the learner
HALVINGS = 40  # bisection steps in the search for a rate

Limit: TypeAlias = Literal["envs", "barrier", "cores", "learner"]
Kind: TypeAlias = Literal["serial", "barrier", "batch", "free"]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The times of one environment, in seconds."""

    times: tuple[float, ...]  # samples of the time of a step, equally likely
    reset: float = 0.0  # time of resets, divided by the steps
    cpu: float = 0.0  # processor time of a step and its part of a reset
    ends_together: bool = False  # whether all episodes have the same length
    #: (lanes, time of one step of all in steps of a single lane), rising; empty: every lane adds the time of one
    together: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, cost: EnvCost, many: EnvCost | None = None) -> StepTimes:
        """Return the measured times without the time that other processes took. many: several lanes in one process."""
        alone = cost.own / cost.row if cost.row > 0 else 1.0
        equal = len(cost.lengths) > 1 and len(set(cost.lengths)) == 1
        measured = cls(times=cost.times or (cost.wall,), reset=cost.row - cost.wall, ends_together=equal)
        found = replace(measured.scaled(alone), cpu=cost.cpu)
        if many is None or many.spec.lanes <= 1 or found.row <= 0:
            return found
        return replace(found, together=((1, 1.0), (many.spec.lanes, many.own / found.row)))

    @property
    def row(self) -> float:
        """Return the mean time of a step and its part of a reset."""
        return float(np.mean(self.times)) + self.reset

    def slowest_of(self, count: int) -> float:
        """Return the mean time of the slowest of `count` independent steps."""
        ranked = np.sort(self.times)
        below = np.arange(len(ranked) + 1) / len(ranked)
        return float(ranked @ np.diff(below**count))

    def scaled(self, factor: float) -> StepTimes:
        """Return the times, all multiplied by `factor`."""
        times = tuple(factor * time for time in self.times)
        return replace(self, times=times, reset=factor * self.reset, cpu=factor * self.cpu)

    def beside(self, lanes: int) -> StepTimes:
        """Return the times of a row if this many lanes share a process."""
        if not self.together or lanes == 1:
            return self
        return self.scaled(along(self.together, lanes) / lanes)


def along(points: tuple[tuple[int, float], ...], at: int) -> float:
    """Interpolate linearly between these points, and extrapolate beyond the last one."""
    if len(points) == 1:
        return points[0][1] * at / points[0][0]
    after = next((index for index, (place, _) in enumerate(points) if index and place >= at), len(points) - 1)
    (left, low), (right, high) = points[after - 1], points[after]
    return low + (high - low) * (at - left) / (right - left)


@dataclass(frozen=True, kw_only=True)
class PolicyTimes:
    """The times of the policy and its learner, in seconds a row."""

    act: float  # choosing an action, for all lanes of one process together
    learn: float  # all work of the learner


@dataclass(frozen=True, kw_only=True)
class WireTimes:
    """Processor seconds of handing rows over from a worker, unless other measurements contain them."""

    row: float = 0.0  # in the worker, for each row
    fragment: float = 0.0  # in the worker, for each fragment
    taken_row: float = 0.0  # in the learner's process, for each row
    taken_fragment: float = 0.0  # in the learner's process, for each fragment

    def sent(self, rows: float) -> float:
        """Return the worker's seconds for a row in fragments of `rows` rows."""
        return self.row + self.fragment / rows

    def taken(self, rows: float) -> float:
        """Return the seconds in the learner's process for a row in fragments of `rows` rows."""
        return self.taken_row + self.taken_fragment / rows


NO_WIRE = WireTimes()


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of collecting rows."""

    kind: Kind  # serial: lanes in turn; barrier: a process each; batch, free: workers
    workers: int  # processes that act
    lanes: int
    steps: int  # steps of each lane in one update
    fragment: int = 0  # steps of each lane that a worker hands over at once; 0: not known
    max_lag: int | None = None  # the bound on the lag; None: no bound
    episode: float = 0.0  # steps of an episode, if it keeps one version of the policy; 0: it does not
    yields: bool = False  # the learner leaves the cores to the workers

    @property
    def rows(self) -> int:
        """Return the rows of one update."""
        return self.steps * self.lanes


@dataclass(frozen=True)
class Forecast:
    """The prediction for a way of collecting."""

    rate: float  # env steps/s
    limit: Limit  # the bottleneck
    lag: float = 0.0  # mean updates between choosing an action and learning from it
    busy: float = 0.0  # share of the time that the learner works


def forecast(
    way: Way, env: StepTimes, policy: PolicyTimes, cores: int, wire: WireTimes = NO_WIRE, barrier: float = 1.0
) -> Forecast:
    """Predict the env steps/s of a way and the lag of its rows. barrier: factor on the usual cost of a barrier."""
    if way.kind == "serial":
        each = env.beside(way.lanes).row + policy.act
        rate = 1.0 / (each + policy.learn)
        return Forecast(rate, "envs" if each >= policy.learn else "learner", busy=rate * policy.learn)
    if way.kind == "barrier":
        return _behind_a_barrier(way, env, policy, cores, barrier)
    return _workers(way, env.beside(way.lanes // way.workers), policy, cores, wire)


def _workers(way: Way, env: StepTimes, policy: PolicyTimes, cores: int, wire: WireTimes) -> Forecast:
    """Predict workers that run in parallel to a learner."""
    each = way.lanes // way.workers
    together = float(max(way.fragment or way.steps, 1) * each)  # rows of a fragment
    works = env.cpu + policy.act + wire.sent(together)
    waits = max(0.0, env.row - env.cpu)
    if way.kind == "batch":  # it ends with the slowest worker; half of the delay is made up by the others
        waits += float(np.std(env.times)) / math.sqrt(way.steps * each) * _greatest_of_normal(way.workers) / 2
    learns = policy.learn + wire.taken(together)
    rate = _shared(way, waits, works, learns, cores)
    limits: dict[Limit, float] = {
        "learner": _rate(1, learns),
        "envs": _rate(way.workers, waits + works),
        "cores": _rate(cores, works + learns),
    }
    if way.max_lag == 0:  # no rows are under way during an update
        rate = _rate(1, 1 / _shared(way, waits, works, 0.0, cores) + learns)
    busy = rate * learns
    return Forecast(rate, min(limits, key=lambda limit: limits[limit]), _lag(way, busy), busy)


def _shared(way: Way, waits: float, works: float, learns: float, cores: int) -> float:
    """Return the rate at which workers and learner share the cores. Unless the learner yields, the workers get the
    cores that it does not use at that rate. The rate is bounded by the learner, the workers and all cores together."""
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
    """Return the cycles per second of `count` workers, which wait and then work at a shared server. This is the
    machine repair model, exact for any distribution of these times if the servers divide their time evenly."""
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
    """Return the mean lag. A batch is one version old. With free-running workers, rows from the time of an update are
    one version older, and unfinished fragments and episodes add their share of a batch. If the learner is always busy,
    rows pile up to the bound."""
    if way.kind == "batch":
        return 1.0
    if busy >= FULL and way.max_lag is not None:
        return float(way.max_lag)
    under_way = way.lanes * (way.episode or way.fragment / 2)
    lag = min(busy, 1.0) + under_way / way.rows
    return lag if way.max_lag is None else min(lag, float(way.max_lag))


def _behind_a_barrier(way: Way, env: StepTimes, policy: PolicyTimes, cores: int, barrier: float) -> Forecast:
    """Predict rounds that wait for the slowest lane or for the cores, each followed by the learner."""
    lanes, lane_row = way.lanes, barrier * LANE_ROW
    resets = env.reset if env.ends_together else lanes * env.reset  # a lane in reset delays the others
    waits = env.slowest_of(lanes) + resets + lane_row
    works = lanes * (env.cpu + lane_row) / cores
    limits: dict[Limit, float] = {"barrier": _rate(1, waits), "cores": _rate(1, works)}
    # Two limits that are close together both slow the rounds down.
    rounds = sum(rate**-SHARPNESS for rate in limits.values()) ** (-1.0 / SHARPNESS)
    each = 1.0 / (rounds * lanes) + barrier * BARRIER_ROW + policy.act
    rate = 1.0 / (each + policy.learn)
    limit: Limit = min(limits, key=lambda limit: limits[limit]) if each >= policy.learn else "learner"
    return Forecast(rate, limit, busy=rate * policy.learn)


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.inf


def _greatest_of_normal(count: int) -> float:
    """Return approximately the mean of the greatest of `count` standard normal numbers."""
    return math.sqrt(2.0 * math.log(count)) if count > 1 else 0.0
