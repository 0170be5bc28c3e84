"""Modes of collection: what each must provide, and the registry of all of them."""

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
    def lanes(self) -> int: ...  # of all workers; known after `planned`

    episodes_per_update: int | None = None  # learn from so many whole episodes; None: from S rows
    max_lag: int | None = None  # rows that are older are never learned from; None: no bound

    def require(self) -> None:
        """UsageError where a package that the mode needs is not installed."""
        return

    @property
    def whole_episodes(self) -> bool:
        """An episode keeps the version that it began with."""
        return False

    @property
    def elsewhere(self) -> bool:
        """Workers run on other machines: they do not take cores from the learner."""
        return False

    @property
    def env_processes(self) -> int:
        """Processes that step environments, besides the trainer; 0: it steps them itself. Known after `planned`."""
        return 0

    @property
    def needs_step_time(self) -> bool:
        """Whether a number that is not given depends on how long a step takes and what it computes."""
        return True

    def planned(self, cost: EnvCost) -> Self: ...  # the same with every number that was "auto" chosen
    def build(self, recipe: RunnerFactory, spec: CollectSpec) -> Collector: ...

    def first_steps(self, batch: BatchSpec) -> int:
        """Steps of each env before the learner is given the first rows; after `planned`."""
        return batch.steps

    def size_notes(self, batch: BatchSpec) -> Sequence[str]:
        """What to tell the user about options that have another effect than they seem to ask for; after `planned`."""
        return ()

    def plan_line(self) -> str:
        """What acts, in one line for the user."""
        return f"{self.lanes} envs"

    def remarks(self, cost: EnvCost) -> list[str]:
        """What the user should know about numbers that were given, or that `planned` chooses."""
        return []


def make_collector(config: ModeConfig, factory: RunnerFactory, spec: CollectSpec) -> Collector:
    """A collector, with all that the base has."""
    return with_defaults(config.build(factory, spec), Collector)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A mode of collection."""

    name: str
    config: type[ModeConfig]
    summary: str  # one line for the help of --mode
    simulators: bool = True  # it can collect from a simulator that steps all lanes at once
    whole_batches: bool = False  # every update gets exactly one batch: the policy must be published after each
    free_running: bool = False  # workers never wait for each other or for an update
    on_request: bool = False  # only where somebody asks for it: it is not chosen, nor advised
    dependencies: tuple[str, ...] = ()  # what it needs beside the process of the trainer, for the user


MODES: Registry[Mode] = Registry("mode", "MODE", "freewheel.collect")

WORKERS = ("worker processes", "shared memory")  # what modes with workers need
LANES = Range(least=1, most=10**7)  # a batched simulator may have very many
FRAGMENT = Range(least=1, most=10**7)  # steps
ENVS = 8  # default number of environments


def count(number: int, noun: str) -> str:
    """1 worker, 2 workers."""
    return f"{number} {noun}" + "s" * (number != 1)
