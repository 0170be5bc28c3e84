"""Any Gymnasium env as an Env: in this process, in a process a lane, or as a vector env of its own."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import DependencyNotInstalled, DeprecatedEnv, UnregisteredEnv

from freewheel.core import Env
from freewheel.envs.lane import raised
from freewheel.envs.legacy import OldGym, is_old
from freewheel.envs.loop import GymLoop, GymSingle
from freewheel.envs.processes import GymProcesses, in_processes
from freewheel.envs.vector import GymVector
from freewheel.errors import FreewheelError, SetupError, UsageError, nearest
from freewheel.rollout.factory import Timeouts

__all__ = ["GymConfig", "GymLoop", "GymProcesses", "GymSingle", "GymVector"]


@dataclass(frozen=True)
class GymConfig:
    """Any Gymnasium environment."""

    id: str = ""
    """A registered Gymnasium id (CartPole-v1), or package.module:Factory, where Factory(**args) returns a gymnasium.Env
    or one of old gym."""

    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment."""

    max_episode_steps: int | None = None
    """Time limit of an episode in steps; None keeps the id's own."""

    measures: tuple[str, ...] = ()
    """Keys of an episode's last info that ride with the episode as numbers."""

    construct_timeout: float = 120.0
    """Seconds that an environment in a process of its own has to come up."""

    reset_timeout: float = 60.0
    """Seconds that an environment in a process of its own has to reset."""

    step_timeout: float = 30.0
    """Seconds that an environment in a process of its own has to answer a step."""

    factory: Callable[..., gymnasium.Env[Any, Any]] | None = None
    """From Python only: a class or function to call instead of looking up an id; `id` is then just a name."""

    def __post_init__(self) -> None:
        if not self.id and self.factory is None:
            raise UsageError(
                "no environment given: set id to a Gymnasium id such as CartPole-v1 or to package.module:Factory"
            )
        if self.max_episode_steps is not None and self.max_episode_steps < 1:
            raise UsageError(
                f"max_episode_steps is {self.max_episode_steps}: give at least 1, or None for the id's own limit"
            )
        if min(self.construct_timeout, self.reset_timeout, self.step_timeout) <= 0:
            raise UsageError("time-outs are in seconds and above 0")

    def __getstate__(self) -> dict[str, Any]:
        """An id that the caller's script has registered goes along: workers do not run that script."""
        return {**vars(self), "registered": gymnasium.registry.get(self.id)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if (registered := state.pop("registered")) is not None:
            gymnasium.registry.setdefault(registered.id, registered)
        vars(self).update(state)

    @property
    def name(self) -> str:
        return self.id or str(getattr(self.factory, "__qualname__", self.factory))

    def make(
        self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False, render_mode: str | None = None
    ) -> Env:
        """An Env of these lanes. `tolerant` is for single envs in this process, `render_mode` for the first of them; a vector
        env cannot begin one lane anew, so there all that goes wrong is raised at once."""
        if processes:
            timeouts = Timeouts(construct=self.construct_timeout, reset=self.reset_timeout, step=self.step_timeout)
            return in_processes(self.open, self.name, lanes, self.measures, timeouts)
        if render_mode is None and (vector := self._vector(len(lanes))) is not None:
            return GymVector(vector, self.name, self.measures, wary=fault_tolerant)
        with ExitStack() as undo:
            envs = []
            for lane in lanes:
                envs.append(self.open(lane, render_mode if lane == lanes[0] else None))
                undo.callback(envs[-1].close)
            loop: Env
            if fault_tolerant and len(lanes) == 1:
                loop = GymSingle(envs[0], self.name, lanes, self.measures)
            else:
                loop = GymLoop(envs, self.name, lanes, self.measures, fault_tolerant=fault_tolerant)
            undo.pop_all()
        return loop

    def render_modes(self) -> list[str]:
        """How one of these can be shown."""
        with closing(self.open(0)) as env:
            return list(env.metadata.get("render_modes", []))

    def open(self, lane: int, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """One env of this kind, or a SetupError or EnvError that says why there is none."""
        args = dict(self.args) if render_mode is None else {**self.args, "render_mode": render_mode}
        with self._explaining(f"lane {lane} of {self.name}"):
            factory = self.factory or self._find()
            if factory is None:
                return gymnasium.make(
                    self.id, max_episode_steps=self.max_episode_steps, disable_env_checker=True, **args
                )
            env = factory(**args)
            if is_old(env):
                return OldGym(env, self.name, self.max_episode_steps)
            if self.max_episode_steps is None:
                return env
            return gymnasium.wrappers.TimeLimit(env, self.max_episode_steps)

    def _find(self) -> Callable[..., Any] | None:
        """What package.module:Factory names; None for a registered id, with or without the module that registers it."""
        module, colon, attribute = self.id.rpartition(":")
        if not colon:
            return None
        try:
            found = importlib.import_module(module)
        except Exception as error:
            why = f"{type(error).__name__}: {_line(error)}"
            raise SetupError(
                f"cannot import '{module}' of '{self.id}' ({why}): install it or set PYTHONPATH"
            ) from error
        if not attribute.isidentifier():
            return None
        factory: Callable[..., Any] | None = getattr(found, attribute, None)
        if not callable(factory):
            factories = [name for name, value in vars(found).items() if callable(value)]
            raise SetupError(f"'{module}' has no factory '{attribute}'{nearest(attribute, factories, '')}")
        return factory

    @property
    def batched(self) -> bool:
        """Whether it is the id's own vector env that is made: many lanes cost little more than one."""
        return self._vector_spec() is not None

    def _vector_spec(self) -> EnvSpec | None:
        """Of an id whose own vector env can seed lanes apart. Gymnasium's take one seed for all lanes and for the first
        episode only, so with those an episode would depend on who plays beside it: B single envs are used instead.
        """
        if self.factory or self._find():
            return None
        spec = gymnasium.registry.get(self.id.rpartition(":")[2])
        if spec is None or spec.vector_entry_point is None:
            return None
        with self._explaining(self.name):
            entry = spec.vector_entry_point
            creator = load_env_creator(entry) if isinstance(entry, str) else entry
            return spec if getattr(creator, "metadata", {}).get("lane_seeds") else None

    def _vector(self, lanes: int) -> gymnasium.vector.VectorEnv[Any, Any, Any] | None:
        if (spec := self._vector_spec()) is None:
            return None
        with self._explaining(self.name):
            limit = {} if self.max_episode_steps is None else {"max_episode_steps": self.max_episode_steps}
            args: dict[str, Any] = {**self.args, **limit}
            return gymnasium.make_vec(spec, lanes, "vector_entry_point", **args)

    @contextmanager
    def _explaining(self, who: str) -> Iterator[None]:
        """One line for what goes wrong; what Gymnasium warns of on the way is told only if nothing does."""
        try:
            with warnings.catch_warnings(record=True, action="always") as told:
                yield
            for warning in told:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        except FreewheelError:
            raise
        except (UnregisteredEnv, DeprecatedEnv) as error:
            listing = "; python -c 'import gymnasium; gymnasium.pprint_registry()' lists what there is"
            raise SetupError(
                f"unknown environment '{self.id}'{nearest(self.id, gymnasium.registry, listing)}"
            ) from error
        except DependencyNotInstalled as error:
            raise SetupError(f"{self.name} needs a package that is missing: {_line(error)}") from error
        except ImportError as error:
            package = f": pip install {error.name}" if error.name else ""
            raise SetupError(f"{self.name} cannot be imported ({_line(error)}){package}") from error
        except TypeError as error:
            if not re.search(r"unexpected keyword|missing \d+ required|takes no arguments", str(error)):
                raise raised(who, error, "in its constructor") from error
            raise SetupError(f"{self.name} does not take args {dict(self.args)}: {_line(error)}") from error
        except gymnasium.error.Error as error:
            raise SetupError(f"cannot make '{self.name}': {_line(error)}") from error
        except Exception as error:
            raise raised(who, error, "in its constructor") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
