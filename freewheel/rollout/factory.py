"""RunnerFactory: all a process needs to start acting, as one picklable value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from freewheel.core import Actor, Env


class MakeEnv(Protocol):
    """Builds an Env of these lanes: a loop in this process, or (processes=True) one process a lane behind a barrier.

    In a tolerant loop a lane that fails is reported in its Step and begun anew; elsewhere a failure raises.
    """

    def __call__(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> Env[Any]: ...


class MakeActor(Protocol):
    """Builds a private copy of the policy, with weights still to be loaded."""

    def __call__(self) -> Actor[Any]: ...


@dataclass(frozen=True)
class RunnerFactory:
    """Worlds and policy are built where they are used; nothing but this value ever travels."""

    make: MakeEnv
    actor: MakeActor
    seed: int
