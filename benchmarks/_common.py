"""What the benchmarks share: fresh processes, what they ran on, rows on disk, medians with their spread, tables, verdicts."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, TypeVar

import numpy as np

from freewheel.rollout.probe import processor

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("freewheel", "stable-baselines3", "torch", "numpy", "gymnasium", "mujoco")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
LIMIT_S = 1800.0  # of one run
DRAWS = 10_000

Row: TypeAlias = Mapping[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Verdict:
    """A target, and whether it is met."""

    text: str
    met: bool
    exact: bool = False  # no figure of speed but a promise: it counts in a quick run too

    def __str__(self) -> str:
        return f"{'PASS' if self.met else 'FAIL'}: {self.text}"


class Notebook:
    """A benchmark under way: rows on disk, tables, verdicts. A quick one keeps nothing, and only promises count in it."""

    def __init__(self, name: str, title: str, *, quick: bool) -> None:
        self._name, self._quick, self._about = name, quick, context()
        self._parts = [f"# {title}"]
        self._verdicts: list[Verdict] = []

    def once(self, module: str, order: Mapping[str, Any], labels: Mapping[str, Any]) -> dict[str, Any]:
        """One measurement by benchmarks.MODULE in a process of its own; its row, labelled and kept."""
        load = os.getloadavg()[0]
        with TemporaryDirectory() as folder:
            answer = run_python("-m", f"benchmarks.{module}", json.dumps(order), cwd=folder)
        row = self.keep({**labels, **json.loads(answer.splitlines()[-1]), "load": load})
        print(*(f"{value}" for value in labels.values()), *_gist(row), sep="  ", flush=True)
        return row

    def keep(self, row: dict[str, Any]) -> dict[str, Any]:
        if not self._quick:
            append(self._name, {**row, **self._about})
        return row

    def write(self, *paragraphs: str) -> None:
        """More of the report."""
        self._parts += paragraphs

    def judge(self, text: str, met: bool, *, exact: bool = False) -> None:
        self._verdicts.append(Verdict(text, bool(met), exact))
        self.write(str(self._verdicts[-1]))

    def judge_promises(self, rows: Sequence[Row]) -> None:
        """What must hold in every run of _collect_once: the ledger balances, and nothing stands still."""
        wrong = [row["ledger"] for row in rows if row["ledger"] != "exact"]
        checks, stalled = sum(row["balances"] for row in rows), sum(row["stalled"] for row in rows)
        text = f"ledger exact in {len(rows)} runs ({checks} checks)" + (f", but {wrong[0]}" if wrong else "")
        self.judge(text, not wrong, exact=True)
        self.judge(f"runs that stood still: {stalled} of {len(rows)}", not stalled, exact=True)

    def goal(self, text: str, met: bool) -> None:
        """What is aimed at, and does not count."""
        self.write(f"goal {'reached' if met else 'not reached'}: {text}")

    def close(self) -> int:
        """Show it all; the exit code."""
        counted = [verdict for verdict in self._verdicts if verdict.exact or not self._quick]
        missed = [verdict.text for verdict in counted if not verdict.met]
        text = "\n\n".join(self._parts)
        print(f"\n{text}\n")
        if not self._quick:
            report(self._name, text, self._about)
        print(f"missed: {'; '.join(missed)}" if missed else f"all {len(counted)} targets that count are met")
        return 1 if missed else 0


def sources(tree: Path) -> list[str]:
    """What a checkout needs on PYTHONPATH, whether it has packages or is older than these."""
    packages = sorted((tree / "packages").glob("*/src"))
    return [str(tree), *map(str, packages or [Path(__file__).parent / "_without_packages"])]


def run_python(*arguments: object, cwd: str, tree: Path = ROOT) -> str:
    """The standard output of a process of its own with the code of this tree, one BLAS thread; ends the benchmark if it fails."""
    path = os.pathsep.join(filter(None, (*sources(tree), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | ONE_THREAD | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"failed in {tree}: python {shlex.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
    return done.stdout


def context() -> dict[str, Any]:
    """Where and when the rows of a benchmark came from."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": processor(),
        "versions": {"python": platform.python_version()} | {package: _version(package) for package in PACKAGES},
    }


def append(name: str, row: Mapping[str, Any]) -> None:
    """One more line of results/NAME.jsonl; rows of earlier days stay."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def report(name: str, text: str, about: Mapping[str, Any]) -> None:
    """results/NAME.md: the newest tables, and what they were measured on."""
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items() if version)
    origin = f"`{about['command']}`, {about['date']}, {about['cores']} cores ({about['cpu']}), {versions}."
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"{text}\n\n{origin}\n", encoding="utf-8")


def bootstrap(values: Sequence[float], statistic: Callable[..., Any] = np.median) -> tuple[float, float]:
    """95 % interval of the median or another statistic; infinities are allowed, so no value is interpolated."""
    rng = np.random.default_rng(0)
    sample = np.asarray(values, np.float64)
    drawn = statistic(sample[rng.integers(len(sample), size=(DRAWS, len(sample)))], axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975), method="inverted_cdf")
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> str:
    """mean (95 % interval of it)"""
    low, high = bootstrap(values, np.mean)
    return f"{number(float(np.mean(values)))} ({number(low)} .. {number(high)})"


def median(rows: Sequence[Row], key: str) -> float:
    return float(np.median([row[key] for row in rows]))


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """The same items, begun with another one every round: a slow minute of the machine hurts each in turn."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def straggler(mode: str, workers: int, world: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `freewheel.train` for so many Stragglers, a process each, whatever the mode."""
    lanes: dict[str, Any] = {"workers": workers}
    if mode == "lockstep":
        lanes = {"num_envs": workers, "placement": "processes"}
    elif mode in ("batch", "continuous"):
        lanes["envs_per_worker"] = 1
    asked = {"env": "freewheel/Straggler-v0", "env_args": dict(world), "measures": ["drawn_s", "slept_s"]}
    update = {"num_steps_per_env": 64, **options, "ppo": {"minibatch": 256, **options.get("ppo", {})}}
    return {**asked, "mode": mode, **lanes, **update}


def spread(values: Sequence[float]) -> str:
    """median (least .. greatest)"""
    return f"{number(float(np.median(values)))} ({number(min(values))} .. {number(max(values))})"


def number(value: float | None) -> str:
    """Three digits, or all of a larger whole number."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown that is also readable on a terminal."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    lines = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in (header, rule, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _gist(row: Row) -> list[str]:
    """The figures of a row that a person watches go by."""
    watched = ("rows_per_s", "steps_per_s", "share", "updates", "update_s", "lag_max", "return_mean", "final_eval")
    return [f"{key} {number(row[key])}" for key in watched if row.get(key) is not None]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
