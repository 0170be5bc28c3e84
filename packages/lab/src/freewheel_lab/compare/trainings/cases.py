"""This module turns every mode into a command line with the same environments, workers, network,
settings and amount of work.

Options are read once, in the same way as by `freewheel train`, and apply to every mode that has
them. This module chooses what differs between modes: all modes have the same number of envs, and
all modes with workers have the same number of workers.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from freewheel.collect.lockstep import LockstepConfig
from freewheel.collect.mode import MODES
from freewheel.collect.workers import WorkersConfig, divisor
from freewheel.config import flags, resolve
from freewheel.config.resolve import Config
from freewheel.core import EnvSpec
from freewheel.errors import FreewheelError, UsageError
from freewheel.rollout.probe import EnvCost
from freewheel.run.learners.devices import placed
from freewheel.run.naming import RunName
from freewheel.run.plan import Plan
from freewheel.run.planning import arrange, survey_env
from freewheel_lab.compare.results import CaseInfo

SURVEY = 2.5  # seconds of stepping to measure the environment
UNNAMED = RunName(Path("runs"), "compare")  # name of a plan that is not carried out here
#: Options of `freewheel train` that a comparison does not accept, and what to do instead.
REFUSED: Mapping[str, str] = {
    "mode": "all modes are compared: choose them with --modes",
    "minutes": "all modes do the same work: use --steps, or --budget for the seconds of each mode",
    "episodes": "all modes do the same work: use --steps, or --budget for the seconds of each mode",
    "run": "the run directories are kept under --out",
    "runs_dir": "the run directories are kept under --out",
    "record_schedule": "recording would affect the measurements; leave it out",
    "trace": "a short training of every mode is recorded after the measurements; leave it out",
}


@dataclass(frozen=True)
class GivenOptions:
    """Holds the options of a command line by name."""

    env: str
    flags: Mapping[str, flags.Tokens]
    trust: bool = False

    @classmethod
    def read(cls, argv: Sequence[str], trust: bool) -> GivenOptions:
        positional, layer = resolve.read_options(argv)
        if len(positional) > 1:
            raise UsageError(f"give one environment, not {flags.shortened(' '.join(positional))}")
        for name in layer.flags:
            if name in REFUSED:
                raise UsageError(f"{flags.as_flag(name)}: {REFUSED[name]}")
        given = dict(layer.flags)
        named = given.pop("env", ())
        if positional and named:
            raise UsageError(f"which environment, {positional[0]} or {named[0]}? leave out one of them")
        return cls((positional or [*named, ""])[0], given, trust)

    def argv(self, mode: str, **changed: object) -> tuple[str, ...]:
        """Return the arguments of `freewheel train` for this mode. None removes an option."""
        has = _options(mode)
        of_modes = {name for one in MODES for name in _options(one)}
        kept = {name: words for name, words in self.flags.items() if name in has or name not in of_modes}
        own = {name: None if value is None else flags.tokens(value) for name, value in changed.items()}
        both = {name: words for name, words in {**kept, **own}.items() if words is not None}
        words = [word for name, values in both.items() for word in (flags.as_flag(name), *values)]
        return (*([self.env] if self.env else []), "--mode", mode, *words)

    def config(self, argv: Sequence[str]) -> Config:
        return resolve.from_argv(argv, trust=self.trust)

    def check(self, modes: Sequence[str]) -> None:
        """Raise UsageError for an option that belongs only to modes that are not compared."""
        for name in self.flags:
            owners = [mode for mode in MODES if name in _options(mode)]
            if owners and not set(owners) & set(modes):
                raise UsageError(
                    f"{flags.as_flag(name)} is an option of mode {owners[0]}; add it to --modes or leave it out"
                )


def _options(mode: str) -> Mapping[str, object]:
    return flags.option_types(MODES[mode].config, flat=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Describes one way to train: a mode, or a variant with one option changed."""

    label: str
    mode: str
    given: GivenOptions
    own: Mapping[str, object] = field(default_factory=dict)  # options that differ from what the user gave
    plan: Plan | None = None
    refused: str = ""
    of: str | None = None  # the mode of which this is a variant

    @property
    def workers(self) -> int:
        return int(str(self.own.get("workers") or (1 if self.plan is None else self.plan.workers)))

    @property
    def envs(self) -> int:
        return int(str(self.own.get("num_envs") or (0 if self.plan is None else self.plan.spec.lanes)))

    def argv(self, **changed: object) -> tuple[str, ...]:
        return self.given.argv(self.mode, **{**self.own, **changed})

    @property
    def trusting(self) -> list[str]:
        return ["--trust"] if self.given.trust else []

    @property
    def synchronous(self) -> bool:
        """Return whether acting and learning take turns."""
        return not (MODES[self.mode].whole_batches or MODES[self.mode].free_running)

    def variant(self, label: str, **changed: object) -> Case:
        return replace(self, label=label, own={**self.own, **changed}, of=self.label)

    def info(self) -> CaseInfo:
        mode = MODES[self.mode]
        return CaseInfo(
            mode=self.label,
            title=mode.summary,
            workers=self.workers,
            envs=self.envs,
            options={name: value for name, value in self.own.items() if value is not None},
            dependencies=self._dependencies(),
            command=shlex.join(
                ["freewheel", "train", *self.argv(num_steps_per_env=self._steps_asked_for), *self.trusting]
            ),
            free_running=mode.free_running,
            synchronous=self.synchronous,
            of=self.of,
            refused=self.refused or None,
        )

    @property
    def _steps_asked_for(self) -> str | None:
        """Return the steps of each env in an update if the user gave them. A number that suits the
        budget of a comparison is not recommended for a training."""
        return next(iter(self.given.flags.get("num_steps_per_env", ())), None)

    def _dependencies(self) -> tuple[str, ...]:
        if self.plan is not None and self.plan.spec.batched_on_device:
            return () if self.synchronous else ("a thread for the simulation",)
        if self.plan is not None and self.plan.worker_config is None and self.plan.env_processes:
            return (*MODES[self.mode].dependencies, "a process for each env")
        return MODES[self.mode].dependencies


@dataclass(frozen=True)
class SharedSettings:
    """Holds what all cases have in common."""

    cases: tuple[Case, ...]
    cost: EnvCost  # of one environment; a simulator of all lanes is not measured
    envs: int
    workers: int  # in the modes that have workers
    notes: tuple[str, ...] = ()

    @property
    def able(self) -> list[Case]:
        """Return the cases that accept the run."""
        return [case for case in self.cases if case.plan is not None]

    @property
    def plan(self) -> Plan:
        """Return the plan of the first case, which has everything that the cases have in common."""
        plan = self.able[0].plan
        assert plan is not None, "the case accepts the run"
        return plan

    @property
    def spec(self) -> EnvSpec:
        return self.plan.spec


def set_up(given: GivenOptions, modes: Sequence[str], report: Callable[[str], None]) -> SharedSettings:
    """Measure the environment, choose the numbers that all modes share, and plan every mode."""
    given.check(modes)
    asked = {mode: _attempt(partial(given.config, given.argv(mode))) for mode in modes}
    configs = {mode: config for mode, config in asked.items() if isinstance(config, Config)}
    if not configs:  # the same error occurs in every mode
        raise next(error for error in asked.values() if isinstance(error, FreewheelError))
    serial = [mode for mode, config in configs.items() if not isinstance(config.collector, WorkersConfig)]
    # An env that cannot be sent to workers can still be measured in a serial mode.
    first, device = placed(configs[next(iter([*serial, *configs]))])
    report(f"measuring {first.env.label} ...")
    cost = survey_env(first, budget=SURVEY)
    planner = _CasePlanner(given, cost, device)
    usual = [plan for mode in configs if isinstance(plan := planner.plan(mode, {}), Plan)]
    if not usual:
        raise next(error for mode in configs if isinstance(error := planner.plan(mode, {}), FreewheelError))
    envs = max(plan.spec.lanes for plan in usual)
    asked_for = [int(word) for word in given.flags.get("workers", ()) if word.isdigit()]
    most = max([*asked_for, *(plan.workers for plan in usual if plan.worker_config is not None)], default=1)
    workers = divisor(envs, most)
    cases = tuple(planner.case(mode, envs, workers, asked[mode]) for mode in modes)
    if not any(case.plan for case in cases):
        raise UsageError(f"no mode accepts this run: {cases[0].refused}")
    return SharedSettings(cases, cost, envs, workers, tuple(_notes(cases, envs, workers)))


def _notes(cases: Sequence[Case], envs: int, workers: int) -> Iterator[str]:
    for case in cases:
        if case.plan is not None and case.plan.worker_config is not None and case.workers != workers:
            yield f"{case.label} has {case.workers} workers instead of {workers}: one for each of the {envs} envs"


def _attempt(make: Callable[[], Config]) -> Config | FreewheelError:
    try:
        return make()
    except FreewheelError as error:
        return error


@dataclass(frozen=True)
class _CasePlanner:
    """Plans modes for an environment that has been measured."""

    given: GivenOptions
    cost: EnvCost
    device: str

    def plan(self, mode: str, own: Mapping[str, object]) -> Plan | FreewheelError:
        try:
            config = self.given.config(self.given.argv(mode, **own))
            if config.env.on_device and not MODES[mode].simulators:
                return UsageError(f"{config.env.label} steps all its lanes at once, which {mode} does not support")
            if isinstance(config.collector, WorkersConfig) and not self.cost.portable:
                return UsageError(
                    "the environment cannot be sent to worker processes: make it with a function that can be imported"
                )
            config = replace(config, env=config.env.to(self.device))
            return arrange(config, self.cost, UNNAMED, self.device)
        except FreewheelError as error:
            return error

    def case(self, mode: str, envs: int, workers: int, config: Config | FreewheelError) -> Case:
        """Return the case with this number of envs and workers. A mode that cannot divide the envs
        in this way gets as many workers as it needs."""
        if isinstance(config, FreewheelError):
            return self._without(mode, config)
        has_workers = isinstance(config.collector, WorkersConfig)
        own: dict[str, object] = {
            "num_envs": envs,
            "envs_per_worker": None,
            "workers": workers if has_workers else None,
        }
        plan = self.plan(mode, own)
        if has_workers and isinstance(plan, FreewheelError):
            own["workers"] = None
            other = self.plan(mode, own)
            plan = other if isinstance(other, Plan) else plan
        if isinstance(plan, FreewheelError):
            return self._without(mode, plan)
        if has_workers:
            own["workers"] = plan.workers
        if isinstance(plan.config.collector, LockstepConfig):  # two trainings could measure the env differently
            own["placement"] = plan.config.collector.placement
        limits = plan.config.run.limits
        own |= {
            name: "none" for name in ("minutes", "episodes") if getattr(limits, name) is not None
        }  # limits from a config file
        if plan.config.learner.on_policy:
            own["num_steps_per_env"] = plan.config.run.steps_per_env
        return Case(label=mode, mode=mode, given=self.given, own=own, plan=plan)

    def _without(self, mode: str, error: FreewheelError) -> Case:
        """Return a case that is skipped. If only its package is missing, the reason is how to
        install it."""
        _, missing, install = str(error).partition("not installed: ")
        return Case(label=mode, mode=mode, given=self.given, refused=missing + install or str(error))
