"""The pace of learners over a replay buffer: how many updates the rows that have arrived require."""

from __future__ import annotations


class UpdateRatio:
    """Counts rows and updates. A learner never makes more than `ratio` updates per row. It takes no rows while updates
    are more than `slack` rows behind: chunks then wait in the learner, uncounted, and so do their workers."""

    def __init__(self, ratio: float, starts: int, slack: int) -> None:
        self.ratio, self.starts, self.slack = ratio, starts, slack
        self.rows = self.updates = 0

    def updates_for(self, rows: int) -> int:
        """Return the updates that this many rows require. There are none before learning starts."""
        return int(self.ratio * max(0, rows - self.starts) + 1e-9)

    @property
    def due(self) -> int:
        """Updates that the rows taken so far still require."""
        return self.updates_for(self.rows) - self.updates

    @property
    def behind(self) -> bool:
        """Return whether updates are too far behind to take more rows."""
        return self.due > self.ratio * self.slack

    def achieved(self, rows: float, learners: int = 1) -> float:
        """Return the updates per row since learning began. `rows` counts the rows of all learners together."""
        return self.updates / max(1, rows - learners * self.starts)
