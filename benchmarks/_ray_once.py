"""What Ray itself costs, measured in this process on clusters of its own: JSON rows on standard output, one a line.

Two nodes are two raylets on this machine, the second with all actors, so that results and weights pass both object stores and a
TCP connection. Processor times are exact (schedstat), of all threads of a process.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, sleep, thread_time
from typing import Any

import numpy as np
import psutil

from freewheel.config.resolve import from_options
from freewheel.run.advice.policy_times import measure_policy
from freewheel.run.planning import plan

# Ray's own types are not those of the calls that it makes.
ray: Any = importlib.import_module("ray")
Cluster: Any = importlib.import_module("ray.cluster_utils").Cluster
Row = dict[str, Any]
INLINE = 64 * 2**10  # bytes that come with the answer; as in --mode ray, more of them go into the object store
STORE = 512 * 2**20  # bytes of an object store
SETTLE = 0.3  # seconds in which Ray's own processes come to rest


class Probe:
    """An actor that returns bytes, as if they were a fragment, and knows how long it stood idle before each call."""

    def __init__(self) -> None:
        self._ended = perf_counter()
        self._data: dict[int, Any] = {}

    def pid(self) -> int:
        import os

        return os.getpid()

    def work(self, size: int, seconds: float) -> tuple[float, Any]:
        """The seconds since the last call ended, and so many bytes, or where they are stored."""
        idle = perf_counter() - self._ended
        if seconds:
            sleep(seconds)
        data = self._data.setdefault(size, np.zeros(size, np.uint8))
        self._ended = perf_counter()
        return idle, [ray.put(data)] if size > INLINE else data

    def read(self, weights: Any) -> int:
        """Copies the weights, as an actor that loads them does."""
        return int(np.array(weights)[-1])


@contextmanager
def cluster(nodes: int, cpus: int) -> Iterator[None]:
    """A cluster of this process's own."""
    quiet: dict[str, Any] = {"include_dashboard": False, "object_store_memory": STORE}
    if nodes == 1:
        ray.init("local", num_cpus=cpus, log_to_driver=False, logging_level="error", **quiet)
        try:
            yield
        finally:
            ray.shutdown()
        return
    several = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **quiet})
    try:
        for _ in range(nodes - 1):
            several.add_node(num_cpus=cpus, object_store_memory=STORE)
        ray.init(address=several.address, log_to_driver=False, logging_level="error")
        yield
    finally:
        ray.shutdown()
        several.shutdown()


def actors(count: int) -> list[Any]:
    made = [ray.remote(Probe).options(num_cpus=1).remote() for _ in range(count)]
    ray.get([actor.pid.remote() for actor in made])
    return made


# ------------------------------------------------------------------------------------------------------- processor time


class Processor:
    """Seconds of processor that the driver, Ray's own processes and the actors have used."""

    def __init__(self) -> None:
        me = psutil.Process()
        found = [(process.pid, process.name()) for process in me.children(recursive=True)]
        self._pids: dict[str, list[int]] = {"driver": [me.pid], "raylet": [], "gcs": [], "actor": []}
        for pid, name in found:
            part = {"raylet": "raylet", "gcs_server": "gcs"}.get(name, "actor" if name.startswith("ray::") else "")
            if part:
                self._pids[part].append(pid)

    def read(self) -> dict[str, float]:
        return {part: sum(map(processor_seconds, pids)) for part, pids in self._pids.items()}


def processor_seconds(pid: int) -> float:
    """Of all threads that live."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            spent += int(task.read_text().split()[0])
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
    return spent * 1e-9


@contextmanager
def metered(row: Row, calls: int) -> Iterator[None]:
    """Adds seconds for each call to a row: wall, and processor by part."""
    processor = Processor()
    before, began, own = processor.read(), perf_counter(), thread_time()
    yield
    wall, pump = perf_counter() - began, thread_time() - own
    after = processor.read()
    row |= {"wall_s": wall / calls, "pump_s": pump / calls}
    row |= {f"{part}_s": (after[part] - before[part]) / calls for part in after}


# --------------------------------------------------------------------------------------------------------- measurements


def pump(made: Sequence[Any], size: int, seconds: float, calls: int) -> list[float]:
    """Every actor has one call open, and the next as soon as that has ended; stored bytes are fetched meanwhile. How long actors
    stood idle between two calls."""
    idle, submitted, received = list[float](), len(made), 0
    pending = {actor.work.remote(size, seconds): actor for actor in made}
    while received < calls:
        ready, left = ray.wait(list(pending), num_returns=1)
        more, _ = ray.wait(left, num_returns=len(left), timeout=0) if left else ([], left)
        for ref in [*ready, *more]:
            actor, answer = pending.pop(ref), ray.get(ref)
            if actor is None:
                received += 1
                continue
            gap, data = answer
            idle.append(gap)
            if submitted < calls:
                pending[actor.work.remote(size, seconds)] = actor
                submitted += 1
            if isinstance(data, list):
                pending[data[0]] = None
            else:
                received += 1
    return idle[len(made) :]


def calls(made: Sequence[Any], size: int, count: int) -> Row:
    """One call after the other, then one open with each of four actors."""
    row: Row = {"bytes": size, "inline": size <= INLINE}
    first, taken = made[0], []
    for _ in range(max(20, count // 4)):
        began = perf_counter()
        ref = first.work.remote(size, 0.0)
        submitted = perf_counter()
        ray.wait([ref])
        _, data = ray.get(ref)
        if isinstance(data, list):
            ray.get(data[0])
        taken.append((submitted - began, perf_counter() - began))
    row["submit_wall_s"], row["latency_s"] = (median(times) for times in zip(*taken, strict=True))
    sleep(SETTLE)
    with metered(row, count):
        idle = pump(made[:4], size, 0.0, count)
    row["idle_saturated_s"] = median(idle)
    sleep(SETTLE)
    row["idle_s"] = median(pump(made[:2], size, 0.01, max(20, count // 8)))
    return row


def waits(made: Sequence[Any], pending: int, count: int) -> Row:
    """A call beside so many others that are open: what ray.wait costs the driver."""
    quick, slow = made[0], made[1]
    others = [slow.work.remote(8, 3600.0 if at == 0 else 0.0) for at in range(pending)]
    row: Row = {"pending": pending}
    with metered(row, count):
        for _ in range(count):
            ref = quick.work.remote(8, 0.0)
            ended, _ = ray.wait([*others, ref], num_returns=1)
            ray.get(ended)
    del row["actor_s"]  # of one that stands still, too
    if others:
        ray.kill(slow)
        ray.wait(others, num_returns=len(others), timeout=30)
    return row


def weights(made: Sequence[Any], size: int) -> Row:
    """One version: put once, read by one actor after the other."""
    snapshot = np.zeros(size, np.uint8)
    began, own = perf_counter(), thread_time()
    ref = ray.put(snapshot)
    row: Row = {"bytes": size, "put_s": perf_counter() - began, "put_cpu_s": thread_time() - own}
    reads = []
    for actor in made:
        began = perf_counter()
        ray.get(actor.read.remote(ref))
        reads.append(perf_counter() - began)
    row["first_read_s"], row["next_read_s"] = reads[0], median(reads[1:])
    return row


def learning(made: Sequence[Any], count: int, busy: bool) -> Row:
    """Calls pumped by a thread while the main thread trains PPO: what the learner does to the pump, and the pump to it."""
    options = {"mode": "continuous", "workers": 4, "num_steps_per_env": 64, "evals": 0, "minutes": 1.0}
    planned = plan(from_options("freewheel/Straggler-v0", {**options, "env_args": {"mean": 0.0}}))
    measure_policy(planned)  # loads and allocates
    row: Row = {"busy": busy}
    idle: list[float] = []
    thread = threading.Thread(target=lambda: idle.extend(pump(made[:4], 25_000, 0.01, count)))
    with metered(row, count):
        thread.start()
        while thread.is_alive():
            measure_policy(planned) if busy else thread.join(0.05)
    del row["pump_s"]  # the pump is another thread here
    row |= {"idle_s": median(idle), "idle_mean_s": float(np.mean(idle)), "idle_p90_s": float(np.quantile(idle, 0.9))}
    return row


def start(count: int) -> Row:
    """So many actors at once, until all have answered; their memory, and that of Ray's own processes."""
    began = perf_counter()
    remote = ray.remote(Probe)  # as those of --mode ray
    made = [remote.options(num_cpus=1).remote() for _ in range(count)]
    pids = ray.get([actor.pid.remote() for actor in made])
    seconds = perf_counter() - began
    held = {process.pid: process.memory_full_info().pss for process in psutil.Process().children(recursive=True)}
    own = sum(held.pop(pid, 0) for pid in pids)
    sleep(2.0)
    before, began = sum(map(processor_seconds, pids)), perf_counter()
    sleep(2.0)  # they do nothing, but their main thread looks for signals a hundred times a second
    standing = (sum(map(processor_seconds, pids)) - before) / (perf_counter() - began) / count
    row = {"actors": count, "start_s": seconds, "actor_pss": own / count, "cluster_pss": sum(held.values())}
    return {**row, "standing": standing}


def measure(order: Mapping[str, Any]) -> Iterable[Row]:
    """The rows of one cluster: what was ordered, by turns."""
    began = perf_counter()
    nodes, count = order.get("nodes", 1), order.get("calls", 200)
    with cluster(nodes, cpus=order.get("cpus", 100)):
        up = perf_counter() - began
        if "actors" in order:
            yield {"kind": "start", "up_s": up, "nodes": nodes, **start(order["actors"])}
            return
        made = actors(4)
        for turn in range(order.get("rounds", 1)):
            about = {"nodes": nodes, "round": turn + 1}
            for size in order.get("results", ()):
                yield {"kind": "call", **about, **calls(made, size, count)}
            for size in order.get("weights", ()):
                yield {"kind": "weights", **about, **weights(made, size)}
            for pending in order.get("pending", ()):
                yield {"kind": "wait", **about, **waits(actors(2), pending, count)}
            for busy in order.get("busy", ()):
                yield {"kind": "learning", **about, **learning(made, count, busy)}


def main() -> None:
    for row in measure(json.loads(sys.argv[1])):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
