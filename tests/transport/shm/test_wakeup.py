"""Wakeups: no ring is lost, many are one or each is its own, and every wait ends."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from freewheel.transport.shm.sync import LISTENERS, Wakeup, Wakeups
from tests.support import children

if TYPE_CHECKING:
    from tests.transport.conftest import Start

LIMIT = 20.0


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    with closing(Wakeup()) as wakeup:
        yield wakeup


def test_a_ring_before_the_wait_counts(wakeup: Wakeup) -> None:
    wakeup.notify()
    assert wakeup.wait(0.0)
    assert not wakeup.wait(0.0), "hearing it silences it"


def test_many_rings_are_one(wakeup: Wakeup) -> None:
    wakeup.notify()
    wakeup.notify(3)
    assert wakeup.wait(0.0)
    assert not wakeup.wait(0.0)


def test_with_each_every_ring_wakes_one_wait() -> None:
    with closing(Wakeup(each=True)) as wakeup:
        wakeup.notify(2)
        wakeup.notify()
        assert [wakeup.wait(0.0) for _ in range(4)] == [True, True, True, False]


def test_a_wait_that_hears_nothing_lasts_its_time(wakeup: Wakeup) -> None:
    began = time.monotonic()
    assert not wakeup.wait(0.05)
    assert 0.045 < time.monotonic() - began < 1.0
    assert not wakeup.wait(-1.0)


def test_ringing_never_waits_and_never_fails(wakeup: Wakeup) -> None:
    wakeup.notify(2**64 - 2)  # as full as the kernel's counter gets
    wakeup.notify()
    assert wakeup.wait(0.0)
    assert not wakeup.wait(0.0)


def test_another_process_hears_it_and_hears_all_of_it_at_once(wakeup: Wakeup, start: Start) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        wakeup.notify(5)
        process = start(children.listen, wakeup, 2, theirs)
        assert ours.poll(LIMIT)
        assert ours.recv() == "ready"
        assert ours.poll(LIMIT)
        assert ours.recv() is True
        assert not ours.poll(0.05), "five rings were one"
        wakeup.notify()
        assert ours.poll(LIMIT)
        assert ours.recv() is True
        process.join(LIMIT)
        assert process.exitcode == 0


def test_with_each_as_many_processes_wake_as_it_was_rung(start: Start) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with closing(Wakeup(each=True)) as wakeup, ours, theirs:
        for _ in range(3):
            start(children.listen_alone, wakeup, theirs)
        assert [ours.recv() for _ in range(3) if ours.poll(LIMIT)] == ["ready"] * 3
        wakeup.notify(2)
        assert [ours.recv() for _ in range(2) if ours.poll(LIMIT)] == ["heard"] * 2
        assert not ours.poll(0.1), "the third one sleeps on"
        wakeup.notify()
        assert ours.poll(LIMIT)
        assert ours.recv() == "heard"


def test_a_child_can_ring_for_us(wakeup: Wakeup, start: Start) -> None:
    start(children.notify, wakeup, 1)
    assert wakeup.wait(LIMIT)


def test_closing_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    wakeup = Wakeup()
    assert str(wakeup.fileno()) in os.listdir("/proc/self/fd")
    wakeup.close()
    wakeup.close()
    assert os.listdir("/proc/self/fd") == before


def test_bells_wake_their_own_listener() -> None:
    with closing(Wakeups(3)) as wakeups:
        wakeups.notify([2, 0, 2])
        assert [wakeups[listener].wait(0.0) for listener in range(3)] == [True, False, True]
        assert not wakeups[2].wait(0.0)


def test_in_a_crowd_bells_are_shared_and_every_ring_wakes_one() -> None:
    with closing(Wakeups(LISTENERS + 2)) as wakeups:
        wakeups.notify([0, LISTENERS, 5])
        assert [wakeups[listener].wait(0.0) for listener in (LISTENERS, 0, 0, 5, 5)] == [True, True, False, True, False]
        assert len({wakeups[listener].fileno() for listener in range(LISTENERS + 2)}) == LISTENERS
