"""Env steps/s over the number of workers: measured, and by the law of run/advice/throughput.py fitted to what was measured.

Workers that never wait for each other make workers / (mean step) steps/s; behind a barrier they make workers / (mean of the
slowest of so many steps). Both stop growing at what the cores and the learner can do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from freewheel.files.memory import in_words
from freewheel.metrics.names import WORKING
from freewheel.run.advice.throughput import Forecast, Kind, PolicyTimes, StepTimes, Way, forecast
from freewheel_lab.compare.results import ResultRow, ScalePoint, ScalingResults
from freewheel_lab.compare.summary import rates, spread

EXTRAPOLATED = (10, 20, 50, 100, 200)
PAYS = 1.25  # times the steps/s for twice the workers: less does not pay
WIDTHS = (2.0, 2.0, 1.2, 1.2, 1.05)  # how far from the best so far other factors are tried, in turn
TRIED = range(-8, 9)
LAW = (
    "free workers: W / (E[t] + a); in whole batches the slowest worker's mean instead of E[t]; behind a barrier "
    "W / (E[max of W t] + W b); never more than cores / (c + a + u) and 1 / u; two limits that lie close are both felt. "
    "t: seconds of a step, a: of choosing an action, u: of learning, c: of the processor, each for a row; "
    "b: of the barrier for a lane"
)


@dataclass(frozen=True)
class FittedLaw:
    """The numbers of the law, from what was measured."""

    env: StepTimes
    policy: PolicyTimes
    barrier: float = 1.0  # times the usual cost of a barrier
    cores: int = 1

    def predict(self, way: Way, cores: int | None = None) -> Forecast:
        """Of so many workers with an env each."""
        return forecast(way, self.env, self.policy, self.cores if cores is None else cores, barrier=self.barrier)


@dataclass(frozen=True)
class MeasuredPoint:
    """What was measured with so many workers of a mode."""

    mode: str
    way: Way
    rows: tuple[ResultRow, ...]
    failed: str = ""

    @property
    def rate(self) -> float:
        return statistics.median(rates(self.rows).values())


def way_with(kind: Kind, workers: int, rows_per_update: int) -> Way:
    """An env for each worker; an update has about as many rows with any number of them."""
    return Way(
        kind=kind,
        workers=workers if kind != "barrier" else 1,
        lanes=workers,
        steps=max(1, round(rows_per_update / workers)),
    )


def fit(points: Sequence[MeasuredPoint], env: StepTimes, policy: PolicyTimes, cores: int) -> FittedLaw:
    """The law's numbers: first from where the trainings' own time went, then each scaled by the factor that explains the
    measured rates best (least squares of their logarithms), one after the other."""
    known = [point for point in points if point.rows]
    start = FittedLaw(env, _own_times(known, policy), cores=cores)
    factors = {"env": 1.0, "learn": 1.0, "barrier": 1.0}
    if not known:
        return start
    for width in WIDTHS:
        for name, best in list(factors.items()):
            if name == "barrier" and all(point.way.kind != "barrier" for point in known):
                continue
            near = [best * width ** (step / 8) for step in TRIED]
            misfits = {factor: _misfit(known, _scaled(start, {**factors, name: factor})) for factor in near}
            # What does not matter stays as it was measured: of two that fit equally, the one nearer to 1.
            factors[name] = min(misfits, key=lambda factor: (round(misfits[factor], 6), abs(math.log(factor))))
    return _scaled(start, factors)


def _scaled(start: FittedLaw, factors: Mapping[str, float]) -> FittedLaw:
    policy = replace(start.policy, learn=start.policy.learn * factors["learn"])
    return replace(start, env=start.env.scaled(factors["env"]), policy=policy, barrier=factors["barrier"])


def _misfit(points: Sequence[MeasuredPoint], law: FittedLaw) -> float:
    return sum(math.log(law.predict(point.way).rate / point.rate) ** 2 for point in points)


def _own_times(points: Sequence[MeasuredPoint], policy: PolicyTimes) -> PolicyTimes:
    """What acting and learning took for each row, by the shares of the trainings."""
    acting, learning = list[float](), list[float]()
    for row in (row for point in points for row in point.rows):
        worker, learner = row.shares.get("worker", {}), row.shares.get("learner", {})
        produced = max(1, row.produced)
        acting.append(worker.get("infer", 0.0) * row.workers * row.wall_s / produced)
        learning.append(sum(learner.get(kind, 0.0) for kind in WORKING) * row.wall_s / max(1, row.trained))
    if not any(learning):
        return policy
    return PolicyTimes(act=statistics.median(acting), learn=statistics.median(learning))


def scaled(points: Sequence[MeasuredPoint], law: FittedLaw, memory: int, rows_per_update: int) -> ScalingResults:
    """Measured beside predicted, then beyond."""
    kinds = {point.mode: point.way.kind for point in points}
    beyond = [workers for workers in EXTRAPOLATED if workers > max(point.way.lanes for point in points)]
    extrapolated = [
        _point(law, mode, way_with(kind, workers, rows_per_update))
        for mode, kind in kinds.items()
        for workers in beyond
    ]
    pays = {mode: pays_up_to(law, kind, rows_per_update) for mode, kind in kinds.items()}
    return ScalingResults(
        law=LAW,
        points=tuple(_beside(law, point) for point in points),
        extrapolated=tuple(extrapolated),
        pays_up_to=pays,
        verdict=tuple(_verdicts(law, kinds, pays, points, rows_per_update)),
        assumptions=tuple(_assumptions(law, memory)),
        fitted={
            "step_s": law.env.row,
            "cpu_s": law.env.cpu,
            "act_s": law.policy.act,
            "learn_s": law.policy.learn,
            "barrier": law.barrier,
            "cores": float(law.cores),
        },
        rows=tuple(row for point in points for row in point.rows),
    )


def _point(law: FittedLaw, mode: str, way: Way) -> ScalePoint:
    found, alone = law.predict(way), law.predict(way, cores=way.lanes + 1)
    return ScalePoint(
        mode=mode, workers=way.lanes, envs=way.lanes, predicted=found.rate, limit=found.limit, a_core_each=alone.rate
    )


def _beside(law: FittedLaw, point: MeasuredPoint) -> ScalePoint:
    predicted = _point(law, point.mode, point.way)
    if not point.rows:
        return replace(predicted, failed=point.failed or "not measured")
    return replace(
        predicted,
        measured=spread(rates(point.rows).values()),
        error=predicted.predicted / point.rate - 1,
        failed=point.failed or None,
    )


def pays_up_to(law: FittedLaw, kind: Kind, rows_per_update: int, most: int = EXTRAPOLATED[-1]) -> int:
    """The smallest number of workers that twice as many exceed by less than a quarter; `most`: all of them pay."""
    for workers in range(1, most):
        now, twice = (law.predict(way_with(kind, count, rows_per_update)).rate for count in (workers, 2 * workers))
        if twice < PAYS * now:
            return workers
    return most


def _verdicts(
    law: FittedLaw,
    kinds: Mapping[str, Kind],
    pays: Mapping[str, int],
    points: Sequence[MeasuredPoint],
    rows_per_update: int,
) -> Iterator[str]:
    waits = {"envs": "the envs", "barrier": "the slowest env", "cores": "the cores", "learner": "the learner"}
    for mode, kind in kinds.items():
        most = pays[mode]
        there, beyond = (law.predict(way_with(kind, count, rows_per_update)) for count in (most, 2 * most))
        measured = max((point.way.lanes for point in points if point.mode == mode and point.rows), default=0)
        source = "measured" if most <= measured else "extrapolated"
        if most >= EXTRAPOLATED[-1]:
            yield f"{mode}: every worker up to {most} pays ({source}), about {there.rate:,.0f} steps/s there"
            continue
        gain = 100 * (beyond.rate / there.rate - 1)
        more = f"twice as many bring {gain:.0f} %, as they wait for {waits[beyond.limit]}"
        yield f"{mode}: up to {most} worker{'s' * (most > 1)} pay ({source}), about {there.rate:,.0f} steps/s; {more}"


def _assumptions(law: FittedLaw, memory: int) -> Iterator[str]:
    yield "one env for each worker, whose steps take as long as those that were measured and do not depend on each other"
    yield f"this machine with its {law.cores} cores (last column: a core for every worker and one for the learner)"
    yield "acting and learning cost as much for each row with any number of workers, and an update has as many rows"
    if memory:
        yield f"there is memory for all: about {in_words(memory)} for an env and its worker, {in_words(200 * memory)} for 200"
