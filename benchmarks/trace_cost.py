"""What --trace costs: the same trainings with it and without it by turns, and the cost of its code on the way of a step."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import thread_time_ns

from benchmarks._common import Notebook, Row, bootstrap, number, table
from freewheel.core import WORKER_TIME
from freewheel.timeline.track import Ring, TurnTrack
from freewheel_lab.bench.measure import TrainingRequest, measure

NAME = "trace_cost"
STEP_NS = 50_000  # of a step
FRAGMENT = 32  # steps
LEAST = 0.99  # of the throughput without it
#: One worker, so that its steps are what limits the run: the learner has a core of its own.
WORKERS = ("--workers", "1", "--num-envs", "1", "--num-steps-per-env", "2048")
BURNS = ["--env.law", "constant", "--env.mean", "50e-6", "--env.kind", "burn", "--env.length", "200"]
WORLDS: Mapping[str, tuple[str, ...]] = {
    "steps of 50 µs, continuous": ("freewheel/Straggler-v0", *BURNS, "--mode", "continuous", *WORKERS),
    "CartPole-v1, continuous": ("CartPole-v1", "--mode", "continuous", *WORKERS),
    "CartPole-v1, sequential": ("CartPole-v1", "--mode", "sequential", "--num-steps-per-env", "2048"),
}
TRACED = {"without": (), "with": ("--trace",)}


def measure_all(notebook: Notebook, given: argparse.Namespace) -> dict[str, dict[str, list[Row]]]:
    """The rows of each world, with and without, round by round."""
    rows: dict[str, dict[str, list[Row]]] = {world: {way: [] for way in TRACED} for world in given.only}
    for turn in range(given.rounds):
        for world in given.only:
            ways = list(TRACED) if turn % 2 == 0 else list(TRACED)[::-1]
            for way in ways:
                rows[world][way].append(_once(notebook, world, way, turn, given.steps))
    return rows


def _once(notebook: Notebook, world: str, way: str, turn: int, steps: int) -> Row:
    words = (*WORLDS[world], *TRACED[way], "--steps", str(steps), "--seed", str(turn))
    with TemporaryDirectory() as folder:
        found = measure(
            TrainingRequest(argv=words, name="run", folder=Path(folder), warm_up_rows=steps // 5, log_every=1.0)
        )
        size = sum(file.stat().st_size for file in (Path(folder) / "run").glob("t*.json") if "targets" not in file.name)
    labels = {"world": world, "trace": way, "round": turn + 1}
    figures = {"steps_per_s": found.steps_per_s, "window_s": found.window_s, "rows": found.rows, "trace_bytes": size}
    print(*labels.values(), f"{found.steps_per_s:,.0f} steps/s", sep="  ", flush=True)
    return notebook.keep({**labels, **figures})


def ratios(rows: Mapping[str, Sequence[Row]]) -> list[float]:
    pairs = zip(rows["with"], rows["without"], strict=True)
    return [float(traced["steps_per_s"]) / float(plain["steps_per_s"]) for traced, plain in pairs]


def direct_cost(steps: int = 100_000, tries: int = 7) -> float:
    """ns that a step of 50 µs pays: the comparison between two steps, its part of a block that is written, and of what is done
    at the end of a fragment. By CPU time, the least of several tries with it and without it."""
    return max(0.0, min(_traced(steps) for _ in range(tries)) - min(_plain(steps) for _ in range(tries))) / steps


def _traced(steps: int) -> int:
    track, counted, now = TurnTrack(Ring.private(), 0), [0] * len(WORKER_TIME), 0
    due = track.due
    began = thread_time_ns()
    for step in range(steps):
        now += STEP_NS
        counted[0] += STEP_NS
        if now >= due:
            due = track.cut(now, counted)
        if step % FRAGMENT == 0:
            track.taken(now, counted)
            counted, due = [0] * len(WORKER_TIME), track.due
    return thread_time_ns() - began


def _plain(steps: int) -> int:
    """The same loop without a track."""
    counted, now = [0] * len(WORKER_TIME), 0
    began = thread_time_ns()
    for step in range(steps):
        now += STEP_NS
        counted[0] += STEP_NS
        if step % FRAGMENT == 0:
            counted = [0] * len(WORKER_TIME)
    return thread_time_ns() - began


def judge(notebook: Notebook, rows: Mapping[str, Mapping[str, Sequence[Row]]]) -> None:
    lines = []
    for world, ways in rows.items():
        found = ratios(ways)
        low, high = bootstrap(found)
        speeds = [number(statistics.median(float(row["steps_per_s"]) for row in ways[way])) for way in TRACED]
        ratio = statistics.median(found)
        size = max(int(row["trace_bytes"]) for row in ways["with"])
        lines.append([world, *speeds, f"{ratio:.4f} ({low:.4f} to {high:.4f})", f"{size / 1e6:.1f} MB"])
        notebook.judge(f"{world}: {ratio:.4f} of the throughput without it, target at least {LEAST}", ratio >= LEAST)
    header = ("world", "steps/s without", "steps/s with --trace", "ratio, median and 95 % interval", "files at most")
    notebook.write(table(header, lines))
    cost = direct_cost()
    most = (1 - LEAST) * STEP_NS
    notebook.judge(
        f"a step of 50 µs pays {cost:.0f} ns ({cost / STEP_NS:.2%}), at most {most:.0f} ns", cost <= most, exact=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=163_840, help="of each training; a fifth of them is its warm-up")
    parser.add_argument("--only", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.steps, given.only = 1, 10_240, given.only[:1]
    notebook = Notebook(NAME, "What --trace costs", quick=given.quick)
    judge(notebook, measure_all(notebook, given))
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
