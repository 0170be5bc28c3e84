"""What goes over Ray's wire, and what it costs: calls, results, weights, actors; fragments beside those of the local modes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks._cluster_page import ms, of, size
from benchmarks._cluster_worlds import WORLDS
from benchmarks._common import Notebook, Row, median, number, rotated, run_python, spread, straggler, table

NAME = "ray_costs"
RESULTS = (1_000, 14_000, 60_000, 200_000, 1_000_000, 4_000_000)  # bytes; up to 64 kB come with the answer
WEIGHTS = (100_000, 1_000_000, 10_000_000, 50_000_000)
PENDING = (0, 100, 1_000)  # calls that are open beside the one that is measured
ACTORS = (10, 50)
ENDLESS = 100_000  # steps of an episode
SHORT, LONG = 4, 32  # steps of a fragment: what a fragment costs is the difference
WORLD = {"law": "constant", "mean": 0.002, "kind": "sleep"}
WORKERS = 2
RAY = "ray, fragments"
WAYS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "continuous": ("continuous", {}),
    RAY: ("ray", {"unit": "fragments"}),
    "episodes": ("episodes", {}),
    "ray, episodes": ("ray", {"unit": "episodes"}),
}


def rows_of(notebook: Notebook, module: str, order: Mapping[str, Any]) -> Sequence[Row]:
    """What a program measures, in a process of its own."""
    with TemporaryDirectory() as folder:
        told = run_python("-m", f"benchmarks.{module}", json.dumps(order), cwd=folder)
    rows = [notebook.keep(json.loads(line)) for line in told.splitlines() if line.startswith("{")]
    for row in rows:
        figures = (f"{key} {number(value) if isinstance(value, float) else value}" for key, value in row.items())
        print(*figures, sep="  ", flush=True)
    return rows


def fragments(notebook: Notebook, given: argparse.Namespace) -> Sequence[Row]:
    """Fragments of each mode, short and long by turns, nobody learning."""
    rows = []
    asked = [(way, steps) for way in WAYS for steps in (SHORT, LONG)]
    times = {"warm_s": given.warm, "window_s": given.window, "learner": "none"}
    for turn in range(given.rounds):
        for way, steps in rotated(asked, turn):
            mode, options = WAYS[way]
            world = {**WORLD, "length": steps if "episodes" in way else ENDLESS}  # an episode is a fragment
            shaped = {"num_steps_per_env": 64, "collection_batch_size": steps, "envs_per_worker": 1, "seed": turn}
            order = {"options": straggler(mode, WORKERS, world, {**shaped, **options}), "all_present": True, **times}
            labels = {"kind": "fragment", "way": way, "steps": steps, "round": turn + 1}
            rows.append(notebook.once("_collect_once", order, labels))
    return rows


def per_fragment(rows: Sequence[Row], way: str, cost: Callable[[Row], float]) -> tuple[list[float], list[float]]:
    """What a fragment costs, and what a row costs besides, round by round: a row costs a + b / steps, and b is a fragment's."""
    fragments, besides = [], []
    for short, long in zip(*(of(rows, kind="fragment", way=way, steps=steps) for steps in (SHORT, LONG)), strict=True):
        fragments.append((cost(short) - cost(long)) / (1 / SHORT - 1 / LONG))
        besides.append(cost(long) - fragments[-1] / LONG)
    return fragments, besides


def wall(row: Row) -> float:
    """Seconds of a worker for a row."""
    return WORKERS / float(row["rows_per_s"])


def driver_cpu(row: Row) -> float:
    return float(row["learner_cpu_s"] / row["rows"])


def worker_cpu(row: Row) -> float:
    """Of all other processes, Ray's own among them."""
    return float(row["worker_cpu_s"] / row["rows"])


# ------------------------------------------------------------------------------------------------------------ the tables


def write_calls(notebook: Notebook, rows: Sequence[Row]) -> None:
    header = ("result", "nodes", "way", "round trip", "submit", "actor idle between two", "driver processor", "of its thread",
              "raylets", "actor processor")  # fmt: skip
    lines = []
    for nodes, count in sorted({(row["nodes"], row["bytes"]) for row in of(rows, kind="call")}):
        part = of(rows, kind="call", nodes=nodes, bytes=count)
        trips = spread([1e3 * row["latency_s"] for row in part])
        keys = ("submit_wall_s", "idle_s", "driver_s", "pump_s", "raylet_s", "actor_s")
        way = "with the answer" if part[0]["inline"] else "object store"
        lines.append([size(count), str(nodes), way, trips, *(ms(part, key) for key in keys)])
    notebook.write("## A call of an actor, in ms", table(header, lines))


def write_weights(notebook: Notebook, rows: Sequence[Row]) -> None:
    lines = []
    for nodes, count in sorted({(row["nodes"], row["bytes"]) for row in of(rows, kind="weights")}):
        part = of(rows, kind="weights", nodes=nodes, bytes=count)
        figures = [spread([1e3 * row[key] for row in part]) for key in ("put_s", "first_read_s", "next_read_s")]
        lines.append([size(count), str(nodes), *figures])
    header = ("weights", "nodes", "put by the driver", "read by the first actor", "by each further one of its node")
    notebook.write("## Weights, in ms", table(header, lines))


def write_waits(notebook: Notebook, rows: Sequence[Row]) -> None:
    parts = {count: of(rows, kind="wait", pending=count) for count in PENDING}
    keys = ("pump_s", "driver_s", "raylet_s", "gcs_s")
    lines = [[str(count), *(ms(part, key) for key in keys)] for count, part in parts.items() if part]
    header = ("calls open beside it", "driver's thread", "driver", "raylet", "gcs")
    notebook.write("## Processor time of a call by the number that are open, in ms", table(header, lines))
    beside = [of(rows, kind="learning", busy=busy) for busy in (False, True)]
    if all(beside):
        names = ("driver idle", "driver trains PPO")
        lines = [[name, ms(part, "idle_s"), ms(part, "idle_p90_s")] for name, part in zip(names, beside, strict=True)]
        title = "## How long an actor stands idle between two calls, in ms"
        notebook.write(title, table(("", "median", "90 %"), lines))


def write_starts(notebook: Notebook, rows: Sequence[Row]) -> None:
    lines = []
    for count in sorted({row["actors"] for row in of(rows, kind="start")}):
        part = of(rows, kind="start", actors=count)
        figures = [number(median(part, "up_s")), spread([row["start_s"] for row in part])]
        figures += [number(median(part, key) / 1e6) for key in ("actor_pss", "cluster_pss")]
        lines.append([str(count), *figures, f"{100 * median(part, 'standing'):.2f} %"])
    header = (
        "actors",
        "cluster, s",
        "all actors, s",
        "MB an actor",
        "MB of Ray's own processes",
        "core of an idle actor",
    )
    notebook.write("## Starting", table(header, lines))


def write_policies(notebook: Notebook, rows: Sequence[Row]) -> None:
    lines = []
    for row in of(rows, kind="policy"):
        figures = [number(1e6 * row[key]) for key in ("act_s", "learn_s")]
        lines.append([row["world"], row["device"], number(row["rows"]), *figures])
    header = ("environment", "learner on", "rows of an update", "action, µs", "learning a row, µs")
    notebook.write("## Policies and learners", table(header, lines), "## What travels", bytes_table(rows))


def bytes_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in of(rows, kind="bytes"):
        way = "object store" if row["stored"] else "with the answer"
        whole = row["rows"] * row["row_bytes"] + (row["answer_bytes"] if row["stored"] else row["around_bytes"])
        figures = [size(row["row_bytes"]), f"{row['rows']:.0f}", size(whole), way, f"{row['around_bytes']:,.0f} bytes"]
        lines.append([f"{row['world']}: {WORLDS[row['world']].about}", *figures, size(row["version_bytes"])])
    header = (
        "environment",
        "a row",
        "rows of a fragment",
        "fragment",
        "travels",
        "of that beside the rows",
        "weights of a version",
    )
    return table(header, lines)


def fragment_table(rows: Sequence[Row]) -> str:
    lines = []
    for way in WAYS:
        parts = [per_fragment(rows, way, cost) for cost in (wall, driver_cpu, worker_cpu)]
        if not all(fragments for fragments, _ in parts):  # the measurement was ended before
            continue
        costs = [spread([1e3 * cost for cost in fragments]) for fragments, _ in parts]
        lines.append([way, *costs, *(number(1e6 * float(np.median(besides))) for _, besides in parts[1:])])
    header = ("mode", "time of its worker, ms", "CPU of the driver, ms", "CPU of the others, ms",
              "besides, of a row: driver, µs", "others, µs")  # fmt: skip
    return table(header, lines)


def write_fragments(notebook: Notebook, rows: Sequence[Row]) -> None:
    notebook.write("## What a fragment costs", fragment_table(rows))
    notebook.judge_promises(of(rows, kind="fragment"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=float, default=1.0, help="seconds before the window of a mode")
    parser.add_argument("--window", type=float, default=2.5, help="seconds")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    notebook = Notebook(NAME, "What goes over Ray's wire, and what it costs", quick=given.quick)
    one: dict[str, Any] = {"rounds": given.rounds, "results": RESULTS, "weights": WEIGHTS, "pending": PENDING}
    one |= {"busy": [False, True]}
    two: dict[str, Any] = {"nodes": 2, "rounds": given.rounds, "results": RESULTS, "weights": WEIGHTS}
    counts: Sequence[int] = ACTORS
    if given.quick:
        given.rounds, given.warm, given.window, counts = 1, 0.3, 0.5, (3,)
        one |= {"rounds": 1, "results": RESULTS[:1], "weights": WEIGHTS[:1], "pending": PENDING[:2], "calls": 20}
        two |= {"rounds": 1, "results": RESULTS[3:4], "weights": WEIGHTS[:1], "calls": 20}
    rows: list[Row] = [*rows_of(notebook, "_ray_once", one), *rows_of(notebook, "_ray_once", two)]
    rows += [row for count in counts for row in rows_of(notebook, "_ray_once", {"actors": count})]
    worlds = ["sleeper"] if given.quick else list(WORLDS)
    rows += rows_of(notebook, "_cluster_worlds", {"worlds": worlds})
    rows += [row for name in worlds for row in rows_of(notebook, "_ray_bytes_once", {"world": name})]
    rows += fragments(notebook, given)
    for write in (write_calls, write_weights, write_waits, write_starts, write_policies, write_fragments):
        write(notebook, rows)
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
