"""Planning: measures the environment, chooses what was left open, and reports every mistake that needs no start."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

from freewheel.collect.mode import MODES
from freewheel.collect.workers import WorkersConfig, require_room
from freewheel.config.auto import check_publications, lighter, settle, sooner, with_publications
from freewheel.config.resolve import Config
from freewheel.core import EnvSpec
from freewheel.envs.family import imported_by_workers
from freewheel.errors import SetupError, UsageError, printable
from freewheel.files.memory import Need
from freewheel.files.stdout import WHITE
from freewheel.policies.spec import PolicySpec, actor_layout, check_weights, head_layout, statistics_layout
from freewheel.rollout.factory import MakeEnv, SideBySide, WorkerSpec
from freewheel.rollout.probe import BUDGET, EnvCost, measured, usable_cores
from freewheel.run.advice.keeping_up import keeping_up
from freewheel.run.advice.limits import check_learner, check_machine, check_sizes
from freewheel.run.advice.measured_costs import Known, recall, remember, seconds
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.checkpoint import Checkpoint
from freewheel.run.learners.devices import placed_or_substituted, task_beside
from freewheel.run.learners.share import check_together, evenly
from freewheel.run.naming import RunName, locate, name_run
from freewheel.run.plan import Plan, nothing
from freewheel.run.policy import read_spec
from freewheel.transport.survey import Survey

Report: TypeAlias = Callable[[str], None]


def silent(text: str) -> None:
    """Report nothing."""


def print_line(text: str) -> None:
    """Print the report."""
    sys.stdout.write(f"{printable(text, WHITE)}\n")
    sys.stdout.flush()


def arrange(config: Config, cost: EnvCost, name: RunName, device: str) -> Plan:
    """Make the plan for a measured environment."""
    cost = replace(cost, batched=config.env.batched)
    remarks = [*config.policy.remarks(cost.spec), *config.collector.remarks(cost)]
    learners = config.run.machine.learners
    config = replace(config, collector=evenly(config.collector.planned(cost), config.collector, learners))
    spec = replace(cost.spec, lanes=config.collector.lanes, model_task=task_beside(cost.spec, device))
    spec.check_context(config.run.contexts)
    init = _initial_weights(config)
    given, fitted = sooner(config if init is None else _as_in(config, init), cost)
    config = with_publications(settle(given, spec), spec)
    policy = config.policy.resolve(spec)
    planned = Plan(config, spec, policy, name, device, init, cost, tuple(remarks))
    if (threads := config.run.machine.threads) > usable_cores():
        fitted.append(f"--threads {threads}: there are {usable_cores()} cores, so {usable_cores()} are used")
    if not config.collector.elsewhere:
        require_room(cost, spec.lanes, planned.workers)
        check_machine(config, planned.env_processes)
    check_learner(config, planned.learner_spec, [Need(spec.lanes, "envs", cost.memory, "--num-envs")])
    _check_weights(config, policy, init)
    planned = keeping_up(planned, lighter(given, config))
    planned = replace(planned, remarks=(*remarks, *fitted, *config.collector.size_notes(planned.batch)))
    check_publications(config, planned.batch.rows)
    _check_recording(config, spec)
    return planned


def plan(
    config: Config,
    report: Report = silent,
    meanwhile: Callable[[], object] = nothing,
    run: Path | None = None,
    arranged: Callable[[Config, EnvCost, RunName, str], Plan] = arrange,
) -> Plan:
    """Make the plan; every mistake that can be found without starting anything is reported here.

    `report` gets progress lines for the user. `meanwhile` is called while the environment is measured. `run` is the
    directory of a run that is resumed or restarted. `arranged` makes the plan from the measured cost.
    """
    config.collector.require()
    check_sizes(config)
    check_together(config)
    name = name_run(config) if run is None else RunName(run.parent, run.name, exact=True)
    config, device = placed_or_substituted(config)
    _initial_weights(config)  # reports unreadable weights before any process is started
    budget = None if arranged is arrange else BUDGET  # any other `arranged` compares modes by the measurement
    known = recall(config, budget)
    verb = "opening" if config.env.on_device or known else "measuring"
    told = f", measured here on {known.when} (`freewheel check` measures again)" if known else ""
    report(f"{verb} {config.env.label}{told} ...")
    cost = survey_env(config, meanwhile, budget=budget, known=known, report=report)
    return arranged(config, cost, name, device)


def survey_env(
    config: Config,
    meanwhile: Callable[[], object] = nothing,
    budget: float | None = None,
    lanes: int = 1,
    known: Known | None = None,
    report: Report = silent,
) -> EnvCost:
    """Measure the cost of the environment for about `budget` seconds in a separate process, except a simulator's. With
    several lanes, the times are for a step of all of them. The limit of the run's minutes holds here, too.

    By default it takes as long as the mode needs: if every number is given, the environment is only tried out, and a
    slow step is not awaited. If `known` holds earlier numbers, the environment is only made and reset.

    An env that cannot be sent to a process is measured here, without time-outs, if the mode would also run it here.
    """
    if config.env.on_device:
        return EnvCost(spec=_simulator(config), wall=0.0, row=0.0, cpu=0.0)
    env, mode, workers = config.env, config.collector, isinstance(config.collector, WorkersConfig)
    make: MakeEnv = env.make if lanes == 1 else SideBySide(env.make, lanes)
    where = WorkerSpec(timeouts=env.timeouts, modules=imported_by_workers(env))
    tried_out = budget is None and not mode.needs_step_time
    hurried = tried_out or (isinstance(mode, WorkersConfig) and mode.workers != "auto")
    budget = seconds(config, budget)
    try:
        survey = Survey(make, env.label, where, budget=budget, patient=workers, hurried=hurried)
    except SetupError:
        if workers:
            raise
        with measured(make, 0, budget=budget) as cost:
            return replace(cost, portable=False)
    with survey.within(60 * (config.run.budget.minutes or math.inf), report):
        meanwhile()
        cost = survey.result(opened=known is not None)
    if known is not None:
        return replace(cost, **known.numbers)
    if lanes == 1:
        remember(config, budget, cost)
    return cost


def _simulator(config: Config) -> EnvSpec:
    """Return the spec of a simulator that steps all lanes at once."""
    if not MODES[config.mode].simulators:
        name = config.env.label
        raise UsageError(f"{name} steps all its lanes at once: use --mode continuous instead of {config.mode}")
    with closing(config.env.make(range(1))) as one:
        return one.spec


def _initial_weights(config: Config) -> Checkpoint | None:
    """Load the weights that --init names."""
    if not (name := config.run.init):
        return None
    place = locate(name, config.run.output.runs_dir)
    return checkpoint.load(place.checkpoints, place.which)


def _as_in(config: Config, init: Checkpoint) -> Config:
    """Return the config with the observation normalisation of the initial weights, unless the user has chosen one."""
    if config.policy.normalize_obs != "auto":
        return config
    normalised = bool(read_spec(init).normalised)
    sources = {**config.sources, "policy.normalize_obs": f"init {config.run.init}"}
    return replace(config, policy=replace(config.policy, normalize_obs=normalised), sources=sources)


def _check_weights(config: Config, policy: PolicySpec, init: Checkpoint | None) -> None:
    """Raise SetupError if the initial weights belong to a different network."""
    if init is None:
        return
    here, there = asdict(policy), asdict(read_spec(init))
    for what in here:
        if here[what] != there[what] and what != "log_std":  # log_std is only an initial value
            differs = f"{what} is {there[what]} there and {here[what]} here"
            remedy = "use the same environment and --policy options"
            raise SetupError(f"--init {config.run.init} has another network ({differs}): {remedy}")
    layout = statistics_layout(policy) | head_layout(policy) if policy.module else actor_layout(policy)
    check_weights(layout, init.params, str(init.path / checkpoint.WEIGHTS))


def _check_recording(config: Config, spec: EnvSpec) -> None:
    """Raise UsageError if the schedule of this run cannot be recorded."""
    if config.run.output.record_schedule and spec.batched_on_device:
        reason = f"{spec.name} steps all its lanes on a device"
        raise UsageError(f"--record-schedule is for environments that run on the CPU; {reason}")
