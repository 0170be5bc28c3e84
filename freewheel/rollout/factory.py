"""What collectors get: a factory of environments and actors, which is sent to where they run, and what to collect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from freewheel.core import NO_CONTEXT, Actor, BatchSpec, Compile, Env, EnvSpec, NDArray


class MakeEnv(Protocol):
    """Builds an Env of these lanes: a loop in this process, or (processes=True) one process for each lane with a barrier.

    A fault-tolerant loop reports a failed lane in its Step and begins its next episode; otherwise a failure raises.
    """

    def __call__(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env[Any]: ...


class MakeActor(Protocol):
    """Builds a private copy of the policy; its weights are loaded later."""

    def __call__(self) -> Actor[Any]: ...


@dataclass(frozen=True)
class RunnerFactory:
    """Builds environments and policy where they are used: only this value is sent to other processes."""

    make: MakeEnv
    actor: MakeActor
    seed: int


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds that an environment in a process of its own may take."""

    construct: float = 120.0
    reset: float = 60.0
    step: float = 30.0


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Settings of worker processes."""

    timeouts: Timeouts = Timeouts()
    modules: Sequence[str] = ()  # imported once, before workers are forked


@dataclass(frozen=True, kw_only=True)
class SimulationSpec:
    """Settings of a batched simulator."""

    compile: Compile = "off"
    reserved_lanes: int = 0  # additional lanes that act greedily, for evaluation
    main_thread: bool = False  # the simulator works only there


def _keep_waiting() -> None:
    """Do not end the wait."""


@dataclass(frozen=True, kw_only=True)
class CollectSpec:
    """What to collect, independent of the mode."""

    env: EnvSpec  # of all lanes
    batch: BatchSpec
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # names and shapes that an actor loads
    context: NDArray = field(default_factory=lambda: NO_CONTEXT)  # [K, C] of the first snapshot; the shape is fixed
    on_policy: bool = True  # whether old rows are worth less
    workers: WorkerSpec = WorkerSpec()
    simulation: SimulationSpec = SimulationSpec()
    while_waiting: Callable[[], None] = _keep_waiting  # called repeatedly during a wait; an exception ends the wait
