"""The plan of a run: a Config resolved for this environment and this machine, before anything is started."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from freewheel.collect.mode import MODES
from freewheel.collect.workers import WorkersConfig, require_room, worker_cores
from freewheel.config.auto import check_publications, kind_of, lighter, settle, sooner, with_publications
from freewheel.config.resolve import DEFAULT_STEPS, Config
from freewheel.core import BatchSpec, EnvSpec, Snapshot
from freewheel.envs.family import imported_by_workers
from freewheel.errors import SetupError, UsageError, printable
from freewheel.files.memory import Need
from freewheel.files.output import WHITE
from freewheel.learn.spec import Compute, LearnerSpec, ReplayConfig, WorldFacts
from freewheel.metrics.targets import Setup
from freewheel.policies.numpy_actor import make_actor, make_tensor_actor
from freewheel.policies.spec import (
    PolicySpec,
    StartWeights,
    actor_layout,
    check_weights,
    head_layout,
    statistics_layout,
)
from freewheel.rollout.factory import CollectSpec, MakeEnv, RunnerFactory, SideBySide, SimulationSpec, WorkerSpec
from freewheel.rollout.probe import BUDGET, EnvCost, measured, usable_cores
from freewheel.run.advice.limits import check_learner, check_machine, check_sizes
from freewheel.run.advice.pace import keeping_up
from freewheel.run.advice.remembered import Known, recall, remember, seconds
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.checkpoint import Checkpoint
from freewheel.run.learners.devices import placed_or_substituted, task_beside
from freewheel.run.learners.share import ALL, Share, check_together, described, evenly
from freewheel.run.naming import RunName, locate, name_run
from freewheel.run.policy import read_spec
from freewheel.run.process import yield_further
from freewheel.seeding import tree
from freewheel.transport.survey import Survey

NICE = 5  # added to the niceness of compute-bound workers if there are more of them than cores

Report: TypeAlias = Callable[[str], None]


def silent(text: str) -> None:
    """Report nothing."""


def print_line(text: str) -> None:
    """Print the report."""
    sys.stdout.write(f"{printable(text, WHITE)}\n")
    sys.stdout.flush()


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Plan:
    """A Config resolved for this environment and this machine; nothing is started yet."""

    config: Config
    spec: EnvSpec
    policy: PolicySpec
    name: RunName
    device: str
    init: Checkpoint | None = None  # the initial weights; None: random ones
    cost: EnvCost | None = None  # of one environment; zeros for a simulator of all lanes
    remarks: tuple[str, ...] = ()  # notes about given or chosen numbers
    share: Share = ALL  # this learner's part of the run if several learners train together

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.name.path

    @property
    def batch(self) -> BatchSpec:
        """The rows of one update."""
        steps, episodes = self.config.run.steps_per_env, self.config.collector.episodes_per_update
        return BatchSpec(steps=steps, lanes=self.spec.lanes, episodes=episodes, max_lag=self.max_lag)

    @property
    def learner_spec(self) -> LearnerSpec:
        """The facts about the run that the learner needs."""
        run, name, spec = self.config.run, self.config.env.label, self.spec
        return LearnerSpec(
            policy=self.policy,
            batch=self.batch,
            seed=run.seed,
            total_steps=self.share.of(self.config.horizon),
            compute=Compute(device=self.device, compile=run.machine.compile),
            world=WorldFacts(
                name=name,
                batched_on_device=spec.batched_on_device,
                has_final_obs=spec.has_final_obs,
                slices=spec.slices,
                model_task=spec.model_task,
            ),
            start=None if self.init is None else StartWeights(self.init.params, self.init.step),
        )

    @property
    def max_lag(self) -> int | None:
        """The bound on the policy lag that the mode enforces, if any; None with a replay buffer, which needs none."""
        return self.config.collector.max_lag if self.config.learner.on_policy else None

    @property
    def gpus(self) -> list[str]:
        """The GPUs of this learner and its simulator, the learner's first; a single one if they share it."""
        both = self.device, self.spec.device if self.spec.batched_on_device else "cpu"
        return [device for device in dict.fromkeys(both) if device != "cpu"]

    @property
    def workers(self) -> int:
        """The number of processes that act; 1, the trainer itself, without worker processes."""
        return 1 if self.worker_config is None else self.worker_config.worker_count

    @property
    def env_processes(self) -> int:
        """The number of processes that step environments; 0: the trainer steps them itself."""
        return 0 if self.spec.batched_on_device else self.config.collector.env_processes

    @property
    def worker_config(self) -> WorkersConfig | None:
        """The numbers of workers and their envs; None without worker processes, as with a batched simulator."""
        collect = self.config.collector
        return collect if isinstance(collect, WorkersConfig) and not self.spec.batched_on_device else None

    @property
    def actors(self) -> str:
        """Describe for the user what is started to act."""
        if self.spec.batched_on_device:
            return f"a simulation of {self.spec.lanes} lanes on {self.spec.device}"
        line = self.config.collector.plan_line()
        line = line if self.share.count == 1 else f"{self.share.count} learners, each with {line}"
        if self.worker_config is None:
            return line
        line += f", {self.turns} at a time" if self.turns else ""
        first = {"learner": " at lower priority", "workers": " at higher priority", None: ""}[self.yields]
        return f"{line}; the learner {f'shares them{first}' if self.workers >= self.cores else 'has a core'}"

    @property
    def turns(self) -> int:
        """The number of workers that act at a time, in turn; 0: all. More compute-bound workers than cores would only
        compete with each other and with the learner."""
        if self.config.collector.elsewhere:
            return 0
        computes = self.cost is not None and self.cost.computes and self.worker_config is not None
        too_many = computes and self.workers > self.cores and MODES[self.config.mode].free_running
        return self.cores if too_many else 0

    @property
    def cores(self) -> int:
        """This learner's share of the machine's cores."""
        return max(1, usable_cores() // self.share.local)

    @property
    def yields(self) -> Literal["learner", "workers"] | None:
        """Who gets a lower priority if there are more workers than cores: the learner, so that waiting workers wake in
        time, or compute-bound workers, which would otherwise starve it."""
        if self.workers <= self.cores or self.config.collector.elsewhere:
            return None
        return "workers" if self.cost is not None and self.cost.computes else "learner"

    @property
    def worker_spec(self) -> WorkerSpec:
        """Settings of worker processes."""
        env, nice = self.config.env, NICE if self.yields == "workers" else 0
        return WorkerSpec(timeouts=env.timeouts, modules=imported_by_workers(env), nice=nice, turns=self.turns)

    @property
    def setup(self) -> Setup:
        """The facts that decide which targets the run can reach."""
        learner, spec, run, workers = self.config.learner, self.learner_spec, self.config.run, self.worker_config
        replay = learner if isinstance(learner, ReplayConfig) else None
        rows = None if self.batch.episodes is not None else float(self.batch.rows)
        kept = None if replay is None else replay.rows_kept(spec)
        return Setup(
            mode=self.config.mode,
            algo=self.config.algo,
            workers=self.env_processes or 1,
            in_turn=workers is None and not self.spec.batched_on_device,
            cores=self.cores,
            device=self.device,
            worker_cores=None if self.cost is None or workers is None else worker_cores(self.cost),
            rows_per_update=rows if replay is None else 1.0 / replay.ratio,
            learning_starts=0 if replay is None else replay.learning_starts,
            replay_rows=kept,
            replay_filled=self.config.horizon,
            threads=run.machine.threads,
            log_every=run.output.log_every,
        )

    def collect_spec(self, snapshot: Snapshot, while_waiting: Callable[[], None]) -> CollectSpec:
        """Return the collector's task. Built-in actors load a part of a snapshot, a user's module loads all of it."""
        needed = snapshot.params if self.policy.module else actor_layout(self.policy)
        run = self.config.run
        reserved = 0  # lanes kept for evaluations if a process can have only one simulation
        if self.spec.one_per_process and run.evaluation.evals:
            reserved = min(run.evaluation.eval_episodes, max(1, self.spec.lanes // 8))
        compiled, in_main = run.machine.compile, self.config.env.main_thread
        return CollectSpec(
            env=self.spec,
            batch=self.batch,
            weights={name: tuple(snapshot.params[name].shape) for name in needed},
            context=run.contexts,
            on_policy=self.config.learner.on_policy,
            whole=self._whole,
            longest=self._longest,
            workers=self.worker_spec,
            simulation=SimulationSpec(
                compile=compiled, reserved_lanes=reserved, main_thread=in_main, deliver_to=self.device
            ),
            while_waiting=while_waiting,
            time_to_spare=yield_further if self.yields == "learner" else nothing,
        )

    @property
    def _whole(self) -> int | None:
        """The rows of all updates, if known. Several learners decide together when the run ends, so it is None."""
        steps, known = self.config.run.budget.steps, self.config.learner.on_policy and self.batch.episodes is None
        return -(-steps // self.batch.rows) * self.batch.rows if steps and known and self.share.count == 1 else None

    @property
    def _longest(self) -> int | None:
        """If episodes have no known limit: the steps of the run, but at least --eval-max-steps. Otherwise None."""
        steps = self.config.run.budget.steps or DEFAULT_STEPS
        return None if self.config.env.episode_limit else max(self.config.run.evaluation.eval_max_steps, steps)

    @property
    def runner_factory(self) -> RunnerFactory:
        """Builds environments and actors in the process or thread where they run."""
        seed, policy = self.config.run.seed, self.policy
        on_device = self.spec.batched_on_device
        first_lane, first_worker = self.share.rank * self.spec.lanes, self.share.rank * self.workers
        own = tree(seed, "actor", first_worker)
        actor = make_tensor_actor(policy, self.spec.device, own) if on_device else make_actor(policy)
        return RunnerFactory(self.config.env.make, actor, seed, first_lane, first_worker)

    @property
    def defaults_line(self) -> str:
        """One line about the defaults chosen for this kind of world; empty if the user gave all of these options."""
        source = f"default for {kind_of(self.spec)}"
        if source not in self.config.sources.values():
            return ""
        config, described = self.config, self.config.learner.describe(self.learner_spec)
        if config.learner.on_policy and self.batch.episodes is None:
            described = f"{self.batch.rows * self.share.count:,} rows an update in {described}"
        both = ("observations", self.policy.normalised), ("rewards", config.learner.normalises_rewards)
        normalised = " and ".join(what for what, is_so in both if is_so)
        return f"{kind_of(self.spec)}: {f'{normalised} normalised, ' if normalised else ''}{described}"

    def lines(self) -> list[str]:
        """Return the plan as text."""
        config, spec = self.config, self.spec
        action = "actions to choose from" if spec.action.kind == "discrete" else "action columns"
        world = f"{spec.obs_size} observation columns ({', '.join(part.name for part in spec.slices)})"
        network = self.policy.module or f"MLP {' - '.join(map(str, self.policy.hidden))} {self.policy.activation}"
        what = "an update" if config.learner.on_policy else "a publication"
        batch = f"{spec.lanes} envs x {config.run.num_steps_per_env} steps = {self.batch.rows} rows {what}"
        if self.batch.episodes is not None:
            batch = f"{spec.lanes} envs, {self.batch.episodes} episodes an update"
        budget, rewards = config.run.budget, ", rewards normalised" * config.learner.normalises_rewards
        limits = [f"{value:,} {name}" for name, value in vars(budget).items() if value is not None]
        lines = [
            f"world    {spec.name}: {world}, {spec.action.size} {action}",
            f"policy   {network}, {self.policy.head} head{', observations normalised' * bool(self.policy.normalised)}",
            f"collect  {config.mode}: {batch}",
            f"learn    {config.algo} on {self.device}{rewards}, {config.learner.describe(self.learner_spec)}",
            f"budget   {' or '.join(limits)}",
            f"run      {self.path}",
        ]
        if self.init is not None:
            lines.insert(2, f"init     {self.init.path}")
        if self.worker_config is not None:
            lines.insert(-3, f"workers  {self.actors}")
        if config.run.machine.learners > 1:
            lines.insert(-3, f"learners {described(self)}")
        lines += [f"note     {remark}" for remark in self.remarks]
        if budget.steps and self.batch.episodes is None and config.learner.on_policy:
            lines.insert(-1, f"updates  {-(-budget.steps // self.batch.rows):,}")
        return [*lines, *(f"note     {note}" for note in config.notes)]


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
