"""Progress lines in the format of earlier trainers: counters of a model-based one, episodes of the others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from freewheel.errors import printable
from freewheel.files.stdout import WHITE
from freewheel.metrics.names import COUNTS


class ClassicLines:
    """Formats each row of metrics as lines.

    With a `name`, the lines show counters: [AsyncMBPO] step=1000 real_data=5000 ... Without one, they show
    10/100 episodes (15.2 eps/sec), and update 3 complete (0.3 s). `episodes` is the total number of episodes, of which
    `before` were played before this run.
    """

    def __init__(self, name: str = "", *, episodes: int | None = None, before: int = 0) -> None:
        self._name, self._episodes, self._before = name, episodes, before
        self._wall, self._updates = 0.0, 0

    def of(self, row: Mapping[str, Any]) -> Iterable[str]:
        """Return the lines for one row."""
        return [_counters(self._name, row)] if self._name else self._progress(row)

    def _progress(self, row: Mapping[str, Any]) -> Iterator[str]:
        played = f"{self._before + row['episodes']}" + ("" if self._episodes is None else f"/{self._episodes}")
        yield f"{played} episodes ({row['episodes_per_s'] or 0.0:.1f} eps/sec)"
        updates, seconds = row["updates"] - self._updates, row["wall_s"] - self._wall
        if updates > 0:
            each = (row.get("time/learner_update") or 0.0) * seconds / updates
            which = f"update {row['updates']}" if updates == 1 else f"updates {self._updates + 1} to {row['updates']}"
            yield f"{which} complete ({each:.2g} s{'' if updates == 1 else ' each'})"
        self._wall, self._updates = row["wall_s"], row["updates"]


def _counters(name: str, row: Mapping[str, Any]) -> str:
    """Format the counters. A step is an update of the agent; the model's counters are 0 if there is no model."""
    counts = dict.fromkeys(COUNTS, 0) | {"real_data": row["env_steps"], "agent_updates": row["updates"]}
    counts |= {count: row[count] for count in COUNTS if count in row}
    return " ".join([f"[{name}] step={row['updates']}", *(f"{count}={value}" for count, value in counts.items())])


class ClassicSink:
    """Prints only these lines, for runs inside a larger program. Implements sink.Sink."""

    direct = True

    def __init__(self, lines: ClassicLines) -> None:
        self._lines = lines

    def write(self, row: Mapping[str, Any]) -> None:
        for line in self._lines.of(row):
            self.note(line)

    def note(self, text: str) -> None:
        sys.stdout.write(f"{printable(text, WHITE)}\n")
        sys.stdout.flush()

    def close(self, summary: Mapping[str, Any]) -> None:
        """Print no summary."""
