"""Decide which sites take part in each round: which are asked, which count, and which are skipped and why. This module knows no
clock, no network and no weights.

A site is *starting* until its first answer, *ready* while it waits for a round, *busy* while it trains, *lost* after it has
ended unexpectedly, and permanently *refused*. A round asks all ready sites and ends when all have answered or the time is up.
A site that has not answered by then is skipped. It continues alone, and the first round after its answer asks it again with the
newest average. The next round starts a lost site again, up to a maximum number of times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

SiteState = Literal["starting", "ready", "busy", "lost", "refused"]
#: The reasons why a site is not in the average of a round.
REASONS = ("late", "lost", "invalid", "empty", "starting", "refused")
FACTOR = 3.0  # auto: the time limit of a round is this multiple of the time that half of its sites took
LEAST = 30.0  # auto: shortest time limit in seconds


@dataclass
class SiteTotals:
    """Totals of one site over all rounds."""

    rounds: int = 0  # rounds in which the site counted
    rows: int = 0  # its rows in these rounds
    skipped: dict[str, int] = field(default_factory=dict)  # number of skipped rounds by reason


@dataclass
class SiteStatus:
    """The state of one site."""

    name: str
    state: SiteState = "starting"
    asked: int = 0  # the last round in which the site was asked
    starts: int = 1
    problem: str = ""  # text of the last problem
    tally: SiteTotals = field(default_factory=SiteTotals)


@dataclass(frozen=True)
class RoundResult:
    """The result of a round."""

    round: int
    counted: tuple[str, ...]
    skipped: dict[str, str]  # site -> one of REASONS
    enough: bool  # whether enough sites answered for an average


class FederationRounds:
    """The rounds of a federation."""

    def __init__(self, names: Sequence[str], *, least: int = 1, restarts: int = 3, done: int = 0) -> None:
        """least: sites that an average needs; restarts: how often each site may start again; done: rounds before this session."""
        self.sites = {name: SiteStatus(name) for name in names}
        self.round = done
        self._least = least
        self._restarts = restarts
        self._open = False
        self._answers: dict[str, int] = {}  # rows of the sites that count in the present round
        self._out: dict[str, str] = {}  # reasons of the asked sites that do not count
        self._asked: tuple[str, ...] = ()
        self._times: list[float] = []  # seconds from the start of the round to each answer

    def those(self, *states: SiteState) -> list[str]:
        return [name for name, site in self.sites.items() if site.state in states]

    # ------------------------------------------------------------------------------------------------------- between rounds

    def joined(self, name: str) -> None:
        """Note that a started site has answered."""
        if self.sites[name].state == "starting":
            self.sites[name].state = "ready"

    def refuse(self, name: str, problem: str) -> None:
        """Exclude a site permanently."""
        self.sites[name].state = "refused"
        self.sites[name].problem = problem
        self._leave(name, "refused")

    def to_restart(self) -> list[str]:
        """Return the lost sites that must be started again now, and count them as started."""
        found = [site for site in self.sites.values() if site.state == "lost" and site.starts <= self._restarts]
        for site in found:
            site.state = "starting"
            site.starts += 1
        return [site.name for site in found]

    @property
    def hopeless(self) -> bool:
        """Whether no site can ever answer again."""
        return all(
            site.state == "refused" or (site.state == "lost" and site.starts > self._restarts)
            for site in self.sites.values()
        )

    def begin(self) -> list[str]:
        """Begin the next round and return the sites to ask."""
        self.round += 1
        self._open = True
        self._answers = {}
        self._out = {}
        self._times = []
        self._asked = tuple(self.those("ready"))
        for name in self._asked:
            self.sites[name].state = "busy"
            self.sites[name].asked = self.round
        return list(self._asked)

    # ------------------------------------------------------------------------------------------------------------- in a round

    def answered(self, name: str, number: int, rows: int, seconds: float, problem: str = "") -> bool:
        """Note the answer of a site for round `number`, this many seconds after the present round began, and return whether it
        counts. A repeated answer, or one for an earlier round, only makes the site ready again."""
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
        """Note that a site has ended or cannot be reached."""
        if self.sites[name].state != "refused":
            self.sites[name].state = "lost"
            self.sites[name].problem = problem
            self._leave(name, "lost")

    def _leave(self, name: str, reason: str) -> None:
        if self._open and name in self._asked and name not in self._answers and name not in self._out:
            self._out[name] = reason

    @property
    def waiting(self) -> list[str]:
        """The sites of this round that have not answered."""
        return [name for name in self._asked if name not in self._answers and name not in self._out]

    def limit(self, given: float | None) -> float:
        """Return the time limit of this round in seconds: the given one, or one that follows from half of its sites."""
        if given is not None:
            return given
        half = math.ceil(len(self._asked) / 2)
        return max(LEAST, FACTOR * sorted(self._times)[half - 1]) if half and len(self._times) >= half else math.inf

    def over(self, seconds: float, given: float | None = None) -> bool:
        """Return whether the round ends now, this many seconds after it began."""
        return not self.waiting or seconds >= self.limit(given)

    def close(self) -> RoundResult:
        """End the round and return its result."""
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
    """List the skipped sites with their reasons as text."""
    return ", ".join(f"{name} {reason}" for name, reason in skipped.items())


def total_skipped(sites: Iterable[SiteStatus]) -> dict[str, int]:
    """Count the skipped rounds of all sites by reason; reasons that did not occur are left out."""
    counts = sum((Counter(site.tally.skipped) for site in sites), Counter[str]())
    return {reason: counts[reason] for reason in REASONS if counts[reason]}
