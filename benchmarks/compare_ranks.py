"""`freewheel compare` beside itself: does every repeat rank the modes the same way, and has every training done the same work?"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, run_python

NAME = "compare_ranks"
CLEAR = 1.10  # times the median steps/s: modes that differ by more are ranked the same way in every repeat
LEFT_OUT = ("curve", "shares", "path")


@dataclass(frozen=True)
class Task:
    """What is compared."""

    words: tuple[str, ...]  # after `freewheel compare`
    quick: tuple[str, ...] = ()


TASKS: Mapping[str, Task] = {
    "straggler": Task(
        (
            "freewheel/Straggler-v0",
            "--env.mean",
            "0.002",
            "--num-envs",
            "8",
            "--workers",
            "8",
            "--num-steps-per-env",
            "64",
        ),
        ("--num-envs", "4", "--workers", "4", "--num-steps-per-env", "16", "--steps", "256"),
    ),
    "cartpole": Task(("CartPole-v1",), ("--num-steps-per-env", "32", "--steps", "1024")),
    "cage2": Task(("freewheel/Cage2-v0",), ("--num-steps-per-env", "32", "--steps", "1024")),
    "cyborg": Task(
        ("cyborg:Scenario2", "--num-envs", "2", "--workers", "2"), ("--num-steps-per-env", "64", "--steps", "512")
    ),
}


def compare(task: Task, given: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """compare.json and table.md of one call."""
    words = [*task.words, "--repeats", str(given.repeats), "--budget", str(given.budget), "--modes", given.modes]
    if given.quick:
        words += [*task.quick, "--repeats", "1", "--modes", "sequential,continuous", "--no-timelines"]
    with TemporaryDirectory() as folder:
        run_python("-m", "freewheel", "compare", *words, "--out", "out", "--json", cwd=folder)
        out = Path(folder, "out")
        return json.loads((out / "compare.json").read_text()), (out / "table.md").read_text()


def rates(results: Mapping[str, Any]) -> dict[str, list[float]]:
    """Steps/s of each mode in each repeat, trainings of one repeat taken together."""
    found: dict[str, list[float]] = {}
    for case in results["modes"]:
        rows = [row for row in results["rows"] if row["mode"] == case["mode"]]
        repeats = sorted({row["repeat"] for row in rows})
        parts = [[row for row in rows if row["repeat"] == repeat] for repeat in repeats]
        found[case["mode"]] = [
            sum(row["window_rows"] for row in part) / sum(row["window_s"] for row in part) for part in parts
        ]
    return {mode: values for mode, values in found.items() if values}


def clear_pairs(speed: Mapping[str, Sequence[float]]) -> list[tuple[str, str, float, int]]:
    """Faster and slower mode, by how much in the median, and in how many repeats the faster one was faster."""
    found = []
    for one, other in itertools.combinations(speed, 2):
        fast, slow = sorted((one, other), key=lambda mode: -float(np.median(speed[mode])))
        ratio = float(np.median(speed[fast]) / np.median(speed[slow]))
        if ratio > CLEAR:
            found.append((fast, slow, ratio, sum(a > b for a, b in zip(speed[fast], speed[slow], strict=True))))
    return found


def judge(notebook: Notebook, name: str, results: Mapping[str, Any], table: str) -> None:
    kept = [
        notebook.keep({"task": name, **{key: row[key] for key in row if key not in LEFT_OUT}})
        for row in results["rows"]
    ]
    notebook.write(f"## {name}: `{results['command']}`", table.partition("\n\n")[2].strip())
    speed = rates(results)
    pairs = clear_pairs(speed)
    repeats = len(next(iter(speed.values())))
    unsure = [f"{fast} over {slow} ({ratio:.2f}x) in {same}" for fast, slow, ratio, same in pairs if same < repeats]
    text = f"{name}: {len(pairs) - len(unsure)} of {len(pairs)} pairs of modes that differ by more than 10 % are ranked the same"
    told = f"{text} in {repeats} of {repeats} repeats" + (f", but {'; '.join(unsure)}" if unsure else "")
    notebook.judge(told, not unsure)
    judge_work(notebook, name, kept, results)


def judge_work(notebook: Notebook, name: str, rows: Sequence[Row], results: Mapping[str, Any]) -> None:
    """Equal work, by the ledgers of the trainings."""
    done = {(row["trained"], row["updates"]) for row in rows}
    balanced = all(
        row["produced"] == row["trained"] + row["queued"] + row["open"] + sum(row["dropped"].values()) for row in rows
    )
    what = ", ".join(f"{trained:,} rows and {updates} updates" for trained, updates in sorted(done))
    text = f"{name}: {what} in each of {len(rows)} trainings, every ledger exact"
    notebook.judge(text, len(done) == 1 and balanced, exact=True)
    failed = [f"{case['mode']}: {case['failed']}" for case in results["modes"] if case["failed"]]
    notebook.judge(f"{name}: modes that failed: {'; '.join(failed) or 'none'}", not failed, exact=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TASKS, help="some of them (default: all but cyborg)")
    parser.add_argument("--cyborg", action="store_true", help="the real CybORG as well: pip install CybORG first")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--budget", type=float, default=50.0, help="seconds of training for each mode, over all repeats"
    )
    parser.add_argument("--modes", default="all")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    names = given.only or [name for name in TASKS if name != "cyborg" or given.cyborg]
    notebook = Notebook(NAME, "The modes, ranked by freewheel compare", quick=given.quick)
    for name in names:
        print(f"{name} ...", flush=True)
        judge(notebook, name, *compare(TASKS[name], given))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
