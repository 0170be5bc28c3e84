"""SAC and MBPO where actions are discrete: CartPole and Acrobot on several seeds, and a defender of CAGE 2 beside PPO."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks._common import Notebook, number, table
from benchmarks.learns import EPISODES, train_and_score

NAME = "discrete"


@dataclass(frozen=True)
class Task:
    """A world, the options of a run in it, and the greedy mean that counts as learned; None: it is only reported."""

    env: str
    steps: int
    flags: str
    target: float | None = None
    seeds: tuple[int, ...] = (1, 2, 3)


CAGE2_SAC = "--algo sac --sac.updates-per-row 0.05 --sac.first-temperature 1 --policy.normalize-obs false --num-envs 64"
TASKS: Mapping[str, Task] = {
    "cartpole-sac": Task("CartPole-v1", 30_000, "--preset cartpole-sac --evals 10", 475.0),
    "acrobot-sac": Task("Acrobot-v1", 100_000, "--preset acrobot-sac --evals 10", -100.0),
    "cartpole-mbpo": Task("CartPole-v1", 3_000, "--preset cartpole-mbpo", 475.0, seeds=(1,)),
    "cage2-sac": Task("freewheel/Cage2-v0", 50_000, CAGE2_SAC, seeds=(1,)),
    "cage2-ppo": Task("freewheel/Cage2-v0", 50_000, "--num-envs 64", seeds=(1,)),
}
QUICK = 1_500  # env steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", help="(default: the task's own)")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    notebook = Notebook(NAME, f"Discrete actions: greedy mean of {EPISODES} fresh episodes", quick=given.quick)
    cells = list[list[str]]()
    for name in given.only:
        task = TASKS[name]
        for seed in (given.seeds or task.seeds)[: 1 if given.quick else None]:
            steps = QUICK if given.quick else task.steps
            found = train_and_score(task.env, seed, steps, *task.flags.split())
            row = notebook.keep({"task": name, "env": task.env, "flags": task.flags, "target": task.target, **found})
            best, latest = row["greedy_best"], row["greedy_latest"]
            figures = [number(value) for value in (best, latest, row["seconds"])]
            cells.append([name, str(seed), f"{row['env_steps']:,}", *figures])
            print(*cells[-1], sep="  ", flush=True)
            if task.target is not None:
                notebook.judge(f"{name}, seed {seed}: {number(best)} (at least {task.target:g})", best >= task.target)
    notebook.write(table(("task", "seed", "env steps", "best weights", "last weights", "seconds"), cells))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
