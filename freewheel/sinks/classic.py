"""Progress in the words of the trainers that people come from: counters of a model-based one, episodes of the others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from freewheel.errors import printable
from freewheel.files.output import WHITE
from freewheel.metrics.names import COUNTS


class ClassicLines:
    """Lines about each row of metrics.

    With a replay buffer or a model the counters, after `name`: [AsyncMBPO] step=1000 real_data=5000 ... Where updates are made
    from batches: 10/100 episodes (15.2 eps/sec), and update 3 complete (0.3 s). `episodes` is the whole number of them, of which
    `before` were played before this run.
    """

    def __init__(self, name: str = "", *, episodes: int | None = None, before: int = 0) -> None:
        self._name, self._episodes, self._before = name, episodes, before
        self._wall, self._updates = 0.0, 0

    def of(self, row: Mapping[str, Any]) -> Iterable[str]:
        """The lines about one row."""
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
    """A step is an update of the agent; the counters of the model are 0 where there is none."""
    counts = dict.fromkeys(COUNTS, 0) | {"real_data": row["env_steps"], "agent_updates": row["updates"]}
    counts |= {count: row[count] for count in COUNTS if count in row}
    return " ".join([f"[{name}] step={row['updates']}", *(f"{count}={value}" for count, value in counts.items())])


class ClassicSink:
    """Prints these lines and nothing else, for runs that are part of something larger. Implements sink.Sink."""

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
        """There is no summary."""
