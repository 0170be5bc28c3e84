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
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import freewheel
from benchmarks._common import RESULTS, context

PUBLISHED = 3.7  # env steps/s of published MBPO
#: Mean of five seeds over 10,000 steps each, from the one that begins with step 0; MACURA stops rollouts at disagreement.
MBPO = (183, 441, 590, 767, 1221, 2158, 2862, 3070)
MACURA = (401, 1153, 1951, 2894, 3152, 3281)
ONE_STEP = {"rollout_schedule": (20_000, 150_000, 1, 15), "max_disagreement": None, "critic_norm": False}
#: What a variant changes in the preset.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "preset": {},
    "one-step": ONE_STEP | {"updates_per_row": 20},
    "five": {"rollout_schedule": (0, 0, 5, 5), "max_disagreement": None, "critic_norm": False, "updates_per_row": 20},
    "five-norm": {"rollout_schedule": (0, 0, 5, 5), "max_disagreement": None, "critic_norm": True, "updates_per_row": 20},
    "five-norm-10": {"rollout_schedule": (0, 0, 5, 5), "max_disagreement": None, "critic_norm": True, "updates_per_row": 10},
    "trust": {"rollout_schedule": (0, 0, 10, 10), "max_disagreement": 1.0, "critic_norm": False, "updates_per_row": 20},
    "trust-norm": {"rollout_schedule": (0, 0, 10, 10), "max_disagreement": 1.0, "critic_norm": True, "updates_per_row": 20},
    "trust2-norm": {"rollout_schedule": (0, 0, 10, 10), "max_disagreement": 2.0, "critic_norm": True, "updates_per_row": 20},
    "trust-norm-10": {"rollout_schedule": (0, 0, 10, 10), "max_disagreement": 1.0, "critic_norm": True, "updates_per_row": 10},
    "trust-redq-10": {
        "rollout_schedule": (0, 0, 10, 10), "max_disagreement": 1.0, "critic_norm": True, "updates_per_row": 10, "critics": 5,
    },
    "trust-redq": {
        "rollout_schedule": (0, 0, 10, 10), "max_disagreement": 1.0, "critic_norm": True, "updates_per_row": 20, "critics": 5,
    },
}  # fmt: skip
APART = 5.0  # seconds between two starts
COLUMNS = (
    "wall_s", "env_steps", "updates", "steps_per_s", "eval_return", "return_mean", "length_mean", "policy/temperature",
    "value/q_mean", "model/holdout", "model/error_1", "model/error_5", "model/error_10", "model/rollout_length", "model/epochs",
)  # fmt: skip
SMALL = {
    "model_hidden": (16, 16), "members": 3, "elites": 2, "learning_starts": 200, "max_epochs": 3, "rollouts_per_row": 4.0,
    "batch": 32,
}  # fmt: skip


def train(variant: str, seed: int, options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """One run; its rows are added to `rows` while it goes on."""
    changes: Any = {**VARIANTS[variant], **(SMALL if options.quick else {}), **options.mbpo}
    labels = {"variant": variant, "seed": seed, "settings": {name: changes[name] for name in sorted(changes)}}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        result = freewheel.train(
            "Hopper-v5", preset="mbpo-hopper", seed=seed, steps=options.steps, minutes=options.minutes, device=options.device,
            evals=options.evals, eval_episodes=options.eval_episodes, log_every=2.0, runs_dir=folder, quiet=True, mbpo=changes,
        )  # fmt: skip
        found = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    told = None
    for row in found:
        if row.get("eval_return") not in (None, told):
            told = row["eval_return"]
            rows.append(labels | {name: row.get(name) for name in COLUMNS})
    summary = result.summary
    rows.append(
        labels
        | {"ended": summary["ended"], "env_steps": summary["env_steps"], "wall_s": time.monotonic() - began}
        | {"final": summary["final_eval"], "best": summary["best_eval"], "shares": summary["shares"]["learner"]}
        | {
            "curve": [[row["env_steps"], row["return_mean"]] for row in found if row.get("return_mean") is not None][
                ::5
            ]
        }
    )
    print(variant, seed, f"{summary['env_steps']} steps, final {summary['final_eval']}", flush=True)


def beside(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All variants and seeds side by side; a run that fails leaves a row that says so."""
    rows: list[dict[str, Any]] = []

    def guarded(variant: str, seed: int) -> None:
        try:
            train(variant, seed, options, rows)
        except BaseException as error:  # noqa: BLE001 - the others go on
            rows.append({"variant": variant, "seed": seed, "error": repr(error)})
            traceback.print_exc()

    jobs = [
        (name, int(seed))
        for name, _, given in (words.partition(":") for words in options.runs)
        for seed in (given.split(",") if given else options.seeds)
    ]
    threads = [threading.Thread(target=guarded, args=job, name="-".join(map(str, job))) for job in jobs]
    for thread in threads:
        thread.start()
        thread.join(APART)
    for thread in threads:
        thread.join()
    return rows


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
    parser.add_argument("--evals", type=int, default=25)
    parser.add_argument("--eval-episodes", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mbpo", type=json.loads, default={}, help="further options, as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS / "hopper.jsonl")
    parser.add_argument("--quick", action="store_true", help="small models and 400 steps, only to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.evals, options.eval_episodes, options.seeds = 400, 1, 1, options.seeds[:1]
    rows = beside(options)
    if not options.quick:
        about = context("hopper") | {"device": torch.cuda.get_device_name() if options.device != "cpu" else "CPU"}
        with options.out.open("a") as file:
            file.writelines(json.dumps(row | about) + "\n" for row in rows)
    print(report(rows))
    failed = [row for row in rows if "error" in row]
    print("targets that count are met" if not failed else f"{len(failed)} runs failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
