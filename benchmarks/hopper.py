"""MBPO on Hopper-v5: what rollouts of several steps, critics and the stop at disagreement bring, and three seeds of the preset.

Runs share one GPU side by side: each has a thread and CUDA streams of its own, because processes would take turns. Each row is an
evaluation (greedy) with the state of learning at that time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import freewheel
from benchmarks._common import RESULTS, context
from freewheel.run.naming import Result

PUBLISHED = 3.7  # env steps/s of published MBPO
#: Mean of five seeds over 10,000 steps each, from the one that begins with step 0; MACURA stops rollouts at disagreement.
MBPO = (183, 441, 590, 767, 1221, 2158, 2862, 3070)
MACURA = (401, 1153, 1951, 2894, 3152, 3281)
PLAIN = {
    "max_disagreement": None, "target_entropy": -1, "first_temperature": 1.0, "tau": 0.005, "max_epochs": 1000,
    "hidden": (256, 256),
}  # fmt: skip
TEN = {"critic_norm": True, "tau": 0.005, "target_entropy": -1}
#: What a variant changes in the preset; "hidden" is the policy's.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "preset": {},  # "ten-slow" in the rows: rollouts of ten steps, slow targets, entropy 0
    "published": PLAIN | {"rollout_schedule": (20_000, 150_000, 1, 15)},
    "five": PLAIN | {"rollout_schedule": (0, 0, 5, 5)},
    "five-norm": PLAIN | {"rollout_schedule": (0, 0, 5, 5), "critic_norm": True},
    "ten-norm": TEN,
    "ten-slow-norm": {"critic_norm": True},
    "unlimited": {"max_disagreement": None},
    "redq": TEN | {"max_disagreement": 1.0, "critics": 5, "updates_per_row": 10, "hidden": (256, 256)},
}
APART = 5.0  # seconds between two starts
COLUMNS = (
    "wall_s", "env_steps", "updates", "steps_per_s", "eval_return", "return_mean", "length_mean", "policy/temperature",
    "value/q_mean", "model/holdout", "model/error_1", "model/error_5", "model/error_10", "model/rollout_length", "model/epochs",
)  # fmt: skip
SMALL = {
    "model_hidden": (16, 16), "members": 3, "elites": 2, "learning_starts": 200, "max_epochs": 3, "rollouts_per_row": 4.0,
    "batch": 32, "hidden": (32, 32), "rollout_schedule": (0, 0, 2, 2),
}  # fmt: skip


class Run:
    """One training, which may go on later; its rows are read from its own directory."""

    def __init__(self, variant: str, seed: int, options: argparse.Namespace, folder: Path) -> None:
        self.variant, self.seed, self._options = variant, seed, options
        self._folder = folder / f"{variant}-{seed}"
        self._result: Result | None = None
        self.error = ""

    def train(self, minutes: float | None) -> None:
        """For so many minutes in all, or to the end of its steps. What goes wrong is kept: the others go on."""
        options = self._options
        changes: Any = {**VARIANTS[self.variant], **(SMALL if options.quick else {}), **options.mbpo}
        policy: Any = {"hidden": changes.pop("hidden")} if "hidden" in changes else {}
        try:
            if self._result is not None:
                self._result = freewheel.resume(self._result, steps=options.steps, minutes=minutes, quiet=True)
            else:
                self._result = freewheel.train(
                    "Hopper-v5", preset="mbpo-hopper", seed=self.seed, steps=options.steps, minutes=minutes, log_every=2.0,
                    device=options.device, evals=options.evals, eval_episodes=options.eval_episodes, quiet=True, mbpo=changes,
                    policy=policy, runs_dir=self._folder,
                )  # fmt: skip
            print(
                self.variant,
                self.seed,
                self._result.summary["env_steps"],
                self._result.summary["final_eval"],
                flush=True,
            )
        except BaseException as error:  # noqa: BLE001
            self.error = repr(error)
            traceback.print_exc()

    def metrics(self) -> list[dict[str, Any]]:
        files = self._folder.glob("*/metrics.jsonl")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def score(self) -> float:
        """Mean of the last three evaluations."""
        found = [row["eval_return"] for row in self.evaluations()]
        return float(sum(found[-3:]) / max(1, len(found[-3:])))

    def evaluations(self) -> list[dict[str, Any]]:
        rows = [row for row in self.metrics() if row.get("eval_return") is not None]
        return [
            row
            for row, before in zip(rows, [{}, *rows], strict=False)
            if row["eval_return"] != before.get("eval_return")
        ]

    def rows(self) -> list[dict[str, Any]]:
        labels = {
            "variant": self.variant,
            "seed": self.seed,
            "settings": {**VARIANTS[self.variant], **self._options.mbpo},
        }
        rows = [labels | {name: row.get(name) for name in COLUMNS} for row in self.evaluations()]
        returns = [
            [row["env_steps"], row["return_mean"]] for row in self.metrics() if row.get("return_mean") is not None
        ]
        end = {} if self._result is None else self._result.summary
        kept = {name: end.get(name) for name in ("ended", "env_steps", "wall_s", "final_eval", "best_eval")}
        return [*rows, labels | kept | {"shares": end.get("shares"), "returns": returns[::5], "error": self.error}]


def beside(runs: Sequence[Run], minutes: float | None) -> None:
    """All of these side by side."""
    threads = [threading.Thread(target=run.train, args=(minutes,)) for run in runs]
    for thread in threads:
        thread.start()
        thread.join(APART)
    for thread in threads:
        thread.join()


def measure(options: argparse.Namespace, folder: Path) -> list[Run]:
    """Every run that is asked for; with --first, then the best variant goes on, and other seeds of it begin."""
    words = [word.partition(":") for word in options.runs]
    jobs = [(name, int(seed)) for name, _, given in words for seed in (given.split(",") if given else options.seeds)]
    runs = [Run(*job, options, folder) for job in jobs]
    beside(runs, options.first or options.minutes)
    if options.first:
        best = max((run for run in runs if not run.error), key=Run.score)
        print("goes on:", best.variant, {(run.variant, run.seed): round(run.score()) for run in runs}, flush=True)
        others = [Run(best.variant, seed, options, folder) for seed in options.seeds if seed != best.seed]
        both = [threading.Thread(target=beside, args=([best], options.first + options.minutes)),
                threading.Thread(target=beside, args=(others, options.minutes))]  # fmt: skip
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        runs += others
    return runs


def report(rows: list[dict[str, Any]]) -> str:
    """Mean of the evaluations in each 10,000 steps, by variant and seed."""
    lines = []
    for variant, seed in dict.fromkeys((row["variant"], row["seed"]) for row in rows):
        mine = [
            row
            for row in rows
            if (row["variant"], row["seed"]) == (variant, seed) and row.get("eval_return") is not None
        ]
        bins: dict[int, list[float]] = {}
        for row in mine:
            bins.setdefault(row["env_steps"] // 10_000, []).append(row["eval_return"])
        means = "  ".join(
            f"{10 * number}-{10 * number + 10}k: {sum(v) / len(v):.0f}" for number, v in sorted(bins.items())
        )
        each = " ".join(
            f"{row['env_steps'] / 1000:.0f}k:{row['eval_return']:.0f}(q{row['value/q_mean'] or 0:.0f})" for row in mine
        )
        rate = f"{mine[-1]['env_steps'] / mine[-1]['wall_s']:.0f} steps/s" if mine else "no evaluation"
        lines.append(f"{variant} seed {seed}, {rate}: {means}\n    {each}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", nargs="+", default=["preset"], help=f"VARIANT or VARIANT:SEED,SEED; {', '.join(VARIANTS)}"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument(
        "--first", type=float, default=0.0, help="minutes for all runs; then the best variant goes on, in all seeds"
    )
    parser.add_argument("--evals", type=int, default=25)
    parser.add_argument("--eval-episodes", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mbpo", type=json.loads, default={}, help="further options, as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS / "hopper.jsonl")
    parser.add_argument("--quick", action="store_true", help="small models and 400 steps, only to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.evals, options.eval_episodes, options.seeds = 400, 1, 1, options.seeds[:1]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for run in measure(options, Path(folder)) for row in run.rows()]
    if not options.quick:
        about = context() | {"device": torch.cuda.get_device_name() if options.device != "cpu" else "CPU"}
        with options.out.open("a") as file:
            file.writelines(json.dumps(row | about) + "\n" for row in rows)
    print(report(rows))
    failed = [row for row in rows if row.get("error")]
    print("targets that count are met" if not failed else f"{len(failed)} runs failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
