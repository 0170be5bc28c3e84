"""Random command lines with tiny budgets, each a real `freewheel train`: which learn, end late, or with a traceback."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks._common import ONE_THREAD, RESULTS, ROOT, Notebook, Row, number, spread, table
from benchmarks._trainers import alive, usual_signals

NAME = "random_configs"
RUNS, QUICK, SEED = 300, 2, 24
LATE, KILLED_AFTER = 10.0, 30.0  # seconds beyond the budget: more than that is too much, and the end of patience
LONG = ("mbpo", "Slow", "Straggler")  # takes longer than UNTIMED for some numbers of steps
UNTIMED = 45.0  # seconds that a run which has a limit of steps alone may take
HALF = 0.5  # of the runs have to train

DISCRETE = ("CartPole-v1", "Acrobot-v1", "./worlds.py:Plain", "./worlds.py:Nested", "./worlds.py:Choices",
            "./worlds.py:Picture", "./worlds.py:Slow", "./worlds.py:SlowReset", "./worlds.py:Endless")  # fmt: skip
CONTINUOUS = ("Pendulum-v1", "MountainCarContinuous-v0", "./worlds.py:Wide", "./worlds.py:OneStep")
OTHER = ("./worlds.py:Many", "./worlds.py:Bits", "freewheel/Straggler-v0", "./worlds.py:LargePicture")
PRESETS = (("CartPole-v1", "cartpole"), ("Pendulum-v1", "pendulum"), ("CartPole-v1", "cartpole-sac"),
           ("Acrobot-v1", "acrobot-sac"), ("CartPole-v1", "cartpole-mbpo"), ("Pendulum-v1", "halfcheetah"))  # fmt: skip
MODES = ("sequential", "lockstep", "batch", "continuous", "episodes", "auto")
#: What people type by mistake, or ask too much of.
MISTAKES = (
    ("--mode", "lockstep", "--workers", "4"),
    ("--mode", "batch", "--max-lag", "3"),
    ("--mode", "sequential", "--placement", "processes"),
    ("--algo", "sac", "--ppo.epochs", "3"),
    ("--num-env", "4"),
    ("--policy.hidden", "20000", "20000"),
    ("--policy.hidden", "0"),
    ("--num-envs", "1000000"),
    ("--mode", "continuous", "--workers", "100000"),
    ("--device", "cuda"),
    ("--steps", "-5"),
    ("--minutes", "0"),
    ("--ppo.lr", "nan"),
    ("--preset", "cartpol"),
    ("--mode", "continous"),
    ("--init", "no-such-run"),
    ("--hooks", "./worlds.py:NoSuchHook"),
    ("--config", "missing.json"),
    ("--num-steps-per-env", "1000000000"),
    ("--run", "x" * 300),
    ("--sac.buffer", "10"),
    ("--mode", "episodes", "--episodes-per-update", "1000000"),
    ("--mode", "auto", "--envs-per-worker", "1000"),
    ("--learners", "3"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One command line."""

    number: int
    words: tuple[str, ...]
    minutes: float | None
    mistaken: bool

    @property
    def budget_s(self) -> float:
        return UNTIMED if self.minutes is None else 60 * self.minutes


def drawn(seed: int, number: int) -> Case:
    """The command line of this number: the same for the same seed."""
    rng = random.Random(f"{seed} {number}")
    minutes = rng.choice((0.1, 0.15, 0.2, 0.3)) if rng.random() < 0.75 else None
    steps = rng.choice((200, 500, 1000, 2000, 3000)) if minutes is None or rng.random() < 0.5 else None
    words = [*_task(rng), *(_mode(rng) if rng.random() < 0.9 else ())]
    if minutes is None and any(slow in " ".join(words) for slow in LONG):
        minutes = 0.3
    words += [] if minutes is None else ["--minutes", f"{minutes:g}"]
    words += [] if steps is None else ["--steps", str(steps)]
    for maybe in (_sizes, _policy, _machine, _evaluation, _output):
        words += maybe(rng)
    words += ["--seed", str(rng.randrange(1000))]
    mistaken = rng.random() < 0.15
    return Case(number, (*words, *(rng.choice(MISTAKES) if mistaken else ())), minutes, mistaken)


def _task(rng: random.Random) -> list[str]:
    """An environment and how to learn it."""
    kind = rng.random()
    if kind < 0.12:
        env, preset = rng.choice(PRESETS)
        return [env, "--preset", preset]
    if kind < 0.55:
        return [rng.choice((*DISCRETE, *OTHER, *CONTINUOUS))]
    env, algo = rng.choice((*DISCRETE, *CONTINUOUS, *CONTINUOUS)), rng.choice(("ppo", "sac", "sac", "mbpo"))
    words = [env, "--algo", algo]
    if algo != "ppo" and rng.random() < 0.5:
        words += [f"--{algo}.learning-starts", rng.choice(("50", "100", "300", "2000"))]
    if algo == "mbpo" and rng.random() < 0.5:
        words += ["--mbpo.model-every", "100", "--mbpo.max-epochs", "5", "--mbpo.members", "3", "--mbpo.elites", "2"]
    if algo == "ppo" and rng.random() < 0.5:
        words += [
            "--ppo.epochs",
            rng.choice(("1", "3", "10")),
            "--ppo.minibatch",
            rng.choice(("16", "64", "500", "4096")),
        ]
    return words


def _mode(rng: random.Random) -> list[str]:
    mode = rng.choice(MODES)
    words = ["--mode", mode]
    if mode in ("sequential", "lockstep") and rng.random() < 0.6:
        words += ["--num-envs", rng.choice(("1", "2", "5", "16", "64"))]
    if mode == "lockstep" and rng.random() < 0.3:
        words += ["--placement", rng.choice(("inline", "processes"))]
    if mode in ("batch", "continuous", "episodes"):
        words += ["--workers", rng.choice(("1", "2", "3", "8", "auto"))] if rng.random() < 0.7 else []
        words += ["--envs-per-worker", rng.choice(("1", "2", "4", "20"))] if rng.random() < 0.3 else []
    if mode == "continuous" and rng.random() < 0.3:
        words += ["--max-lag", rng.choice(("0", "1", "4"))]
    if mode == "continuous" and rng.random() < 0.2:
        words += ["--collection-batch-size", rng.choice(("1", "8", "64"))]
    if mode == "episodes" and rng.random() < 0.4:
        words += ["--episodes-per-update", rng.choice(("1", "4", "20"))]
    return words


def _sizes(rng: random.Random) -> list[str]:
    return ["--num-steps-per-env", rng.choice(("1", "8", "32", "100", "auto"))] if rng.random() < 0.3 else []


def _policy(rng: random.Random) -> list[str]:
    words = []
    if rng.random() < 0.25:
        words += ["--policy.hidden", *rng.choice((("8",), ("64", "64"), ("256", "256"), ("512",)))]
    if rng.random() < 0.1:
        words += ["--policy.normalize-obs", rng.choice(("true", "false"))]
    return words


def _machine(rng: random.Random) -> list[str]:
    return ["--threads", rng.choice(("1", "2", "4"))] if rng.random() < 0.15 else []


def _evaluation(rng: random.Random) -> list[str]:
    words = ["--evals", rng.choice(("0", "1", "20"))] if rng.random() < 0.25 else []
    words += ["--eval-episodes", rng.choice(("1", "5", "200"))] if rng.random() < 0.25 else []
    return words + (["--eval-max-steps", rng.choice(("10", "1000"))] if rng.random() < 0.1 else [])


def _output(rng: random.Random) -> list[str]:
    words = []
    for option, value, share in (
        ("--checkpoint-every", ("0", "0.02", "1"), 0.2),
        ("--log-every", ("0.1", "0.5", "10"), 0.2),
        ("--console", ("classic",), 0.1),
        ("--trace", ("true",), 0.08),
        ("--record-schedule", ("true",), 0.08),
        ("--run", ("mine", "läufe 1", "a/b", "-x"), 0.1),
    ):
        words += [option, rng.choice(value)] if rng.random() < share else []
    return words


# ------------------------------------------------------------------------------------------------------------------ running


def tried(case: Case) -> dict[str, Any]:
    """The command, run to its end or until it is killed."""
    with TemporaryDirectory(prefix="random-configs-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        shutil.copy(ROOT / "benchmarks" / "_odd_worlds.py", folder / "worlds.py")
        load, began = os.getloadavg()[0], time.monotonic()
        with (folder / "said.txt").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "freewheel", "train", *case.words],
                cwd=folder,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            killed = not _ended(process, case.budget_s + KILLED_AFTER)
        took = time.monotonic() - began
        text = (folder / "said.txt").read_text(errors="replace")
        paths = list(folder.glob("runs/**/summary.json"))
        summary: dict[str, Any] = json.loads(paths[0].read_text()) if paths else {}
    return {
        "number": case.number,
        "typed": shlex.join(case.words),
        "mistaken": case.mistaken,
        "minutes": case.minutes,
        "code": None if killed else process.returncode,
        "wall_s": round(took, 2),
        "over_s": round(took - case.budget_s, 2),
        "load": load,
        "outcome": _outcome(killed, process.returncode, summary, text),
        "updates": summary.get("updates", 0),
        "ended": summary.get("ended"),
        "foreign": foreign(text),
        "said": _last_words(text),
    }


def _ended(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Whether it ends within so many seconds; after that, nothing of it is left."""
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for one in filter(alive, family):
            one.kill()
        return False
    return True


def _outcome(killed: bool, code: int, summary: Row, text: str) -> str:
    if killed:
        return "killed"
    if code == 0:
        return "trained" if summary.get("updates") else "learned nothing"
    complaints = re.findall(r"^freewheel: .*", text, re.MULTILINE)
    return "refused" if not summary and len(complaints) == 1 else "failed"


def foreign(text: str) -> bool:
    """Whether there is a traceback that no line of ours introduces: that of an environment comes after its report."""
    before, found, _ = text.partition("Traceback (most recent call last)")
    return bool(found) and "freewheel: " not in before


def _last_words(text: str) -> str:
    ours = re.findall(r"^freewheel: .*", text, re.MULTILINE)
    return (ours[-1] if ours else text.strip().rpartition("\n")[2])[:500]


# ------------------------------------------------------------------------------------------------------------------- judging


def show(row: Row) -> None:
    wrong = "  TRACEBACK" * row["foreign"] + "  LATE" * (row["over_s"] > LATE)
    print(
        f"{row['number']:>4}  {row['outcome']:<16}{row['wall_s']:6.1f} s ({row['over_s']:+.1f}){wrong}  {row['typed']}",
        flush=True,
    )
    if row["outcome"] != "trained":
        print(f"      {row['said']}", flush=True)


def judge(notebook: Notebook, rows: Sequence[Row]) -> None:
    counts = Counter((row["outcome"], row["mistaken"]) for row in rows)
    outcomes = ("trained", "refused", "failed", "learned nothing", "killed")
    cells = [[name, str(counts[name, False]), str(counts[name, True])] for name in outcomes]
    notebook.write(table(("outcome", "sensible commands", "with a mistake"), cells))
    notebook.write(f"Seconds beyond the budget: {spread([row['over_s'] for row in rows])}.")
    trained = sum(row["outcome"] == "trained" for row in rows)
    notebook.judge(f"{trained} of {len(rows)} trained, at least {HALF:.0%}", trained >= HALF * len(rows))
    late = [row["number"] for row in rows if row["over_s"] > LATE]
    notebook.judge(f"{len(late)} ended more than {number(LATE)} s after the budget {late or ''}", not late, exact=True)
    strange = [row["number"] for row in rows if row["foreign"]]
    notebook.judge(f"{len(strange)} foreign tracebacks {strange or ''}", not strange, exact=True)
    green = [row["number"] for row in rows if row["outcome"] == "learned nothing"]
    notebook.write(f"Exit code 0 without an update: {green or 'none'}.")


def listed(words: Sequence[str]) -> list[int]:
    """Numbers, and ranges of them with both ends."""
    ends = (word.partition("..") for word in words)
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[f"0..{RUNS - 1}"], metavar="FROM..TO|NUMBER", help="a part of them"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=1, help="side by side")
    parser.add_argument("--quick", action="store_true", help="see that it works: a few, nothing is kept")
    parser.add_argument("--report", action="store_true", help="no runs: the table of the last row of each number")
    given = parser.parse_args()
    usual_signals()
    notebook = Notebook(NAME, "Random command lines with tiny budgets", quick=given.quick)
    if given.report:
        kept = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
        rows = list({row["number"]: row for row in kept}.values())
    else:
        rows = []
        with ThreadPoolExecutor(given.jobs) as pool:
            numbers = range(QUICK) if given.quick else listed(given.only)
            for row in pool.map(lambda number: tried(drawn(given.seed, number)), numbers):
                rows.append(notebook.keep(row))
                show(row)
    judge(notebook, sorted(rows, key=lambda row: int(row["number"])))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
