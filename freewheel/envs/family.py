"""World families: what a kind of environment brings, from its options to its own evaluation, as one registry entry each."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from freewheel.core import Env
from freewheel.registry import Registry, names_code
from freewheel.rollout.factory import Timeouts

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from freewheel.core import Actor
    from freewheel.run.saved import SavedRun


class Rendering(NamedTuple):
    """How an environment can be shown."""

    modes: Sequence[str] = ()  # of Gymnasium's render modes
    fps: float | None = (
        None  # pictures per second at which time passes as in the environment, one a step; None: unknown
    )

    @classmethod
    def of(cls, env: Any) -> Rendering:
        """As an environment of Gymnasium declares it, or by the time that a step of it takes."""
        metadata, world = getattr(env, "metadata", None) or {}, getattr(env, "unwrapped", env)
        step_s = next((value for name in ("step_dt", "dt") if (value := _positive(getattr(world, name, None)))), None)
        fps = _positive(metadata.get("render_fps")) or (step_s and 1 / step_s)
        return cls(tuple(metadata.get("render_modes") or ()), fps)


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < math.inf else None


class EnvConfig(Protocol):
    """An environment and its options: builds it wherever it is needed."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...  # what --env was, from any directory
    @property
    def label(self) -> str: ...  # the name for people, which may be shorter
    @property
    def args(self) -> Mapping[str, Any]: ...  # keyword arguments of the environment, as --env.KEY gives them
    @property
    def timeouts(self) -> Timeouts: ...
    @property
    def modules(self) -> Sequence[str]: ...  # that its worker processes will import
    @property
    def on_device(self) -> bool: ...  # it is one simulation of all lanes, which may run on a GPU
    @property
    def batched(self) -> bool: ...  # many lanes cost little more than one
    @property
    def episode_limit(self) -> int | None: ...  # steps after which an episode is cut short, where that is known
    @property
    def main_thread(self) -> bool: ...  # it must be built and stepped in the main thread of the process
    def to(self, device: str) -> Self: ...  # the same on this device; without effect where on_device is false
    def make(
        self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False, render_mode: str | None = None
    ) -> Env[Any]: ...
    def rendering(self) -> Rendering: ...


def imported_by_workers(env: EnvConfig) -> tuple[str, ...]:
    """The modules that every process with this environment imports, to train or to evaluate."""
    common = ("freewheel.envs.gym", "freewheel.policies.numpy_actor", "freewheel.run.evaluation.players")
    return *common, *env.modules


class BuildEnv(Protocol):
    """Makes the config of an environment from its name, its keyword arguments, its options and the device."""

    def __call__(self, name: str, args: Mapping[str, Any], options: Any, device: str) -> EnvConfig: ...


@dataclass(frozen=True, kw_only=True)
class FamilyFlags:
    """What a family adds to the command line."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # options that differ from the general defaults
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of options: {"level": "env.level"}
    presets: str = ""  # a package that has a presets.toml
    env_help: str = ""  # how its environments are named, for the help of --env
    help: str = ""  # a sentence for the top of `freewheel train --help`


@dataclass(frozen=True, kw_only=True)
class EvalProtocol:
    """A way to evaluate a run that its world prescribes: `freewheel eval RUN --NAME`."""

    name: str
    help: str  # one sentence
    episodes: int
    seed: int
    run: Callable[[SavedRun, Actor, int, int], tuple[Mapping[str, Any], RenderableType]]
    """(run, actor, episodes, seed) -> what NAME.json in the run directory holds, and what to print."""


@dataclass(frozen=True, kw_only=True)
class FamilyEvaluation:
    """What a family adds to `freewheel eval`."""

    protocols: Sequence[EvalProtocol] = ()
    compare: Callable[[SavedRun, float, Console], None] | None = None  # prints other scores beside the mean return


@dataclass(frozen=True, kw_only=True)
class WorldFamily:
    """A kind of environment. Only the first four fields are needed."""

    name: str
    serves: Callable[[str], bool]  # whether an environment of this name belongs to the family
    options: type[Any]  # a frozen dataclass with defaults: its fields are options of `freewheel train`
    build: BuildEnv
    ids: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # arguments of gymnasium.register by id
    flags: FamilyFlags = FamilyFlags()
    evaluation: FamilyEvaluation = FamilyEvaluation()
    packages: Mapping[str, str] = field(default_factory=dict)  # optional modules: what for, and how to get them
    #: An environment of this family to use in place of one that cannot run on this machine, and why; None: there is none.
    stand_in: Callable[[str], tuple[str, str] | None] = lambda _: None
    #: Whether a name stands for code that is imported, so that it needs consent where it comes from a file.
    names_code: Callable[[str], bool] = names_code


#: Every family; `gym` serves the names that no other family serves.
WORLDS: Registry[WorldFamily] = Registry("world", "FAMILY", "freewheel.envs", "freewheel.testing")


def family_of(name: str) -> WorldFamily:
    """The family that an environment belongs to; Gymnasium knows the ids of all families after this."""
    register_ids()
    return next((family for family in WORLDS.values() if family.serves(name)), WORLDS["gym"])


def find_stand_in(name: str) -> tuple[str, str] | None:
    """What to use in place of an environment that cannot run on this machine, and why; None: nothing, or it can run."""
    return next((found for family in WORLDS.values() if (found := family.stand_in(name)) is not None), None)


def register_ids() -> None:
    """Register the ids of all families with Gymnasium. Calling it again changes nothing; no environment is imported."""
    import gymnasium

    for family in WORLDS.values():
        for name, entry in family.ids.items():
            if name not in gymnasium.registry:
                gymnasium.register(name, order_enforce=False, disable_env_checker=True, **entry)


def read_presets(package: str) -> dict[str, dict[str, Any]]:
    """The presets.toml of a package: options by the name of the preset."""
    return tomllib.loads(resources.files(package).joinpath("presets.toml").read_text(encoding="utf-8"))
