"""Two learners that train together (gloo, CPU) beside one learner with twice the batch of each: learning curves, and time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks._common import Notebook, Row, mean_interval, rotated, spread, table

NAME = "learners"
WAYS = {"one learner": 1, "two learners": 2}
#: By name: options of the whole run, which learners share. An update has the same rows in both ways.
CASES: Mapping[str, Mapping[str, Any]] = {
    "lockstep": {"mode": "lockstep", "num_envs": 8},
    "batch, 4 workers": {"mode": "batch", "workers": 4, "num_envs": 8},
}
NOISE = 2.0  # standard errors of the difference of two means, beyond which it would be more than seed noise


def measure(notebook: Notebook, given: argparse.Namespace) -> dict[tuple[str, str], list[Row]]:
    cases = list(CASES)[: 1 if given.quick else None]
    rows: dict[tuple[str, str], list[Row]] = {(case, way): [] for case in cases for way in WAYS}
    for turn in range(given.seeds):
        for case, way in rotated(list(rows), turn):
            run = {"env": "CartPole-v1", "steps": given.steps, "seed": turn + 1, "evals": 1, "log_every": 0.1}
            order = {"options": {**run, **CASES[case], "learners": WAYS[way]}}
            rows[case, way].append(notebook.once("_learners_once", order, {"case": case, "way": way, "seed": turn + 1}))
    return rows


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of two means over seeds, in standard errors of it."""
    error = np.sqrt(np.var(ours, ddof=1) / len(ours) + np.var(theirs, ddof=1) / len(theirs))
    return float(abs(np.mean(ours) - np.mean(theirs)) / max(float(error), 1e-9))


def judge(notebook: Notebook, rows: Mapping[tuple[str, str], Sequence[Row]]) -> None:
    header = ("case", "learners", "final evaluation", "mean return while it trains", "seconds", "waits for others")
    notebook.write(
        table(
            header,
            [
                [case, way, *(mean_interval([row[name] for row in part]) for name in ("final_eval", "mean_return")),
                 spread([row["wall_s"] for row in part]),
                 spread([max(row["waited"]) for row in part]) if part[0]["waited"] else "-"]
                for (case, way), part in rows.items()
            ],
        )
    )  # fmt: skip
    for case in dict.fromkeys(case for case, _ in rows):
        one, two = (rows[case, way] for way in WAYS)
        if len(one) > 1:
            for name, what in (("mean_return", "learning curve"), ("final_eval", "final evaluation")):
                apart = difference([row[name] for row in two], [row[name] for row in one])
                text = f"{case}: {what} of two learners {apart:.1f} standard errors from that of one, at most {NOISE:g}"
                notebook.judge(text, apart <= NOISE)
        work = [[(row["updates"], row["trained"]) for row in part] for part in (one, two)]
        notebook.judge(f"{case}: as many updates on as many rows", work[0] == work[1], exact=True)
    every = [row for part in rows.values() for row in part]
    notebook.judge(f"ledger exact in {len(every)} runs", all(row["ledger"] == "exact" for row in every), exact=True)
    shared = [row for row in every if len(row["learners"]) > 1]
    notebook.judge(
        "every learner trains on as many rows", all(len(set(row["learners"])) == 1 for row in shared), exact=True
    )
    notebook.judge("the same weights in every learner", all(row["same_weights"] for row in shared), exact=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40_960, help="of a run")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.steps = 1, 4_096
    notebook = Notebook(NAME, "Two learners beside one", quick=given.quick)
    judge(notebook, measure(notebook, given))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
