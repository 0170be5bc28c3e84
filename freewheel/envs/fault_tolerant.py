"""Fault-tolerant lanes: a failure invalidates the row and starts the next episode; too many end the lane."""

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
from freewheel.rollout.tolerance import Tolerance

NO_ANSWER = 0.0, False, False  # what a failed lane returns


def numpy_finite(values: NDArray) -> bool:
    """Return whether all values [N] are finite. The sum of squares is a fast test; if it overflows, test each value."""
    with np.errstate(over="ignore"):
        return math.isfinite(values.dot(values)) or bool(np.isfinite(values).all())


finite = compiled("finite", numpy_finite)


class FaultTolerantLane:
    """A Lane that appends its failures to a list instead of raising them."""

    __slots__ = ("_failures", "_first", "_index", "_step", "_taken", "_tolerance", "down", "given_up", "lane")

    def __init__(self, lane: Lane, index: int, first: NDArray, failures: list[Failure]) -> None:
        self.lane, self._index, self._first, self._failures = lane, index, first, failures
        self._step = lane.step
        self._tolerance = Tolerance()
        self._taken = 0  # steps since the last failure
        self.down = True  # no episode is in progress
        self.given_up = False  # no further episode will begin

    def reset(self) -> None:
        """Start the next episode. If its reset fails, try the one after it, until the lane is given up."""
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
            return NO_ANSWER
        self._taken += 1
        try:
            return self._step(action)
        except EnvError as error:
            self.fail(error)
            return NO_ANSWER

    def fail(self, error: EnvError, *, in_reset: bool = False) -> None:
        """End the episode and record the failure. Give up the lane after too many failures in a row."""
        good = self._taken if in_reset else self._taken - 1
        self._taken, self.down = 0, True
        self._failures.append(Failure(self._index, error.cause, error.report, in_reset))
        if self._tolerance.exhausted(good):
            self.given_up = True
            report = f"{self.lane.who} was given up after {self._tolerance.limit} failures in a row; the last: {error.report}"
            self._failures.append(Failure(self._index, "quarantine", report, in_reset))


class FaultTolerantLanes:
    """The lanes of one fault-tolerant Env."""

    def __init__(self, name: str, lanes: Sequence[Lane], step: Step, first: NDArray, *, part: bool = False) -> None:
        """`part`: the Env has lanes in other processes too."""
        self._name, self._part, self.failures = name, part, list[Failure]()
        self.lanes = [FaultTolerantLane(lane, index, first[index], self.failures) for index, lane in enumerate(lanes)]
        self._floats = [values.reshape(-1) for values in (step.next_obs, step.reward) if values.dtype != np.uint8]
        self._all_valid = True  # in the last step

    def check(self, step: Step, ended: list[Lane | FaultTolerantLane]) -> Step:
        """Return the step with its failures. A failed lane gets an empty row and is added to `ended`."""
        if not all(map(finite, self._floats)):
            self._fail_not_finite(step)
        if self._all_valid and not self.failures:
            return step
        down = np.array([lane.down for lane in self.lanes])
        np.logical_not(down, out=step.valid)
        for values in (step.reward, step.terminated, step.truncated, step.next_obs):
            values[down] = 0
        ended[:] = compress(self.lanes, step.terminated | step.truncated | down)
        self._all_valid = not down.any()
        self.require_a_lane()
        failures = tuple(self.failures)
        self.failures.clear()
        return replace(step, failures=failures)

    def require_a_lane(self) -> None:
        """Raise if every lane of the Env was given up."""
        if not self._part and all(lane.given_up for lane in self.lanes):
            raise EnvError(f"no lane of {self._name} is left: {self.failures[-1].report}", "quarantine")

    def _fail_not_finite(self, step: Step) -> None:
        for lane, observation, reward in zip(self.lanes, step.next_obs, step.reward, strict=True):
            for what, values in (("an observation", observation), ("a reward", reward)):
                if not lane.down and not np.isfinite(values).all():
                    lane.fail(lane.lane.not_finite(what, values))
