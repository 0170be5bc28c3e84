"""Run `freewheel train ENV --federate ROUNDS`, from the command line to the end of the last round."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from freewheel.config import flags, resolve
from freewheel.errors import DEGRADED, DONE, FAILED, SIGNALLED, FreewheelError, UsageError
from freewheel.files.reach import check_folder
from freewheel.metrics.meter import Budget
from freewheel.run.advice.auto_mode import plan_run
from freewheel.run.advice.first_update import checked
from freewheel.run.checkpoints.checkpoint import fingerprint
from freewheel.run.evaluation.evaluator import open_evaluator
from freewheel.run.evaluation.schedule import Around, EvaluationSchedule, Verdict
from freewheel.run.plan import Plan
from freewheel.run.planning import print_line
from freewheel.run.process import import_torch
from freewheel.run.saved import lock_run
from freewheel.run.stopping.stop import Interrupted, Stop
from freewheel_ray.actors import address_check
from freewheel_ray.actors.calls import NodeSpec
from freewheel_ray.actors.cluster import Cluster, require_ray
from freewheel_ray.actors.driver import Driver
from freewheel_ray.actors.node_processes import NodeProcesses
from freewheel_ray.federate import site_config
from freewheel_ray.federate.average import weights_of
from freewheel_ray.federate.coordinator import BEGINNING, AverageEvaluations, Coordinator, FederationStart, line
from freewheel_ray.federate.message import SiteMessage
from freewheel_ray.federate.options import SITES, FederateOptions
from freewheel_ray.federate.run_dir import FederationRunDir
from freewheel_ray.federate.site_config import SiteConfig

SITE = "freewheel_ray.federate.site_process"  # the module that a site's process runs


@dataclass(frozen=True)
class Federation:
    """The complete description of a federation, known before anything starts."""

    planned: Plan  # the coordinator's plan: the environment for evaluating averages, and the policy
    sites: Sequence[SiteConfig]
    options: FederateOptions
    address: str | None
    trust: bool

    @property
    def where(self) -> str:
        return "a local Ray cluster" if self.address is None else f"Ray at {self.address}"

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        steps = {site.steps // (self.options.federate or 1) for site in self.sites}
        each = f"{min(steps):,}" if len(steps) == 1 else f"{min(steps):,} to {max(steps):,}"
        where, names = f"{len(self.sites)} sites on {self.where}", ", ".join(site.name for site in self.sites)
        return [
            *(text for text in self.planned.lines() if not text.startswith(("budget", "updates"))),
            f"federate {self.options.federate} rounds of {each} steps at each of {where}: {names}",
        ]


def read(argv: Sequence[str], options: FederateOptions, *, trust: bool) -> Federation:
    """Read a federation from a command line. Reports every mistake that can be found without the sites."""
    require_ray()
    words, own = flags.split_argv(argv, {"address": str})
    address = own["address"][0] if "address" in own else None
    config = resolve.from_argv(words, trust=trust)
    site_config.check_options(resolve.read_options(words)[1].flags, config)
    nodes = 1 if address is None or options.sites != "auto" else len(address_check.find(address).cpus)
    found = [
        site_config.site_of(table, number, words, trust=trust, source=options.sites)
        for number, table in enumerate(site_config.read(options.sites, nodes))
    ]
    _check_sites(found, options, address)
    output = config.run.output
    if not output.name:
        output = replace(output, name=f"{config.env.label}-{config.algo}-federated".replace("/", "_"))
    config = replace(config, run=replace(config.run, output=output))
    planned = checked(plan_run(config, print_line, meanwhile=import_torch))
    needed, rounds = planned.config.learner.rows_before_update(planned.learner_spec), options.federate or 1
    for site in found:
        if site.steps // rounds < needed:
            fewer = f"use --federate {site.steps // needed} or less, or more --steps"
            remedy = fewer if site.steps >= needed else "use more --steps"
            each = f"{site.steps:,} steps in {rounds} rounds are {site.steps // rounds:,} steps each"
            raise UsageError(f"site {site.name}: {each}, but the first update needs {needed:,} rows; {remedy}")
    return Federation(planned, found, options, address, trust)


def _check_sites(sites: Sequence[SiteConfig], options: FederateOptions, address: str | None) -> None:
    if options.min_sites > len(sites):
        raise UsageError(f"--min-sites {options.min_sites} is larger than the number of sites ({len(sites)})")
    for site in sites:
        if address is None and (named := next((key for key in ("node", "resources") if key in site.place), None)):
            raise UsageError(
                f"site {site.name}: {named} cannot be chosen in a local cluster of one node; use --address"
            )


def train(federation: Federation, start: FederationStart = BEGINNING) -> int:
    """Run all rounds and return the exit code. In any case the run directory is completed and all processes are ended."""
    stop = Stop()
    with stop.listening(), ExitStack() as held:
        planned = federation.planned
        if not start.round:
            planned = replace(planned, name=planned.name.claim())
        stop.begin()
        held.enter_context(lock_run(planned.path))
        check_folder(planned.path / SITES)
        return _FederationSession(replace(federation, planned=planned), stop, start).train()


class _FederationSession:
    """One session of a federation."""

    def __init__(self, federation: Federation, stop: Stop, start: FederationStart) -> None:
        self._federation = federation
        self._stop = stop
        self._start = start
        planned = federation.planned
        options = federation.options
        folder = str(federation.planned.path / SITES)
        self._record = FederationRunDir(planned)
        self._coordinator = Coordinator(
            federation.sites, options, planned.spec.layout, folder, start=start, trust=federation.trust
        )
        self._schedule: EvaluationSchedule | None = None
        self._verdict: Verdict | None = None
        self._problems: list[str] = []

    def train(self) -> int:
        ended, failure = "failed", None
        try:
            ended = self._in_cluster()
        except Interrupted:
            ended = "interrupted"
        except BaseException as error:  # noqa: BLE001 - raised again when the summary is written
            failure = error
        self._stop.over = True
        code = self._exit_code(failure)
        summary = self._summary(ended, code, failure)
        self._record.close(summary)
        if failure is not None:
            raise failure
        for text in self._closing_lines(summary):
            print_line(text)
        return code

    def _in_cluster(self) -> str:
        federation, planned = self._federation, self._federation.planned
        most = max(float(site.place.get("cpus", 1.0)) for site in federation.sites)
        print_line(f"{'starting' if federation.address is None else 'connecting to'} {federation.where} ...")
        cluster = Cluster(
            federation.address, workers=len(federation.sites), cpus_per_worker=max(1.0, most), placement="spread"
        )
        with (
            Driver(cluster) as driver,
            NodeProcesses(driver) as carrier,
            open_evaluator(planned, planned.runner_factory) as evaluator,
        ):
            around = Around(
                lambda: self._coordinator.wall_s,
                lambda: self._coordinator.wall_s,
                lambda: 0,
                print_line,
                self._stop.check,
            )
            budget = Budget(steps=sum(site.steps for site in federation.sites))
            self._schedule = EvaluationSchedule(evaluator, planned.config.run.evaluation, budget, around)
            if self._start.evaluation is not None:
                self._schedule.restore(self._start.evaluation, self._start.best)
            try:
                self._rounds(carrier)
                ended = "rounds"
            except Interrupted:
                ended = "interrupted"
                print_line("stopping all sites ...")
            finally:
                self._end(carrier)
            if ended == "rounds":
                self._evaluate_last(self._schedule)
        return ended

    def _rounds(self, carrier: NodeProcesses) -> None:
        coordinator = self._coordinator
        record = self._record
        waiting = self._stop.check
        begin = partial(self._begin, carrier)
        print_line(f"starting {len(self._federation.sites)} sites ...")
        coordinator.join(carrier, waiting, begin)
        self._print_problems({})
        assert self._schedule is not None, "the caller has made it"
        scores = AverageEvaluations(self._schedule, record, coordinator.total)
        printed = dict[str, str]()
        began = monotonic()
        while coordinator.rounds.round < coordinator.total:
            outcome = coordinator.round(carrier, waiting, begin)
            if outcome is None:
                continue
            row = coordinator.adopt(outcome)
            snapshot = record.snapshot(outcome.round, coordinator.base)
            record.save(coordinator.env_steps, snapshot)
            if outcome.round < coordinator.total:
                scores.turn(coordinator.env_steps, outcome.round, snapshot)
            record.keep(coordinator.about() | self._evaluated(self._schedule), coordinator.base)
            record.row(row | ({} if scores.newest is None else {"eval_return": scores.newest}))
            each = (monotonic() - began) / (outcome.round - self._start.round)
            print_line(line(row, coordinator.total, len(self._federation.sites), each))
            self._print_problems(printed)

    def _evaluated(self, schedule: EvaluationSchedule) -> dict[str, Any]:
        """Return the state of evaluations that a later session needs."""
        best = schedule.candidate
        return {
            "address": self._federation.address,
            "trust": self._federation.trust,
            "evaluation": schedule.state() if schedule.active else None,
            "best_version": None if best is None else best.snapshot.version,
        }

    def _begin(self, carrier: NodeProcesses, name: str) -> None:
        """Start the process of a site."""
        site = next(one for one in self._federation.sites if one.name == name)
        output = self._federation.planned.path / SITES / f"{name}.txt"
        carrier.start(name, SITE, str(output), NodeSpec(**site.place))

    def _print_problems(self, printed: dict[str, str]) -> None:
        """Print new problems of the sites. `printed` holds those that the user has seen."""
        for site in self._coordinator.rounds.sites.values():
            if site.problem and printed.get(site.name) != site.problem:
                printed[site.name] = site.problem
                print_line(f"  {site.name}: {site.problem}")

    def _end(self, carrier: NodeProcesses) -> None:
        learned = self._coordinator.base
        for name, problem in carrier.end(SiteMessage("end", {}, learned).pack()).items():
            self._problems.append(f"{name}: {problem}")

    def _evaluate_last(self, schedule: EvaluationSchedule) -> None:
        coordinator, record = self._coordinator, self._record
        last = record.snapshot(coordinator.rounds.round, coordinator.base)
        schedule.stop(coordinator.env_steps, last)
        self._verdict = schedule.close()
        if self._verdict.best is not None:
            record.save(self._verdict.best.step, self._verdict.best.snapshot, best=True)

    def _exit_code(self, failure: BaseException | None) -> int:
        if failure is not None:
            return failure.exit_code if isinstance(failure, FreewheelError) else FAILED
        if self._stop.signal is not None:
            return SIGNALLED + self._stop.signal
        return DEGRADED if self._coordinator.absent() else DONE

    def _summary(self, ended: str, code: int, failure: BaseException | None) -> dict[str, Any]:
        planned, asked = self._federation.planned, self._stop.signal
        verdict = self._verdict or (Verdict() if self._schedule is None else self._schedule.without_closing())
        base = self._coordinator.base
        weights = weights_of(base, planned.policy) if base else None
        return {
            "run": planned.path.name,
            "ended": ended if asked is None else f"{ended} ({asked.name})",
            "exit_code": code,
            "error": None if failure is None else str(failure) or repr(failure),
            "wall_s": self._coordinator.wall_s,
            "env_steps": self._coordinator.env_steps,
            **self._coordinator.summary(),
            **verdict.summary(),
            "evals_skipped": 0 if self._schedule is None else self._schedule.skipped,
            "weights_sha256": None if weights is None else fingerprint(weights),
            "path": str(planned.path),
            "problems": [*self._coordinator.absent(), *self._problems],
        }

    def _closing_lines(self, summary: dict[str, Any]) -> list[str]:
        skipped = ", ".join(f"{count} {reason}" for reason, count in summary["rounds_skipped"].items())
        missed = f"; skipped: {skipped}" if skipped else ""
        of = f"{summary['env_steps']:,} rows of {len(summary['sites'])} sites"
        lines = [f"{summary['ended']}: {summary['rounds']} rounds, {of}{missed}", *self._coordinator.absent()]
        if summary["final_eval"] is not None:
            lines.append(f"the last average returns {summary['final_eval']:.1f}, the best {summary['best_eval']:.1f}")
        return [*lines, f"run      {summary['path']}"]
