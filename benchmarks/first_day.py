"""A simulator of one's own: the default command beside the one that `freewheel check` advises, and beside its prediction."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._common import Notebook, Row, median, number, rotated, run_python, spread, table

NAME = "first_day"
SIMULATORS: Mapping[str, str] = {
    "uneven": "benchmarks._simulators:Uneven",  # waits, 5 ms in the mean, log-normal
    "burning": "benchmarks._simulators:Burning",  # computes, 2 ms in the mean
}
WARM = 3.0  # seconds of a run before the window
DEFAULT, OTHER = "default", "other"
CLOSE, GAIN = 0.25, 1.3  # how far a prediction may be off, and what a gain is


def check(simulator: str, options: Sequence[str]) -> dict[str, Any]:
    """What `freewheel check` says."""
    with TemporaryDirectory() as folder:
        said: dict[str, Any] = json.loads(
            run_python("-m", "freewheel", "check", simulator, *options, "--json", cwd=folder)
        )
    return said


def train(words: Sequence[str], seconds: float, seed: int) -> float:
    """Env steps/s of a command after WARM seconds."""
    asked = ["--minutes", (WARM + seconds) / 60, "--seed", seed, "--evals", 0, "--log-every", 0.2, "--run", "it"]
    with TemporaryDirectory() as folder:
        run_python("-m", *words, *asked, cwd=folder)
        lines = (Path(folder) / "runs" / "it" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["wall_s"] >= min(WARM, seconds)]
    first, last = rows[0], rows[-1]
    return float((last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"]))


def measure(notebook: Notebook, kind: str, given: argparse.Namespace) -> list[Row]:
    """Round by round: what is predicted for the default command and for the best other one, and what both make."""
    rows: list[Row] = []
    for turn in range(given.rounds):
        load, said = os.getloadavg()[0], check(SIMULATORS[kind], given.options)
        usual, advised = said["default"], said["advice"]
        others = [mode for mode in said["modes"] if mode.get("steps_per_s") and mode["mode"] != usual["mode"]]
        other = advised or max(others, key=lambda mode: mode["steps_per_s"])
        commands = {DEFAULT: usual["command"], OTHER: other["command"]}
        made = {way: train(shlex.split(commands[way]), given.window, turn) for way in rotated(list(commands), turn)}
        row = {"simulator": kind, "round": turn + 1, "advised": advised is not None, "command": commands[OTHER]}
        row |= {"load": load, "step_ms": 1e3 * said["cost"]["own"], "workers": other["workers"], "mode": other["mode"]}
        row |= {"predicted": usual["steps_per_s"], "rows_per_s": made[DEFAULT]}
        row |= {"predicted_other": other["steps_per_s"], "other_per_s": made[OTHER]}
        row |= {"gain": made[OTHER] / made[DEFAULT], "predicted_gain": other["steps_per_s"] / usual["steps_per_s"]}
        rows.append(notebook.keep(row))
        print(
            *(f"{key} {number(value) if isinstance(value, float) else value}" for key, value in row.items()), sep="  "
        )
    return rows


def off(rows: Sequence[Row], predicted: str, measured: str) -> float:
    """How far the median prediction is from the median measurement."""
    return abs(median(rows, predicted) / median(rows, measured) - 1)


def judge(notebook: Notebook, kind: str, rows: Sequence[Row]) -> None:
    modes = sorted({f"{row['mode']}, {row['workers']} workers" for row in rows})
    header = (f"{kind}, {median(rows, 'step_ms'):.2g} ms", "predicted env steps/s", "measured", "off by")
    lines = [
        ["`freewheel train`", *figures(rows, "predicted", "rows_per_s")],
        [f"{'advised' if rows[0]['advised'] else 'best other'}: {'; '.join(modes)}",
         *figures(rows, "predicted_other", "other_per_s")],
        ["times as much", *figures(rows, "predicted_gain", "gain")],
    ]  # fmt: skip
    notebook.write(table(header, lines))
    gain, wrong = median(rows, "gain"), off(rows, "predicted_gain", "gain")
    advised = [row["advised"] for row in rows]
    if kind == "uneven":
        notebook.judge(f"{kind}: advice is given", all(advised), exact=True)
        notebook.judge(f"{kind}: the advice makes {gain:.1f}x, a gain", gain >= GAIN)
    else:
        promised = [row["predicted_gain"] for row in rows if row["advised"]]
        most = (1 + CLOSE) * gain
        text = f"{kind}: {gain:.2f}x is to be had, promised {spread(promised) if promised else 'nothing'}"
        notebook.judge(text, all(promise <= most for promise in promised))
    notebook.judge(f"{kind}: prediction of the gain off by {wrong:.0%}, at most {CLOSE:.0%}", wrong <= CLOSE)


def figures(rows: Sequence[Row], predicted: str, measured: str) -> list[str]:
    columns = [spread([row[key] for row in rows]) for key in (predicted, measured)]
    return [*columns, f"{100 * off(rows, predicted, measured):.0f} %"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=10.0, help="seconds")
    parser.add_argument("--only", choices=SIMULATORS, help="one of the simulators")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    given.options = []
    if given.quick:
        given.rounds, given.window, given.only, given.options = 1, 1.0, "uneven", ["--env.mean_ms", "1.5"]
    notebook = Notebook(NAME, "The default command beside what `freewheel check` advises", quick=given.quick)
    for kind in [given.only] if given.only else SIMULATORS:
        judge(notebook, kind, measure(notebook, kind, given))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
