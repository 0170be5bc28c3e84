"""Runs that begin with bad settings, with and without --adapt, beside runs with good ones."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._common import Notebook, Row, median, number, rotated, spread, straggler, table

NAME = "adapt"
WORLD = {"law": "lognormal", "mean": 0.0002, "kind": "burn", "length": 100}
#: By case: the number of workers and options of the bad start, and of the good one.
CASES: Mapping[str, tuple[tuple[int, Mapping[str, Any]], tuple[int, Mapping[str, Any]]]] = {
    "fragments of one step": ((2, {"collection_batch_size": 1}), (2, {})),
    "40 workers where 2 do, fragments of one step": ((40, {"collection_batch_size": 1}), (2, {})),
}
WAYS = ("bad", "bad, --adapt", "good")
LEAST = 0.9  # of the good one's rows a second
MAX_LAG = 2


def options(case: str, way: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    workers, asked = CASES[case][way == "good"]
    adapting = {"adapt": True, "adapt_patience": given.patience} if way.endswith("--adapt") else {}
    run = {"minutes": given.minutes, "log_every": 1.0 if given.minutes > 0.5 else 0.2, "max_lag": MAX_LAG, "seed": seed}
    ppo = {"epochs": 10, "minibatch": 64}
    steps = 2_048 // workers  # an update has the same rows, whatever the number of workers
    return straggler("continuous", workers, WORLD, {"num_steps_per_env": steps, "ppo": ppo, **run, **asked, **adapting})


def measure(notebook: Notebook, given: argparse.Namespace) -> dict[tuple[str, str], list[Row]]:
    cases = list(CASES)[: 1 if given.quick else None]
    rows: dict[tuple[str, str], list[Row]] = {(case, way): [] for case in cases for way in WAYS}
    for turn in range(given.rounds):
        for case, way in rotated(list(rows), turn):
            labels = {"case": case, "way": way, "round": turn + 1}
            order = {"options": options(case, way, given, turn)}
            rows[case, way].append(notebook.once("_adapt_once", order, labels))
    return rows


def cells(case: str, way: str, rows: Sequence[Row], good: Sequence[Row]) -> list[str]:
    ratio = spread(
        [ours["rows_per_s"] / max(theirs["rows_per_s"], 1.0) for ours, theirs in zip(rows, good, strict=True)]
    )
    last = rows[-1]
    return [case, way, spread([row["rows_per_s"] for row in rows]), ratio, number(last["turns"]), number(last["fragment"]),
            number(max(len(row["changes"]) for row in rows))]  # fmt: skip


def judge(notebook: Notebook, rows: Mapping[tuple[str, str], Sequence[Row]]) -> None:
    header = (
        "start",
        "way",
        "rows/s at the end",
        "of the good one's",
        "workers at a time",
        "steps of a fragment",
        "changes",
    )
    notebook.write(table(header, [cells(case, way, part, rows[case, "good"]) for (case, way), part in rows.items()]))
    for case in dict.fromkeys(case for case, _ in rows):
        ratio = median(rows[case, "bad, --adapt"], "rows_per_s") / max(median(rows[case, "good"], "rows_per_s"), 1.0)
        notebook.judge(f"{case}: {ratio:.2f} of the good setting's rows/s, target at least {LEAST}", ratio >= LEAST)
    every = [row for part in rows.values() for row in part]
    notebook.judge(f"ledger exact in {len(every)} runs", all(row["ledger"] == "exact" for row in every), exact=True)
    lag = max(row["lag_max"] or 0 for row in every)
    notebook.judge(f"lag at most {lag:g}, bound {MAX_LAG}", lag <= MAX_LAG, exact=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1.5, help="of a run")
    parser.add_argument("--patience", type=int, default=3, help="rows of metrics before a change")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.minutes, given.patience = 1, 0.05, 1
    notebook = Notebook(NAME, "Runs that begin with bad settings", quick=given.quick)
    judge(notebook, measure(notebook, given))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
