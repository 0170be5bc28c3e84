"""The real CybORG on two cores: collection by two workers beside twice one process, and what learning leaves of the cores."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, median, number, rotated, spread, table

NAME = "cyborg_rates"
WORKERS, CORES, STEPS = 2, 2, 100  # steps of an episode
TURN = "sequential"
WAYS: Mapping[str, tuple[str, str]] = {
    TURN: ("sequential", "none"),
    "episodes": ("episodes", "none"),
    "continuous": ("continuous", "none"),
    "episodes, PPO": ("episodes", "ppo"),
    "continuous, PPO": ("continuous", "ppo"),
}
USEFUL = ("step", "reset", "infer")
IDLE = ("wait-credit", "wait-slot", "wait-gate", "down")
WORKING = ("observe", "update", "publish", "other")
LEAST_OF_TWICE, LEAST_OF_CORES = 0.97, 0.95


def options(mode: str, red_agent: str, seed: int, episodes: int) -> dict[str, Any]:
    """As `freewheel train` takes them, with so many episodes an update."""
    lanes = {"num_envs": 1} if mode == TURN else {"workers": WORKERS, "num_envs": WORKERS}
    rows = episodes * STEPS // lanes["num_envs"]
    world = {"env": "cyborg:Scenario2", "red_agent": red_agent, "max_episode_steps": STEPS}
    return {
        **world,
        "mode": mode,
        **lanes,
        "num_steps_per_env": rows,
        "seed": seed,
        "ppo": {"minibatch": min(256, episodes * STEPS)},
    }


def measure(notebook: Notebook, given: argparse.Namespace) -> dict[str, list[Row]]:
    """The rows of each way, round by round."""
    rows: dict[str, list[Row]] = {way: [] for way in given.ways}
    times = {"warm_s": given.warm, "window_s": given.window, "cores": CORES}
    for turn in range(given.rounds):
        for way in rotated(list(rows), turn):
            mode, learner = WAYS[way]
            order = {"options": options(mode, given.red_agent, turn, given.episodes), "learner": learner, **times}
            labels = {"way": way, "round": turn + 1, "red_agent": given.red_agent}
            rows[way].append(notebook.once("_collect_once", order, labels))
    return rows


def of_twice(ours: Row, turn: Row) -> float:
    return float(ours["rows_per_s"]) / (WORKERS * float(turn["rows_per_s"]))


def accounts(row: Row) -> tuple[float, float, float]:
    """Shares of the cores: steps, resets and inference; updates; all that our processes used besides.

    CPU time is known by process; within one it is shared out by the time that its parts took, waiting apart.
    """
    workers, learner, cores = row["worker_time"], row["learner_time"], CORES * row["window_s"]
    acting = sum(workers[kind] for kind in USEFUL) / (1 - sum(workers[kind] for kind in IDLE))
    updating = learner["update"] / sum(learner[kind] for kind in WORKING)
    acted, updated = row["worker_cpu_s"] * acting / cores, row["learner_cpu_s"] * updating / cores
    return acted, updated, (row["worker_cpu_s"] + row["learner_cpu_s"]) / cores - acted - updated


def cells(rows: Mapping[str, Sequence[Row]], way: str) -> list[str]:
    part = rows[way]
    figures = [spread([row["rows_per_s"] / STEPS for row in part])]
    if way == TURN:
        return [way, *figures, "-", "-", "-", "-", "-"]
    figures.append(spread([of_twice(ours, turn) for ours, turn in zip(part, rows[TURN], strict=True)]))
    shares = np.array([accounts(row) for row in part])
    figures.append(spread(shares[:, :2].sum(axis=1).tolist()))
    figures += [f"{share:.3f}" for share in np.median(shares, axis=0)[1:]]
    return [way, *figures, number(1e3 * median(part, "update_s"))]


def judge(notebook: Notebook, rows: Mapping[str, Sequence[Row]]) -> None:
    header = ("way", "episodes/s", "of twice sequential", "cores for steps, resets, inference, updates", "updates", "besides",
              "update ms")  # fmt: skip
    notebook.write(table(header, [cells(rows, way) for way in rows]))
    for way in rows:
        mode, learner = WAYS[way]
        if mode == TURN:
            continue
        if learner == "none":
            share = float(np.median([of_twice(ours, turn) for ours, turn in zip(rows[way], rows[TURN], strict=True)]))
            text, least = f"{way}: collection {share:.3f} of twice sequential", LEAST_OF_TWICE
        else:
            share = float(np.median([sum(accounts(row)[:2]) for row in rows[way]]))
            text, least = f"{way}: {share:.3f} of the cores for steps, resets, inference and updates", LEAST_OF_CORES
        notebook.judge(f"{text}, target at least {least}", share >= least)
    notebook.judge_promises([row for part in rows.values() for row in part])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--red-agent", default="B_lineAgent")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=float, default=4.0, help="seconds before the window")
    parser.add_argument("--window", type=float, default=30.0, help="seconds")
    parser.add_argument("--episodes", type=int, default=10, help="of an update")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    given.ways = list(WAYS)
    if given.quick:
        given.rounds, given.warm, given.window, given.episodes = 1, 0.5, 1.5, 2
        given.ways = [TURN, "episodes", "continuous, PPO"]
    notebook = Notebook(NAME, f"The real CybORG, {WORKERS} workers on {CORES} cores", quick=given.quick)
    judge(notebook, measure(notebook, given))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
