"""Show the progress of a workflow search: a live panel on a terminal, and otherwise a plain line every few seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freewheel.sinks.formats import clock
from freewheel_cage2.workflow.envs import CANONICAL
from freewheel_cage2.workflow.search import Proposal, WorkflowSearch
from freewheel_cage2.workflow.trials import workflow

LINE_EVERY = 5.0  # seconds between two plain lines
WIDTH = 88  # maximum width of the panel


def which_trial(search: WorkflowSearch, proposal: Proposal) -> str:
    """Return text such as "trial 3 of about 10". The estimate assumes that later trials are as long as the earlier ones."""
    exact = {"plain": 1, "canonical": len(CANONICAL)}.get(search.rules.strategy)
    if exact is not None:
        return f"trial {proposal.number + 1} of {exact}"
    made = len(search.trials)
    mean = search.spent / made if made else proposal.episodes
    later = search.left - mean  # episodes that are left after the next trial
    more = math.ceil(later / mean) if later >= search.rules.least_episodes else 0
    return f"trial {proposal.number + 1} of about {made + 1 + more}"


class TrialProgress:
    """Shows the metrics of a trial and the progress of the search. Implements sink.Sink."""

    direct = True

    def __init__(
        self,
        console: Console,
        search: WorkflowSearch,
        proposal: Proposal,
        session: tuple[float, int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`session`: the time by `now` at which this session of the search began, and the episodes that were played before."""
        self._console = console
        self._search = search
        self._proposal = proposal
        self._now = now
        self._session = session
        self._before = search.spent
        self._which = which_trial(search, proposal)
        self._wall = 0.0
        self._updates = 0
        self._next = now() + LINE_EVERY
        self._seconds: float | None = None  # duration of an update
        self._live: Live | None = None

    def write(self, row: Mapping[str, Any]) -> None:
        updates, seconds = row["updates"] - self._updates, row["wall_s"] - self._wall
        if updates > 0:
            self._seconds = (row.get("time/learner_update") or 0.0) * seconds / updates
        self._wall = row["wall_s"]
        self._updates = row["updates"]
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._show(row)
        elif self._now() >= self._next:
            self._next = self._now() + LINE_EVERY
            played = f"{row['episodes']:,}/{self._proposal.episodes:,} episodes"
            searched = f"search {self._share(row):.0%}, eta {clock(self._left(row))}"
            self._console.print(
                f"  {played}  {'  '.join(self._figures(row))}  {searched}", markup=False, soft_wrap=True
            )

    def note(self, text: str) -> None:
        """Print nothing: the messages of trainings are in their run directories."""

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, row: Mapping[str, Any]) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        bars = Table.grid(padding=(0, 2), expand=True)
        bars.add_column()
        bars.add_column(ratio=1)
        for _ in range(2):
            bars.add_column(justify="right")
        total = self._search.rules.total_episodes
        for name, done, of in (
            (self._which, row["episodes"], self._proposal.episodes),
            ("search", self._before + row["episodes"], total),
        ):
            bar = ProgressBar(total=1.0, completed=min(done / of, 1.0), complete_style="green")
            left = f"eta {clock(self._left(row))}" if name == "search" else ""
            bars.add_row(Text(name, "bold"), bar, f"{done:,} / {of:,} episodes", Text(left, "cyan"))
        title = Text(workflow(self._proposal.order), "bold")
        body = Group(bars, "", Text("   ".join(self._figures(row))))
        self._live.update(Panel(body, title=title, padding=(0, 1), width=min(self._console.width, WIDTH)), refresh=True)

    def _figures(self, row: Mapping[str, Any]) -> list[str]:
        figures = [f"{row['episodes_per_s'] or 0.0:.3g} episodes/s"]
        if self._seconds is not None:
            figures.append(f"update {self._updates} in {self._seconds:.2g} s")
        known = [(name, row.get(f"measure/{name}")) for name in ("env_return", "compliance")]
        figures += [f"{name.replace('_', ' ')} {value:.3g}" for name, value in known if value is not None]
        if "evaluating/episodes" in row:
            figures.append(f"evaluating {row['evaluating/ended']}/{row['evaluating/episodes']}")
        return figures

    def _share(self, row: Mapping[str, Any]) -> float:
        done: int = self._before + row["episodes"]
        return min(done / self._search.rules.total_episodes, 1.0)

    def _left(self, row: Mapping[str, Any]) -> float | None:
        """Return the seconds until all episodes are played at the rate of this session, or None if that is unknown."""
        began, before = self._session
        done: int = self._before + row["episodes"]
        if done <= before:
            return None
        return (self._now() - began) / (done - before) * max(self._search.rules.total_episodes - done, 0)
