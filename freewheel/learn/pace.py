"""Pace: so many updates a row, held within hard bounds on both sides whoever is the faster one."""

from __future__ import annotations


class Pace:
    """Counts rows and updates. Updates never run ahead of `ratio` a row, and rows are not taken while updates are more than
    `slack` rows' worth behind: what arrived too early waits with the learner, its credit unpaid, and so does its author."""

    def __init__(self, ratio: float, starts: int, slack: int) -> None:
        self.ratio, self.starts, self.slack = ratio, starts, slack
        self.rows = self.updates = 0

    def called_for(self, rows: int) -> int:
        """Updates that so many rows call for; none while they are fewer than learning starts with."""
        return int(self.ratio * max(0, rows - self.starts) + 1e-9)

    @property
    def due(self) -> int:
        """Updates that the rows taken so far still call for."""
        return self.called_for(self.rows) - self.updates

    @property
    def behind(self) -> bool:
        """Too far behind to take more rows."""
        return self.due > self.ratio * self.slack

    @property
    def achieved(self) -> float:
        """Updates per row since learning began."""
        return self.updates / max(1, self.rows - self.starts)
