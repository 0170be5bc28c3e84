"""The mailbox: the newest weights, complete, and the previous ones until the next are posted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from freewheel.core import Snapshot
from freewheel.transport.shm.memory import NEVER, Mailbox, SharedArrays
from tests.support import children
from tests.support.trainers import wait_until
from tests.transport.conftest import Start

LAYOUT = {"w": (2, 3), "b": (3,), "log_std": ()}


def weights(version: int) -> Snapshot:
    """w counts up from the version, b down from it."""
    params = {
        "b": np.arange(version, version - 3, -1, dtype=np.float32),
        "critic": np.full((50, 50), np.nan, np.float32),
        "w": np.arange(version, version + 6, dtype=np.float32).reshape(2, 3),
        "log_std": np.array(-version, np.float32),
    }
    return Snapshot(version, params)


def assert_holds(snapshot: Snapshot, version: int) -> None:
    assert snapshot.version == version
    assert list(snapshot.params) == list(LAYOUT), "names outside the layout are not written"
    for name, values in snapshot.params.items():
        np.testing.assert_array_equal(np.asarray(values), np.asarray(weights(version).params[name]))


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with closing(Mailbox(LAYOUT)) as mailbox:
        yield mailbox


def test_it_is_empty_at_first(mailbox: Mailbox) -> None:
    assert mailbox.version == NEVER
    with pytest.raises(LookupError, match="version -1 is not in the mailbox"):
        mailbox.read()
    with pytest.raises(LookupError):
        mailbox.read(0)


def test_the_newest_and_the_previous_version_are_available(mailbox: Mailbox) -> None:
    for version in range(4):
        mailbox.post(weights(version))
        assert mailbox.version == version
        assert_holds(mailbox.read(), version)
        assert_holds(mailbox.read(version), version)
        if version:
            assert_holds(mailbox.read(version - 1), version - 1)
        for absent in {version - 2, version + 1, version + 2}:
            with pytest.raises(LookupError, match=f"version {absent} is not in the mailbox"):
                mailbox.read(absent)


def test_weights_of_another_shape_are_refused(mailbox: Mailbox) -> None:
    wrong = {**weights(0).params, "w": np.zeros((2, 2), np.float32)}
    with pytest.raises(ValueError, match="reshape"):
        mailbox.post(Snapshot(0, wrong))


def test_contexts_are_sent_with_the_weights() -> None:
    with closing(Mailbox(LAYOUT, (2, 3))) as mailbox:
        buffer, kept = mailbox.buffer(), list[Snapshot]()
        for version in range(3):
            context = np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * version
            mailbox.post(replace(weights(version), context=context))
            kept.append(mailbox.read(buffer=buffer))
        assert_holds(mailbox.read(), 2)
        assert [snapshot.context[0, 0] for snapshot in kept] == [0, 10, 20], "a copy, although the buffer is used again"
        mailbox.post(replace(weights(3), context=np.full((1, 3), 30, np.float32)))
        assert mailbox.read(buffer=buffer).context.tolist() == [[30, 30, 30]], "a table may have fewer rows"
        assert mailbox.read(2).context.tolist() == [[20, 21, 22], [23, 24, 25]]
        for wrong in (np.zeros((3, 3), np.float32), np.zeros((2, 2), np.float32), np.zeros((0, 0), np.float32)):
            with pytest.raises(ValueError, match="contexts must have 3 columns and at most 2 rows, not"):
                mailbox.post(replace(weights(4), context=wrong))
        assert mailbox.version == 3


def test_readers_never_see_a_mixture_of_two_versions(start: Start) -> None:
    layout = {"w": (64, 64), "b": (64,)}
    with closing(Mailbox(layout, (16, 4))) as mailbox, closing(SharedArrays({"stop": ((1,), "i8")})) as stop:
        writer = start(children.post_forever, mailbox, stop)
        wait_until(lambda: mailbox.version > 0)
        first, last, missed, found = mailbox.version, 0, 0, 0
        turns, deadline = itertools.count(), time.monotonic() + 20.0
        while not (missed and found and last > first + 100):  # the writer has been active meanwhile
            assert time.monotonic() < deadline
            for turn in itertools.islice(turns, 2000):
                try:
                    snapshot = mailbox.read((None, mailbox.version - 1, None, mailbox.version + 1)[turn % 4])
                except LookupError:  # the version was overwritten, or is not posted yet
                    missed += turn % 2
                    continue
                parts = (*snapshot.params.values(), snapshot.context)
                assert {float(v) for p in parts for v in (np.min(p), np.max(p))} == {snapshot.version}
                found += turn % 2
                if turn % 2 == 0:
                    assert snapshot.version >= last
                    last = snapshot.version
        stop["stop"][0] = 1
        writer.join(20.0)
        assert writer.exitcode == 0
