"""Numbers that are not finite: how they are found, what is put back, and when a run has to end because it learns nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freewheel.core import Array, Learner, SkippingLearner
from freewheel.errors import DivergedError

LATEST, MOST_SKIPPED = 20, 10  # a run ends when so many of its latest updates were skipped
REMEMBER = 500  # gradient steps between two copies of a state that can be put back

#: What the numbers of an update are called where they are not a loss, a gradient or a weight.
STATISTICS, TARGET, ADVANTAGE, LOG_PROB = "observation statistics", "value target", "advantage", "log-probability"
GRADIENT, WEIGHTS = "gradient", "weights"


def is_finite(value: Any) -> bool:
    """Whether all numbers are; a tensor is waited for."""
    if isinstance(value, Tensor):  # their sum is looked at first: much faster, and finite only if they all are
        return math.isfinite(float(value.sum())) or bool(torch.isfinite(value).all())
    return bool(np.isfinite(value).all())


def first_not_finite(values: Mapping[str, Any]) -> str:
    """The name of the first value with a number that is not finite; empty: there is none."""
    return next((name for name, value in values.items() if not is_finite(value)), "")


class LastGood:
    """The state of what is trained when all of it was last known to be finite."""

    def __init__(self, state: Mapping[str, Array]) -> None:
        self.state, self._steps = state, 0

    def renew(self, state: Mapping[str, Array], steps: int) -> str:
        """After so many gradient steps, if this state is finite; else what in it is not."""
        broken = first_not_finite({name: value for name, value in state.items() if np.asarray(value).dtype.kind == "f"})
        if not broken:
            self.state, self._steps = state, steps
        return broken

    def is_old(self, steps: int) -> bool:
        return steps - self._steps >= REMEMBER


class SkippedUpdates:
    """Counts updates that were skipped because a number was not finite. A learner that skips too many of them learns nothing."""

    def __init__(self, algorithm: str, remedy: str, what: str = "updates") -> None:
        self._algorithm, self._remedy, self._what = algorithm, remedy, what
        self._latest: deque[bool] = deque(maxlen=LATEST)
        self._updates = self._since = 0
        self._term = ""

    def take(self, not_finite: str) -> None:
        """One update, or one publication of an algorithm that publishes now and then: what was not finite, if anything."""
        self._updates += 1
        if not_finite:
            if not any(self._latest):
                self._since = self._updates
            self._term = not_finite
        self._latest.append(bool(not_finite))
        if sum(self._latest) >= MOST_SKIPPED:
            raise self._error()

    def end(self) -> None:
        """At the end of a run that was too short for that: most of its updates were skipped."""
        if 2 * sum(self._latest) > len(self._latest):
            raise self._error()

    def _error(self) -> DivergedError:
        skipped = f"{sum(self._latest)} of the last {len(self._latest)} {self._what} were skipped"
        share = f"{skipped}, since {self._what.removesuffix('s')} {self._since}"
        reason = f"because a number in the {self._term} was not finite"
        return DivergedError(f"{self._algorithm} learns nothing: {share}, {reason}; {self._remedy}")


class Judge:
    """Ends a run whose updates are skipped, because it learns nothing; learners that skip none are never judged."""

    def __init__(self, learner: Learner, algorithm: str) -> None:
        self._learner, self._version, self._skipped = learner, learner.version, None
        if isinstance(learner, SkippingLearner):
            self._skipped = SkippedUpdates(algorithm, learner.remedy)

    def turn(self, version: int) -> None:
        """After every turn of the loop; DivergedError if too many updates were skipped."""
        learner = self._learner
        if self._skipped is not None and isinstance(learner, SkippingLearner) and version != self._version:
            self._version = version
            self._skipped.take(learner.not_finite)

    def end(self) -> None:
        """At the end of the run."""
        if self._skipped is not None:
            self._skipped.end()
