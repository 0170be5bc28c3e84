"""Federated averaging: three sites with poles of other lengths and uneven data, one of which drops out in the middle; the average
beside each site alone and beside all data in one place, every policy scored on all three lengths."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks._common import ONE_THREAD, ROOT, Notebook, Row, number, run_python, table

NAME = "federate"
POLES = """
import gymnasium

LENGTHS = {lengths}

class Pole(gymnasium.Wrapper):
    def __init__(self, length=None):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.lengths = LENGTHS if length is None else [length]

    def reset(self, *, seed=None, options=None):
        found = self.env.reset(seed=seed, options=options)
        pole = self.env.unwrapped
        pole.length = self.lengths[int(pole.np_random.integers(len(self.lengths)))]
        pole.polemass_length = pole.masspole * pole.length
        return found
"""
SCORE = """
import json, sys
import freewheel
sys.path.insert(0, ".")
from poles import Pole

def only(length):
    return lambda **_: Pole(length)  # whatever length the run was trained with

print(json.dumps([freewheel.score(sys.argv[1], env=only(length)).mean for length in json.loads(sys.argv[2])]))
"""
LENGTHS, SHARES = (0.25, 0.5, 1.5), (1.0, 0.5, 0.25)  # of the poles; of the steps that the first site has
COMMON = ("--num-envs", "8", "--num-steps-per-env", "32")


def score(folder: str, run: str) -> list[float]:
    """Greedy returns on every length."""
    found: list[float] = json.loads(run_python("-c", SCORE, run, json.dumps(LENGTHS), cwd=folder).splitlines()[-1])
    return found


def federated(folder: str, steps: int, rounds: int) -> dict[str, Any]:
    """All sites, and the last of them is killed for good when half of the rounds are over."""
    tables = (
        f"[site-{number}]\nsteps = {int(steps * share)}\nenv_args = {{length = {length}}}\n"
        for number, (length, share) in enumerate(zip(LENGTHS, SHARES, strict=True), start=1)
    )
    Path(folder, "sites.toml").write_text("".join(tables))
    words = ["./poles.py:Pole", "--federate", str(rounds), "--sites", "sites.toml", "--trust", "--site-restarts", "0"]
    command = [sys.executable, "-m", "freewheel", "train", *words, "--run", "federated", *COMMON]
    env = os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)}
    killed = 0
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for told in process.stdout:
            if told.startswith(f"round {rounds // 2} of") and not killed:
                killed = kill(psutil.Process(process.pid), "site-3.txt")
    summary = json.loads(Path(folder, "runs", "federated", "summary.json").read_text())
    rows = [json.loads(line) for line in Path(folder, "runs", "federated", "metrics.jsonl").read_text().splitlines()]
    return {
        "form": "federated",
        "exit_code": process.returncode,
        "rounds": summary["rounds"],
        "env_steps": summary["env_steps"],
        "wall_s": summary["wall_s"],
        "skipped": summary["rounds_skipped"],
        "killed": killed,
        "bytes_a_site": rows[0]["bytes_in"] / 3,
        "distance": [row["distance"] for row in rows],
        "returns": score(folder, "federated"),
    }


def kill(driver: psutil.Process, output: str) -> int:
    """The process of a site, by the file that it prints to."""
    for process in driver.children(recursive=True):
        with suppress(psutil.Error, OSError):
            if os.readlink(f"/proc/{process.pid}/fd/1").endswith(output):
                process.kill()
                return 1
    return 0


def alone(folder: str, name: str, steps: int, length: float | None) -> dict[str, Any]:
    """One training of its own, on one length or on all."""
    own = [] if length is None else ["--env.length", str(length)]
    words = ["train", "./poles.py:Pole", *own, "--steps", str(steps), "--run", name, "--evals", "0", *COMMON]
    run_python("-m", "freewheel", *words, cwd=folder)
    return {"form": name, "env_steps": steps, "returns": score(folder, name)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000, help="of the site with the most data")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.steps, given.rounds = 16_384, 8
    notebook = Notebook(NAME, f"Federated averaging: 3 sites, {given.rounds} rounds, one drops out", quick=given.quick)
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        Path(folder, "poles.py").write_text(POLES.format(lengths=list(LENGTHS)))
        rows.append(notebook.keep(federated(folder, given.steps, given.rounds)))
        for place, (length, share) in enumerate(zip(LENGTHS, SHARES, strict=True), start=1):
            if not given.quick or place == 3:
                rows.append(notebook.keep(alone(folder, f"site-{place} alone", int(given.steps * share), length)))
        if not given.quick:
            rows.append(notebook.keep(alone(folder, "all data in one place", int(given.steps * sum(SHARES)), None)))
    lines = [
        [row["form"], f"{row['env_steps']:,}", *map(number, row["returns"]), number(min(row["returns"]))]
        for row in rows
    ]
    notebook.write(table(("training", "env steps", *(f"length {length}" for length in LENGTHS), "worst"), lines))
    first, worst = rows[0], {row["form"]: min(row["returns"]) for row in rows}
    lost = first["skipped"].get("lost", 0)
    text = f"the killed site was skipped in {lost} of {given.rounds} rounds, and all rounds were played"
    notebook.judge(text, lost >= 1 and first["rounds"] == given.rounds and first["exit_code"] == 3, exact=True)
    notebook.judge(
        f"a site sent {first['bytes_a_site']:,.0f} bytes a round, less than 100 kB",
        first["bytes_a_site"] < 1e5,
        exact=True,
    )
    least = worst.get("site-3 alone", 0.0)
    notebook.judge(
        f"the average's worst length {worst['federated']:.0f}, site-3 alone {least:.0f}", worst["federated"] >= least
    )
    if "all data in one place" in worst:
        share = worst["federated"] / worst["all data in one place"]
        notebook.judge(
            f"the average's worst length is {share:.2f} of all data in one place, at least 0.8", share >= 0.8
        )
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
