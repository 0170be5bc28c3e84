"""Collection modes: the interface that each mode implements, and the registry of all modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from freewheel.core import BatchSpec, Collector
from freewheel.errors import Range
from freewheel.registry import Registry, with_defaults
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.rollout.probe import EnvCost


class ModeConfig(Protocol):
    """The options of a mode: a frozen dataclass that builds the Collector."""

    @property
    def lanes(self) -> int: ...  # environments over all workers; known after `planned`

    episodes_per_update: int | None = None  # learn from this many whole episodes; None: from S rows
    max_lag: int | None = None  # the learner never uses a row with a larger lag; None: no bound

    def require(self) -> None:
        """Raise UsageError if a package that the mode needs is not installed."""
        return

    @property
    def whole_episodes(self) -> bool:
        """Return whether an episode keeps the version that it began with."""
        return False

    @property
    def elsewhere(self) -> bool:
        """Return whether workers run on other machines and so take no cores from the learner."""
        return False

    @property
    def env_processes(self) -> int:
        """Number of processes that step environments; 0: the trainer steps them itself. Known after `planned`."""
        return 0

    @property
    def needs_step_time(self) -> bool:
        """Return whether the plan depends on the measured time and CPU use of a step."""
        return True

    def planned(self, cost: EnvCost) -> Self: ...  # a copy with a value for every "auto"
    def build(self, recipe: RunnerFactory, spec: CollectSpec) -> Collector: ...

    def first_steps(self, batch: BatchSpec) -> int:
        """Steps of each env before the learner receives its first rows; known after `planned`."""
        return batch.steps

    def size_notes(self, batch: BatchSpec) -> Sequence[str]:
        """Notes for the user on options whose effect differs from what they ask for; known after `planned`."""
        return ()

    def plan_line(self) -> str:
        """Describe the planned workers and envs in one line for the user."""
        return f"{self.lanes} envs"

    def remarks(self, cost: EnvCost) -> list[str]:
        """Remarks for the user on given numbers or on numbers that `planned` chooses."""
        return []


def make_collector(config: ModeConfig, factory: RunnerFactory, spec: CollectSpec) -> Collector:
    """Build the collector; methods that it lacks get the defaults of Collector."""
    return with_defaults(config.build(factory, spec), Collector)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A mode of collection."""

    name: str
    config: type[ModeConfig]
    summary: str  # one line for the help of --mode
    simulators: bool = True  # supports a simulator that steps all lanes at once
    whole_batches: bool = False  # every update gets exactly one batch: the policy must be published after each
    free_running: bool = False  # workers never wait for each other or for an update
    on_request: bool = False  # used only on explicit request: never chosen or recommended automatically
    dependencies: tuple[str, ...] = ()  # what the mode needs besides the trainer's process, for the user


MODES: Registry[Mode] = Registry("mode", "MODE", "freewheel.collect")

WORKERS = ("worker processes", "shared memory")  # what modes with workers need
LANES = Range(least=1, most=10**7)  # a batched simulator may have very many
FRAGMENT = Range(least=1, most=10**7)  # steps
ENVS = 8  # default number of environments


def count(number: int, noun: str) -> str:
    """Return the number with its noun: 1 worker, 2 workers."""
    return f"{number} {noun}" + "s" * (number != 1)
