"""Bringing episodes to where they were, by their seeds, their contexts and their actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Protocol

import numpy as np

from freewheel.core import NDArray, Played, SeedStream
from freewheel.errors import EnvError
from freewheel.rollout.restoring import NextEpisodes

LIMIT = 60.0  # seconds that the episodes of one Env may take to be played again
OTHERWISE = "the environment did something else with the same seed and actions"

Calling = Callable[[str], None]


class Lane(Protocol):
    """One environment that plays the episodes of a stream."""

    def set_context(self, context: NDArray) -> None: ...  # for episodes that begin from now on
    def reset(self) -> object: ...  # begin the next episode
    def step(self, action: object) -> tuple[float, bool, bool]: ...  # reward, terminated, truncated


class Clock:
    """Whether what is left to play fits into the time that there is."""

    def __init__(self, seconds: float = LIMIT) -> None:
        self._began = monotonic()
        self._until = self._began + seconds
        self._seconds, self._done = seconds, 0

    def too_slow(self, left: int) -> str:
        """After each step. Why the episode is given up, if it is."""
        self._done += 1
        now = monotonic()
        if now + (now - self._began) / self._done * left <= self._until:
            return ""
        return f"playing its actions again would take more than {self._seconds:g} s"


def play_again(
    lane: Lane, played: Played, actions: Sequence[object], successor: NDArray, clock: Clock, calling: Calling
) -> str:
    """Begin the lane's next episode and bring it to where it was; why it did not come there. successor: the lane's buffer."""
    total = 0.0
    try:
        calling("reset")
        lane.set_context(played.context)
        lane.reset()
        for count, action in enumerate(actions, start=1):
            calling("step")
            reward, terminated, truncated = lane.step(action)
            total += float(np.float32(reward))
            if terminated or truncated:
                return OTHERWISE
            if count < len(actions) and (reason := clock.too_slow(len(actions) - count)):
                return reason
    except EnvError as error:
        return f"it failed: {error.report.splitlines()[0]}"
    return differs(played, successor, total)


def differs(played: Played, obs: NDArray, total: float) -> str:
    """Why this is not the point that was reached before, bit for bit."""
    return "" if total == played.ret and obs.tobytes() == played.obs.tobytes() else OTHERWISE


class HeldStream:
    """The episodes of a lane that waits for its turn: until then every reset begins the first one. Implements core.SeedStream."""

    def __init__(self, stream: SeedStream) -> None:
        self._stream = stream
        self.resets = self.waited = 0  # of this lane; those that came before its turn

    def number(self, k: int) -> int:
        return self._stream.number(max(0, int(k) - self.waited))

    def seed(self, k: int) -> int:
        return self._stream.seed(max(0, int(k) - self.waited))


def after_what_was_played(seeds: Iterable[SeedStream], played: Iterable[Played | None]) -> list[SeedStream]:
    """The episodes that follow those under way."""
    return [stream if own is None else NextEpisodes(stream) for stream, own in zip(seeds, played, strict=True)]
