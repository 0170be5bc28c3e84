"""The number of failures after which an environment is given up."""

from __future__ import annotations

GOOD_STEPS = 10  # good steps between two failures after which these do not count as consecutive
FAILURES = 3  # consecutive failures after which an untrusted environment is given up
TRUSTED_FAILURES = 10  # the same for a trusted environment: rare random failures must not add up


class Tolerance:
    """Counts the failures of one environment, which is trusted after `trusted_after` good steps in a row."""

    __slots__ = ("_in_a_row", "_trusted_after", "limit")

    def __init__(self, trusted_after: int = GOOD_STEPS) -> None:
        self._in_a_row, self._trusted_after, self.limit = 0, trusted_after, FAILURES

    def exhausted(self, good: int) -> bool:
        """Count a failure that came after `good` good steps; returns whether it was one too many."""
        if good >= self._trusted_after:
            self.limit = TRUSTED_FAILURES
        if good >= GOOD_STEPS:
            self._in_a_row = 0
        self._in_a_row += 1
        return self._in_a_row == self.limit
