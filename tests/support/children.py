"""Functions for child processes of tests; without pytest, so that a process starts fast."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from freewheel.core import Snapshot
from freewheel.pacing.episode_queue import EpisodeQueue
from freewheel.pacing.pacing import Tally
from freewheel.transport.shm.barrier import WakePipe
from freewheel.transport.shm.channel import Port, Writer
from freewheel.transport.shm.memory import Mailbox, SharedArrays
from freewheel.transport.shm.permits import SharedPermits
from freewheel.transport.shm.sync import ProcessLock, Wakeup
from freewheel.transport.workers.heartbeats import NO_LANES_LEFT, RESET, STEP, WAIT, Heartbeats
from tests.support.ring_rows import NO_TIME, Pen

LIMIT = 20.0  # seconds


def hang() -> None:
    while True:
        time.sleep(60.0)


def double(memory: SharedArrays, answer: Connection) -> None:
    memory["words"][:] *= 2
    memory.cells("numbers", 1)[2] = 7
    answer.send({name: memory[name].tolist() for name in memory.fields})


def listen(wakeup: Wakeup, times: int, answer: Connection) -> None:
    """Wait for a wakeup several times and send each result."""
    answer.send("ready")
    for _ in range(times):
        answer.send(wakeup.wait(LIMIT))


def notify(wakeup: Wakeup, times: int) -> None:
    wakeup.notify(times)


def increment(lock: ProcessLock, memory: SharedArrays, times: int) -> None:
    """Read, let others run, write: without a lock, most increments are lost."""
    cell = memory["counter"]
    for _ in range(times):
        with lock:
            seen = int(cell[0])
            os.sched_yield()
            cell[0] = seen + 1


def hold(lock: ProcessLock, answer: Connection) -> None:
    """Take the lock and never release it."""
    with lock:
        answer.send("held")
        hang()


def take_once(lock: ProcessLock, answer: Connection) -> None:
    with lock:
        answer.send("held")


def post_forever(mailbox: Mailbox, stop: SharedArrays) -> None:
    """Version after version, every weight of which is the version."""
    version = 0
    sizes = mailbox.layout.items()
    while not stop["stop"][0]:
        version += 1
        params = {name: np.full(shape, version, np.float32) for name, shape in sizes}
        mailbox.post(Snapshot(version, params, np.full(mailbox.context, version, np.float32)))


def describe(answer: Connection, *names: str) -> None:
    """Send the environment variables, modules and script of this process."""
    facts: dict[str, Any] = {name: os.environ.get(name) for name in names}
    answer.send((facts, sorted(sys.modules), vars(sys.modules["__main__"]).get("__file__")))


def listen_alone(wakeup: Wakeup, answer: Connection) -> None:
    """Wait until this process consumes the notification: of several woken processes, only one does."""
    answer.send("ready")
    while not wakeup.wait(LIMIT):
        pass
    answer.send("woken")


def hang_on(answer: Connection) -> None:
    """Hang, and send a message after an interrupt."""
    answer.send("here")
    signal.sigtimedwait([], 0.2)
    answer.send("still here")
    hang()


def start_others(answer: Connection, stays: bool) -> None:
    """Start a process in the group of this one, and one in a session of its own; then hang, or end."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    answer.send([subprocess.Popen(sleep, start_new_session=alone).pid for alone in (False, True)])
    if stays:
        hang()


def write_forever(port: Port, incarnation: int) -> None:
    """Fragments of 1 to all steps, as fast as they can be written; row k is numbered k over all incarnations."""
    writer = Writer(port, 0, incarnation)
    author = Pen(writer, writer.tally.produced)
    while True:
        for steps in range(1, port.shape.steps + 1):
            while writer.full():
                port.slot_freed.wait(LIMIT)
            author.fragment(steps, version=author.number)
            writer.notify()


def write_blanks_forever(port: Port) -> None:
    """Full fragments of empty rows: all time is spent in the channel."""
    writer = Writer(port, 0, 0)
    port.memory["valid"][0] = True
    while True:
        while writer.full():
            port.slot_freed.wait(LIMIT)
        writer.begin(0)
        for t in range(port.shape.steps):
            writer.row(t, port.shape.spec.lanes)
        writer.commit(NO_TIME)


def wait_for_grant(permits: SharedPermits, worker: int, answer: Connection) -> None:
    grant = permits.take(worker, Tally(0, 0, ended=True))
    answer.send("waiting")
    while grant is None:
        assert permits.wakeups[worker].wait(LIMIT)
        grant = permits.take(worker, Tally(0, 0, ended=True))
    answer.send((grant.steps, grant.version))


def act_again_and_again(permits: SharedPermits, worker: int, memory: SharedArrays) -> None:
    """Log the version of every grant; fails unless the worker is announced from take to give_back."""
    log, count = memory["log"][worker], memory["count"]
    tally = Tally(0, 0, ended=True)
    while count[worker] < len(log):
        grant = permits.take(worker, tally)
        if grant is None:
            permits.wakeups[worker].wait(LIMIT)
            continue
        log[count[worker]] = grant.version
        count[worker] += 1
        for _ in range(2):
            assert permits.pacing.announced()[worker] == grant.version
            os.sched_yield()
        permits.give_back(worker, tally)


def issue_many(permits: SharedPermits, worker: int, go: Wakeup, answer: Connection) -> None:
    answer.send("ready")
    go.wait(LIMIT)
    queue = permits.pacing
    assert isinstance(queue, EpisodeQueue)
    answer.send([permits.locked(queue.issue, worker) for _ in range(2000)])


def die_in_report(heartbeats: Heartbeats, worker: int) -> None:
    """Be killed while writing a report."""
    heartbeats.memory["reported"][worker] += 1
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_stop(heartbeats: Heartbeats) -> None:
    deadline = time.monotonic() + LIMIT
    while not heartbeats.stopping:
        assert time.monotonic() < deadline
        os.sched_yield()


@dataclass(frozen=True)
class Shift:
    """What the workers of a supervisor share."""

    heartbeats: Heartbeats
    board: SharedArrays  # incarnation [W], acted [W] ns: which one acts, and since when
    lock: ProcessLock
    plans: tuple[tuple[str, ...], ...]  # for every worker what its incarnations do; the last plan is repeated


def board(workers: int) -> SharedArrays:
    memory = SharedArrays({"incarnation": ((workers,), "i8"), "acted": ((workers,), "i8")})
    memory["incarnation"][:] = -1
    return memory


def serve(shift: Shift, worker: int, incarnation: int) -> None:
    """One incarnation of a worker: take a number of good steps (or inf), and end as planned."""
    plan = shift.plans[worker]
    steps, _, end = plan[min(incarnation, len(plan) - 1)].partition(" ")
    heartbeats, count = shift.heartbeats, float(steps)
    if end == "hang in construct":
        hang()
    heartbeats.enter(worker, RESET)
    if end == "hang in reset":
        hang()
    shift.board["acted"][worker] = time.monotonic_ns()
    shift.board["incarnation"][worker] = incarnation
    while count > 0 and not heartbeats.stopping:
        with shift.lock:
            heartbeats.enter(worker, STEP)
        time.sleep(0.001)  # this is the step
        heartbeats.memory["steps"][worker] += 1
        count -= 1
    if not heartbeats.stopping:
        heartbeats.enter(worker, STEP)
        _end(shift, worker, end)


def _end(shift: Shift, worker: int, end: str) -> None:
    heartbeats = shift.heartbeats
    if end == "stop in wait":
        heartbeats.enter(worker, WAIT)
    elif end == "report and exit":
        heartbeats.report(worker, "the env failed\nand why")
    ENDS[end]()


def _spin() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def _send(number: int) -> None:
    os.kill(os.getpid(), number)


ENDS: dict[str, Callable[[], None]] = {
    "exit": partial(os._exit, 0),
    "exit, no lanes left": partial(os._exit, NO_LANES_LEFT),
    "report and exit": partial(os._exit, 3),
    "die": partial(_send, signal.SIGKILL),
    "die of signal 40": partial(_send, 40),
    "hang in step": hang,
    "spin, ignore SIGTERM": _spin,
    "stop": partial(_send, signal.SIGSTOP),
    "stop in wait": partial(_send, signal.SIGSTOP),
}


def answer_at_barrier(line: WakePipe, heartbeats: Heartbeats, number: int, first: str) -> None:
    """Answers with its number and what it was asked; of special words it does something else."""
    line.send(first)
    count = 0
    while True:
        heartbeats.enter(number, WAIT)
        asked = line.receive()
        heartbeats.enter(number, STEP)
        count += 1
        match asked:
            case None if number:
                line.send(count)
            case None:
                line.wake()
            case ("close",):
                line.send(f"closed {number}")
                return
            case "die":
                os._exit(5)
            case "reset for ever":
                heartbeats.enter(number, RESET)
                hang()
            case "hang":
                hang()
            case _:
                line.send((number, asked))
