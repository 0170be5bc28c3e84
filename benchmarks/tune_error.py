"""What `freewheel tune` predicts beside what is then measured, and its choice beside an exhaustive grid."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, median, number, rotated, run_python, spread, table
from freewheel.config import flags
from freewheel.errors import MeasureError
from freewheel_lab.bench.measure import TrainingRequest, measure

NAME = "tune_error"
SLEEP = {"law": "lognormal", "mean": 0.010, "kind": "sleep", "length": 100}
SLEEPER = ["freewheel/Straggler-v0", *(word for key, value in SLEEP.items() for word in (f"--env.{key}", str(value)))]
WORLDS: Mapping[str, Sequence[str]] = {
    "straggler": SLEEPER,
    "cartpole": ["CartPole-v1"],
    "cage2": ["freewheel/Cage2-v0"],
}
#: The grid: those of tune's settings that have these numbers, in every mode.
WORKERS, EACH, LANES, FRAGMENTS = (1, 2, 8, 32, 64, 128), (1, 8, 64), (1, 8, 32, 64, 128), (8, 32)
HOPELESS = 1 / 3  # of the best prediction: settings that are held for slower than this are not measured
CLOSE, BEST = 0.15, 0.95  # a prediction may be off by so much; the choice makes so much of the best of the grid
SLEEPERS, ALONE, BESIDE = 100, 0.98, 0.96
HALF_A_CORE = """
import time
while True:
    end = time.perf_counter() + 0.005
    while time.perf_counter() < end:
        pass
    time.sleep(0.005)
"""
CYBORG = ("cyborg:Scenario2", "--mode", "continuous", "--max-episode-steps", "100")
MANY, FEW, AS_FAST = 20, 2, 0.97  # workers, and the noise that is allowed


def tune(words: Sequence[str], given: argparse.Namespace) -> dict[str, Any]:
    """What `freewheel tune` says."""
    seconds = ["--probe-seconds", given.probe, "--measure-seconds", given.window]
    with TemporaryDirectory() as folder:
        said: dict[str, Any] = json.loads(run_python("-m", "freewheel", "tune", *words, *seconds, "--json", cwd=folder))
    return said


def typed(options: Mapping[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (flags.as_flag(name), *flags.tokens(value))]


def rate(words: Sequence[str], candidate: Row, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One training with a setting for about a window: its env steps/s and lag; None where it failed."""
    each = candidate["rows_per_update"]
    updates = max(5, ceil(candidate["steps_per_s"] * given.window / each))
    with TemporaryDirectory() as folder:
        argv = (*words, *typed(candidate["options"]), "--steps", str(updates * each), "--seed", str(seed))
        order = TrainingRequest(
            argv=argv, name="it", folder=Path(folder), warm_up_rows=max(2, updates // 5) * each, limit_s=900
        )
        try:
            found = measure(order)
        except MeasureError as error:
            return {"steps_per_s": None, "lag": None, "failed": str(error)}
    return {"steps_per_s": found.steps_per_s, "lag": found.lag_mean, "window_s": found.window_s, "failed": None}


def on_grid(one: Row) -> bool:
    """Whether a setting of tune's search is part of the grid."""
    if not one["workers"]:
        return one["envs"] in LANES
    usual = "collection_batch_size" not in one["options"] or one["fragment"] in FRAGMENTS
    return usual and one["workers"] in WORKERS and one["envs"] // one["workers"] in EACH


def grid_of(said: Row, given: argparse.Namespace) -> list[Row]:
    """The settings to measure, tune's choice first."""
    chosen = said["chosen"]
    least = HOPELESS * max(one["steps_per_s"] for one in said["candidates"])
    near = [one for one in said["candidates"] if on_grid(one) and one["steps_per_s"] >= least]
    others = [one for one in near if one["options"] != chosen["options"]]
    return [chosen, *(others[:: max(1, len(others))] if given.quick else others)]


def measure_world(notebook: Notebook, world: str, given: argparse.Namespace) -> None:
    """Tune, then the grid by turns, then the verdicts."""
    words = WORLDS[world]
    said = tune(words, given)
    settings = grid_of(said, given)
    print(f"{world}: {said['recommendation']}; a grid of {len(settings)} settings", flush=True)
    rows: dict[int, list[Row]] = {index: [] for index in range(len(settings))}
    for turn in range(given.rounds):
        for index in rotated(list(rows), turn):
            one = settings[index]
            made = rate(words, one, given, turn)
            row = {"world": world, "round": turn + 1, "chosen": index == 0, "options": one["options"], **made}
            row |= {"predicted": one["steps_per_s"], "lag_predicted": one["lag"], "memory": one["memory"]}
            rows[index].append(notebook.keep(row))
            print(
                world,
                one["options"],
                f"predicted {number(one['steps_per_s'])}",
                f"made {number(made['steps_per_s'])}",
                flush=True,
            )
    judge_world(notebook, world, [part for part in rows.values() if all(row["steps_per_s"] for row in part)])


def judge_world(notebook: Notebook, world: str, parts: Sequence[Sequence[Row]]) -> None:
    if not parts or not parts[0][0]["chosen"]:
        notebook.judge(f"{world}: the chosen setting runs", False, exact=True)
        return
    order = sorted(parts, key=lambda part: -median(part, "steps_per_s"))
    header = (f"{world}: setting", "predicted env steps/s", "measured", "error", "lag predicted", "lag measured")
    notebook.write(table(header, [cells(part) for part in order]))
    errors = [abs(error(part)) for part in parts]
    chosen, best = median(parts[0], "steps_per_s"), median(order[0], "steps_per_s")
    notebook.write(
        f"{world}: over the grid predictions are off by {np.median(errors):.0%} in the median, {max(errors):.0%} at most"
    )
    notebook.judge(
        f"{world}: prediction of the choice off by {error(parts[0]):+.0%}, at most {CLOSE:.0%}", errors[0] <= CLOSE
    )
    notebook.judge(
        f"{world}: the choice makes {chosen / best:.3f} of the best of {len(parts)}, at least {BEST}",
        chosen >= BEST * best,
    )


def error(part: Sequence[Row]) -> float:
    return median(part, "predicted") / median(part, "steps_per_s") - 1


def cells(part: Sequence[Row]) -> list[str]:
    options = ", ".join(
        f"{name} {value}" if name != "mode" else str(value) for name, value in part[0]["options"].items()
    )
    lags = [row["lag"] for row in part if row["lag"] is not None]
    return [
        f"**{options}**" if part[0]["chosen"] else options,
        number(median(part, "predicted")),
        spread([row["steps_per_s"] for row in part]),
        f"{error(part):+.0%}",
        f"{part[0]['lag_predicted']:.1f}",
        f"{np.mean(lags):.1f}" if lags else "-",
    ]


@contextmanager
def half_a_core() -> Iterator[None]:
    """Another program that computes half of the time."""
    process = subprocess.Popen([sys.executable, "-c", HALF_A_CORE])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure_sleepers(notebook: Notebook, given: argparse.Namespace) -> None:
    """A hundred sleepers with tune's setting beside a free run, alone and beside another program."""
    said = tune([*SLEEPER, "--workers", str(given.sleepers_count)], given)
    print(f"sleepers: {said['recommendation']}", flush=True)
    options = {"env": SLEEPER[0], "env_args": SLEEP, "measures": ["drawn_s", "slept_s"], **said["chosen"]["options"]}
    times = {"warm_s": given.warm, "window_s": given.long}
    for where, least in (("alone", ALONE), ("beside half a core", BESIDE)):
        shares: list[float] = []
        for turn in range(given.rounds):
            ours: dict[str, float] = {}
            with nullcontext() if where == "alone" else half_a_core():
                for way in rotated(["tuned", "free run"], turn):
                    labels = {"world": "sleepers", "where": where, "way": way, "round": turn + 1}
                    free: dict[str, Any] = {"workers": given.sleepers_count, "world": SLEEP, "seed": turn, **times}
                    tuned = {"options": {**options, "seed": turn}, **times}
                    found = notebook.once(
                        *(("_collect_once", tuned) if way == "tuned" else ("_free_run", free)), labels
                    )
                    ours[way] = found["share"]
            shares.append(ours["tuned"] / ours["free run"])
        share = float(np.median(shares))
        notebook.write(
            f"{given.sleepers_count} sleepers {where}: {spread(shares)} of the free run, {said['chosen']['options']}"
        )
        notebook.judge(f"sleepers {where}: {share:.3f} of the free run, at least {least}", share >= least)


def measure_cyborg(notebook: Notebook, given: argparse.Namespace) -> None:
    """Many requested CybORG workers beside few."""
    rates: dict[int, list[float]] = {MANY: [], FEW: []}
    for turn in range(given.rounds):
        for workers in rotated(list(rates), turn):
            one = {"options": {"workers": workers, "num_envs": MANY}, "rows_per_update": 2000, "steps_per_s": 1000.0}
            words = [*CYBORG, "--num-steps-per-env", str(2000 // MANY)]
            made = rate(words, one, given, turn)
            notebook.keep({"world": "cyborg", "round": turn + 1, "workers": workers, **made})
            print("cyborg", workers, number(made["steps_per_s"]), made["failed"] or "", flush=True)
            if made["steps_per_s"]:
                rates[workers].append(made["steps_per_s"])
    if not all(rates.values()):
        notebook.judge("cyborg: both numbers of workers train (make cyborg installs it)", False)
        return
    ratio = float(np.median(rates[MANY]) / np.median(rates[FEW]))
    notebook.write(f"cyborg: {MANY} workers make {spread(rates[MANY])} env steps/s, {FEW} make {spread(rates[FEW])}")
    notebook.judge(f"cyborg: {MANY} workers make {ratio:.2f} of {FEW}, at least {AS_FAST} (noise)", ratio >= AS_FAST)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--probe", type=float, default=15.0, help="seconds of tune's probe")
    parser.add_argument("--window", type=float, default=5.0, help="seconds of each training, about")
    parser.add_argument("--only", choices=WORLDS, nargs="*", help="these worlds")
    parser.add_argument("--sleepers", action="store_true", help="only the hundred sleepers beside a free run")
    parser.add_argument("--cyborg", action="store_true", help="only 20 CybORG workers beside 2")
    parser.add_argument("--sleepers-count", type=int, default=SLEEPERS)
    parser.add_argument("--warm", type=float, default=6.0, help="seconds before the window of --sleepers")
    parser.add_argument("--long", type=float, default=30.0, help="seconds of the window of --sleepers")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.probe, given.window, given.only = 1, 2.0, 0.5, given.only or ["cartpole"]
        given.warm, given.long, given.sleepers_count = 1.0, 2.0, 20
    notebook = Notebook(
        NAME, "What `freewheel tune` predicts and chooses, beside an exhaustive grid", quick=given.quick
    )
    if given.sleepers:
        measure_sleepers(notebook, given)
    if given.cyborg:
        measure_cyborg(notebook, given)
    if not (given.sleepers or given.cyborg):
        for world in given.only or WORLDS:
            measure_world(notebook, world, given)
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
