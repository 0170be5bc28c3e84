"""How a trial goes: its episodes as they come in, and the rules that end it before its episodes are used up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from freewheel.core import Episode, NDArray

BETTER = 0.02  # what counts as an improvement of a return, as a share of it


@dataclass(frozen=True)
class Stops:
    """When a workflow has been trained enough."""

    threshold: float  # of mean compliance: it has been learned
    window: int  # episodes behind every mean
    patience: int  # windows without a better return: it will not get better; 0: go on


class Played(NamedTuple):
    """An episode: its reward, the two parts of it, and what its fixes were worth (as envs.MEASURES reports them)."""

    total_reward: float
    env_return: float
    alignment: float
    compliance: float  # NaN: not applicable
    fixes: float


class Means(NamedTuple):
    """Of a number of episodes."""

    total_reward: float
    env_return: float
    alignment: float
    compliance: float | None  # over the episodes to which it applies; None: there are none
    fixes: float


def means(played: Sequence[Played]) -> Means:
    columns: NDArray = np.array(played).T  # [5, N]
    compliance = columns[Played._fields.index("compliance")]
    applicable = compliance[~np.isnan(compliance)]
    every = Means(*columns.mean(axis=1).tolist())
    return every._replace(compliance=float(applicable.mean()) if applicable.size else None)


class Progress:
    """The episodes of one trial."""

    def __init__(self, stops: Stops, *, fixed: bool = False) -> None:
        self._stops, self._fixed = stops, fixed
        self.played: list[Played] = []
        self._windows, self._since = 0, 0  # that are full; that came after the best one
        self._best: float | None = None

    def take(self, episodes: Sequence[Episode]) -> str:
        """Why the trial should end, if it should."""
        self.played += [Played(episode.ret, *episode.measures) for episode in episodes]
        self._look_at_windows()
        if self._fixed or not self._windows:
            return ""
        compliance = self.last.compliance
        if compliance is not None and compliance >= self._stops.threshold:
            return "threshold"
        return "plateau" if 0 < self._stops.patience <= self._since else ""

    @property
    def last(self) -> Means:
        """Over the last window."""
        return means(self.played[-self._stops.window :])

    def _look_at_windows(self) -> None:
        """A window is better if its return is above the best one's by more than a little."""
        size = self._stops.window
        while (self._windows + 1) * size <= len(self.played):
            value = means(self.played[self._windows * size : (self._windows + 1) * size]).env_return
            self._windows += 1
            self._since += 1
            if self._best is None or value > self._best + BETTER * abs(self._best):
                self._best, self._since = value, 0
