"""How often an environment may fail before it is given up."""

from __future__ import annotations

GOOD_STEPS = 10  # steps between two failures after which they are not in a row
FAILURES = 3  # in a row: an environment that is not trusted is given up
TRUSTED_FAILURES = 10  # the same for one that is: rare random failures must not add up


class Tolerance:
    """Counts the failures of one environment, which is trusted after so many good steps in a row."""

    __slots__ = ("_in_a_row", "_trusted_after", "limit")

    def __init__(self, trusted_after: int = GOOD_STEPS) -> None:
        self._in_a_row, self._trusted_after, self.limit = 0, trusted_after, FAILURES

    def exhausted(self, good: int) -> bool:
        """Count one more failure, after so many good steps; whether it was one too many."""
        if good >= self._trusted_after:
            self.limit = TRUSTED_FAILURES
        if good >= GOOD_STEPS:
            self._in_a_row = 0
        self._in_a_row += 1
        return self._in_a_row == self.limit
