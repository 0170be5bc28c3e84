"""World families: a registry entry describes a kind of environment, from its options to its evaluation protocols."""

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
    from pathlib import Path

    from rich.console import Console, RenderableType

    from freewheel.core import Actor


class Rendering(NamedTuple):
    """How an environment can be shown."""

    modes: Sequence[str] = ()  # a subset of Gymnasium's render modes
    fps: float | None = None  # pictures per second for playback in real time, one picture per step; None: unknown

    @classmethod
    def of(cls, env: Any) -> Rendering:
        """Read what a Gymnasium environment declares; without a frame rate, derive it from the duration of a step."""
        metadata, world = getattr(env, "metadata", None) or {}, getattr(env, "unwrapped", env)
        step_s = next((value for name in ("step_dt", "dt") if (value := _positive(getattr(world, name, None)))), None)
        fps = _positive(metadata.get("render_fps")) or (step_s and 1 / step_s)
        return cls(tuple(metadata.get("render_modes") or ()), fps)


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < math.inf else None


class EnvConfig(Protocol):
    """An environment with its options; it can build the environment in any process."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...  # the value of --env, valid in any directory
    @property
    def label(self) -> str: ...  # a name for display, which may be shorter
    @property
    def args(self) -> Mapping[str, Any]: ...  # keyword arguments of the environment, as --env.KEY gives them
    @property
    def timeouts(self) -> Timeouts: ...
    @property
    def modules(self) -> Sequence[str]: ...  # the modules that its worker processes will import
    @property
    def on_device(self) -> bool: ...  # one simulation runs all lanes, possibly on a GPU
    @property
    def batched(self) -> bool: ...  # many lanes cost little more than one
    @property
    def episode_limit(self) -> int | None: ...  # steps after which an episode is truncated, if known
    @property
    def main_thread(self) -> bool: ...  # it must be built and stepped in the main thread of the process
    def to(self, device: str) -> Self: ...  # a config for this device; no effect unless on_device
    def make(
        self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False, render_mode: str | None = None
    ) -> Env[Any]: ...
    def rendering(self) -> Rendering: ...


def imported_by_workers(env: EnvConfig) -> tuple[str, ...]:
    """Return the modules that every process with this environment imports for training or evaluation."""
    common = ("freewheel.envs.gym", "freewheel.policies.numpy_actor", "freewheel.run.evaluation.players")
    return *common, *env.modules


class BuildEnv(Protocol):
    """Builds the config of an environment from its name, its keyword arguments, its options and the device."""

    def __call__(self, name: str, args: Mapping[str, Any], options: Any, device: str) -> EnvConfig: ...


@dataclass(frozen=True, kw_only=True)
class FamilyFlags:
    """Additions of a family to the command line."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # options that differ from the general defaults
    aliases: Mapping[str, str] = field(default_factory=dict)  # alternative names of options: {"level": "env.level"}
    presets: str = ""  # a package that contains a presets.toml
    env_help: str = ""  # how its environments are named, for the help of --env
    help: str = ""  # a sentence for the top of `freewheel train --help`


class EvaluatedRun(Protocol):
    """The run that is evaluated."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> Any: ...  # its Config


@dataclass(frozen=True, kw_only=True)
class EvalProtocol:
    """An evaluation protocol that a world prescribes: `freewheel eval RUN --NAME`."""

    name: str
    help: str  # one sentence
    episodes: int
    seed: int
    run: Callable[[EvaluatedRun, Actor, int, int], tuple[Mapping[str, Any], RenderableType]]
    """(run, actor, episodes, seed) -> the content of NAME.json in the run directory, and the output to print."""


@dataclass(frozen=True, kw_only=True)
class FamilyEvaluation:
    """Additions of a family to `freewheel eval`."""

    protocols: Sequence[EvalProtocol] = ()
    compare: Callable[[EvaluatedRun, float, Console], None] | None = None  # prints more scores after the mean return


@dataclass(frozen=True, kw_only=True)
class WorldFamily:
    """A kind of environment. Only the first four fields are needed."""

    name: str
    serves: Callable[[str], bool]  # returns whether an environment of this name belongs to the family
    options: type[Any]  # a frozen dataclass with defaults: its fields are options of `freewheel train`
    build: BuildEnv
    ids: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # arguments of gymnasium.register by id
    flags: FamilyFlags = FamilyFlags()
    evaluation: FamilyEvaluation = FamilyEvaluation()
    packages: Mapping[str, str] = field(default_factory=dict)  # optional modules: purpose, and how to install them
    #: Returns a replacement of this family for an environment that cannot run on this machine, and the reason; or None.
    stand_in: Callable[[str], tuple[str, str] | None] = lambda _: None
    #: Returns whether a name refers to code to import, which requires consent if the name comes from a file.
    names_code: Callable[[str], bool] = names_code


#: All families. `gym` serves the names that no other family serves.
WORLDS: Registry[WorldFamily] = Registry("world", "FAMILY", "freewheel.envs", "freewheel.testing")


def family_of(name: str) -> WorldFamily:
    """Register the ids of all families with Gymnasium, and return the family of an environment."""
    register_ids()
    return next((family for family in WORLDS.values() if family.serves(name)), WORLDS["gym"])


def find_stand_in(name: str) -> tuple[str, str] | None:
    """Return a replacement for an environment that cannot run on this machine, and the reason; or None."""
    return next((found for family in WORLDS.values() if (found := family.stand_in(name)) is not None), None)


def register_ids() -> None:
    """Register the ids of all families with Gymnasium. Further calls change nothing; no environment is imported."""
    import gymnasium

    for family in WORLDS.values():
        for name, entry in family.ids.items():
            if name not in gymnasium.registry:
                gymnasium.register(name, order_enforce=False, disable_env_checker=True, **entry)


def read_presets(package: str) -> dict[str, dict[str, Any]]:
    """Read the presets.toml of a package: options by the name of the preset."""
    return tomllib.loads(resources.files(package).joinpath("presets.toml").read_text(encoding="utf-8"))
