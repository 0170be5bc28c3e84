"""Records evaluations in the timeline of a run."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

from freewheel.errors import FreewheelError
from freewheel.run.evaluation.episodes import Score
from freewheel.run.evaluation.players import EpisodeRequest, Evaluator
from freewheel.timeline.track import Track


class TracedEvaluator:
    """Wraps an evaluator and records its evaluations. Implements Evaluator."""

    def __init__(self, evaluator: Evaluator, track: Track) -> None:
        self._evaluator, self._track, self._began = evaluator, track, 0
        self.seconds, self.games, self.slowest = evaluator.seconds, evaluator.games, evaluator.slowest

    @property
    def in_turn(self) -> bool:
        return self._evaluator.in_turn

    @property
    def replays(self) -> bool:
        return self._evaluator.replays

    @property
    def progress(self) -> tuple[int, int]:
        return self._evaluator.progress

    def start(self, order: EpisodeRequest, *, alone: bool) -> None:
        self._began = perf_counter_ns()
        self._evaluator.start(order, alone=alone)

    def poll(self, wait: float) -> Sequence[Score] | FreewheelError | None:
        found = self._evaluator.poll(wait)
        if found is not None:
            self._ended()
        return found

    def cancel(self) -> None:
        self._evaluator.cancel()
        self._ended()

    def _ended(self) -> None:
        if self._began:
            self._track.add("eval", self._began, perf_counter_ns())
            self._track.flush()
            self._began = 0
