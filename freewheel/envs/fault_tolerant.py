"""Lanes that may fail: their row is a gap, their next episode begins, and one that does little but fail is given up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from freewheel.core import Failure, NDArray, Step
from freewheel.envs.lane import Lane
from freewheel.errors import EnvError
from freewheel.rollout.kernel import compiled

FAILURES = 3  # running, with fewer than ...
GOOD_STEPS = 10  # ... good steps between, and a lane is given up
TRUSTED = (
    10  # failures running of a lane that has shown so many good steps before: chance alone must not add up to them
)

NOTHING = 0.0, False, False  # the answer of a lane that has none


def numpy_finite(values: NDArray) -> bool:
    """Whether all numbers [N] are: the cheapest look there is, for then the sum of their squares is, unless they are huge."""
    with np.errstate(over="ignore"):
        return math.isfinite(values.dot(values)) or bool(np.isfinite(values).all())


finite = compiled("finite", numpy_finite)


class FaultTolerantLane:
    """A Lane whose failures are noted, not raised."""

    __slots__ = ("_failures", "_first", "_index", "_limit", "_notes", "_step", "_taken", "down", "given_up", "lane")

    def __init__(self, lane: Lane, index: int, first: NDArray, notes: list[Failure]) -> None:
        self.lane, self._index, self._first, self._notes = lane, index, first, notes
        self._step = lane.step
        self._failures = 0  # running
        self._limit = FAILURES
        self._taken = 0  # steps since the last of them
        self.down = True  # no episode is being played ...
        self.given_up = False  # ... nor ever will be

    def reset(self) -> None:
        """Start the next episode that can be started."""
        while not self.given_up:
            try:
                self.lane.reset()
                if not np.isfinite(self._first).all():
                    raise self.lane.not_finite("an observation", self._first)
            except EnvError as error:
                self.fail(error, in_reset=True)
            else:
                self.down = False
                return
        self._first.fill(0)

    def step(self, action: object) -> tuple[float, bool, bool]:
        if self.down:
            return NOTHING
        self._taken += 1
        try:
            return self._step(action)
        except EnvError as error:
            self.fail(error)
            return NOTHING

    def fail(self, error: EnvError, *, in_reset: bool = False) -> None:
        """Note that the episode is cut short and, when it is too often running, that there will be no other."""
        good = self._taken if in_reset else self._taken - 1
        self._failures, self._limit = (1, TRUSTED) if good >= GOOD_STEPS else (self._failures + 1, self._limit)
        self._taken, self.down = 0, True
        self._notes.append(Failure(self._index, error.cause, error.report, in_reset))
        if self._failures == self._limit:
            self.given_up = True
            report = f"{self.lane.who} was given up after {self._limit} failures running; the last: {error.report}"
            self._notes.append(Failure(self._index, "quarantine", report, in_reset))


class FaultTolerantLanes:
    """The Wards of one Env."""

    def __init__(self, name: str, lanes: Sequence[Lane], step: Step, first: NDArray) -> None:
        self._name, self.notes = name, list[Failure]()
        self.wards = [FaultTolerantLane(lane, index, first[index], self.notes) for index, lane in enumerate(lanes)]
        self._floats = [values.reshape(-1) for values in (step.next_obs, step.reward) if values.dtype != np.uint8]
        self._whole = True  # the last step had no gap

    def judge(self, step: Step, ended: list[Lane | FaultTolerantLane]) -> Step:
        """The step as it may be shown: failed lanes have an empty row and are among those that ended."""
        if not all(map(finite, self._floats)):
            self._inspect(step)
        if self._whole and not self.notes:
            return step
        gaps = np.array([ward.down for ward in self.wards])
        np.logical_not(gaps, out=step.valid)
        for values in (step.reward, step.terminated, step.truncated, step.next_obs):
            values[gaps] = 0
        ended[:] = compress(self.wards, step.terminated | step.truncated | gaps)
        self._whole = not gaps.any()
        self.insist()
        failures = tuple(self.notes)
        self.notes.clear()
        return replace(step, failures=failures)

    def insist(self) -> None:
        """Raise if no lane is left."""
        if all(ward.given_up for ward in self.wards):
            raise EnvError(f"no lane of {self._name} is left: {self.notes[-1].report}", "quarantine")

    def _inspect(self, step: Step) -> None:
        for ward, observation, reward in zip(self.wards, step.next_obs, step.reward, strict=True):
            for what, values in (("an observation", observation), ("a reward", reward)):
                if not ward.down and not np.isfinite(values).all():
                    ward.fail(ward.lane.not_finite(what, values))
