"""CollectSpec: what a collector has to do, apart from how its mode does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from freewheel.core import NO_CONTEXT, Compile, EnvSpec, NDArray


def _patiently() -> None:
    """Wait on."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a world in a process of its own may take."""

    construct: float = 120.0
    reset: float = 60.0
    step: float = 30.0


@dataclass(frozen=True)
class CollectSpec:
    """The same for every mode."""

    spec: EnvSpec  # of all lanes
    steps: int  # of each lane an on-policy update learns from
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # what an actor loads: names and shapes
    limits: Timeouts = Timeouts()
    modules: Sequence[str] = ()  # what workers will need: loaded once, before they are forked
    compile: Compile = "off"
    reserved: int = 0  # lanes beyond those of `spec` that act greedily, for evaluation, and are not learned from
    main_thread: bool = False  # a simulator that only lives there
    on_policy: bool = True  # whether rows are worth less the older the policy is that wrote them
    context: NDArray = field(default_factory=lambda: NO_CONTEXT)  # [K, C] of the first snapshot; its shape stays
    waiting: Callable[[], None] = (
        _patiently  # called again and again while a collector waits; what it raises ends the wait
    )

    @property
    def rows(self) -> int:
        """S: rows an on-policy update consumes."""
        return self.steps * self.spec.lanes
