"""Bells: no ring is lost, many are one or each is its own, and every wait ends."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from freewheel.transport.bell import CROWD, Bell, Bells
from tests.transport import children

if TYPE_CHECKING:
    from tests.transport.conftest import Start

LIMIT = 20.0


@pytest.fixture
def bell() -> Iterator[Bell]:
    with closing(Bell()) as bell:
        yield bell


def test_a_ring_before_the_wait_counts(bell: Bell) -> None:
    bell.ring()
    assert bell.wait(0.0)
    assert not bell.wait(0.0), "hearing it silences it"


def test_many_rings_are_one(bell: Bell) -> None:
    bell.ring()
    bell.ring(3)
    assert bell.wait(0.0)
    assert not bell.wait(0.0)


def test_with_each_every_ring_wakes_one_wait() -> None:
    with closing(Bell(each=True)) as bell:
        bell.ring(2)
        bell.ring()
        assert [bell.wait(0.0) for _ in range(4)] == [True, True, True, False]


def test_a_wait_that_hears_nothing_lasts_its_time(bell: Bell) -> None:
    began = time.monotonic()
    assert not bell.wait(0.05)
    assert 0.045 < time.monotonic() - began < 1.0
    assert not bell.wait(-1.0)


def test_ringing_never_waits_and_never_fails(bell: Bell) -> None:
    bell.ring(2**64 - 2)  # as full as the kernel's counter gets
    bell.ring()
    assert bell.wait(0.0)
    assert not bell.wait(0.0)


def test_another_process_hears_it_and_hears_all_of_it_at_once(bell: Bell, start: Start) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        bell.ring(5)
        process = start(children.listen, bell, 2, theirs)
        assert ours.poll(LIMIT)
        assert ours.recv() == "ready"
        assert ours.poll(LIMIT)
        assert ours.recv() is True
        assert not ours.poll(0.05), "five rings were one"
        bell.ring()
        assert ours.poll(LIMIT)
        assert ours.recv() is True
        process.join(LIMIT)
        assert process.exitcode == 0


def test_with_each_as_many_processes_wake_as_it_was_rung(start: Start) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with closing(Bell(each=True)) as bell, ours, theirs:
        for _ in range(3):
            start(children.listen_alone, bell, theirs)
        assert [ours.recv() for _ in range(3) if ours.poll(LIMIT)] == ["ready"] * 3
        bell.ring(2)
        assert [ours.recv() for _ in range(2) if ours.poll(LIMIT)] == ["heard"] * 2
        assert not ours.poll(0.1), "the third one sleeps on"
        bell.ring()
        assert ours.poll(LIMIT)
        assert ours.recv() == "heard"


def test_a_child_can_ring_for_us(bell: Bell, start: Start) -> None:
    start(children.ring, bell, 1)
    assert bell.wait(LIMIT)


def test_closing_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    bell = Bell()
    assert str(bell.fileno()) in os.listdir("/proc/self/fd")
    bell.close()
    bell.close()
    assert os.listdir("/proc/self/fd") == before


def test_bells_wake_their_own_listener() -> None:
    with closing(Bells(3)) as bells:
        bells.ring([2, 0, 2])
        assert [bells[listener].wait(0.0) for listener in range(3)] == [True, False, True]
        assert not bells[2].wait(0.0)


def test_in_a_crowd_bells_are_shared_and_every_ring_wakes_one() -> None:
    with closing(Bells(CROWD + 2)) as bells:
        bells.ring([0, CROWD, 5])
        assert [bells[listener].wait(0.0) for listener in (CROWD, 0, 0, 5, 5)] == [True, True, False, True, False]
        assert len({bells[listener].fileno() for listener in range(CROWD + 2)}) == CROWD
