"""The trainer's parties in a timeline: the learner, and work that runs at the same time in threads and processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from time import perf_counter_ns
from typing import Any, NamedTuple

from freewheel.core import Executor, MakeExecutor
from freewheel.timeline.recording import Doing, SpanRecording
from freewheel.timeline.track import Track

LEARNER, FITS, EVALUATOR, SAVER = "learner", "model fits", "evaluator", "checkpoints"
ON_GPU = ("update", "fit", "rollout")  # kinds of work that a learner on a GPU does there


class LearnerTracks:
    """Records the learner's time as the meter reports it; a separate row shows when its GPU has work."""

    def __init__(self, recording: SpanRecording, *, on_gpu: bool) -> None:
        self._recording, self._track = recording, recording.track(LEARNER, "learner")
        self._gpu = recording.track("GPU learner", "gpu") if on_gpu else None

    def __call__(self, kind: str, begin_s: float, end_s: float) -> None:
        """Record a span, in seconds of time.perf_counter. A wait for rows was for the party whose rows ended it."""
        begin, end = int(begin_s * 1e9), int(end_s * 1e9)
        self._track.add(kind, begin, end, self._recording.latest if kind == "wait-data" else -1)
        if self._gpu is not None and kind in ON_GPU:
            self._gpu.add(kind, begin, end)


def doing(present: Callable[[], tuple[str, float, float]]) -> Callable[[], Doing]:
    """Return a function for the learner's current activity. `present`: metrics.meter.Meter.present."""

    def now() -> Doing:
        kind, begin, end = present()
        return {LEARNER: [(kind, int(begin * 1e9), int(end * 1e9))]}

    return now


class _Timed(NamedTuple):
    """The result of a call, and when the call began and ended, in ns."""

    result: Any
    began: int
    ended: int


def timed_executors(make: MakeExecutor, recording: SpanRecording) -> MakeExecutor:
    """Return executors that record their calls as rows of the timeline, for work that runs next to the learner."""

    names = itertools.chain([FITS], (f"{FITS} {number}" for number in itertools.count(2)))

    def made(build: Callable[[], Callable[[Any], Any]], what: str) -> Executor:
        return _TimedExecutor(make(lambda: _timed(build()), what), recording.track(next(names), "learner"))

    return made


def _timed(function: Callable[[Any], Any]) -> Callable[[Any], Generator[Any, None, _Timed]]:
    def call(argument: Any) -> Generator[Any, None, _Timed]:
        began = perf_counter_ns()
        result = function(argument)
        while isinstance(result, Generator):
            result = yield from result
        return _Timed(result, began, perf_counter_ns())

    return call


class WatchedExecutor:
    """Wraps an executor; subclasses act when a result is taken. Implements core.Executor."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.submit = executor, executor.submit

    @property
    def busy(self) -> bool:
        return self.executor.busy

    def result(self, wait: float = 0.0) -> Any:
        return self.executor.result(wait)


class _TimedExecutor(WatchedExecutor):
    def __init__(self, executor: Executor, track: Track) -> None:
        super().__init__(executor)
        self._track = track

    def result(self, wait: float = 0.0) -> Any:
        found = self.executor.result(wait)
        if not isinstance(found, _Timed):  # no result yet, or an error
            return found
        self._track.add("fit", found.began, found.ended)
        self._track.flush()
        return found.result
