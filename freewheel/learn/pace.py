"""The pace of learners over a replay buffer: how many updates the rows that have arrived require."""

from __future__ import annotations


class Pace:
    """Counts rows and updates. Updates never run ahead of `ratio` a row, and rows are not taken while updates are more than
    `slack` rows' worth behind: they wait with the learner, uncounted, and so do the workers that wrote them."""

    def __init__(self, ratio: float, starts: int, slack: int) -> None:
        self.ratio, self.starts, self.slack = ratio, starts, slack
        self.rows = self.updates = 0

    def updates_for(self, rows: int) -> int:
        """Updates that this many rows require; none while they are fewer than learning starts with."""
        return int(self.ratio * max(0, rows - self.starts) + 1e-9)

    @property
    def due(self) -> int:
        """Updates that the rows taken so far still require."""
        return self.updates_for(self.rows) - self.updates

    @property
    def behind(self) -> bool:
        """Too far behind to take more rows."""
        return self.due > self.ratio * self.slack

    def achieved(self, rows: float, learners: int = 1) -> float:
        """Updates per row since learning began, where so many learners have these rows."""
        return self.updates / max(1, rows - learners * self.starts)
