"""What collectors are given: a factory of environments and actors that travels to where they run, and what to collect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from freewheel.core import NO_CONTEXT, Actor, BatchSpec, Compile, Env, EnvSpec, NDArray
from freewheel.errors import require_positive


class MakeEnv(Protocol):
    """Builds an Env of these lanes: a loop in this process, or (processes=True) one process a lane behind a barrier.

    In a fault-tolerant loop a lane that fails is reported in its Step and begun again; elsewhere a failure raises.
    """

    def __call__(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env[Any]: ...


class MakeActor(Protocol):
    """Builds a private copy of the policy, with weights still to be loaded."""

    def __call__(self) -> Actor[Any]: ...


@dataclass(frozen=True)
class RunnerFactory:
    """Environments and policy are built where they are used; nothing but this value ever travels."""

    make: MakeEnv
    actor: MakeActor
    seed: int


def _seconds(default: float, action: str, what: str) -> Any:
    description = f"Seconds that {what} may take, where an environment runs in another process."
    return field(default=default, metadata={"flag": f"{action}_timeout", "help": description})


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds that an environment in a process of its own may take; on the command line --construct-timeout and so on."""

    construct: float = _seconds(120.0, "construct", "the constructor of an environment")
    reset: float = _seconds(60.0, "reset", "a reset")
    step: float = _seconds(30.0, "step", "a step")

    def __post_init__(self) -> None:
        require_positive(construct_timeout=self.construct, reset_timeout=self.reset, step_timeout=self.step)


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What worker processes are told."""

    timeouts: Timeouts = Timeouts()
    modules: Sequence[str] = ()  # that workers will need: loaded once, before they are forked


@dataclass(frozen=True, kw_only=True)
class SimulationSpec:
    """What a batched simulator is told."""

    compile: Compile = "off"
    reserved_lanes: int = 0  # beyond those that are learned from: they act greedily, for evaluation
    main_thread: bool = False  # it only lives there


def _keep_waiting() -> None:
    """Nothing ends the wait."""


@dataclass(frozen=True, kw_only=True)
class CollectSpec:
    """What a collector has to do, apart from how its mode does it."""

    env: EnvSpec  # of all lanes
    batch: BatchSpec
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # what an actor loads: names and shapes
    context: NDArray = field(default_factory=lambda: NO_CONTEXT)  # [K, C] of the first snapshot; its shape stays
    on_policy: bool = True  # whether rows are worth less the older the policy is that wrote them
    workers: WorkerSpec = WorkerSpec()
    simulation: SimulationSpec = SimulationSpec()
    while_waiting: Callable[[], None] = _keep_waiting  # called again and again; what it raises ends the wait
