"""Any Gymnasium environment as an Env: in this process, in one process per lane, or as a vector env."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import cloudpickle  # type: ignore[import-untyped]
import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import DependencyNotInstalled, DeprecatedEnv, UnregisteredEnv

from freewheel.core import Env
from freewheel.envs.family import EnvConfig, FamilyFlags, Rendering, WorldFamily
from freewheel.envs.lane import close_env, raised
from freewheel.envs.legacy import OldGym, is_old
from freewheel.envs.loop import GymLoop, GymSingle
from freewheel.envs.processes import LaneProcesses
from freewheel.envs.vector import GymVector
from freewheel.errors import FreewheelError, Range, SetupError, UsageError, check_ranges, cut, nearest, text_of
from freewheel.files import own_folders
from freewheel.registry import importable, is_file, own_file, own_module, package_of, refuse_builtin
from freewheel.rollout import call_state, probe
from freewheel.rollout.factory import Timeouts

__all__ = ["GymConfig", "GymLoop", "GymSingle", "GymVector", "LaneProcesses"]


@dataclass(frozen=True, kw_only=True)
class GymOptions:
    """Options of the environment."""

    max_episode_steps: Annotated[int | None, Range(least=1, most=10**9)] = None
    """Truncate episodes after this many steps (default: the environment's own limit)."""
    measures: tuple[str, ...] = ()
    """Keys of the last info of an episode whose numbers are reported with the episode."""
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class GymConfig(GymOptions):
    """Any Gymnasium environment."""

    id: str = ""  # registered (CartPole-v1), or package.module:Factory: Factory(**args) returns an env of Gymnasium or old gym
    args: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the environment
    _: KW_ONLY
    factory: Callable[..., gymnasium.Env[Any, Any]] | None = None  # called in place of `id`, which then is only a name
    preload: tuple[str, ...] = ()  # modules that workers import, instead of the one that defines the environment

    on_device: ClassVar[bool] = False
    main_thread: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.id and self.factory is None:
            raise UsageError(
                "no environment given: use an id such as CartPole-v1, package.module:Factory or file.py:Factory"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Include the registration of the id, because workers do not run the script that may have registered it.
        Include also the code of a module that is pickled by value, because the receiver may not have its file."""
        state = {"admitted": own_folders.state(), **vars(self), "registered": gymnasium.registry.get(self.id)}
        carried = cloudpickle.list_registry_pickle_by_value()
        if carried and self.factory is None:
            with suppress(FreewheelError):  # `open` will raise the error
                factory = self._find()
                state["factory"] = factory if getattr(factory, "__module__", None) in carried else None
        registered = state["registered"]
        entry = getattr(registered, "entry_point", None)
        if registered is not None and isinstance(entry, str) and entry.partition(":")[0] in carried:
            state["registered"] = replace(registered, entry_point=load_env_creator(entry))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        own_folders.restore(*state.pop("admitted"))
        if (registered := state.pop("registered")) is not None:
            gymnasium.registry.setdefault(registered.id, registered)
        vars(self).update(state)

    @property
    def name(self) -> str:
        return self.id or str(getattr(self.factory, "__qualname__", self.factory))

    @property
    def label(self) -> str:
        """The name for display, without the folders of a file."""
        module, _, attribute = self.name.rpartition(":")
        return f"{Path(module).stem}:{attribute}" if is_file(module) else self.name

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that a worker will import, as far as they are known without importing them."""
        if self.preload:
            return self.preload
        registered = gymnasium.registry.get(self.id)
        where = registered.entry_point if registered is not None else self.id if self.factory is None else None
        module = where.rpartition(":")[0] if isinstance(where, str) else ""
        if is_file(module):
            module = importable(Path(module))
        return (module,) if module else ()

    def to(self, device: str) -> Self:
        """Return this config: the environment does not run on a device."""
        return self

    def make(
        self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False, render_mode: str | None = None
    ) -> Env:
        """Build an Env of these lanes. Only single envs can be fault-tolerant, because a vector env cannot reset one
        lane after a failure. `render_mode` applies to the first lane."""
        if processes:
            return LaneProcesses(partial(self._part, fault_tolerant), self.label, lanes, self.timeouts)
        if render_mode is None and (vector := self._vector(len(lanes))) is not None:
            return GymVector(vector, self.label, self.measures, wary=fault_tolerant)
        with ExitStack() as undo:
            envs = []
            for lane in lanes:
                call_state.cells[call_state.LANE] = lane
                probe.constructing(lane)
                envs.append(self.open(lane, render_mode if lane == lanes[0] else None))
                undo.callback(close_env, envs[-1], self.label)
            loop: Env
            if fault_tolerant and len(lanes) == 1:
                loop = GymSingle(envs[0], self.label, lanes, self.measures)
            else:
                loop = GymLoop(envs, self.label, lanes, self.measures, fault_tolerant=fault_tolerant)
            undo.pop_all()
        return loop

    def _part(self, fault_tolerant: bool, lane: int) -> GymLoop:
        """Build one of several lanes, in its separate process."""
        probe.constructing(lane)
        envs, lanes = [self.open(lane)], range(lane, lane + 1)
        return GymLoop(envs, self.label, lanes, self.measures, fault_tolerant=fault_tolerant, part=True)

    def rendering(self) -> Rendering:
        """Return how the environment can be shown."""
        with closing(self.open(0)) as env:
            return Rendering.of(env)

    def open(self, lane: int, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """Build one env; raise a SetupError or EnvError with the reason if this fails."""
        args = dict(self.args) if render_mode is None else {**self.args, "render_mode": render_mode}
        with self._explaining(f"lane {lane} of {self.label}"):
            factory = self.factory or self._find()
            limit = self.max_episode_steps
            if factory is None:
                known = self.id.rpartition(":")[2]  # `_find` has imported the module before the colon
                return gymnasium.make(known, max_episode_steps=limit, disable_env_checker=True, **args)
            env = factory(**args)
            if hasattr(env, "possible_agents"):
                remedy = "give an environment of one agent, whose step() lets the others act"
                raise SetupError(f"{self.label} has several agents (PettingZoo), which is not supported: {remedy}")
            if isinstance(env, gymnasium.vector.VectorEnv):
                remedy = "give a factory of single ones; --num-envs sets the number of copies"
                raise SetupError(f"{self.label} is a vector of environments, which is not supported: {remedy}")
            if is_old(env):
                return OldGym(env, self.name, limit)
            return env if limit is None else gymnasium.wrappers.TimeLimit(env, limit)

    def _find(self) -> Callable[..., Any] | None:
        """Return the factory that package.module:Factory or file.py:Factory names; None for a registered id. For
        module:Id-v0, import the module first."""
        module, colon, attribute = self.id.rpartition(":")
        if not colon:
            return None
        found = own_module(module)
        entries = (str(spec.entry_point) for spec in gymnasium.registry.values())  # the module may have registered some
        own_folders.asked.update(re.split("[.:]", entry)[0] for entry in entries)
        if not attribute.isidentifier():
            return None
        factory: Callable[..., Any] | None = getattr(found, attribute, None)
        if not callable(factory):
            own = [name for name, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__]
            raise SetupError(f"'{module}' has no factory '{attribute}'{nearest(attribute, own)}")
        refuse_builtin(factory, f"the environment '{self.id}'")
        if isinstance(factory, type) and not (hasattr(factory, "reset") and hasattr(factory, "step")):
            raise SetupError(f"'{self.id}' is not an environment: the class has no reset() and step()")
        return factory

    @property
    def episode_limit(self) -> int | None:
        """Steps after which an episode is truncated, if this is known without building the environment."""
        registered = gymnasium.registry.get(self.id.rpartition(":")[2]) if self.factory is None else None
        return self.max_episode_steps or (registered.max_episode_steps if registered is not None else None)

    @property
    def batched(self) -> bool:
        """Return whether the vector env of the id is used, so that many lanes cost little more than one."""
        return self._vector_spec() is not None

    def _vector_spec(self) -> EnvSpec | None:
        """Return the spec if the id has a vector env that takes a seed for every lane and episode. The others
        take one seed for all lanes, so an episode would depend on the other lanes: B single envs are used instead."""
        if self.factory or self._find():
            return None
        spec = gymnasium.registry.get(self.id.rpartition(":")[2])
        if spec is None or spec.vector_entry_point is None:
            return None
        with self._explaining(self.label):
            entry = spec.vector_entry_point
            creator = load_env_creator(entry) if isinstance(entry, str) else entry
            return spec if getattr(creator, "metadata", {}).get("lane_seeds") else None

    def _vector(self, lanes: int) -> gymnasium.vector.VectorEnv[Any, Any, Any] | None:
        if (spec := self._vector_spec()) is None:
            return None
        with self._explaining(self.label):
            limit = {} if self.max_episode_steps is None else {"max_episode_steps": self.max_episode_steps}
            return gymnasium.make_vec(spec, lanes, "vector_entry_point", **{**self.args, **limit})

    def _arguments(self, error: TypeError) -> str:
        """Describe the parameters of the constructor for an error message; empty if they are unknown."""
        registered = gymnasium.registry.get(self.id.rpartition(":")[2])
        try:
            entry = self.factory or self._find() or (registered.entry_point if registered is not None else None)
            creator = load_env_creator(entry) if isinstance(entry, str) else entry
            parameters = inspect.signature(creator).parameters.values() if creator is not None else ()
        except (FreewheelError, ImportError, TypeError, ValueError):
            return ""
        names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        unknown = re.search(r"unexpected keyword argument '(\w+)'", text_of(error))
        near = nearest(unknown[1], names, "") if unknown else ""
        return f"{near or ';'} it takes {', '.join(names)}" if names else ""

    @contextmanager
    def _explaining(self, who: str) -> Iterator[None]:
        """Turn every failure into a SetupError or an EnvError. Show warnings only if nothing fails."""
        try:
            with warnings.catch_warnings(record=True, action="always") as caught:
                yield
            for warning in caught:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        except FreewheelError:
            raise
        except (UnregisteredEnv, DeprecatedEnv) as error:
            listing = "; python -c 'import gymnasium; gymnasium.pprint_registry()' lists all ids"
            hint = nearest(self.id, gymnasium.registry, listing, cutoff=0.75)
            known = package_of("envs", self.id)
            hint = f": it is in a package of its own, pip install {known}" if known else hint
            raise SetupError(f"unknown environment '{self.id}'{hint}") from error
        except DependencyNotInstalled as error:
            raise SetupError(f"{self.label} needs a package that is missing: {_line(error)}") from error
        except ImportError as error:
            package = own_folders.withheld(error.name) or (f": pip install {error.name}" if error.name else "")
            raise SetupError(f"{self.label} cannot be imported ({_line(error)}){package}") from error
        except TypeError as error:
            if not re.search(r"unexpected keyword|missing \d+ required|takes no arguments", text_of(error)):
                raise raised(who, error, "in its constructor") from error
            given = f"{self.label} does not accept the arguments {dict(self.args)}: {_line(error)}"
            raise SetupError(f"{given}{self._arguments(error)}") from error
        except gymnasium.error.Error as error:
            raise SetupError(f"cannot make '{self.label}': {_line(error)}") from error
        except Exception as error:
            raise raised(who, error, "in its constructor") from error


def _line(error: Exception) -> str:
    return cut(" ".join(text_of(error).split()))


def env_classes(file: Path) -> list[str]:
    """Find the environments of a file without running it: subclasses of an env, and classes with reset and step."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{file} is not Python: {_line(error)}") from None
    found: list[str] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
            methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            if {"reset", "step"} <= methods or any(base.endswith("Env") or base in found for base in bases):
                found.append(node.name)
    return found


def absolute(name: str) -> str:
    """Return a name that is valid in any directory: a file gets its full path and the name of a class."""
    module, colon, attribute = name.rpartition(":")
    if is_file(name):
        module, attribute = name, _only(Path(name).expanduser())
    elif colon and not is_file(module) and (file := own_file(module)) is not None:
        module = str(file)
    return f"{Path(module).expanduser().absolute()}:{attribute}" if is_file(module) else name


def _only(file: Path) -> str:
    """Return the only environment of a file; UsageError if it has none or several."""
    found = env_classes(file)
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"{file} defines no environment: name a class or a function that makes one, {file}:Name")
    raise UsageError(f"{file} has {len(found)} environments, {', '.join(found)}: say which, e.g. {file}:{found[-1]}")


def build(name: str, args: Mapping[str, Any], options: Any, device: str) -> EnvConfig:  # noqa: ARG001
    """Build the config of this environment."""
    return GymConfig(absolute(name), args, **vars(options))


FAMILY = WorldFamily(
    name="gym",
    serves=lambda _: False,  # it is the fallback for names that no other family serves
    options=GymOptions,
    build=build,
    flags=FamilyFlags(env_help="a Gymnasium id (CartPole-v1), package.module:Factory, or path/to/file.py:Factory"),
)
