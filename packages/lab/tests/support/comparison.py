"""This module makes comparisons with made-up numbers for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from freewheel.core import LEARNER_TIME, WORKER_TIME
from freewheel_lab.compare.results import (
    CaseInfo,
    IdealSpeed,
    ResultRow,
    Results,
    ScalePoint,
    ScalingResults,
    Spread,
    WorkAmount,
)
from freewheel_lab.compare.summary import summarised
from freewheel_lab.compare.verdict import judged
from tests.support.timelines import made

ROWS, UPDATES, WARM_UP = 20_480, 10, 1
RATES: Mapping[str, tuple[float, ...]] = {  # steps/s in three repeats
    "sequential": (1000.0, 1010.0, 990.0),
    "lockstep": (2500.0, 2550.0, 2450.0),
    "batch": (2750.0, 2800.0, 2700.0),
    "continuous": (3100.0, 3150.0, 3050.0),
}
FIVE = {**RATES, "episodes": (2900.0, 2940.0, 2860.0)}
LAG = {"sequential": 0.0, "lockstep": 0.0, "batch": 1.0, "continuous": 2.0, "episodes": 2.0}


def row(mode: str, repeat: int, rate: float, **changed: Any) -> ResultRow:
    """Return one training of this rate, whose episodes have 100 steps."""
    window_rows = ROWS * (UPDATES - WARM_UP) // UPDATES
    wall = ROWS / rate + 0.5
    shares = {
        "worker": {kind: 0.5 * (kind in ("step", "wait-credit")) for kind in WORKER_TIME},
        "learner": {kind: {"wait-data": 0.7, "update": 0.3}.get(kind, 0.0) for kind in LEARNER_TIME},
    }
    curve = tuple((wall * part / 10, ROWS * part // 10, 20.0 * part) for part in range(1, 11))
    under_way = 0 if LAG.get(mode, 0.0) == 0 else 512
    values: dict[str, Any] = {
        "repeat": repeat, "mode": mode, "seed": repeat, "workers": 1 if LAG.get(mode, 0) == 0 else 8, "envs": 8,
        "startup_s": 1.0 + len(mode) / 10, "wall_s": wall, "window_s": window_rows / rate, "window_rows": window_rows,
        "rows": ROWS, "updates": UPDATES, "episodes": ROWS // 100,
        "steps_per_s": rate, "episodes_per_s": rate / 100, "updates_per_s": rate / 2048, "return_final": 200.0 + repeat,
        "curve": curve, "lag_mean": LAG.get(mode, 0.0) / 2, "lag_max": LAG.get(mode, 0.0),
        "memory_mb": 300.0 + 10 * len(mode) + repeat, "cpu_util": len(mode) / 12, "gpu_util": None,
        "produced": ROWS + under_way, "trained": ROWS, "queued": 0, "open": 0,
        "dropped": {"shutdown": under_way} if under_way else {}, "shares": shares, "path": f"runs/{mode}-r{repeat}",
    }  # fmt: skip
    return ResultRow(**values | changed)


def rows(rates: Mapping[str, Sequence[float]] = RATES) -> tuple[ResultRow, ...]:
    """Return all trainings, repeat by repeat."""
    return tuple(
        row(mode, repeat, rate)
        for repeat, of_all in enumerate(zip(*rates.values(), strict=True), start=1)
        for mode, rate in zip(rates, of_all, strict=True)
    )


def case(mode: str, **changed: Any) -> CaseInfo:
    """Return the description of a mode."""
    apart = LAG.get(mode, 0.0) > 0
    values: dict[str, Any] = {
        "mode": mode, "title": f"how {mode} collects", "workers": 8 if apart else 1, "envs": 8, "synchronous": not apart,
        "free_running": mode == "continuous", "dependencies": ("worker processes", "shared memory") if apart else (),
        "command": f"freewheel train CartPole-v1 --mode {mode} --num-envs 8",
    }  # fmt: skip
    return CaseInfo(**values | changed)


def measured(rates: Mapping[str, Sequence[float]] = RATES, **changed: Any) -> Results:
    """Return a comparison whose trainings have ended, without a summary."""
    repeats = len(next(iter(rates.values()), ()))
    values: dict[str, Any] = {
        "env": "CartPole-v1", "algo": "ppo", "command": "freewheel compare CartPole-v1", "created": "2026-01-01T00:00:00+00:00",
        "hardware": {"cpu": "a processor", "cores": 2, "memory_gb": 8.0, "gpu": None, "versions": {"freewheel": "0.1.0"}},
        "work": WorkAmount(rows=ROWS, updates=UPDATES, rows_per_update=2048, envs=8, steps_per_env=256, warm_up=WARM_UP,
                     seeds=tuple(range(1, repeats + 1))),
        "ideal": IdealSpeed(steps_per_s=4000.0, formula="min(envs / row_s, cores / cpu_s)", envs=8, cores=2, row_s=2e-3,
                       cpu_s=1e-4, step_median_s=1.5e-3, slowest_s=5e-3, episode_steps=22.0),
        "budget_s": 60.0, "repeats": repeats, "modes": tuple(case(mode) for mode in rates), "rows": rows(rates),
        "wall_s": 120.0,
    }  # fmt: skip
    return Results(**values | changed)


def reported(rates: Mapping[str, Sequence[float]] = FIVE, **changed: Any) -> Results:
    """Return a comparison with its summary and its recommendation."""
    return judged(summarised(measured(rates, **changed)))


def full() -> Results:
    """Return a comparison with everything that a report can show."""
    late = [replace(one, dropped={"late": 12, "shutdown": 500}) if one.lag_max else one for one in rows(FIVE)]
    timelines = {mode: made().to_json() for mode in ("lockstep", "continuous")}
    ideal = replace(measured().ideal, steps_per_s=5200.0)
    return reported(rows=tuple(late), scale=scale(), timelines=timelines, ideal=ideal)


def scale() -> ScalingResults:
    """Return speeds that are measured with up to 8 workers and extrapolated beyond."""
    points, far = [], []
    for mode in ("lockstep", "continuous"):
        for workers in (1, 2, 4, 8, 10, 20, 50, 100, 200):
            rate = (1200 if mode == "continuous" else 700) * workers / (1 + workers / 30)
            point = ScalePoint(mode=mode, workers=workers, envs=workers, predicted=rate, limit="envs")
            if workers > 8:
                far.append(replace(point, a_core_each=rate * 1.4))
            else:
                points.append(replace(point, error=0.03, measured=Spread(rate / 1.03, rate / 1.1, rate)))
    return ScalingResults(
        law="steps/s = workers / E[step]",
        points=tuple(points),
        extrapolated=tuple(far),
        pays_up_to={"lockstep": 40, "continuous": 60},
        verdict=("continuous: up to 60 workers pay",),
        assumptions=("memory suffices",),
        fitted={"step_s": 0.001},
    )
