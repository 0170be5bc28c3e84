"""1 to 1 000 workers on 1 to 100 nodes, simulated: what --mode ray would make, what limits it, what to change.

Nothing is typed in that can be measured: calls, weights and learners cost what the newest rows of `ray_costs` say. What was
measured with --mode ray (`ray_straggler`, `ray_costs`) is predicted too, and has to come out within 15 %.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from benchmarks import _cluster_page
from benchmarks._cluster import CallCosts, Costs, Curve, Outcome, Setting, World, simulate
from benchmarks._cluster_page import newest, of
from benchmarks._cluster_worlds import STEPS, WORLDS
from benchmarks._common import RESULTS, ROOT, Notebook, Row, median, number, table
from benchmarks.ray_costs import LONG, RAY, SHORT, WORKERS, driver_cpu, per_fragment, wall, worker_cpu
from freewheel_lab.plots import picture
from freewheel_lab.plots.chart import ChartLine, LineChart

NAME, PICTURE = "cluster_model", ROOT / "packages" / "ray" / "docs" / "cluster.png"
POINTS = ((1, 1), (3, 1), (10, 1), (30, 3), (100, 10), (300, 30), (1_000, 100))  # workers and nodes
CORES, GBIT = 16, 10  # of a node, and of its network
AS_IT_IS = "as it is"
PPO, ALONE = LEARNERS = "PPO on a CPU core", "learning costs nothing"
NOTHING = Curve(((0.0, 0.0),))
#: What could be changed: options of `freewheel train`, and what they are in the simulation.
CHANGES: Mapping[str, Mapping[str, object]] = {
    "--collection-batch-size 128": {"fragment": 128},
    "--unit episodes": {"unit": "episodes"},
    "4 learners": {"learners": 4},
    "16 learners": {"learners": 16},
}
WORTH, SAME = 1.1, 1.03  # a change is named if it makes so much more; rates so close are the same
CLOSE = 0.15  # prediction beside measurement


# ------------------------------------------------------------------------------------------------------ what was measured


def curve(rows: Iterable[Row], x: str, *keys: str) -> Curve:
    """The median of the first key less the others, by size."""
    rows = list(rows)
    points = []
    for at in sorted({row[x] for row in rows}):
        part = of(rows, **{x: at})
        points.append((float(at), max(0.0, median(part, keys[0]) - sum(median(part, key) for key in keys[1:]))))
    return Curve(tuple(points))


def calibrated(rows: Sequence[Row]) -> Costs:
    """Plain calls by size; what --mode ray adds to a call is what its own fragments cost more than they."""
    near, far = (of(rows, kind="call", nodes=nodes) for nodes in (1, 2))
    waits = curve(of(rows, kind="wait"), "pending", "pump_s")
    few, many = waits.points[0], waits.points[-1]
    idle, trains = (median(of(rows, kind="learning", busy=busy), "idle_mean_s") for busy in (False, True))
    apart = of(rows, kind="weights", nodes=2)
    trip = median(of(near, bytes=min(row["bytes"] for row in near)), "latency_s")
    read = curve(of(rows, kind="weights", nodes=1), "bytes", "next_read_s")
    plain = _call(near)
    own = [float(np.median(per_fragment(rows, RAY, cost)[0])) for cost in (wall, driver_cpu, worker_cpu)]
    small = min(row["bytes"] for row in near)
    added = (
        own[0] - plain.idle(small),
        own[1] - plain.pump(small) - plain.threads(small),
        own[2] - plain.actor(small) - plain.raylets(small),
    )
    return Costs(
        near=_more(plain, *added),
        far=_more(_call(far), *added),
        pending=max(0.0, (many[1] - few[1]) / (many[0] - few[0])),
        learning=max(0.0, trains - idle),
        standing=median(of(rows, kind="start"), "standing"),
        submit=median(near, "submit_wall_s"),
        put=curve(apart, "bytes", "put_s"),
        fetch=curve(apart, "bytes", "first_read_s", "next_read_s"),
        read=Curve(tuple((size, max(0.0, seconds - trip)) for size, seconds in read.points)),
    )


def _more(call: CallCosts, idle: float, pump: float, actor: float) -> CallCosts:
    return replace(call, idle=call.idle.plus(idle), pump=call.pump.plus(pump), actor=call.actor.plus(actor))


def _call(rows: Sequence[Row]) -> CallCosts:
    return CallCosts(
        idle=curve(rows, "bytes", "idle_s"),
        pump=curve(rows, "bytes", "pump_s"),
        threads=curve(rows, "bytes", "driver_s", "pump_s"),
        raylets=curve(rows, "bytes", "raylet_s"),
        actor=curve(rows, "bytes", "actor_s"),
    )


def world(name: str, rows: Sequence[Row]) -> World:
    env, part, sent = WORLDS[name], of(rows, kind="policy", world=name), of(rows, kind="bytes", world=name)
    waking = float(np.median(per_fragment(rows, RAY, worker_cpu)[1]))  # a row of an env that only sleeps
    sleeps = env.args.get("kind") == "sleep"
    learn = curve(part, "rows", "learn_s").points
    return World(
        name=name,
        step=env.step,
        spread=env.spread,
        computes=waking if sleeps else median(part, "env_cpu_s") + median(part, "act_s"),
        row_bytes=median(sent, "row_bytes"),
        weights_bytes=median(sent, "version_bytes"),
        learn=Curve(
            (*learn, (math.inf, learn[-1][1]))
        ),  # larger updates have larger minibatches, and cost no less a row
    )


# -------------------------------------------------------------------------------------------------------------- predictions


def predicted(row: Row, made: World, costs: Costs) -> Outcome:
    """What a measured run of --mode ray should have made."""
    options = row["order"]["options"]
    steps = row["rows_per_update"] // row["lanes"]
    setting = Setting(
        workers=row["workers"],
        cores=row["cores"],
        unit=options.get("unit", "fragments"),
        steps=steps,
        fragment=options.get("collection_batch_size") or min(64, steps),
        gradient_steps=0,
    )
    mean = float(options["env_args"]["mean"])
    seen = replace(made, step=mean, spread=0.0 if options["env_args"]["law"] == "constant" else made.spread)
    seen = replace(seen, episode=int(options["env_args"]["length"]))
    if row["learner"] == "none":
        seen = replace(seen, learn=NOTHING)
    return simulate(setting, seen, costs)


def check(notebook: Notebook, rows: Sequence[Row], costs: Costs) -> None:
    """Predictions beside what was measured."""
    made, lines = world("sleeper", rows), []
    path = RESULTS / "ray_straggler.jsonl"
    measured = {f"50 sleepers, {row['way']}": row for row in newest("ray_straggler")} if path.exists() else {}
    few = {f"{WORKERS} sleepers of 2 ms, fragments of {steps}": steps for steps in (SHORT, LONG)}
    measured |= {what: row for what, steps in few.items() for row in of(rows, kind="fragment", way=RAY, steps=steps)}
    for what, row in measured.items():
        if row.get("mode") != "ray":
            continue
        outcome = predicted(row, made, costs)
        error = outcome.rate / row["rows_per_s"] - 1
        lines.append([what, number(row["rows_per_s"]), number(outcome.rate), f"{100 * error:+.1f} %"])
        text = f"{what}: {outcome.rate:,.0f} env steps/s predicted, {row['rows_per_s']:,.0f} measured"
        notebook.judge(f"{text}, at most {100 * CLOSE:.0f} % off", abs(error) <= CLOSE, exact=True)
    if lines:
        notebook.write("## Beside measurements", table(("run", "measured", "predicted", "error"), lines))


def outcomes(made: World, costs: Costs, points: Sequence[tuple[int, int]]) -> dict[str, list[Outcome]]:
    """What each way would make at every point."""
    found: dict[str, list[Outcome]] = {way: [] for way in (AS_IT_IS, *CHANGES)}
    for workers, nodes in points:
        setting = Setting(workers=workers, nodes=nodes, cores=CORES, bandwidth=GBIT * 1e9 / 8, steps=STEPS)
        if made.learn is NOTHING:
            setting = replace(setting, gradient_steps=0)
        found[AS_IT_IS].append(simulate(setting, made, costs))
        for way, change in CHANGES.items():
            changed = replace(setting, **change)  # type: ignore[arg-type]  # the fields of a Setting, by name
            found[way].append(simulate(changed, made, costs) if changed.learners <= workers else found[AS_IT_IS][-1])
    return found


def advised(found: Mapping[str, Sequence[Outcome]], at: int) -> tuple[str, Outcome] | None:
    """The change that makes the most, if it is worth it; of those that make as much, the simplest."""
    most = max(found[way][at].rate for way in CHANGES)
    best = next(way for way in CHANGES if found[way][at].rate >= most / SAME)
    worth = found[best][at].rate >= WORTH * found[AS_IT_IS][at].rate
    return (best, found[best][at]) if worth else None


def lines_of(found: Mapping[str, Sequence[Outcome]], points: Sequence[tuple[int, int]]) -> list[list[str]]:
    lines = []
    for at, (workers, nodes) in enumerate(points):
        usual, change = found[AS_IT_IS][at], advised(found, at)
        line = [f"{workers:,} on {nodes}", number(usual.rate), f"{usual.share:.2f}", usual.limit]
        line += [number(usual.bytes_in / 1e6), number(usual.bytes_out / 1e6)]
        line += ["-", "-", "-"] if change is None else [change[0], number(change[1].rate), change[1].limit]
        lines.append(line)
    return lines


def chart(
    name: str, title: str, found: Mapping[str, Sequence[Outcome]], points: Sequence[tuple[int, int]]
) -> LineChart:
    workers = [float(count) for count, _ in points]
    drawn = []
    for colour, (way, outcomes_) in enumerate(found.items()):
        shares = tuple((at, outcome.share) for at, outcome in zip(workers, outcomes_, strict=True))
        drawn.append(ChartLine(way, shares, colour=colour))
    return LineChart(
        name, title, "workers, ten on a node", "share of the ideal", tuple(drawn), log_x=True, from_zero=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--picture", type=Path, default=None, help="where to draw (default: packages/ray/docs/cluster.png)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="see that it works: two points, no picture, nothing is kept"
    )
    given = parser.parse_args()
    notebook = Notebook(NAME, "A cluster, simulated", quick=given.quick)
    rows = newest("ray_costs")
    costs, points = calibrated(rows), POINTS[2:4] if given.quick else POINTS
    charts = []
    for learner, (name, env) in itertools.product(LEARNERS, WORLDS.items()):
        made = world(name, rows)
        found = outcomes(made if learner == PPO else replace(made, learn=NOTHING), costs, points)
        for way, outcomes_ in found.items():
            for (workers, nodes), outcome in zip(points, outcomes_, strict=True):
                about = {"world": name, "learner": learner, "way": way, "workers": workers, "nodes": nodes}
                notebook.keep({**about, **asdict(outcome)})
        header = ("workers on nodes", "env steps/s", "of the ideal", "limit", "MB/s of rows", "MB/s of weights", "change",
                  "env steps/s then", "limit then")  # fmt: skip
        title = f"{name.capitalize()}, {learner}"
        notebook.write(f"## {title}: {env.about}", table(header, lines_of(found, points)))
        charts.append(chart(name, title, found, points))
        print(title, flush=True)
    check(notebook, rows, costs)
    path = given.picture or (None if given.quick else PICTURE)
    if path is not None:
        picture.write(charts, path, columns=3)
    code = notebook.close()
    if not given.quick:
        _cluster_page.write()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
