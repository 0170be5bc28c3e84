"""What the ways to draw rows are worth: SAC on Pendulum-v1 with each of them, and what an update costs with a million rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks._common import RESULTS, Notebook, Row, number, rotated, spread, table

NAME = "replay_switches"
ARMS: Mapping[str, Mapping[str, Any]] = {
    "uniform": {},
    "td": {"priority": "td"},
    "td, beta 0.4": {"priority": "td", "priority_beta": 0.4},
    "recent": {"priority": "recent"},
    "n-step 3": {"n_step": 3},
}
ENV, LENGTH, STEPS = "Pendulum-v1", 200, 5_000  # every episode has as many steps
SETTINGS: Mapping[str, Any] = {"lr": 1e-3, "batch": 128, "learning_starts": 500, "first_temperature": 1.0}
POLICY = {"hidden": (64, 64), "normalize_obs": False}
GOAL, WINDOW = -250.0, 5  # mean return of so many training episodes in a row
STORED, OBS, ACTION, LANES = 1_000_000, 11, 3, 16  # rows of the buffer whose updates are timed; as wide as Hopper's
PARTS = ("learning", "cost")


def learning(notebook: Notebook, given: argparse.Namespace) -> list[Row]:
    rows = list[Row]()
    for seed in range(1, given.seeds + 1):
        for arm in rotated(given.arms, seed - 1):
            sac = {**SETTINGS, "learning_starts": min(SETTINGS["learning_starts"], given.steps // 2), **ARMS[arm]}
            options = {
                "env": ENV,
                "algo": "sac",
                "mode": "sequential",
                "num_envs": 1,
                "steps": given.steps,
                "seed": seed,
            }
            options |= {"evals": 1, "sac": sac, "policy": POLICY}
            row = notebook.once("_train_once", {"options": options, "returns": True}, {"arm": arm, "seed": seed})
            rows.append(row)
    return rows


def steps_to_goal(returns: list[float]) -> float:
    """Env steps after which the latest episodes first had a mean of GOAL; never: infinite."""
    means = (float(np.mean(returns[end - WINDOW : end])) for end in range(WINDOW, len(returns) + 1))
    return next((float(LENGTH * (WINDOW + late)) for late, mean in enumerate(means) if mean >= GOAL), float("inf"))


def cost(notebook: Notebook, given: argparse.Namespace, stored: int, turns: int) -> list[Row]:
    """Milliseconds of an update with each arm, on one thread or from CUDA graphs: arms take turns, the median of turns counts."""
    import torch

    from freewheel.core import BatchSpec
    from freewheel.learn.sac.config import SACConfig
    from freewheel.learn.sac.learner import SAC
    from freewheel.learn.spec import Compute, LearnerSpec
    from freewheel.policies.spec import PolicySpec

    torch.set_num_threads(1)
    seen = ((0, OBS),)
    policy = PolicySpec(OBS, "float32", seen, seen, (), None, "squashed", ACTION, (256, 256), "relu", 0.0, "")
    device, learners = torch.device(given.device), {}
    compute = Compute(device=given.device, compile="off" if device.type == "cpu" else "graphs")
    for arm in given.arms:
        config = SACConfig(buffer=stored, **ARMS[arm])
        learner = SAC(config, LearnerSpec(policy=policy, batch=BatchSpec(1, LANES), seed=1, compute=compute))
        _fill(learner, stored)
        learner.updater.step()
        learner.updater.losses()  # waits for the device
        assert not learner.fallback, learner.fallback
        learners[arm] = learner
    times: dict[str, list[float]] = {arm: [] for arm in given.arms}
    for turn in range(turns):
        for arm in rotated(given.arms, turn):
            began = perf_counter()
            for _ in range(20):
                learners[arm].updater.step()
            learners[arm].updater.losses()
            times[arm].append(1e3 * (perf_counter() - began) / 20)
    about = {"stored": stored, "device": given.device}
    return [notebook.keep({"arm": arm, "update_ms": times[arm], **about}) for arm in given.arms]


def _fill(learner: Any, stored: int) -> None:
    """Random rows of lanes that go on for ever."""
    import torch

    from freewheel.core import Transitions

    steps, rng = stored // LANES, np.random.default_rng(0)
    obs = rng.normal(size=(steps + 1, LANES, OBS)).astype(np.float32)
    never, scalar = np.zeros((steps, LANES), np.bool_), rng.normal(size=(steps, LANES)).astype(np.float32)
    action = np.tanh(rng.normal(size=(steps, LANES, ACTION))).astype(np.float32)
    data = Transitions(obs[:-1], action, scalar, scalar, never, never, obs[1:], ~never)
    rows = learner.replay.columns.pack(data, torch.device(learner.spec.compute.device))
    learner.replay.add(rows)
    learner.replay.follow(data, 0, rows)


def kept(part: str) -> list[Row]:
    """The newest rows of a part that was not asked for, by arm and seed."""
    path = RESULTS / f"{NAME}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    chosen = [row for row in rows if ("update_ms" in row) == (part == "cost")]
    return list({(row["arm"], row.get("seed"), row.get("device")): row for row in chosen}.values())


def report(notebook: Notebook, learned: list[Row], costs: list[Row]) -> None:
    if learned:
        notebook.write(f"## {ENV}: steps to a mean return of {GOAL:g} over {WINDOW} training episodes, by seed")
        lines = []
        for arm in dict.fromkeys(row["arm"] for row in learned):
            rows = sorted((row for row in learned if row["arm"] == arm), key=lambda row: int(row["seed"]))
            first = [number(steps_to_goal(row["returns"])) for row in rows]
            last = [number(float(np.mean(row["returns"][-WINDOW:]))) for row in rows]
            greedy = [number(row["final_eval"]) for row in rows]
            lines.append([arm, ", ".join(first), ", ".join(last), ", ".join(greedy)])
        notebook.write(table(("", f"steps to {GOAL:g}", f"last {WINDOW} episodes", "greedy, fresh episodes"), lines))
    for device in dict.fromkeys(row["device"] for row in costs):
        there = [row for row in costs if row["device"] == device]
        plain = float(np.median(there[0]["update_ms"]))
        notebook.write(f"## An update on {device} with {there[0]['stored']:,} rows stored, batches of 256")
        times = [(row["arm"], row["update_ms"], float(np.median(row["update_ms"])) / plain) for row in there]
        lines = [[arm, spread(each), f"{ratio:.2f}×"] for arm, each, ratio in times]
        notebook.write(table(("", "ms: median (least .. greatest)", f"of {there[0]['arm']}"), lines))
    finite = all(np.isfinite(row["returns"]).all() for row in learned)
    notebook.judge(f"{len(learned)} runs, every return is finite", finite, exact=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each arm, seeds 1 .. SEEDS")
    parser.add_argument("--steps", type=int, default=STEPS, help="env steps of a run")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--device", default="cpu", help="of the updates whose cost is measured; on a GPU from CUDA graphs"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    stored, turns = STORED, 15
    if given.quick:
        given.seeds, given.steps, stored, turns = 1, 250, 2_000, 1
    notebook = Notebook(NAME, "Ways to draw rows from a replay buffer", quick=given.quick)
    learned = learning(notebook, given) if "learning" in given.only else kept("learning")
    costs = cost(notebook, given, stored, turns) if "cost" in given.only else kept("cost")
    report(notebook, learned, costs)
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
