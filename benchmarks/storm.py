"""A kill storm: every worker is SIGKILLed with probability 10 % a second for a minute, beside an undisturbed twin."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, number, straggler, table

NAME = "storm"
MODES = ("continuous", "batch", "episodes")
WORLD = {"law": "lognormal", "mean": 0.005, "kind": "sleep", "length": 100}
WORKERS, RATE = 8, 0.1  # kills a second of each worker
LEAST_OF_TWIN, LONGEST_WAIT = 0.70, 2.0
CALM = 3.0  # seconds after the storm in which all must come back


def storm(seconds: float, seed: int) -> list[tuple[float, int]]:
    """Poisson: when, and whom."""
    rng = np.random.default_rng(seed)
    count = rng.poisson(RATE * WORKERS * seconds)
    times = np.sort(rng.uniform(0, seconds, count)).tolist()
    return list(zip(times, rng.integers(WORKERS, size=count).tolist(), strict=True))


def measure(notebook: Notebook, mode: str, seconds: float, warm: float, seed: int) -> tuple[Row, Row]:
    """An undisturbed run, and the same in the storm."""
    options = straggler(mode, WORKERS, WORLD, {"num_steps_per_env": 64, "seed": seed})
    order: dict[str, Any] = {"options": options, "warm_s": warm, "window_s": seconds + CALM}
    calm = notebook.once("_collect_once", order, {"mode": mode, "weather": "calm"})
    kills = {"kills": storm(seconds, seed)}
    return calm, notebook.once("_collect_once", order | kills, {"mode": mode, "weather": "storm"})


def ratio(calm: Row, wild: Row) -> float:
    return float(wild["trained_per_s"] / calm["trained_per_s"])


def cells(mode: str, calm: Row, wild: Row) -> list[str]:
    back = [1e3 * seconds for seconds in wild["back_s"]] or [0.0]
    return [
        mode,
        number(calm["trained_per_s"]),
        number(wild["trained_per_s"]),
        f"{ratio(calm, wild):.3f}",
        str(wild["kills"]),
        str(wild["restarts"]),
        f"{np.median(back):.0f} (.. {max(back):.0f})",
        f"{wild['longest_wait_s']:.2f}",
        " ".join(f"{cause} {count}" for cause, count in wild["dropped"].items()) or "0",
    ]


def judge(notebook: Notebook, rows: Mapping[str, tuple[Row, Row]]) -> None:
    header = ("mode", "rows trained/s, calm", "storm", "ratio", "kills", "restarts", "back after ms", "longest wait s",
              "dropped")  # fmt: skip
    notebook.write(table(header, [cells(mode, *pair) for mode, pair in rows.items()]))
    for mode, (calm, wild) in rows.items():
        part, wait = ratio(calm, wild), wild["longest_wait_s"]
        notebook.judge(f"{mode}: {part:.3f} of its twin, at least {LEAST_OF_TWIN}", part >= LEAST_OF_TWIN)
        notebook.judge(f"{mode}: longest wait for chunks {wait:.2f} s, at most {LONGEST_WAIT:g}", wait <= LONGEST_WAIT)
        text = f"{mode}: {wild['kills']} kills, {wild['restarts']} restarts, {wild['workers_lost']} workers lost"
        notebook.judge(text, wild["kills"] == wild["restarts"] and not wild["workers_lost"], exact=True)
    notebook.judge_promises([row for pair in rows.values() for row in pair])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    notebook = Notebook(NAME, f"{WORKERS} workers in a kill storm", quick=given.quick)
    seconds, warm = (2.0, 0.5) if given.quick else (given.seconds, 2.0)
    modes = given.modes[::2] if given.quick else given.modes
    judge(notebook, {mode: measure(notebook, mode, seconds, warm, given.seed) for mode in modes})
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
