"""This module computes env steps/s over the number of workers. It fits the law of
run/advice/throughput.py to measurements and extrapolates.

Workers that never wait for each other make workers / (mean step) steps/s. Behind a barrier they
make workers / (mean of the slowest of that many steps). Both stop growing at the limit of the cores
and of the learner.
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
PAYS = 1.25  # if twice the workers bring less than this factor, they are not worth it
WIDTHS = (2.0, 2.0, 1.2, 1.2, 1.05)  # in each pass, factors within this distance from the best one are tried
TRIED = range(-8, 9)
LAW = (
    "free workers: W / (E[t] + a); in whole batches the slowest worker's mean replaces E[t]; behind a barrier: "
    "W / (E[max of W t] + W b); at most cores / (c + a + u) and 1 / u; two limits that are close both slow it down. "
    "t: seconds of a step, a: of choosing an action, u: of learning, c: of the processor, all per row; "
    "b: seconds of the barrier per lane"
)


@dataclass(frozen=True)
class FittedLaw:
    """Holds the parameters of the law, fitted to measurements."""

    env: StepTimes
    policy: PolicyTimes
    barrier: float = 1.0  # relative to the usual cost of a barrier
    cores: int = 1

    def predict(self, way: Way, cores: int | None = None) -> Forecast:
        """Return the forecast for this number of workers with one env each."""
        return forecast(way, self.env, self.policy, self.cores if cores is None else cores, barrier=self.barrier)


@dataclass(frozen=True)
class MeasuredPoint:
    """Holds the measurements of a mode with one number of workers."""

    mode: str
    way: Way
    rows: tuple[ResultRow, ...]
    failed: str = ""

    @property
    def rate(self) -> float:
        return statistics.median(rates(self.rows).values())


def way_with(kind: Kind, workers: int, rows_per_update: int) -> Way:
    """Return a setting with one env for each worker. The rows of an update are about the same for
    any number of workers."""
    return Way(
        kind=kind,
        workers=workers if kind != "barrier" else 1,
        lanes=workers,
        steps=max(1, round(rows_per_update / workers)),
    )


def fit(points: Sequence[MeasuredPoint], env: StepTimes, policy: PolicyTimes, cores: int) -> FittedLaw:
    """Return the law that explains the measurements best. First it takes times from the trainings'
    own shares. Then it scales one parameter after the other to minimise the squared error of the
    logarithms of the rates."""
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
            # A factor that does not matter stays near 1: of two that fit equally well, the one nearer to 1 is taken.
            factors[name] = min(misfits, key=lambda factor: (round(misfits[factor], 6), abs(math.log(factor))))
    return _scaled(start, factors)


def _scaled(start: FittedLaw, factors: Mapping[str, float]) -> FittedLaw:
    policy = replace(start.policy, learn=start.policy.learn * factors["learn"])
    return replace(start, env=start.env.scaled(factors["env"]), policy=policy, barrier=factors["barrier"])


def _misfit(points: Sequence[MeasuredPoint], law: FittedLaw) -> float:
    return sum(math.log(law.predict(point.way).rate / point.rate) ** 2 for point in points)


def _own_times(points: Sequence[MeasuredPoint], policy: PolicyTimes) -> PolicyTimes:
    """Return the times of acting and learning for each row, from the time shares of the trainings."""
    acting = list[float]()
    learning = list[float]()
    for row in (row for point in points for row in point.rows):
        worker = row.shares.get("worker", {})
        learner = row.shares.get("learner", {})
        produced = max(1, row.produced)
        acting.append(worker.get("infer", 0.0) * row.workers * row.wall_s / produced)
        learning.append(sum(learner.get(kind, 0.0) for kind in WORKING) * row.wall_s / max(1, row.trained))
    if not any(learning):
        return policy
    return PolicyTimes(act=statistics.median(acting), learn=statistics.median(learning))


def scaled(points: Sequence[MeasuredPoint], law: FittedLaw, memory: int, rows_per_update: int) -> ScalingResults:
    """Return measured and predicted speeds, and the extrapolation to more workers."""
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
    found = law.predict(way)
    alone = law.predict(way, cores=way.lanes + 1)
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
    """Return the smallest number of workers for which twice as many bring less than 25 % more.
    `most` means that all of them are worth it."""
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
        more = f"twice as many bring {gain:.0f} %, because they wait for {waits[beyond.limit]}"
        yield f"{mode}: up to {most} worker{'s' * (most > 1)} pay ({source}), about {there.rate:,.0f} steps/s; {more}"


def _assumptions(law: FittedLaw, memory: int) -> Iterator[str]:
    yield "each worker has one env; its steps take as long as the measured ones and do not depend on each other"
    yield f"this machine has {law.cores} cores (last column: a core for every worker and one for the learner)"
    yield "acting and learning cost the same per row with any number of workers, and an update has the same number of rows"
    if memory:
        yield f"there is enough memory: about {in_words(memory)} for an env and its worker, {in_words(200 * memory)} for 200"
