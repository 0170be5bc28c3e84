"""The lock: one at a time over processes and threads, and never lost with a holder, dead or stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import pytest

from freewheel.transport.shm.memory import SharedArrays
from freewheel.transport.shm.sync import ProcessLock
from tests.support import children

if TYPE_CHECKING:
    from tests.transport.conftest import Start

LIMIT = 20.0


@pytest.fixture
def lock() -> Iterator[ProcessLock]:
    with closing(ProcessLock()) as lock:
        yield lock


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        yield ours, theirs


def test_processes_take_turns(lock: ProcessLock, start: Start) -> None:
    with closing(SharedArrays({"counter": ((1,), "i8")})) as memory:
        processes = [start(children.increment, lock, memory, 2000) for _ in range(3)]
        for process in processes:
            process.join(LIMIT)
        assert memory["counter"][0] == 3 * 2000


def test_threads_take_turns(lock: ProcessLock) -> None:
    counter, interval = [0], sys.getswitchinterval()

    def increment() -> None:
        for _ in range(1000):
            with lock:
                seen = counter[0]
                time.sleep(0)  # gives the interpreter away
                counter[0] = seen + 1

    threads = [threading.Thread(target=increment) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
    finally:
        sys.setswitchinterval(interval)
    assert counter == [4 * 1000]


def test_the_kernel_frees_it_when_its_holder_is_killed(
    lock: ProcessLock, start: Start, pipe: tuple[Connection, Connection]
) -> None:
    ours, theirs = pipe
    process = start(children.hold, lock, theirs)
    assert ours.poll(LIMIT)
    assert not lock.acquire(0.05)
    process.kill()
    assert lock.acquire(LIMIT)
    lock.release()
    assert lock.holder() is None


def test_a_stopped_holder_is_named_and_can_be_got_rid_of(
    lock: ProcessLock, start: Start, pipe: tuple[Connection, Connection]
) -> None:
    ours, theirs = pipe
    assert lock.holder() is None
    process = start(children.hold, lock, theirs)
    assert process.pid is not None
    assert ours.poll(LIMIT)
    os.kill(process.pid, signal.SIGSTOP)
    assert lock.holder() == process.pid
    assert not lock.acquire(0.0)
    os.kill(process.pid, signal.SIGKILL)
    with lock:
        assert lock.holder() is None, "it is not another process that holds it"


def test_others_wait_until_it_is_given_back_as_often_as_it_was_taken(
    lock: ProcessLock, start: Start, pipe: tuple[Connection, Connection]
) -> None:
    ours, theirs = pipe
    with lock:
        assert lock.acquire(0.0)
        with lock:
            pass
        start(children.take_once, lock, theirs)
        lock.release()
        assert not ours.poll(0.2), "it is still held here"
    assert ours.poll(LIMIT)


def test_an_interrupt_that_comes_while_it_waits_leaves_it_free_for_other_threads(
    lock: ProcessLock, start: Start, pipe: tuple[Connection, Connection]
) -> None:
    ours, theirs = pipe
    process = start(children.hold, lock, theirs)
    assert ours.poll(LIMIT)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt), lock:
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    process.kill()

    def take() -> None:
        with lock:
            pass

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(LIMIT / 2)
    assert not thread.is_alive()


def test_a_thread_that_tries_gives_up_in_time(lock: ProcessLock) -> None:
    answers: list[bool] = []
    with lock:
        thread = threading.Thread(target=lambda: answers.append(lock.acquire(0.05)))
        thread.start()
        thread.join(LIMIT)
    assert answers == [False]
