"""Which sites take part in which round: who is asked, who counts, who is skipped and why. No clock, no network, no weights.

A site is *starting* until it has answered for the first time, *ready* when it waits for the next round, *busy* while it trains,
*lost* when it has ended by itself, and *refused* for good. A round asks all that are ready. It ends when all have answered or
the time is up; whoever has not answered by then is skipped, goes on alone, and is asked again in the first round after its
answer, with the newest average. A lost site is started again at the next round, so many times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

SiteState = Literal["starting", "ready", "busy", "lost", "refused"]
#: Why a site is not in the average of a round.
REASONS = ("late", "lost", "invalid", "empty", "starting", "refused")
FACTOR, LEAST = 3.0, 30.0  # auto: a round may take so many times as long as half of its sites, at least so many seconds


@dataclass
class SiteTotals:
    """What a site has done in all rounds."""

    rounds: int = 0  # in which it counted
    rows: int = 0  # in these rounds
    skipped: dict[str, int] = field(default_factory=dict)  # rounds, by reason


@dataclass
class SiteStatus:
    """What is known of one site."""

    name: str
    state: SiteState = "starting"
    asked: int = 0  # the round that it was asked for last
    starts: int = 1
    problem: str = ""  # the last one, in words
    tally: SiteTotals = field(default_factory=SiteTotals)


@dataclass(frozen=True)
class RoundResult:
    """A round that is over."""

    round: int
    counted: tuple[str, ...]
    skipped: dict[str, str]  # site -> one of REASONS
    enough: bool  # whether there are enough sites for an average


class FederationRounds:
    """The rounds of a federation."""

    def __init__(self, names: Sequence[str], *, least: int = 1, restarts: int = 3, done: int = 0) -> None:
        """least: sites that an average needs; restarts: of each site; done: rounds before."""
        self.sites = {name: SiteStatus(name) for name in names}
        self.round, self._least, self._restarts = done, least, restarts
        self._open = False
        self._answers: dict[str, int] = {}  # rows, of those that count in the present round
        self._out: dict[str, str] = {}  # reasons of those that have answered and do not count
        self._asked: tuple[str, ...] = ()
        self._times: list[float] = []  # seconds from the beginning of the round to each answer

    def those(self, *states: SiteState) -> list[str]:
        return [name for name, site in self.sites.items() if site.state in states]

    # ------------------------------------------------------------------------------------------------------- between rounds

    def joined(self, name: str) -> None:
        """A site that was started has answered."""
        if self.sites[name].state == "starting":
            self.sites[name].state = "ready"

    def refuse(self, name: str, problem: str) -> None:
        """A site that can never take part."""
        self.sites[name].state, self.sites[name].problem = "refused", problem
        self._leave(name, "refused")

    def to_restart(self) -> list[str]:
        """Lost sites that are to be started again now; they count as started."""
        found = [site for site in self.sites.values() if site.state == "lost" and site.starts <= self._restarts]
        for site in found:
            site.state, site.starts = "starting", site.starts + 1
        return [site.name for site in found]

    @property
    def hopeless(self) -> bool:
        """Whether no site will ever answer again."""
        return all(
            site.state == "refused" or (site.state == "lost" and site.starts > self._restarts)
            for site in self.sites.values()
        )

    def begin(self) -> list[str]:
        """The next round: the sites to ask."""
        self.round += 1
        self._open, self._answers, self._out, self._times = True, {}, {}, []
        self._asked = tuple(self.those("ready"))
        for name in self._asked:
            self.sites[name].state, self.sites[name].asked = "busy", self.round
        return list(self._asked)

    # ------------------------------------------------------------------------------------------------------------- in a round

    def answered(self, name: str, number: int, rows: int, seconds: float, problem: str = "") -> bool:
        """A site has answered for round `number`, so many seconds after the present one began; whether it counts. A second answer
        and one that comes after its round change nothing but that the site is ready again."""
        site = self.sites[name]
        if site.state != "busy" or number != site.asked:
            return False
        site.state = "ready"
        if not self._open or number != self.round:
            return False
        self._times.append(seconds)
        if problem or rows <= 0:
            site.problem = problem or site.problem
            self._out[name] = "invalid" if problem else "empty"
            return False
        self._answers[name] = rows
        return True

    def lost(self, name: str, problem: str) -> None:
        """A site has ended, or cannot be reached any more."""
        if self.sites[name].state != "refused":
            self.sites[name].state, self.sites[name].problem = "lost", problem
            self._leave(name, "lost")

    def _leave(self, name: str, reason: str) -> None:
        if self._open and name in self._asked and name not in self._answers and name not in self._out:
            self._out[name] = reason

    @property
    def waiting(self) -> list[str]:
        """Sites of this round that have not answered."""
        return [name for name in self._asked if name not in self._answers and name not in self._out]

    def limit(self, given: float | None) -> float:
        """Seconds that this round may take: those that are given, else by the time that half of its sites took."""
        if given is not None:
            return given
        half = math.ceil(len(self._asked) / 2)
        return max(LEAST, FACTOR * sorted(self._times)[half - 1]) if half and len(self._times) >= half else math.inf

    def over(self, seconds: float, given: float | None = None) -> bool:
        """Whether the round ends now, so many seconds after it began."""
        return not self.waiting or seconds >= self.limit(given)

    def close(self) -> RoundResult:
        """End the round."""
        self._open = False
        skipped = {name: self._reason(name) for name in self.sites if name not in self._answers}
        enough = len(self._answers) >= self._least
        for name, reason in skipped.items():
            tally = self.sites[name].tally
            tally.skipped[reason] = tally.skipped.get(reason, 0) + 1
        for name, rows in self._answers.items() if enough else ():
            self.sites[name].tally.rounds += 1
            self.sites[name].tally.rows += rows
        return RoundResult(self.round, tuple(name for name in self.sites if name in self._answers), skipped, enough)

    def _reason(self, name: str) -> str:
        if name in self._out:
            return self._out[name]
        state = self.sites[name].state
        return "late" if state in ("busy", "ready") else state


def shown(skipped: dict[str, str]) -> str:
    """Who was skipped and why, in words."""
    return ", ".join(f"{name} {reason}" for name, reason in skipped.items())


def total_skipped(sites: Iterable[SiteStatus]) -> dict[str, int]:
    """Skipped rounds of all sites by reason, those that occurred."""
    counts = sum((Counter(site.tally.skipped) for site in sites), Counter[str]())
    return {reason: counts[reason] for reason in REASONS if counts[reason]}
