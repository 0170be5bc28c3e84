"""The progress of a worker's lanes by the delivered rows: a resumed run brings the lanes back there."""

from __future__ import annotations

import numpy as np

from freewheel.core import Array, NDArray
from freewheel.rollout.recording import MOST_BYTES, EpisodeRecording
from freewheel.rollout.restoring import LaneStates
from freewheel.seeding import words_at
from freewheel.transport.wire import Fragment

ALL_BYTES = 4 * MOST_BYTES  # of the recordings of all workers


class WorkerProgress:
    """The progress of one worker. Fragments come in the order of writing; a resumed run repeats undelivered ones."""

    def __init__(self, lanes: int, state_size: int, rng: NDArray, context: NDArray, *, workers: int) -> None:
        self.numbers = [0] * lanes  # the number of each lane's present or next episode
        self._memory = np.zeros((lanes, state_size), np.float32)
        self._rng: NDArray | None = rng  # as in After; None: not known
        self._contexts = [context] * lanes
        self._recording = EpisodeRecording(lanes, min(MOST_BYTES, ALL_BYTES // workers))

    @property
    def under_way(self) -> NDArray:
        """[B] whether the lane is inside an episode."""
        return np.asarray(self._recording.steps != 0)

    def add(self, fragment: Fragment, context: NDArray) -> None:
        """Add the next fragment; context: the table of its version."""
        data, after = fragment.data, fragment.after
        if fragment.gap or (after is None and self._memory.size):
            self._recording.forget()
        steps = len(data.valid)
        ended = np.zeros(len(self.numbers), np.bool_)
        if steps:
            if fragment.episodes or fragment.rows < data.valid.size:
                ended = (data.terminated | data.truncated | ~data.valid).any(axis=0)
            self._recording.add(data, ends=bool(ended.any()))
        if after is None:  # the fragment is still open, or its writer has died
            self._rng = None
            numbers = self.numbers.copy()
            for episode in fragment.episodes:
                numbers[episode.lane % len(numbers)] = episode.number + 1
        else:
            numbers, self._memory, self._rng = after.numbers, after.memory, after.rng
        for lane, number in enumerate(numbers):
            if ended[lane]:
                self._contexts[lane] = context
            elif number != self.numbers[lane] and not fragment.gap:  # the episode began between two fragments
                self._contexts[lane] = context
                self._recording.restart(lane, steps)
        self.numbers = numbers

    def state(self) -> dict[str, Array]:
        """Return the arrays for Runner.load_state_dict."""
        states = LaneStates(self.numbers, self._memory, self._contexts, self._recording.state())
        return states.to_arrays() | ({} if self._rng is None else {"rng": words_at(self._rng)})

    def restore(self, state: dict[str, NDArray]) -> None:
        states = LaneStates.from_arrays(state)
        self.numbers, self._memory, self._contexts = list(states.numbers), states.memory, list(states.contexts)
        self._recording.restore(states.recording)
        self._rng = np.append(state["rng"], np.uint64(0)) if "rng" in state else None
