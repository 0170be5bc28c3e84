"""A trace while the run goes on."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from freewheel.sinks import timeline


def test_what_is_written_less_often_is_not_lost_and_never_old(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, clock = Mock(), Mock()
    sink = timeline.TimelineSink(recorded)
    monkeypatch.setattr(timeline, "monotonic", clock)
    # Each write takes a second of the trainer's time.
    monkeypatch.setattr(timeline, "thread_time", lambda: float(recorded.write_recent.call_count))
    for clock.return_value in range(100, 120, 2):
        sink._recent()
    assert (recorded.write_recent.call_count, recorded.drain.call_count) == (5, 5)
