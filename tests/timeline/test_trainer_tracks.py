"""The learner and what runs beside it, as rows of a timeline."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from freewheel.errors import FreewheelError
from freewheel.timeline.model import Row
from freewheel.timeline.recording import SpanRecording
from freewheel.timeline.trainer_tracks import LearnerTracks, doing, timed_executors
from freewheel.transport.executors import SerialExecutor, ThreadExecutor
from tests.support.timelines import Clock

SECOND = 1_000_000_000


def rows_of(recording: SpanRecording) -> dict[str, Row]:
    return {row.name: row for row in recording.finished().rows}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_learner_on_a_gpu_has_a_row_of_what_it_does_there(on_gpu: bool) -> None:
    recording = SpanRecording(now=(clock := Clock()))
    recording.latest = recording.number("worker 0", "envs")
    learner = LearnerTracks(recording, on_gpu=on_gpu)
    for second, kind in enumerate(("wait-data", "observe", "update", "publish"), 1000):
        learner(kind, second, second + 1)
    clock.now = 1004 * SECOND
    rows = rows_of(recording)
    assert [(span.kind, span.waits_for) for span in rows["learner"].spans] == [
        ("wait-data", "worker 0"), ("observe", ""), ("update", ""), ("publish", ""),
    ]  # fmt: skip
    on_it = [(span.kind, span.t0_s, span.t1_s) for span in rows["GPU learner"].spans] if "GPU learner" in rows else []
    assert on_it == ([("update", 2, 3)] if on_gpu else [])


def test_what_a_learner_does_now_is_shown() -> None:
    recording = SpanRecording(now=(clock := Clock()))
    recording.track("learner", "learner")
    recording.attach({}, "learner", doing(lambda: ("update", 1001.0, clock.now / SECOND)))
    clock.now = 1003 * SECOND
    (row,) = recording.timeline().rows
    assert [tuple(span[:3]) for span in row.spans] == [("update", 1.0, 3.0)]


def doubled(argument: int) -> int:
    return 2 * argument


def doubled_slowly(argument: int) -> Generator[None, None, int]:
    yield
    return 2 * argument


@pytest.mark.parametrize("function", [doubled, doubled_slowly])
def test_a_timed_executor_answers_the_same_and_leaves_a_span_for_each_call(function: Callable[[int], Any]) -> None:
    recording = SpanRecording()
    make = timed_executors(SerialExecutor, recording)
    for _ in range(2):
        executor = make(lambda: function, "twice")
        assert executor.result() is None
        executor.submit(3)
        executor.submit(4)
        assert [executor.result(), executor.result(), executor.result()] == [6, 8, None]
    rows = rows_of(recording)
    assert list(rows) == ["model fits", "model fits 2"], "each executor has a row of its own"
    assert [span.kind for row in rows.values() for span in row.spans] == ["fit"] * 4


def test_an_error_of_a_call_comes_out_as_it_is() -> None:
    def fails(argument: int) -> int:
        raise FreewheelError(f"no {argument}")

    recording = SpanRecording()
    made: list[ThreadExecutor] = []

    def make(build: Callable[[], Callable[[Any], Any]], what: str) -> ThreadExecutor:
        made.append(ThreadExecutor(build, what, "cpu"))
        return made[-1]

    executor = timed_executors(make, recording)(lambda: fails, "failing")
    executor.submit(5)
    assert str(executor.result(wait=20.0)) == "no 5"
    made[0].close()
    assert "model fits" not in rows_of(recording)
