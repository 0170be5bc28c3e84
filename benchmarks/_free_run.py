"""Stragglers without any framework: a process each that steps its world with actions drawn before, and counts; one JSON object.

It is the most that any collector could reach on this machine, measured in the same window by the same clock.
"""

from __future__ import annotations

import gc
import json
import mmap
import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import numpy as np
import psutil

from freewheel.core import NDArray
from freewheel.seeding import training_episodes
from freewheel.testing.straggler import ACTIONS, Straggler

LINE = 8  # numbers of a cache line: every process writes to its own


@dataclass(frozen=True)
class Order:
    """What to measure."""

    workers: int
    world: Mapping[str, Any]  # arguments of Straggler
    warm_s: float
    window_s: float
    cores: int = 0  # use only so many; 0: all
    seed: int = 0


def play(order: Order, worker: int, memory: mmap.mmap, parent: int) -> None:
    """Episodes for ever, each step counted with the seconds that were drawn for it."""
    env, episodes = Straggler(**order.world), training_episodes(order.seed, worker)
    actions = np.random.default_rng((order.seed, worker)).integers(ACTIONS, size=10_000).tolist()
    cells = memoryview(memory).cast("q")[worker * LINE :]
    gc.freeze()
    step, number = 0, 0
    while os.getppid() == parent:
        env.reset(seed=episodes.seed(number))
        number, over, at = number + 1, False, 0
        while not over:
            _, _, over, _, _ = env.step(actions[step % 10_000])
            step, at = step + 1, at + 1
            cells[0] += 1
            cells[1] += int(env.seconds[at] * 1e9)


def measure(order: Order) -> dict[str, Any]:
    if order.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order.cores])
    memory = mmap.mmap(-1, order.workers * LINE * 8)
    counted = np.frombuffer(memory, np.int64).reshape(-1, LINE)  # rows and the ns drawn for them, by worker
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=play, args=(order, worker, memory, os.getpid()), daemon=True)
        for worker in range(order.workers)
    ]
    began = perf_counter()
    for process in processes:
        process.start()
    try:
        while not counted[:, 0].all():
            sleep(0.002)
        started = perf_counter() - began
        sleep(order.warm_s)
        first = _read(counted)
        sleep(order.window_s)
        window, rows, drawn, cpu = (_read(counted) - first).tolist()
    finally:
        for process in processes:
            process.kill()
    return {
        "mode": "free run",
        "workers": order.workers,
        "started_s": started,
        "window_s": window,
        "rows": rows,
        "rows_per_s": rows / window,
        "drawn_s": drawn,
        "share": drawn / (order.workers * window),
        "share_rows": rows / window * float(order.world["mean"]) / order.workers,
        "worker_cpu_s": cpu,
    }


def _read(counted: NDArray) -> NDArray:
    """[4] now, rows, seconds drawn for them, CPU seconds."""
    cpu = sum(sum(process.cpu_times()[:2]) for process in psutil.Process().children())
    return np.array([perf_counter(), counted[:, 0].sum(), counted[:, 1].sum() * 1e-9, cpu])


def main() -> None:
    order = json.loads(sys.argv[1])
    print(json.dumps({"order": order, **measure(Order(**order))}))


if __name__ == "__main__":
    main()
