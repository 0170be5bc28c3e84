"""Results of comparisons: rows that are made up, and the summary that is made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from freewheel.compare.results import (
    CaseInfo,
    Ideal,
    Pair,
    Recommendation,
    Results,
    Row,
    Scale,
    ScalePoint,
    Spread,
    Work,
)
from freewheel.compare.summary import summarised
from freewheel.timeline.model import Row as TimelineRow
from freewheel.timeline.model import Span, Timeline

#: Steps/s, lag, memory and CPU of the modes.
MODES = {
    "sequential": (812.0, 0, 410.0, 0.51),
    "lockstep": (2190.0, 0, 702.0, 0.83),
    "batch": (3344.0, 1, 731.0, 0.9),
    "continuous": (4871.0, 2, 745.0, 0.97),
    "episodes": (4610.0, 2, 744.0, 0.96),
}
LENGTH = 97.3  # mean steps of an episode


def learned(t: float) -> float:
    return 190 / (1 + math.exp(3 - t / 3))


def row(mode: str, repeat: int, **other: Any) -> Row:
    """A training; repeats differ a little."""
    rate, lag, memory, cpu = MODES[mode]
    rate *= 1 + 0.03 * math.sin(7 * repeat + len(mode))
    waits = {"sequential": 0.5, "lockstep": 0.4}.get(mode, 0.08)
    values: dict[str, Any] = {
        "repeat": repeat, "mode": mode, "seed": repeat, "workers": 1 if mode == "sequential" else 4, "envs": 8,
        "startup_s": 1.1 + 0.2 * len(mode) % 1, "wall_s": 20480 / rate, "window_s": 18432 / rate, "window_rows": 18432,
        "rows": 20480, "updates": 10, "episodes": 210, "steps_per_s": rate, "episodes_per_s": rate / LENGTH,
        "updates_per_s": rate / 2048, "return_final": 180.0 + repeat,
        "curve": tuple((1024 * t / rate, 1024 * t, None if t == 0 else learned(t) + 5 * repeat) for t in range(21)),
        "lag_mean": lag * 0.45, "lag_max": float(lag), "memory_mb": memory + repeat, "cpu_util": cpu, "gpu_util": None,
        "produced": 20480 + 17 * (lag > 0), "trained": 20480, "queued": 0, "open": 0,
        "dropped": {"late": 12, "shutdown": 5} if lag else {},
        "shares": {
            "worker": {"step": 0.8 - waits, "infer": 0.16, "wait-gate" if lag else "wait-credit": waits, "other": 0.04},
            "learner": {"update": 0.3 + 0.2 * (lag > 0), "observe": 0.02, "wait-data": 0.6 - 0.2 * (lag > 0), "other": 0.08},
        },
        "path": f"runs/{mode}-{repeat}",
    }  # fmt: skip
    return Row(**{**values, **other})


def timeline(workers: int = 4) -> dict[str, Any]:
    rows = []
    for number in range(workers):
        spans, at = [], 0.0
        while at < 2.0:
            for kind, length in (
                ("infer", 0.012),
                ("step", 0.03 + 0.02 * math.sin(number + 9 * at)),
                ("wait-credit", 0.02),
            ):
                spans.append(Span(kind, at, at + length, "learner" if kind == "wait-credit" else ""))
                at += length
        rows.append(TimelineRow(f"worker {number}", "envs", spans))
    beat = [Span(kind, n * 0.5 + start, n * 0.5 + stop) for n in range(4)
            for kind, start, stop in (("wait-data", 0.0, 0.28), ("update", 0.28, 0.48), ("publish", 0.48, 0.5))]  # fmt: skip
    rows.append(TimelineRow("learner", "learner", beat))
    return Timeline(
        rows, {"wait-credit": "Enough rows are under way: the learner is the slower one."}, 0.0, 2.0
    ).to_json()


def scale() -> Scale:
    def rate(mode: str, workers: int) -> float:
        return (1200 if mode == "continuous" else 700) * workers / (1 + workers / 30)

    known = [(mode, workers) for mode in ("lockstep", "continuous") for workers in (1, 2, 4, 8)]
    points = tuple(
        ScalePoint(mode=mode, workers=n, envs=n, predicted=rate(mode, n), limit="envs", error=0.03,
                   measured=Spread(rate(mode, n) / 1.03, rate(mode, n) / 1.1, rate(mode, n)))
        for mode, n in known
    )  # fmt: skip
    far = tuple(
        ScalePoint(
            mode=mode,
            workers=n,
            envs=n,
            predicted=rate(mode, n),
            limit="cores" if n > 50 else "envs",
            a_core_each=rate(mode, n) * 1.4,
        )
        for mode in ("lockstep", "continuous")
        for n in (10, 20, 50, 100, 200)
    )
    return Scale(
        law="steps/s = workers / E[slowest of the workers' steps] in lockstep, workers / E[step] where nobody waits, "
        "both below what the cores and the learner can do.",
        points=points, extrapolated=far, pays_up_to={"lockstep": 40, "continuous": 60},
        verdict=("lockstep: more than 40 workers bring less than 10 % for twice as many", "continuous: up to 60 workers pay"),
        assumptions=("steps take as long with more workers as with these", "the learner keeps its core", "memory suffices"),
        fitted={"step_s": 0.001},
    )  # fmt: skip


def results(modes: Sequence[str] = tuple(MODES), repeats: int = 3, **other: Any) -> Results:
    """A comparison of these modes."""
    rows = [row(mode, repeat) for repeat in range(1, repeats + 1) for mode in modes]
    return from_rows(rows, modes, **{"repeats": repeats, **other})


def from_rows(rows: Sequence[Row], modes: Sequence[str], **other: Any) -> Results:
    ideal, failed = other.pop("ideal", 5200.0), other.pop("failed", {})
    values: dict[str, Any] = {
        "env": "CartPole-v1", "algo": "ppo", "command": "freewheel compare CartPole-v1", "created": "2026-11-16 16:40 UTC",
        "hardware": {"cpu": "AMD EPYC 9354", "cores": 2, "memory_gb": 15.6, "gpu": None, "python": "3.11.2", "torch": "2.9.0"},
        "work": Work(rows=20480, updates=10, rows_per_update=2048, envs=8, steps_per_env=256, warm_up=1, seeds=(1, 2, 3)),
        "ideal": Ideal(steps_per_s=ideal, formula="8 envs on 2 cores, 0.38 ms a step", envs=8, cores=2),
        "budget_s": 60.0,
        "modes": tuple(
            CaseInfo(mode=mode, title=f"What {mode} does", workers=1 if mode == "sequential" else 4, envs=8,
                     options={"placement": "inline"} if mode == "lockstep" else {}, dependencies=("shared memory",),
                     command=f"freewheel train CartPole-v1 --mode {mode}", failed=failed.get(mode))
            for mode in modes
        ),
        "rows": tuple(rows), "wall_s": 93.4, "repeats": 3,
    }  # fmt: skip
    made = summarised(Results(**{**values, **other}))
    best = max(made.summary, key=lambda one: one.steps_per_s.median, default=None)
    if best is None:
        return made
    sentence = "continuous: 4,871 env steps/s, 5 % above episodes, because nobody waits for the slowest environment"
    command = f"freewheel train CartPole-v1 --mode {best.mode}"
    return replace(made, recommendation=Recommendation(
        mode=best.mode, sentence=sentence, margin=0.05, within_noise=False, command=command, steps_per_s=best.steps_per_s.median
    ))  # fmt: skip


def full() -> Results:
    """With everything that a report can show."""
    gain = Spread(2.22, 2.1, 2.4)
    pairs = (
        Pair(what="sync against async", before="lockstep", after="continuous", gain=gain, sentence="Nobody waits: 2.2 times."),
        Pair(what="overlap", before="lockstep", after="batch", gain=Spread(1.53, 1.5, 1.6), sentence="Acts during an update."),
        Pair(what="CUDA graphs", before="", after="", gain=None, sentence="Not measured: there is no GPU here."),
    )  # fmt: skip
    return results(scale=scale(), pairs=pairs, timelines={mode: timeline() for mode in ("lockstep", "continuous")})
