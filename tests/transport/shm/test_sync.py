"""The lock: exclusive over processes and threads, and released if its holder dies. Wakeups: none is lost, every wait ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from freewheel.transport.shm.memory import SharedArrays
from freewheel.transport.shm.sync import LISTENERS, ProcessLock, Wakeup, Wakeups
from tests.support import children
from tests.transport.conftest import Pipe, Start

LIMIT = 20.0


@pytest.fixture
def lock() -> Iterator[ProcessLock]:
    with closing(ProcessLock()) as lock:
        yield lock


def test_the_lock_is_exclusive_over_processes(lock: ProcessLock, start: Start) -> None:
    with closing(SharedArrays({"counter": ((1,), "i8")})) as memory:
        for process in [start(children.increment, lock, memory, 2000) for _ in range(3)]:
            process.join(LIMIT)
        assert memory["counter"][0] == 3 * 2000


def test_the_lock_is_exclusive_over_threads(lock: ProcessLock) -> None:
    counter, interval = [0], sys.getswitchinterval()

    def increment() -> None:
        for _ in range(1000):
            with lock:
                seen = counter[0]
                time.sleep(0)  # lets other threads run
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


def test_a_stopped_holder_is_known_and_can_be_killed(lock: ProcessLock, start: Start, pipe: Pipe) -> None:
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
        assert lock.holder() is None, "no other process holds it"


def test_others_wait_until_it_is_released_as_often_as_it_was_taken(lock: ProcessLock, start: Start, pipe: Pipe) -> None:
    ours, theirs = pipe
    with lock:
        assert lock.acquire(0.0)
        with lock:
            pass
        start(children.take_once, lock, theirs)
        lock.release()
        assert not ours.poll(0.2), "it is still held here"
    assert ours.poll(LIMIT)


def test_an_interrupt_in_a_wait_leaves_it_free_for_other_threads(lock: ProcessLock, start: Start, pipe: Pipe) -> None:
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


def test_an_attempt_of_a_thread_ends_in_time(lock: ProcessLock) -> None:
    answers: list[bool] = []
    with lock:
        thread = threading.Thread(target=lambda: answers.append(lock.acquire(0.05)))
        thread.start()
        thread.join(LIMIT)
    assert answers == [False]


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    with closing(Wakeup()) as wakeup:
        yield wakeup


@pytest.mark.parametrize("counts", [(1,), (1, 3), (2**64 - 2, 1)], ids=["one", "several", "as full as a counter gets"])
def test_one_wait_consumes_all_notifications_that_came_before(wakeup: Wakeup, counts: tuple[int, ...]) -> None:
    for count in counts:
        wakeup.notify(count)
    assert wakeup.wait(0.0)
    assert not wakeup.wait(0.0), "a wait resets it"


def test_with_each_one_notification_ends_one_wait() -> None:
    with closing(Wakeup(each=True)) as wakeup:
        wakeup.notify(2)
        wakeup.notify()
        assert [wakeup.wait(0.0) for _ in range(4)] == [True, True, True, False]


def test_a_wait_without_a_notification_lasts_its_time(wakeup: Wakeup) -> None:
    began = time.monotonic()
    assert not wakeup.wait(0.05)
    assert time.monotonic() - began > 0.045
    assert not wakeup.wait(-1.0)


def test_another_process_consumes_all_notifications_at_once(wakeup: Wakeup, start: Start, pipe: Pipe) -> None:
    ours, theirs = pipe
    wakeup.notify(5)
    process = start(children.listen, wakeup, 2, theirs)
    assert ours.poll(LIMIT)
    assert ours.recv() == "ready"
    assert ours.poll(LIMIT)
    assert ours.recv() is True
    assert not ours.poll(0.05), "one wait consumed all five"
    wakeup.notify()
    assert ours.poll(LIMIT)
    assert ours.recv() is True
    process.join(LIMIT)
    assert process.exitcode == 0


def test_with_each_as_many_processes_wake_as_there_are_notifications(start: Start, pipe: Pipe) -> None:
    ours, theirs = pipe
    with closing(Wakeup(each=True)) as wakeup:
        for _ in range(3):
            start(children.listen_alone, wakeup, theirs)
        assert [ours.recv() for _ in range(3) if ours.poll(LIMIT)] == ["ready"] * 3
        wakeup.notify(2)
        assert [ours.recv() for _ in range(2) if ours.poll(LIMIT)] == ["woken"] * 2
        assert not ours.poll(0.1), "the third one still waits"
        wakeup.notify()
        assert ours.poll(LIMIT)
        assert ours.recv() == "woken"


def test_a_child_can_notify_its_parent(wakeup: Wakeup, start: Start) -> None:
    start(children.notify, wakeup, 1)
    assert wakeup.wait(LIMIT)


def test_closing_a_wakeup_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    wakeup = Wakeup()
    assert str(wakeup.fileno()) in os.listdir("/proc/self/fd")
    wakeup.close()
    wakeup.close()
    assert os.listdir("/proc/self/fd") == before


def test_many_listeners_share_wakeups_and_every_notification_wakes_one() -> None:
    with closing(Wakeups(LISTENERS + 2)) as wakeups:
        wakeups.notify([0, LISTENERS, 5])
        assert [wakeups[listener].wait(0.0) for listener in (LISTENERS, 0, 0, 5, 5)] == [True, True, False, True, False]
        wakeups.notify([1])
        assert [wakeups[listener].wait(0.0) for listener in (1, LISTENERS + 1, 1)] == [True, True, False], "both wake"
        assert len({wakeups[listener].fileno() for listener in range(LISTENERS + 2)}) == LISTENERS
