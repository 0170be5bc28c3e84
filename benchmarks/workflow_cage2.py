"""Workflow search on CAGE 2, our world: every strategy and ablation after equal episodes, beside plain PPO, as it is."""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._common import Notebook, Row, mean_interval, number, rotated, run_python, table
from freewheel.run.saved import open_run
from freewheel_cage2.workflow.trials import SAMPLING, STATE, TRAINING, TRIALS

NAME = "workflow_cage2"
ARMS: Mapping[str, Sequence[str]] = {
    "plain PPO": ("--strategy", "plain"),
    "gp": (),
    "greedy": ("--strategy", "greedy"),
    "random": ("--strategy", "random"),
    "canonical": ("--strategy", "canonical"),
    "gp, fixed episodes": ("--fixed-episodes",),
    "gp, no warm start": ("--no-warm-start",),
}
PLAIN = "plain PPO"
GREEDY_EPISODES, GREEDY_SEED = 1000, 4711  # of the chosen policy, the same for all


def search(arm: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One search by the command line; its choice, played greedily."""
    command = ["-m", "freewheel", "workflow", "search", *ARMS[arm], "--seed", seed, "--run", "search"]
    for option in ("red_agent", "total_episodes", "max_episodes_per_workflow"):
        command += [f"--{option.replace('_', '-')}", getattr(given, option)]
    with TemporaryDirectory() as place:
        begun = time.monotonic()
        run_python(*command, *given.more, cwd=place)
        seconds = time.monotonic() - begun
        folder = Path(place) / "runs" / "search"
        state = json.loads((folder / STATE).read_text())
        saved = open_run(str(folder / TRIALS / state["best"]["run"]))
        score = saved.score(saved.actor("latest")[0], given.greedy_episodes, GREEDY_SEED)
        trials = state["trials"]
        return {
            "workflow": state["best"]["workflow"],
            "greedy_env_return": score.measures["env_return"],
            "greedy_compliance": _finite(score.measures["compliance"]),
            "training_env_return": state["best"]["env_return"],
            "training_compliance": state["best"]["compliance"],
            "episodes": sum(trial["outcome"]["episodes"] for trial in trials),
            "workflows": len({str(trial["proposal"]["order"]) for trial in trials}),
            "compliant": (state["best"]["compliance"] or 0.0) >= state["asked"]["options"]["compliance_threshold"],
            "reconciled": all(_reconciles(folder / name) for name in (TRAINING, SAMPLING)),
            "seconds": seconds,
            "trials": trials,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _reconciles(path: Path) -> bool:
    """Whether the parts of the reward make the whole in every row."""
    with path.open(newline="") as file:
        parts = [
            [float(row[name]) for name in ("env_return", "alignment", "total_reward")] for row in csv.DictReader(file)
        ]
    return all(abs(own + aligned - whole) < 1e-2 for own, aligned, whole in parts)


def cells(arm: str, rows: Sequence[Row], plain: Sequence[Row]) -> list[str]:
    returns = [row["greedy_env_return"] for row in rows]
    known = [row["greedy_compliance"] for row in rows if row["greedy_compliance"] is not None]
    differences = [own - row["greedy_env_return"] for own, row in zip(returns, plain, strict=True)]
    return [
        arm,
        mean_interval(returns),
        "-" if arm == PLAIN else mean_interval(differences),
        mean_interval(known) if known else "n/a",
        f"{sum(bool(row['compliant']) for row in rows)} of {len(rows)}",
        number(sum(row["workflows"] for row in rows) / len(rows)),
        number(sum(row["episodes"] for row in rows) / len(rows)),
        number(sum(row["seconds"] for row in rows) / len(rows)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="searches of each arm, seeds 1 .. SEEDS")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--red-agent", default="B_lineAgent")
    parser.add_argument("--total-episodes", type=int, default=30_000)
    parser.add_argument("--max-episodes-per-workflow", type=int, default=5_000)
    parser.add_argument("--greedy-episodes", type=int, default=GREEDY_EPISODES, help="that score a search's choice")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    parser.add_argument("more", nargs="*", help="further options of the search, after --")
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.total_episodes, given.max_episodes_per_workflow = 1, 512, 256
        given.arms, given.greedy_episodes = given.arms[:2], 50
    if PLAIN not in given.arms:
        given.arms = [PLAIN, *given.arms]
    notebook = Notebook(NAME, f"Workflow search on CAGE 2 against {given.red_agent}", quick=given.quick)
    rows: dict[str, list[Row]] = {arm: [] for arm in given.arms}
    for seed in range(1, given.seeds + 1):
        for arm in rotated(given.arms, seed):
            row = notebook.keep({"arm": arm, "seed": seed, "red_agent": given.red_agent, **search(arm, seed, given)})
            rows[arm].append(row)
            told = f"env return {number(row['greedy_env_return'])}, compliance {number(row['greedy_compliance'])}"
            print(arm, seed, row["workflow"], told, f"{row['seconds']:.0f} s", sep="  ", flush=True)
    notebook.write(
        f"{given.total_episodes:,} episodes a search, {given.seeds} seeds, mean (95 %); {given.greedy_episodes:,} greedy "
        "episodes of the chosen workflow's last weights. Compliant: its compliance in training reached the threshold.",
        table(
            ("", "env return", "less plain PPO's", "compliance", "compliant", "workflows", "episodes", "seconds"),
            [cells(arm, rows[arm], rows[PLAIN]) for arm in given.arms],
        ),
    )
    every = [row for part in rows.values() for row in part]
    notebook.judge(
        "env return + alignment = total reward in every row of both logs",
        all(row["reconciled"] for row in every),
        exact=True,
    )
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
