"""Plan: what a Config means on this machine for this world, worked out before anything is started."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import gymnasium

from freewheel.config.resolve import Config, EnvConfig, WorldConfig
from freewheel.core import BatchSpec, EnvSpec, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.errors import SetupError, UsageError, nearest
from freewheel.learn.spec import Compute, LearnerSpec, WorldFacts
from freewheel.policies.numpy_actor import make_actor, make_tensor_actor
from freewheel.policies.spec import PolicySpec, Start, actor_layout
from freewheel.rollout.factory import CollectSpec, RunnerFactory, SimulationSpec, Timeouts, WorkerSpec
from freewheel.rollout.probe import StepCost
from freewheel.run import checkpoint
from freewheel.run.checkpoint import Checkpoint
from freewheel.seeding import tree
from freewheel.transport.workers import WorkersConfig
from freewheel.worlds.cage2 import cyborg

OURS = ("freewheel.envs.gym", "freewheel.policies.numpy_actor")  # what every worker loads


@dataclass(frozen=True)
class Plan:
    """What a Config means on this machine for this world; nothing is started yet."""

    config: Config
    spec: EnvSpec
    policy: PolicySpec
    path: Path
    device: str
    begins: Checkpoint | None = None  # with these weights; None: drawn

    @property
    def batch(self) -> BatchSpec:
        """What one update learns from."""
        return BatchSpec(
            steps=self.config.run.num_steps_per_env,
            lanes=self.spec.lanes,
            episodes=getattr(self.config.collector, "episodes_per_update", None),
            max_lag=self.max_lag,
        )

    @property
    def rows(self) -> int:
        """S: rows an on-policy update consumes."""
        return self.batch.rows

    @property
    def learner_spec(self) -> LearnerSpec:
        return LearnerSpec(
            policy=self.policy,
            batch=self.batch,
            seed=self.config.run.seed,
            total_steps=self.config.run.budget.steps,
            compute=Compute(device=self.device, compile=self.config.run.compile),
            world=WorldFacts(
                name=self.config.env.name,
                batched_on_device=self.spec.batched_on_device,
                has_final_obs=self.spec.has_final_obs,
            ),
            start=None if self.begins is None else Start(self.begins.params, self.begins.step),
        )

    @property
    def max_lag(self) -> int | None:
        """The bound that the mode holds by a gate, if it does; with a replay buffer there is nothing to bound."""
        return getattr(self.config.collector, "max_lag", None) if self.config.learner.on_policy else None

    @property
    def overlaps(self) -> bool:
        """Whether parts of the learner run beside each other, as acting and learning do."""
        clock = self.config.learner.executor
        return clock == "async" or (clock == "auto" and isinstance(self.config.collector, WorkersConfig))

    @property
    def workers(self) -> int:
        """Processes that act; the trainer itself where none do."""
        return 1 if self.staff is None else self.staff.worker_count

    @property
    def in_processes(self) -> bool:
        """Whether workers act, in processes of their own."""
        return self.staff is not None

    @property
    def staff(self) -> WorkersConfig | None:
        """Workers and their envs, where workers act; all lanes of a batched simulator have one author."""
        collect = self.config.collector
        return collect if isinstance(collect, WorkersConfig) and not self.spec.batched_on_device else None

    def job(self, snapshot: Snapshot, waiting: Callable[[], None]) -> CollectSpec:
        """What the collector has to do. An actor of ours loads its own part of a snapshot, a user's module all of it."""
        needed = snapshot.params if self.policy.module else actor_layout(self.policy)
        weights = {name: tuple(snapshot.params[name].shape) for name in needed}
        env = self.config.env
        return CollectSpec(
            env=self.spec,
            batch=self.batch,
            weights=weights,
            context=self.config.run.contexts,
            on_policy=self.config.learner.on_policy,
            workers=WorkerSpec(timeouts=_timeouts(self.config.world), modules=_modules(env)),
            simulation=SimulationSpec(
                compile=self.config.run.compile,
                reserved_lanes=self.reserved,
                main_thread=getattr(env, "main_thread", False),
            ),
            while_waiting=waiting,
        )

    @property
    def reserved(self) -> int:
        """Lanes for evaluation where there can be only one simulation."""
        options = self.config.run
        if not self.spec.one_per_process or not options.evals:
            return 0
        return min(options.eval_episodes, max(1, self.spec.lanes // 8))

    @property
    def recipe(self) -> RunnerFactory:
        seed = self.config.run.seed
        if self.spec.batched_on_device:
            actor = make_tensor_actor(self.policy, self.device, tree(seed, "actor", 0))
            return RunnerFactory(self.config.env.make, actor, seed)
        return RunnerFactory(self.config.env.make, make_actor(self.policy), seed)

    def lines(self) -> list[str]:
        """The plan for a person."""
        config, spec = self.config, self.spec
        action = "actions to choose from" if spec.action.kind == "discrete" else "action columns"
        world = f"{spec.obs_size} observation columns ({', '.join(part.name for part in spec.slices)})"
        network = self.policy.module or f"MLP {' - '.join(map(str, self.policy.hidden))} {self.policy.activation}"
        what = "an update" if config.learner.on_policy else "a publication"
        batch = f"{spec.lanes} envs x {config.run.num_steps_per_env} steps = {self.rows} rows {what}"
        if self.batch.episodes is not None:
            batch = f"{spec.lanes} envs, {self.batch.episodes} episodes an update"
        budget = config.run.budget
        limits = [f"{value:,} {name}" for name, value in vars(budget).items() if value is not None]
        lines = [
            f"world    {spec.name}: {world}, {spec.action.size} {action}",
            f"policy   {network}, {self.policy.head} head",
            f"collect  {config.mode}: {batch}",
            f"learn    {config.algo} on {self.device}, {config.learner.describe(self.learner_spec)}",
            f"budget   {' or '.join(limits)}",
            f"run      {self.path}",
        ]
        if self.begins is not None:
            lines.insert(2, f"begin    with {self.begins.path}")
        if self.staff is not None:
            lines.insert(-3, f"workers  {self.staff.plan_line()}")
        if budget.steps and self.batch.episodes is None and config.learner.on_policy:
            lines.insert(-1, f"updates  {-(-budget.steps // self.rows):,}")
        return lines


def plan(config: Config) -> Plan:
    """Look before starting: every mistake that can be known now is reported now."""
    path, device = _run_path(config), find_device(config.run.device)
    if isinstance(config.env, GymConfig):
        spec, cost = config.collector.survey(config.env.make, _timeouts(config.world), _modules(config.env))
    else:
        config = replace(config, env=replace(config.env, device=device))
        if config.mode == "episodes":
            raise UsageError(
                f"{config.env.name} steps all its lanes at once: use --mode continuous instead of episodes"
            )
        with closing(config.env.make(range(1))) as env:
            spec, cost = env.spec, StepCost(0.0, 0.0)
    config = replace(config, collector=config.collector.planned(cost))
    spec = replace(spec, lanes=config.collector.lanes)
    spec.check_context(config.run.contexts)
    policy = config.policy.resolve(spec)
    planned = Plan(config, spec, policy, path, device, _beginning(config, policy))
    _check_publications(config, planned.rows)
    return planned


def _beginning(config: Config, policy: PolicySpec) -> Checkpoint | None:
    """The weights that --init names, if they are those of the same network."""
    if not (name := config.run.init):
        return None
    run, at, which = name.rpartition("@")
    if not at or not re.fullmatch(r"best|latest|\d+", which):
        run, which = name, "best"
    found = checkpoint.load(find_run(run, config.run.runs_dir) / "checkpoints", which)
    here, there = asdict(policy), asdict(PolicySpec.from_json(found.about["policy"]))
    for what in here:
        if here[what] != there[what] and what != "log_std":  # which is only where training began
            differs = f"{what} is {there[what]} there and {here[what]} here"
            raise SetupError(
                f"--init {name} is another network, its {differs}: choose the same --policy options and world"
            )
    return found


def find_run(name: str, runs_dir: str) -> Path:
    """The directory of the run of this name under runs_dir, or at this path."""
    for place in (Path(runs_dir) / name, Path(name)):
        if (place / "config.json").is_file():
            return place
    folder = Path(runs_dir)
    known = [entry.name for entry in os.scandir(folder) if entry.is_dir()] if folder.is_dir() else []
    raise UsageError(f"no run '{name}' in {runs_dir}" + (nearest(name, known) if known else "; train one first"))


def _check_publications(config: Config, rows: int) -> None:
    """Whoever acts beside the learner waits for a publication after so many rows: it must not wait for more of them."""
    every = config.learner.publish_every
    if every is None or not isinstance(config.collector, WorkersConfig):
        return
    if every > rows or (every < rows and config.mode == "batch"):
        most = "has to be" if config.mode == "batch" else "can be at most"
        size = f"--num-steps-per-env × envs = {rows}"
        raise UsageError(f"{config.algo}.publish_every {every} {most} {size} in mode {config.mode}; leave it out")


def _timeouts(world: WorldConfig) -> Timeouts:
    return Timeouts(construct=world.construct_timeout, reset=world.reset_timeout, step=world.step_timeout)


def _modules(env: EnvConfig) -> tuple[str, ...]:
    """What a worker loads: ours, and where the world's code lives, if that is known without loading it."""
    if not isinstance(env, GymConfig):
        return ()
    if env.id.startswith(cyborg.PREFIX):
        return (*OURS, *cyborg.MODULES)
    registered = gymnasium.registry.get(env.id)
    where = registered.entry_point if registered is not None else env.id if env.factory is None else None
    module, colon, _ = where.rpartition(":") if isinstance(where, str) else ("", "", "")
    return (*OURS, module) if colon else OURS


def _run_path(config: Config) -> Path:
    """Where the run will live; refused if it exists or could not be written."""
    folder = Path(config.run.runs_dir)
    parent = next((place for place in (folder, *folder.absolute().parents) if place.exists()), folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise SetupError(
            f"cannot write runs under {folder}: {parent} is not a writable directory; choose another --runs-dir"
        )
    if config.run.run:
        if (folder / config.run.run).exists():
            raise SetupError(f"run '{config.run.run}' exists in {folder}; choose another --run or remove it")
        return folder / config.run.run
    base = re.sub(r"[^\w.-]+", "_", f"{config.env.name}-{config.algo}-{config.mode}")
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return next(folder / name for name in names if not (folder / name).exists())


def find_device(wanted: str) -> str:
    """Where to compute: auto is a GPU if there is one."""
    if wanted == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise SetupError("--device cuda: torch sees no GPU here; use --device cpu")
    return "cpu"
