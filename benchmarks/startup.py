"""What a start costs: of a command until its first line and its first env step, beside another checkout too; and of a hundred
workers until all have acted, in memory, in CPU time for new weights, and until a killed one is back."""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import numpy as np

from benchmarks._command_once import COMMANDS, measured
from benchmarks._common import ROOT, Notebook, Row, number, spread, straggler, table
from benchmarks.beside import commit_of
from freewheel.core import TRANSITION_FIELDS, WORKER_TIME, ActionSpec, EnvSpec, Slice, Snapshot
from freewheel.policies.numpy_actor import NumpyActor
from freewheel.policies.spec import FlatParams, PolicyConfig, actor_layout
from freewheel.transport.shm.channel import Channel, Port, Reader, Shape, Writer
from freewheel.transport.shm.memory import Mailbox

NAME = "startup"
STEP_S, BRISK_STEP_S = 0.010, 0.005
WORLD = EnvSpec("Straggler", 1, 52, "float32", (Slice("obs", 0, 52, (52,)),), ActionSpec("discrete", 145))
HIDDEN = 410  # twice: an actor of 250,000 numbers, 1 MB
SLOTS, FRAGMENT = 64, 32
KILLED_OF, KILLS, EVERY_S = 8, 20, 0.7
MOST_LINE_S, MOST_STEP_S = 0.5, {"lockstep": 3.5, "continuous": 4.5}  # of a command
MOST_START_S, MOST_MB, MOST_LOAD_MS, LEAST_FRAGMENTS, MOST_BACK_S = 5.0, 8.0, 20.0, 50_000.0, 0.5


def sleepy(mean: float) -> dict[str, object]:
    return {"law": "lognormal", "mean": mean, "kind": "sleep"}


def commands(notebook: Notebook, rounds: int, other: Path | None, *, quick: bool) -> None:
    """`freewheel train CartPole-v1`, twice a round: what it measures the first time it knows the second time."""
    trees = {"this tree": ROOT} | ({} if other is None else {commit_of(other): other.resolve()})
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for turn in range(0 if quick else -1, rounds):  # before the first one counts, what has changed is compiled
        for command in COMMANDS:
            for name, tree in trees.items():
                with TemporaryDirectory() as cache:
                    for time in ("first", "again") if turn >= 0 and not quick else ("first",):
                        seconds = measured(command, tree, cache)
                        if turn >= 0:
                            found.setdefault((command, name, time), []).append(seconds)
                            labels = {"part": "command", "mode": command, "tree": name, "time": time}
                            notebook.keep({**labels, "round": turn + 1, **seconds})
    header = ("mode", "tree", "time", "first line, s", "first env step, s", "in all, s")
    lines = [
        [*labels, *(spread([row[key] for row in rows]) for key in ("line_s", "step_s", "all_s"))]
        for labels, rows in found.items()
    ]
    notebook.write("## freewheel train CartPole-v1", table(header, lines))
    for (command, name, time), rows in found.items():
        line, step = (float(np.median([row[key] for row in rows])) for key in ("line_s", "step_s"))
        if name == "this tree":
            limit = MOST_STEP_S[command]
            text = f"{command}, {time}: a line after {line:.2f} s, at most {MOST_LINE_S:g}"
            text += f", and a step after {step:.2f} s, at most {limit:g}"
            notebook.judge(text, line <= MOST_LINE_S and step <= limit)


def starts(notebook: Notebook, workers: int, rounds: int) -> list[Row]:
    """Whole starts of a supervisor; nothing is learned."""
    options = straggler("continuous", workers, sleepy(STEP_S), {})
    order = {"options": options, "learner": "none", "warm_s": 1.0, "window_s": 2.0}
    rows: list[Row] = [notebook.once("_collect_once", order, {"part": "start", "round": n + 1}) for n in range(rounds)]
    seconds = [row["started_s"] for row in rows]
    sizes = [size / 1024 for row in rows for size in row["pss_kb"]]
    lines = [
        ["seconds until all have acted", spread(seconds), f"≤ {MOST_START_S:g}"],
        ["planning before that, s", spread([row["plan_s"] for row in rows]), ""],
        ["PSS of a worker, MB", spread(sizes), f"≤ {MOST_MB:g}"],
    ]
    notebook.write(f"## {workers} workers", table(("median (least .. greatest)", "measured", "target"), lines))
    middle = float(np.median(seconds))
    notebook.judge(f"all have acted after {middle:.2f} s, at most {MOST_START_S:g}", middle <= MOST_START_S)
    notebook.judge(f"no worker takes more than {max(sizes):.1f} MB, target {MOST_MB:g}", max(sizes) <= MOST_MB)
    return rows


def weights(notebook: Notebook, readers: int, rounds: int) -> None:
    """CPU time of one post, and of a load by everyone, all in one process."""
    spec = PolicyConfig(hidden=(HIDDEN, HIDDEN)).resolve(WORLD)
    layout = actor_layout(spec)
    actors, params, mailbox = [NumpyActor(spec) for _ in range(readers)], FlatParams(layout), Mailbox(layout)
    posts, loads = [], []
    for version in range(rounds + 1):
        params.vector[:] = version
        began = process_time()
        mailbox.post(Snapshot(version, params.views))
        posted = process_time()
        for actor in actors:
            actor.load(mailbox.read())
        posts.append(1e3 * (posted - began))
        loads.append(1e3 * (process_time() - posted))
    mailbox.close()
    posts, loads = posts[1:], loads[1:]  # the first one touches the memory for the first time
    both = np.add(posts, loads).tolist()
    size = params.vector.nbytes
    lines = [["post", spread(posts), ""], [f"{readers} loads", spread(loads), ""]]
    lines.append(["both", spread(both), f"≤ {MOST_LOAD_MS:g}"])
    notebook.write(f"## new weights of {size / 1e6:.2f} MB, CPU ms", table(("", "measured", "target"), lines))
    notebook.keep({"part": "weights", "readers": readers, "bytes": size, "post_ms": posts, "loads_ms": loads})
    middle = float(np.median(both))
    text = f"a post and {readers} loads take {middle:.1f} ms of CPU time, at most {MOST_LOAD_MS:g}"
    notebook.judge(text, middle <= MOST_LOAD_MS)


def arrival(notebook: Notebook, workers: int, seconds: float) -> Row:
    """From a publication until sleeping workers act on it."""
    options = straggler("continuous", workers, sleepy(STEP_S), {"num_steps_per_env": 64})
    order = {"options": options, "learner": "none", "loads": True, "warm_s": 2.0, "window_s": seconds}
    row = notebook.once("_collect_once", order, {"part": "arrival"})
    found = row["loads"]
    lines = [
        [who, spread([1e3 * after for after in found[key]]), number(float(np.median(found[key])) / STEP_S)]
        for who, key in (("median worker", "median_s"), ("last worker", "last_s"))
    ]
    title = f"## until {workers} workers act on new weights, ms ({len(found['median_s'])} publications)"
    notebook.write(title, table(("", "median (least .. greatest)", f"in mean steps of {1e3 * STEP_S:g} ms"), lines))
    return row


def channel(notebook: Notebook, rounds: int, fragments: int) -> None:
    """Fragments a second from one process to another: of a single step, and of as many as a worker sends by default."""
    lines, single = [], list[float]()
    for steps, count in ((1, fragments), (FRAGMENT, fragments // 8)):
        rates, size = zip(*(_throughput(steps, count) for _ in range(rounds)), strict=True)
        single = single or list(rates)
        target = f"≥ {LEAST_FRAGMENTS:,.0f}" if steps == 1 else ""
        lines.append([f"{steps} steps", spread(rates), f"{np.median(rates) * size[0] / 1e6:.0f}", target])
        notebook.keep({"part": "channel", "steps": steps, "bytes": size[0], "fragments_per_s": rates})
    notebook.write("## the channel, one to one", table(("fragments of", "fragments/s", "MB/s", "target"), lines))
    middle = float(np.median(single))
    notebook.judge(f"{middle:,.0f} fragments/s, at least {LEAST_FRAGMENTS:,.0f}", middle >= LEAST_FRAGMENTS)


def _throughput(steps: int, fragments: int) -> tuple[float, int]:
    """Fragments a second, and the bytes of one."""
    link = Channel(Shape(WORLD, 1, SLOTS, steps))
    reader, taken, began, size = Reader(link), 0, 0.0, 0
    process = multiprocessing.get_context("fork").Process(target=_fill, args=(link.ports[0], fragments), daemon=True)
    process.start()
    while taken < fragments:
        if not reader.ready() and not link.wakeup.wait(5.0):
            raise SystemExit("the writing process has stopped")
        for _ in range(int(link.memory["committed"][0] - link.memory["taken"][0])):
            data = reader.take(0).data
            began, taken = began or perf_counter(), taken + 1
            size = size or sum(getattr(data, name).nbytes for name in TRANSITION_FIELDS)
    rate = (taken - 1) / (perf_counter() - began)
    process.join()
    link.close()
    return rate, size


def _fill(port: Port, fragments: int) -> None:
    """What a worker does to hand its rows over, without acting."""
    writer, time = Writer(port, 0, 0), [0] * len(WORKER_TIME)
    for _ in range(fragments):
        while writer.full():
            port.slot_freed.wait(0.5)
        writer.begin(0).valid[...] = True
        for t in range(port.shape.steps):
            writer.row(t, 1)
        writer.commit(time)
        writer.notify()


def comebacks(notebook: Notebook, kills: int) -> Row:
    """From SIGKILL until the next incarnation has stepped."""
    options = straggler("continuous", KILLED_OF, sleepy(BRISK_STEP_S), {"num_steps_per_env": 64})
    order = {"options": options, "warm_s": 1.0, "window_s": EVERY_S * kills + 2.0}
    order["kills"] = [(EVERY_S * number, number % KILLED_OF) for number in range(kills)]
    row = notebook.once("_collect_once", order, {"part": "comeback"})
    back = row["back_s"]
    notebook.write(f"## back after SIGKILL: {spread(back)} s, {len(back)} of {row['kills']}")
    middle = float(np.median(back))
    notebook.judge(f"back after {middle:.3f} s, below {MOST_BACK_S:g}", middle < MOST_BACK_S)
    notebook.judge(f"{row['kills']} kills, {len(back)} comebacks", len(back) == row["kills"], exact=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--other", type=Path, help="another checkout, whose commands are started by turns with ours")
    parser.add_argument("--only-commands", action="store_true", help="leave the hundred workers out")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    workers, rounds = (20, 1) if given.quick else (given.workers, given.rounds)
    typed = Notebook(f"{NAME}_commands", "Until a command has stepped an env", quick=given.quick)
    commands(typed, rounds, given.other, quick=given.quick)
    code = typed.close()
    if given.only_commands:
        return code
    notebook = Notebook(NAME, "Starting, loading, coming back", quick=given.quick)
    rows = starts(notebook, workers, rounds)
    weights(notebook, 100, 3 if given.quick else 20)
    rows.append(arrival(notebook, workers, 3.0 if given.quick else 20.0))
    channel(notebook, rounds, 20_000 if given.quick else 200_000)
    rows.append(comebacks(notebook, 4 if given.quick else KILLS))
    notebook.judge_promises(rows)
    return notebook.close() or code


if __name__ == "__main__":
    raise SystemExit(main())
