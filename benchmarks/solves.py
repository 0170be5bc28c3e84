"""Every mode learns: CartPole-v1 with one preset in all of them, several seeds, judged by greedy episodes never seen before."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks._common import Notebook, Row, number, rotated, spread, table
from benchmarks.learns import EPISODES, MANY, TASKS, learn

NAME = "solves"
MODES = ("sequential", "lockstep", "batch", "continuous", "episodes")
TASK = "cartpole"


def cells(mode: str, rows: Sequence[Row]) -> list[str]:
    solved = sum(row["learned"] for row in rows)
    figures = [spread([row[key] for row in rows]) for key in ("greedy_best", "greedy_latest", "seconds")]
    return [mode, f"{solved} of {len(rows)}", *figures]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=TASKS[TASK].steps, help="env steps of a run")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.steps = given.seeds[:1], 2_048
    target = TASKS[TASK].target
    notebook = Notebook(NAME, f"{TASKS[TASK].env}, preset {TASK}, {given.steps:,} env steps", quick=given.quick)
    rows: dict[str, list[Row]] = {mode: [] for mode in given.modes}
    for turn, seed in enumerate(given.seeds):
        for mode in rotated(given.modes, turn):
            many = EPISODES if given.quick else MANY
            row = notebook.keep({"mode": mode, **learn(TASK, seed, given.steps, "--mode", mode, many=many)})
            print(
                f"{mode} seed {seed}: best {number(row['greedy_best'])} latest {number(row['greedy_latest'])}",
                flush=True,
            )
            rows[mode].append(row)
    header = ("mode", f"solved (≥ {target:g})", f"best weights, {EPISODES} greedy episodes", "last weights", "seconds")
    notebook.write(table(header, [cells(mode, part) for mode, part in rows.items()]))
    for mode, part in rows.items():
        solved = sum(row["learned"] for row in part)
        notebook.judge(f"{mode}: {solved} of {len(part)} seeds reach {target:g}", solved == len(part))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
