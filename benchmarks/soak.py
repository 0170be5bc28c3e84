"""A long training: memory, descriptors, threads, shared memory and speed stay what they were after the warm-up."""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks._common import Notebook, number, table
from benchmarks._faults import SETUPS, Setup
from benchmarks._trainers import Trainer, shared_memory

NAME = "soak"
WARM_UP = 0.25  # of the time
MOST_GROWTH, MOST_DRIFT = 2.0, 0.03  # MB, share of the speed
SAMPLE = 2.0  # seconds between two looks


def sample(trainer: Trainer, names: set[str]) -> dict[str, float]:
    """All processes of the run together."""
    totals = {"memory_mb": 0.0, "descriptors": 0.0, "threads": 0.0, "processes": 0.0}
    for one in (psutil.Process(trainer.process.pid), *trainer.note_family()):
        with suppress(psutil.Error):
            memory = one.memory_info()  # without files: pages of libraries count as soon as no other program uses them
            found = (memory.rss - memory.shared) / 2**20, one.num_fds(), one.num_threads(), 1
            totals = {name: total + value for (name, total), value in zip(totals.items(), found, strict=True)}
    rows = trainer.rows()
    last = rows[-1] if rows else {"env_steps": 0, "wall_s": 0.0}
    return totals | {
        "shared_memory": float(len(shared_memory() - names)),
        "env_steps": float(last["env_steps"]),
        "wall_s": float(last["wall_s"]),
    }


def measure(setup: Setup, seconds: float) -> dict[str, Any]:
    names = shared_memory()
    with (
        TemporaryDirectory(prefix="soak-") as folder,
        Trainer(Path(folder), *setup.argv("--log-every", "1")) as trainer,
    ):
        trainer.await_row()
        began, samples = time.monotonic(), list[dict[str, float]]()
        while time.monotonic() - began < seconds:
            time.sleep(SAMPLE)
            if trainer.process.poll() is not None:
                raise SystemExit(f"it ended: {trainer.said()[-500:]}")
            samples.append(sample(trainer, names))
    warm = samples[int(WARM_UP * len(samples)) :]
    part = max(1, len(warm) // 5)
    first, last = warm[:part], warm[-part:]
    row: dict[str, Any] = {"seconds": seconds, "samples": len(samples)}
    for name in ("memory_mb", "descriptors", "threads", "processes", "shared_memory"):
        row[name], row[f"{name}_growth"] = (
            (value := median(one[name] for one in last)),
            value - median(one[name] for one in first),
        )
    row["memory_peak_mb"] = max(one["memory_mb"] for one in samples)
    row["speed_first"], row["speed_last"] = speed(first), speed(last)
    return row


def speed(samples: list[dict[str, float]]) -> float:
    """Env steps a second."""
    seconds = samples[-1]["wall_s"] - samples[0]["wall_s"]
    return (samples[-1]["env_steps"] - samples[0]["env_steps"]) / seconds if seconds else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="of each training")
    parser.add_argument("--modes", nargs="+", choices=[setup.mode for setup in SETUPS if setup.algo == "ppo"])
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    notebook = Notebook(NAME, "A long training", quick=given.quick)
    chosen = [one for one in SETUPS if one.algo == "ppo" and one.mode in (given.modes or ["continuous"])]
    cells = []
    for setup in chosen:
        row = notebook.keep({"mode": setup.mode, **measure(setup, 10.0 if given.quick else 60 * given.minutes)})
        drift = row["speed_last"] / max(1e-9, row["speed_first"]) - 1
        kinds = ("descriptors", "threads", "processes", "shared_memory")
        counts = [f"{row[kind]:g} ({row[f'{kind}_growth']:+g})" for kind in kinds]
        cells.append(
            [setup.mode, f"{row['seconds'] / 60:g}", f"{row['memory_mb']:.1f} ({row['memory_mb_growth']:+.2f})", *counts,
             f"{number(row['speed_last'])} ({drift:+.1%})"]
        )  # fmt: skip
        grown = row["memory_mb_growth"]
        notebook.judge(f"{setup.mode}: memory grew by {grown:.2f} MB, less than {MOST_GROWTH:g}", grown < MOST_GROWTH)
        same = all(row[f"{kind}_growth"] == 0 for kind in kinds)
        notebook.judge(f"{setup.mode}: descriptors, threads, processes and shared memory are constant", same)
        notebook.judge(
            f"{setup.mode}: speed drifted by {drift:+.1%}, less than {MOST_DRIFT:.0%}", abs(drift) < MOST_DRIFT
        )
    header = (
        "mode",
        "minutes",
        "memory MB (growth)",
        "descriptors",
        "threads",
        "processes",
        "shared memory",
        "steps/s",
    )
    notebook.write(table(header, cells))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
