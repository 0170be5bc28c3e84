"""Modes of collection: what each must provide, and the registry of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from freewheel.core import Collector, EnvSpec
from freewheel.registry import Registry
from freewheel.rollout.factory import CollectSpec, MakeEnv, RunnerFactory, Timeouts
from freewheel.rollout.probe import StepCost


class ModeConfig(Protocol):
    """The options of a mode: a frozen dataclass that builds the Collector."""

    @property
    def lanes(self) -> int: ...  # of all workers; known after `planned`
    @property
    def episodes_per_update(self) -> int | None: ...  # learn from so many whole episodes; None: from S rows
    @property
    def max_lag(self) -> int | None: ...  # rows that are older are never learned from; None: no bound
    def survey(self, make: MakeEnv, limits: Timeouts, modules: Sequence[str] = ()) -> tuple[EnvSpec, StepCost]: ...
    def planned(self, cost: StepCost) -> Self: ...  # the same with every number that was "auto" chosen
    def build(self, recipe: RunnerFactory, spec: CollectSpec) -> Collector: ...


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A mode of collection."""

    name: str
    config: type[ModeConfig]
    summary: str  # one line for the help of --mode
    simulators: bool = True  # it can collect from a simulator that steps all lanes at once
    whole_batches: bool = False  # every update gets exactly one batch: the policy must be published after each
    free_running: bool = False  # workers never wait for each other or for an update


MODES: Registry[Mode] = Registry("mode", "MODE", "freewheel.collect")
