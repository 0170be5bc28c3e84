"""A trace while the run goes on."""

from __future__ import annotations

from typing import Any, cast

import pytest

from freewheel.sinks import timeline


class Recorded:
    """As much of a Recording as is written; each write takes a second of the trainer's time."""

    drained = written = 0

    def drain(self) -> None:
        self.drained += 1

    def write_recent(self) -> None:
        self.written += 1


def test_what_is_written_less_often_is_not_lost_and_never_old(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded()
    sink = timeline.TimelineSink(cast(Any, recorded))
    monkeypatch.setattr(timeline, "thread_time", lambda: float(recorded.written))
    for now in range(100, 120, 2):
        monkeypatch.setattr(timeline, "monotonic", lambda now=now: float(now))
        sink._recent()
    assert (recorded.written, recorded.drained) == (5, 5)
