"""MBPO solves InvertedPendulum-v5 within 5,000 env steps on a CPU, whether it acts and learns in turn or at the same time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import freewheel
from benchmarks._common import Notebook, Row, number, rotated, spread, table

NAME, ENV, PRESET = "inverted_pendulum", "InvertedPendulum-v5", "mbpo-inverted-pendulum"
MODES = ("continuous", "batch", "sequential")
STEPS, TARGET, EPISODES = 5_000, 990.0, 10
QUICK = {"updates_per_row": 1, "max_epochs": 2, "rollouts_per_row": 4}
WORK = ("update", "fit", "rollout", "wait-model", "wait-data", "eval")


class StopWhenSolved:
    """A hook. What it sees is not what is reported: the run closes with fresh episodes, for its best weights and its last."""

    def on_eval(self, run: freewheel.Run, step: int, score: Any) -> None:
        if score.mean >= TARGET:
            run.stop("solved")


def solve(mode: str, seed: int, steps: int, **mbpo: object) -> dict[str, Any]:
    """One run; its best weights and its last ones are scored on the same fresh episodes."""
    with TemporaryDirectory() as folder:
        result = freewheel.train(
            ENV, quiet=True, seed=seed, steps=steps, evals=10, eval_episodes=EPISODES, eval_share=0.5, runs_dir=folder,
            hooks=[StopWhenSolved()], options={"preset": PRESET, "mode": mode, "device": "cpu", "mbpo": mbpo},
        )  # fmt: skip
    summary = result.summary
    shares = summary["shares"]
    return {
        "mode": mode, "seed": seed, "ended": summary["ended"], "env_steps": summary["env_steps"], "updates": summary["updates"],
        "best_eval": summary["best_eval"], "best_step": summary["best_step"], "final_eval": summary["final_eval"],
        "episodes": summary["eval_episodes"], "fresh": summary["eval_fresh"], "seconds": summary["wall_s"],
        "learner": {kind: round(shares["learner"][kind], 3) for kind in WORK},
        "workers": {kind: round(share, 3) for kind, share in shares["worker"].items() if share >= 0.01},
        "solved": summary["eval_fresh"] and summary["best_eval"] >= TARGET,
    }  # fmt: skip


def cells(mode: str, rows: Sequence[Row]) -> list[str]:
    solved = sum(row["solved"] for row in rows)
    figures = [spread([row[key] for row in rows]) for key in ("best_eval", "best_step", "final_eval", "seconds")]
    return [mode, f"{solved} of {len(rows)}", *figures]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.modes = given.seeds[:1], given.modes[:1]
    steps, mbpo = (700, QUICK) if given.quick else (STEPS, {})
    notebook = Notebook(NAME, f"{ENV}, preset {PRESET}, at most {steps:,} env steps on a CPU", quick=given.quick)
    rows: dict[str, list[Row]] = {mode: [] for mode in given.modes}
    for turn, seed in enumerate(given.seeds):
        for mode in rotated(given.modes, turn):
            row = notebook.keep(solve(mode, seed, steps, **mbpo))
            best, last = number(row["best_eval"]), number(row["final_eval"])
            print(f"{mode} seed {seed}: best {best} (step {row['best_step']}), last {last}", flush=True)
            rows[mode].append(row)
    header = ("mode", f"solved (≥ {TARGET:g})", f"best weights, {EPISODES} fresh episodes", "step", "last", "seconds")
    notebook.write(table(header, [cells(mode, part) for mode, part in rows.items()]))
    for mode, part in rows.items():
        solved = sum(row["solved"] for row in part)
        notebook.judge(f"{mode}: {solved} of {len(part)} seeds reach {TARGET:g}", solved == len(part))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
