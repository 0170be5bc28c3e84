"""The plan of a run: a Config resolved for this environment and this machine, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from freewheel.collect.mode import MODES, count
from freewheel.collect.workers import WorkersConfig, worker_cores
from freewheel.config.auto import kind_of
from freewheel.config.resolve import DEFAULT_STEPS, Config
from freewheel.core import BatchSpec, EnvSpec, Snapshot
from freewheel.envs.family import imported_by_workers
from freewheel.learn.spec import Compute, LearnerSpec, ReplayConfig, WorldFacts
from freewheel.metrics.targets import Setup
from freewheel.policies.numpy_actor import make_actor, make_tensor_actor
from freewheel.policies.spec import PolicySpec, StartWeights, actor_layout
from freewheel.rollout.factory import CollectSpec, RunnerFactory, SimulationSpec, WorkerSpec
from freewheel.rollout.probe import EnvCost, usable_cores
from freewheel.run.checkpoints.checkpoint import Checkpoint
from freewheel.run.naming import RunName
from freewheel.run.process import yield_further
from freewheel.seeding import tree

NICE = 5  # added to the niceness of compute-bound workers if there are more of them than cores


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Share:
    """The learner that a plan is for; `local` of the `count` learners are on this machine."""

    rank: int = 0
    count: int = 1
    local: int = 1

    def of(self, total: int | None) -> int | None:
        """Return this learner's part of `total` rows, rounded up."""
        return None if total is None else -(-total // self.count)


ALL = Share()  # one learner does everything


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
    def learners_line(self) -> str:
        """Describe the shares of several learners in one line; this is the plan of all of them."""
        learners = self.config.run.machine.learners
        line = f"{learners} that train together, each with {count(self.spec.lanes // learners, 'env')}"
        if self.worker_config is not None:
            line += f" in {count(self.workers // learners, 'worker')}"
        if self.batch.episodes is not None:
            return f"{line} and {count(self.batch.episodes // learners, 'episode')} of an update"
        what = "an update" if self.config.learner.on_policy else "a publication"
        return f"{line} and {self.batch.rows // learners:,} rows of {what}"

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
            lines.insert(-3, f"learners {self.learners_line}")
        lines += [f"note     {remark}" for remark in self.remarks]
        if budget.steps and self.batch.episodes is None and config.learner.on_policy:
            lines.insert(-1, f"updates  {-(-budget.steps // self.batch.rows):,}")
        return [*lines, *(f"note     {note}" for note in config.notes)]
