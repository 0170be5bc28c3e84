"""What the benchmarks share: fresh processes, what they ran on, rows on disk, medians with their spread, tables."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("freewheel", "stable-baselines3", "torch", "numpy", "gymnasium", "mujoco")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
LIMIT_S = 1800.0  # of one run
DRAWS = 10_000


def run_python(*arguments: object, cwd: str) -> str:
    """The standard output of a Python process of its own, one BLAS thread, started in `cwd`; ends the benchmark if it fails."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
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
        raise SystemExit(f"failed: python {shlex.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
    return done.stdout


def context(name: str) -> dict[str, Any]:
    """Where and when the rows of a benchmark came from."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
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


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median; infinities are allowed, so no value is interpolated."""
    rng = np.random.default_rng(0)
    sample = np.asarray(values, np.float64)
    medians = np.median(sample[rng.integers(len(sample), size=(DRAWS, len(sample)))], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975), method="inverted_cdf")
    return float(low), float(high)


def spread(values: Sequence[float]) -> str:
    """median (least .. greatest)"""
    return f"{number(float(np.median(values)))} ({number(min(values))} .. {number(max(values))})"


def number(value: float) -> str:
    """Three digits, or all of a larger whole number."""
    if math.isinf(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown that is also readable on a terminal."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    lines = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in (header, rule, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _output(*command: str) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
