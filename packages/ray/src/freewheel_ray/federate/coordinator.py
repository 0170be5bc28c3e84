"""The coordinator. In each round it sends the sites the average, collects what they have learned, and averages that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, Protocol

from freewheel.core import NDArray, Snapshot
from freewheel.errors import FileError, FreewheelError, SetupError
from freewheel.files.read import value_of
from freewheel.policies.layout import Layout
from freewheel.run.evaluation.schedule import EvaluationSchedule
from freewheel.sinks.formats import clock
from freewheel_ray.actors.node_processes import ProcessReply
from freewheel_ray.federate.average import Contribution, average, bounded, distance
from freewheel_ray.federate.message import SiteMessage, unpack
from freewheel_ray.federate.options import FederateOptions
from freewheel_ray.federate.rounds import FederationRounds, RoundResult, SiteState, SiteTotals, shown, total_skipped
from freewheel_ray.federate.run_dir import FederationRunDir
from freewheel_ray.federate.site_config import SiteConfig
from freewheel_ray.federate.site_hook import SiteSetup

MOST = 2  # a site counts for at most this many times its rows of a round, whatever it claims
ABSENT: Mapping[SiteState, str] = {
    "lost": "it was lost and not started again",
    "starting": "it was lost, and had not answered again when the last round ended",
    "refused": "it was refused",
}
POLL = 0.1  # seconds between two checks for answers
START = 120.0  # seconds that sites have to start; then the first round begins without the others
SLOWEST = 600.0  # seconds within which at least one site must have started
PATIENCE = 3600.0  # seconds that a site waits for the coordinator if rounds have no time limit


class SiteTransport(Protocol):
    """Carries bytes to the sites and back. actors/node_processes.py implements it."""

    def ask(self, names: Sequence[str], data: bytes) -> None: ...  # every site answers once or is lost
    def answers(self, seconds: float) -> Sequence[ProcessReply]: ...  # waits at most this many seconds
    def drop(self, name: str) -> None: ...


@dataclass(frozen=True)
class FederationStart:
    """The state from which a federation begins or continues."""

    round: int = 0
    env_steps: int = 0
    learned: Mapping[str, NDArray] | None = None  # None: use the initial weights of the first site
    wall_s: float = 0.0
    sites: Mapping[str, SiteTotals] = field(default_factory=dict)  # what each site has done before
    evaluation: Mapping[str, Any] | None = None  # state of the evaluations
    best: Snapshot | None = None  # the best average so far


BEGINNING = FederationStart()


class Coordinator:
    """Runs all rounds of one federation."""

    def __init__(
        self,
        sites: Sequence[SiteConfig],
        options: FederateOptions,
        spaces: Mapping[str, Any],
        folder: str,
        *,
        start: FederationStart = BEGINNING,
        trust: bool = False,
    ) -> None:
        """spaces: the spaces of the policy's environment; folder: the folder of the sites' run directories; trust: whether sites
        may import code that options name."""
        assert options.federate is not None, "the caller has checked this"
        self.options = options
        self.total = options.federate
        self._trust = trust
        self._first = start
        self._folder = folder
        self._sites = {site.name: site for site in sites}
        self.rounds = FederationRounds(
            list(self._sites), least=options.min_sites, restarts=options.site_restarts, done=start.round
        )
        for name, tally in start.sites.items():
            self.rounds.sites[name].tally = tally
        self._spaces = spaces
        self.base: dict[str, NDArray] = dict(start.learned or {})
        self._offered: dict[str, dict[str, NDArray]] = {}  # the sites' initial weights, until there is an average
        self._found: dict[str, Contribution] = {}  # answers in the present round
        self._reports: dict[str, tuple[float, int]] = {}  # mean return and number of episodes in the present round
        self.env_steps = start.env_steps
        self.bytes_out = self.bytes_in = 0
        self._began = monotonic()
        self._asked_at = 0.0
        self.done = start.round  # rounds that are over

    @property
    def wall_s(self) -> float:
        """The time of all sessions together."""
        return self._first.wall_s + monotonic() - self._began

    # --------------------------------------------------------------------------------------------------------------- starting

    def order(self, name: str) -> bytes:
        """Return the message that starts a site. Its schedules end one round after the last, so that the coordinator ends it."""
        site, left = self._sites[name], self.total - self.rounds.round
        steps = site.steps // self.total
        own = {"steps": steps * (left + 1), "runs_dir": self._folder, "run": name}
        words = (*site.words, *(f"--{option}={value}" for option, value in own.items()))
        patience = PATIENCE if self.options.time_limit is None else START + 3 * self.options.time_limit
        order = SiteSetup(words, self._trust, steps, self.options.site_report == "returns", patience)
        return SiteMessage("order", asdict(order)).pack()

    def join(self, carrier: SiteTransport, waiting: Callable[[], None], start: Callable[[str], None]) -> None:
        """Start all sites and wait until they are ready or their time is over."""
        for name in self._sites:
            start(name)
            carrier.ask([name], self.order(name))
        while self.rounds.those("starting") and monotonic() - self._began < START:
            self.look(carrier, waiting)
        self._await_ready(carrier, waiting)
        if not self.base:
            self.base = self._offered[next(name for name in self._sites if name in self._offered)]

    def _await_ready(self, carrier: SiteTransport, waiting: Callable[[], None]) -> None:
        """Wait until at least one site can be asked."""
        began = monotonic()
        while not self.rounds.those("ready"):
            if self.rounds.hopeless:
                sites = self.rounds.sites.values()
                problems = "; ".join(f"{site.name}: {site.problem}" for site in sites if site.problem)
                raise FreewheelError(f"no site is left: {problems}")
            if self.rounds.those("lost") and not self.rounds.those("starting", "busy"):
                return  # the next round starts them again
            if monotonic() - began > SLOWEST:
                raise FreewheelError(
                    f"no site has answered for {SLOWEST:.0f} s; check that the nodes of the cluster are alive and have "
                    f"the CPUs that sites need ({', '.join(self.rounds.those('starting', 'busy'))})"
                )
            self.look(carrier, waiting)

    # ---------------------------------------------------------------------------------------------------------------- a round

    def round(
        self, carrier: SiteTransport, waiting: Callable[[], None], start: Callable[[str], None]
    ) -> RoundResult | None:
        """Play one round. Returns None if no site could be asked because all are starting again."""
        for name in self.rounds.to_restart():
            start(name)
            carrier.ask([name], self.order(name))
        self._await_ready(carrier, waiting)
        if not self.rounds.those("ready"):
            return None
        asked = self.rounds.begin()
        message = SiteMessage("round", {"round": self.rounds.round}, self.base).pack()
        self._found = {}
        self._reports = {}
        self.bytes_in = 0
        self.bytes_out = len(message) * len(asked)
        carrier.ask(asked, message)
        self._asked_at = monotonic()
        while not self.rounds.over(monotonic() - self._asked_at, self.options.time_limit):
            self.look(carrier, waiting)
        return self.rounds.close()

    def adopt(self, outcome: RoundResult) -> dict[str, Any]:
        """Average the answers and return the metrics of this round."""
        self.done = outcome.round
        counted = [self._found[name] for name in outcome.counted]
        rows, apart = sum(one.rows for one in counted), None
        if outcome.enough:
            mean = average(self.base, counted)
            apart = distance(mean, counted)
            self.base = mean
            self.env_steps += rows
        episodes = sum(count for _, count in self._reports.values())
        returns = math.fsum(mean * count for mean, count in self._reports.values()) / episodes if episodes else None
        return {
            "round": outcome.round,
            "wall_s": round(self.wall_s, 3),
            "round_s": round(monotonic() - self._asked_at, 3),
            "env_steps": self.env_steps,
            "rows": rows,
            "sites": len(counted),
            "averaged": outcome.enough,
            "skipped": outcome.skipped,
            "restarts": sum(site.starts - 1 for site in self.rounds.sites.values()),
            "bytes_out": self.bytes_out,
            "bytes_in": self.bytes_in,
            "distance": apart,
            **({"return_mean": returns, "return_episodes": episodes} if episodes else {}),
        }

    def look(self, carrier: SiteTransport, waiting: Callable[[], None]) -> None:
        """Handle the answers that have arrived."""
        waiting()
        for answer in carrier.answers(POLL):
            self.bytes_in += len(answer.data)
            self._answered(carrier, answer)

    def _answered(self, carrier: SiteTransport, answer: ProcessReply) -> None:
        name, site = answer.name, self.rounds.sites[answer.name]
        if not answer.data:
            self.rounds.lost(name, answer.problem)
            carrier.drop(name)
        elif site.state == "starting":
            self._started(carrier, name, answer.data)
        else:
            self._learned(carrier, name, answer.data)

    def _started(self, carrier: SiteTransport, name: str, data: bytes) -> None:
        try:
            message = unpack(data, name, "ready", "failed", known=self.base or next(iter(self._offered.values()), None))
            problem = str(message.values.get("problem")) if message.kind == "failed" else self._misfit(name, message)
        except FileError as error:
            problem = str(error)
        if not problem:
            self._offered[name] = dict(message.arrays)
            self.rounds.joined(name)
            return
        if not self.rounds.round:
            raise SetupError(f"site {name} cannot take part: {problem}")
        self.rounds.refuse(name, problem)
        carrier.drop(name)

    def _misfit(self, name: str, message: SiteMessage) -> str:
        """Describe how the environment of a site differs from the coordinator's. Returns an empty text if they fit."""
        if not message.arrays:
            return "it sent no weights"
        theirs = Layout.from_json(message.values.get("spaces"), f"the spaces of {name}")
        return Layout.from_json(self._spaces).misfit(theirs).replace("the policy", "the federation's policy", 1)

    def _learned(self, carrier: SiteTransport, name: str, data: bytes) -> None:
        number = self.rounds.sites[name].asked
        rows = 0
        problem = ""
        try:
            message = unpack(data, name, "learned", "failed", known=self.base)
            if message.kind == "failed":
                self.rounds.lost(name, f"its training failed: {message.values.get('problem')}")
                carrier.drop(name)
                return
            number, rows = (value_of(int, message.values.get(key), f"{key} of {name}") for key in ("round", "rows"))
            if not message.arrays:
                raise FileError(f"{name} sent no weights")
            rows, learned = self._weight(name, rows, message.arrays)
        except FileError as error:
            problem = str(error)
        if self.rounds.answered(name, number, rows, monotonic() - self._asked_at, problem):
            self._found[name] = Contribution(learned, rows)
            mean, episodes = message.values.get("return"), message.values.get("episodes")
            if self.options.site_report == "returns" and isinstance(mean, float) and isinstance(episodes, int):
                self._reports[name] = mean, episodes

    def _weight(self, name: str, rows: int, learned: Mapping[str, NDArray]) -> tuple[int, dict[str, NDArray]]:
        """Limit the rows and statistics of a site to MOST times the rows of its round, whatever it claims."""
        steps = self._sites[name].steps
        if rows > MOST * steps:
            raise FileError(f"{name} claims {rows:,} rows in a round, but has only {steps:,} steps for all rounds")
        most = MOST * (steps // self.total)
        try:
            return min(rows, most), bounded(learned, most)
        except ValueError as error:
            raise FileError(f"{name}: {error}") from None

    # ---------------------------------------------------------------------------------------------------------------- reports

    def about(self) -> dict[str, Any]:
        """Return the contents of federation.json."""
        return {
            "rounds": self.total,
            "round": self.done,
            "env_steps": self.env_steps,
            "wall_s": round(self.wall_s, 3),
            "options": asdict(self.options),
            "sites": {name: {**asdict(site), **self.describe(name)} for name, site in self._sites.items()},
        }

    def describe(self, name: str) -> dict[str, Any]:
        """Return the state and the totals of a site."""
        known = self.rounds.sites[name]
        return {"state": known.state, **asdict(known.tally), "starts": known.starts, "problem": known.problem or None}

    def absent(self) -> list[str]:
        """Describe the sites that did not take part at the end."""
        sites = (self.rounds.sites[name] for name in self.rounds.those(*ABSENT))
        return [f"{site.name}: {ABSENT[site.state]} ({site.problem or 'it did not answer'})" for site in sites]

    def summary(self) -> dict[str, Any]:
        """Return the totals over all rounds for summary.json."""
        return {
            "rounds": self.done,
            "rounds_skipped": total_skipped(self.rounds.sites.values()),
            "site_restarts": sum(site.starts - 1 for site in self.rounds.sites.values()),
            "sites": {name: self.describe(name) for name in self._sites},
        }


def line(row: Mapping[str, Any], total: int, sites: int, each: float) -> str:
    """Describe a round and the time that is left. `each` is the total time of a round in seconds."""
    left = (total - row["round"]) * each
    apart = "" if row["distance"] is None else f"  apart {100 * row['distance']:.2g} %"
    returned = f"  return {row['return_mean']:.1f}" if "return_mean" in row else ""
    skipped = f"  skipped: {shown(row['skipped'])}" if row["skipped"] else ""
    few = "" if row["averaged"] else "  too few for an average"
    eta = f"  left {clock(left)}" if row["round"] < total else ""
    mine = f"{row['sites']} of {sites} sites  {row['rows']:,} rows  {row['round_s']:.1f} s"
    return f"round {row['round']} of {total}  {mine}{apart}{returned}{skipped}{few}{eta}"


class AverageEvaluations:
    """Evaluates the averages in the coordinator."""

    def __init__(self, schedule: EvaluationSchedule, record: FederationRunDir, total: int) -> None:
        self._schedule = schedule
        self._record = record
        self._total = total
        self.newest: float | None = None

    def turn(self, step: int, number: int, snapshot: Snapshot) -> None:
        """After a round, start evaluations that are due and take the scores of those that have ended."""
        for found in self._schedule.turn(step, number / self._total, lambda: snapshot):
            self.newest = found.score.mean
            if found is self._schedule.candidate:
                self._record.save(found.step, found.snapshot, best=True)
