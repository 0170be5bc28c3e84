"""Every fault that a day brings, many times, done to real trainings: how many survive, what is lost, how soon they are back."""

from __future__ import annotations

import argparse
import json
import random
import traceback
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._common import RESULTS, Notebook, number, spread, table
from benchmarks._faults import EVERY, FAULTS, SAVE_LIMIT, Row, Setup
from benchmarks._trainers import usual_signals

NAME = "chaos"
TRIALS = {
    "killed": 104,
    "killed-resuming": 50,
    "signal": 104,
    "worker-killed": 100,
    "stopped": 12,
    "disk-full": 20,
    "deleted": 9,
    "ray": 12,
    "damaged": 1200,
    "no-end": 22,
    "killed-early": 54,
    "same-step": 24,
    "hostile": 136,
}
QUICK = {
    "killed": 1,
    "killed-resuming": 1,
    "signal": 2,
    "worker-killed": 2,
    "disk-full": 1,
    "ray": 1,
    "damaged": 60,
    "no-end": 1,
    "killed-early": 2,
    "same-step": 1,
    "hostile": 4,
}


def do(notebook: Notebook, name: str, setup: Setup, trials: int, rng: random.Random) -> list[Row]:
    """These trials with one setup. A trial that raises has not survived, and ends the chain of those after it."""
    rows: list[Row] = []
    labels = {"fault": name, "mode": setup.mode, "algo": setup.algo}
    with TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        try:
            for row in FAULTS[name].trials(Path(folder), rng, setup, trials):
                rows.append(notebook.keep({**labels, **row}))
                show(rows[-1])
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the trial is lost
            said = f"{type(error).__name__}: {error}"
            where = traceback.format_exc(limit=-2)
            rows.append(notebook.keep({**labels, "survived": False, "lost": None, "recover_s": None, "why": said}))
            print(f"{name}  {setup}  LOST  {where}", flush=True)
    return rows


def show(row: Row) -> None:
    if not row["survived"] or row["fault"] != "damaged":
        rest = {key: value for key, value in row.items() if key not in ("fault", "mode", "algo", "survived")}
        print(row["fault"], row["mode"], row["algo"], "ok" if row["survived"] else "LOST", rest, sep="  ", flush=True)


def cells(name: str, rows: Sequence[Row]) -> list[str]:
    alive = [row for row in rows if row["survived"]]
    back = [row["recover_s"] for row in alive]
    lost = [row["lost"] for row in alive if row["lost"]]
    work = f"{spread(lost)} s" if lost else "0"
    return [
        FAULTS[name].title,
        str(len(rows)),
        str(len(alive)),
        str(len(rows) - len(alive)),
        work,
        spread(back) if back else "-",
    ]


def judge(notebook: Notebook, found: dict[str, list[Row]]) -> None:
    header = ("fault", "trials", "survived", "lost", "work lost", "back after s")
    notebook.write(table(header, [cells(name, rows) for name, rows in found.items()]))
    for name, rows in found.items():
        alive = sum(row["survived"] for row in rows)
        notebook.judge(f"{FAULTS[name].title}: {alive} of {len(rows)} survived", alive == len(rows), exact=True)
    if kills := found.get("killed"):
        in_save = sum(bool(row.get("in_save")) for row in kills)
        share, most = in_save / len(kills), max((row["lost"] or 0.0 for row in kills), default=0.0)
        notebook.judge(f"{in_save} of {len(kills)} kills came in the middle of a save, at least 30 %", share >= 0.3)
        limit = EVERY + SAVE_LIMIT
        text = f"at most {number(most)} s of training lost, with a checkpoint every {EVERY:g} s (limit {limit:g})"
        notebook.judge(text, most <= limit)


def shares(total: int, setups: int) -> list[int]:
    return [total // setups + (place < total % setups) for place in range(setups)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of trials")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--quick", action="store_true", help="see that it works: a trial or two of some, nothing is kept"
    )
    parser.add_argument("--report", action="store_true", help="no trials: the table of the newest rows of each fault")
    given = parser.parse_args()
    usual_signals()
    notebook = Notebook(NAME, "Faults, and what they cost", quick=given.quick)
    found = kept() if given.report else trials_of(notebook, given)
    judge(notebook, found)
    return notebook.close()


def kept() -> dict[str, list[Row]]:
    """By fault, the rows of the newest commit that has any: several calls may have shared the work."""
    rows = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    found = {}
    for name in FAULTS:
        if own := [row for row in rows if row["fault"] == name]:
            commit = own[-1]["commit"].removesuffix("-dirty")  # the rows themselves make the tree dirty
            found[name] = [row for row in own if row["commit"].removesuffix("-dirty") == commit]
    return found


def trials_of(notebook: Notebook, given: argparse.Namespace) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for name in given.only:
        fault, trials = FAULTS[name], (QUICK if given.quick else TRIALS).get(name, 0)
        setups: Sequence[Any] = fault.setups[:1] if given.quick else fault.setups
        for setup, count in zip(setups, shares(round(trials * given.scale), len(setups)), strict=True):
            rng = random.Random(f"{given.seed} {name} {setup}")
            if count:
                found.setdefault(name, []).extend(do(notebook, name, setup, count, rng))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
