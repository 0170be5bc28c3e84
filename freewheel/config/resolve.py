"""Config: a run as one value, world × algorithm × mode × run, layered from defaults, preset, file and flags."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from freewheel.collect.batch import BatchConfig
from freewheel.collect.continuous import ContinuousConfig
from freewheel.collect.episodes import EpisodesConfig
from freewheel.collect.lockstep import LockstepConfig
from freewheel.collect.sequential import SequentialConfig
from freewheel.config import flags
from freewheel.core import NO_CONTEXT, Compile, NDArray
from freewheel.envs.batched import PREFIX as TORCH
from freewheel.envs.batched import BatchedConfig
from freewheel.envs.gym import GymConfig
from freewheel.envs.isaaclab import PREFIX as ISAAC
from freewheel.envs.isaaclab import IsaacConfig
from freewheel.errors import UsageError, nearest
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.spec import REPLAY_DEFAULTS as REPLAYING
from freewheel.metrics.meter import Budget
from freewheel.policies.spec import PolicyConfig
from freewheel.worlds import registry
from freewheel.worlds.cage2 import cyborg
from freewheel.worlds.cage2.scenario import RED_AGENTS, check_red

registry.register()

AlgorithmConfig = PPOConfig | SACConfig | MBPOConfig
ALGORITHMS: Mapping[str, type[AlgorithmConfig]] = {"ppo": PPOConfig, "sac": SACConfig, "mbpo": MBPOConfig}
#: What is usual for one simulation of many lanes.
SIMULATED = {"num_envs": 64, "workers": 1, "device": "auto"}
#: What CAGE Challenge 2 begins with.
ATTACKED = {"red_agent": RED_AGENTS[0]}
CUSTOMS: Mapping[str, Mapping[str, Any]] = {"ppo": {}, "sac": REPLAYING, "mbpo": REPLAYING}
EnvConfig = GymConfig | BatchedConfig | IsaacConfig
ModeConfig = SequentialConfig | LockstepConfig | BatchConfig | ContinuousConfig | EpisodesConfig
MODES: Mapping[str, type[ModeConfig]] = {
    "sequential": SequentialConfig,
    "lockstep": LockstepConfig,
    "batch": BatchConfig,
    "continuous": ContinuousConfig,
    "episodes": EpisodesConfig,
}
#: Names that people know from elsewhere.
ALIASES = {"num_collectors": "workers", "n_workers": "workers", "task": "env", "red_agent": "env.red_agent"}
DEFAULT_STEPS = 100_000
FREE = "env."  # --env.KEY VALUE goes to the environment's constructor


@dataclass(frozen=True)
class RunConfig:
    """The run."""

    steps: int | None = None
    """Stop after this many environment steps (100000 if no other budget is given)."""
    minutes: float | None = None
    """Stop after this many minutes."""
    episodes: int | None = None
    """Stop after this many finished episodes."""
    seed: int = 0
    """The one seed that everything random grows from."""
    num_steps_per_env: int = 64
    """Steps of each lane an on-policy update learns from (sac and mbpo: between two publications of the policy, 1)."""
    run: str = ""
    """Name of the run: its directory under --runs-dir (default: env-algo-mode, numbered)."""
    runs_dir: str = "runs"
    """Where runs are kept."""
    log_every: float = 1.0
    """Seconds between two rows of metrics."""
    console: Literal["live", "classic"] = "live"
    """live: a panel on a terminal, plain lines elsewhere; classic: a line of counters a row ([AsyncMBPO] step=1000 ...)."""
    sinks: tuple[str, ...] = ()
    """Sinks to write metrics to in addition to the usual ones, by name (those of installed packages)."""
    evals: int = 5
    """Evaluations over the run, evenly spaced, the last at its end; 0: none."""
    eval_episodes: int = 20
    """Greedy episodes an evaluation."""
    eval_max_steps: int = 10_000
    """Steps after which an evaluation episode is cut, for worlds without a time limit."""
    eval_seed: int = 1000
    """Seed of the evaluation episodes: the same ones for every mode and algorithm."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where the learner computes; auto: on a GPU if there is one."""
    threads: int = 1
    """CPU threads of the learner; small networks are fastest with one."""
    context: flags.Table = ()
    """Contexts, a row each, as JSON ([[1,0],[0,1]]): every episode is told one, drawn by its seed, as options["context"] of
    reset(), and shows it as "context" in its observation."""
    init: str = ""
    """Begin with the weights of another run, a name under --runs-dir or a path: its best ones, or RUN@latest or RUN@STEP."""
    compile: Compile = "graphs"
    """graphs: on a GPU, capture fixed-shape work in CUDA graphs and replay it; off: launch every operation by itself."""

    def __post_init__(self) -> None:
        positive = ("steps", "minutes", "episodes", "num_steps_per_env", "log_every", "threads")
        for name in (*positive, "eval_episodes", "eval_max_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value}")
        for name in ("seed", "eval_seed", "evals"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} must not be negative, but is {getattr(self, name)}")
        if "/" in self.run or self.run.startswith("."):
            raise UsageError(f"--run '{self.run}' must be a plain name; --runs-dir says where it is kept")

    @property
    def contexts(self) -> NDArray:
        """[K, C] float32."""
        return np.array(self.context, np.float32) if self.context else NO_CONTEXT

    @property
    def budget(self) -> Budget:
        given = any(limit is not None for limit in (self.steps, self.minutes, self.episodes))
        return Budget(self.steps if given else DEFAULT_STEPS, self.minutes, self.episodes)


@dataclass(frozen=True)
class WorldConfig:
    """The world."""

    max_episode_steps: int | None = None
    """Time limit of an episode (default: the environment's own)."""
    measures: tuple[str, ...] = ()
    """Numbers of an episode's last info to report with it."""
    construct_timeout: float = 120.0
    """Seconds an environment in a process of its own may take to be built."""
    reset_timeout: float = 60.0
    """Seconds it may take to reset."""
    step_timeout: float = 30.0
    """Seconds it may take to step."""
    action_bounds: float | None = None
    """Batched simulators: actions that the world does not bound have the range ± this (SAC and MBPO need one)."""
    clip_actions: float | None = None
    """Batched simulators: actions that the world does not bound are clipped to ± this on their way into it."""
    headless: bool = True
    """Isaac Lab: show no window."""

    def __post_init__(self) -> None:
        for name in (
            "max_episode_steps",
            "construct_timeout",
            "reset_timeout",
            "step_timeout",
            "action_bounds",
            "clip_actions",
        ):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value}")


@dataclass(frozen=True)
class Choices:
    """What to run."""

    env: str = ""
    """The environment: a Gymnasium id, package.module:Factory, torch:ID and isaaclab:TASK for batched simulators, or
    cyborg:Scenario2. Also the first or last word."""
    algo: Literal["ppo", "sac", "mbpo"] = "ppo"
    """The algorithm."""
    mode: Literal["sequential", "lockstep", "batch", "continuous", "episodes"] = "lockstep"
    """How experience is collected."""
    preset: str = ""
    """Named settings to start from: cartpole, pendulum, halfcheetah, mbpo-inverted-pendulum, mbpo-hopper, isaac-64, isaac-128,
    isaac-256, isaac-batch, drone-ppo, drone-sac, cage2."""
    config: str = ""
    """A JSON or TOML file of options, e.g. another run's config.json."""


@dataclass(frozen=True)
class Config:
    """All of a run. `sources` says where each value came from, unless it is a default."""

    algo: str
    mode: str
    env: EnvConfig
    run: RunConfig
    learner: AlgorithmConfig
    policy: PolicyConfig
    collector: ModeConfig
    world: WorldConfig
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        fading = self.learner.schedules_need_steps
        if fading and self.run.budget.steps is None:
            raise UsageError(
                f"{self.algo}.{fading[0]} linear needs --steps to fade over; give it, or set the schedule to constant"
            )
        if not self.learner.on_policy and getattr(self.collector, "episodes_per_update", None):
            raise UsageError(f"{self.algo} learns from a replay buffer, row by row; leave out --episodes-per-update")

    def to_json(self) -> dict[str, Any]:
        """Every option by name, as `--config` reads it back."""
        return {
            "env": self.env.name,
            "env_args": dict(self.env.args),
            "algo": self.algo,
            "mode": self.mode,
            **dataclasses.asdict(self.world),
            **dataclasses.asdict(self.collector),
            **dataclasses.asdict(self.run),
            self.algo: dataclasses.asdict(self.learner),
            "policy": dataclasses.asdict(self.policy),
            "sources": dict(self.sources),
        }


def from_argv(argv: Sequence[str]) -> Config:
    """The run that a command line asks for."""
    positional, given = flags.read_argv([_known_as(word) for word in argv], _all_options(), FREE)
    if len(positional) > 1:
        raise UsageError(f"one environment at a time, not {' '.join(positional)}")
    if positional and "env" in given:
        raise UsageError(f"which environment, {positional[0]} or {given['env'][0]}? leave out one of them")
    if positional:
        given["env"] = (positional[0],)
    return _resolve(flags.Layer("flag", given))


def from_options(env: str | Callable[..., Any], options: Mapping[str, Any]) -> Config:
    """The run that Python arguments ask for; nested mappings and dotted names both work."""
    name = env if isinstance(env, str) else f"{env.__module__}:{getattr(env, '__qualname__', type(env).__qualname__)}"
    config = _resolve(flags.Layer("argument", {"env": (name,), **_flags(options, "train()")}))
    if isinstance(env, str):
        return config
    assert isinstance(config.env, GymConfig), "a function has no prefix"
    return dataclasses.replace(config, env=dataclasses.replace(config.env, factory=env))


def from_file(path: Path) -> Config:
    """The run that a config.json describes."""
    return _resolve(_file(path))


def show_help(argv: Sequence[str]) -> None:
    """Print the options of train, for the algorithm and mode that are named, and leave."""
    words = [word for known in argv for word in known.split("=", 1)]
    chosen = dict(itertools.pairwise(words))
    algo = chosen.get("--algo", "ppo") if chosen.get("--algo") in ALGORITHMS else "ppo"
    mode = chosen.get("--mode", "lockstep") if chosen.get("--mode") in MODES else "lockstep"
    description = (
        "Train an agent on ENV. --env.KEY VALUE goes to the environment's constructor, and --red-agent NAME as well: who attacks "
        "in CAGE Challenge 2 (B_lineAgent, RedMeanderAgent, SleepAgent, mixture). "
        "--dry-run shows the plan and --print-config the resolved options, without starting anything. "
        f"These are the options of {algo} in mode {mode}; --algo and --mode beside --help show those of others."
    )
    flags.show_help(_options(algo, mode), "freewheel train ENV", description)


def _resolve(given: flags.Layer) -> Config:
    """defaults < preset < file < given."""
    layers = [given]
    if path := _last(layers, "config"):
        layers.insert(0, _file(Path(path)))
    if name := _last(layers, "preset"):
        layers.insert(0, flags.Layer(f"preset {name}", _flags(_preset(name), f"preset {name}")))
    algo = _choice(layers, "algo", ALGORITHMS, "ppo")
    if _batched(where := _last(layers, "env")) or where.startswith(ISAAC):
        layers.insert(0, flags.Layer("batched simulator", _flags(SIMULATED, "batched simulator")))
    if cyborg.plays(where):
        layers.insert(0, flags.Layer("CAGE Challenge 2", _flags(ATTACKED, "CAGE Challenge 2")))
    layers.insert(0, flags.Layer(f"algorithm {algo}", _flags(CUSTOMS[algo], f"algorithm {algo}")))
    mode = _choice(layers, "mode", MODES, "lockstep")
    options = _options(algo, mode)
    known = flags.option_types(options)
    for name in given.flags:
        if name not in known and not name.startswith(FREE):
            raise UsageError(f"--{name.replace('_', '-')} does not belong to {algo} in mode {mode}; leave it out")
    merged, sources = flags.merge(layers)
    args = {name.removeprefix(FREE): _literal(words[0]) for name, words in merged.items() if name.startswith(FREE)}
    merged = {name: words for name, words in merged.items() if name in known}
    if not merged.get("env", ("",))[0]:
        raise UsageError("which environment? e.g. freewheel train CartPole-v1")
    built = flags.build(options, merged)
    parts = {item.name: getattr(built, item.name) for item in dataclasses.fields(built)}
    env = _world(parts["choices"].env, args, parts["world"], parts["run"].device)
    kept = {name: source for name, source in sources.items() if name in known or name.startswith(FREE)}
    return Config(algo, mode, env, parts["run"], parts[algo], parts["policy"], parts["collector"], parts["world"], kept)


def _world(name: str, args: Mapping[str, Any], options: WorldConfig, device: str) -> EnvConfig:
    """The family that a name belongs to."""
    if (name.startswith(ISAAC) or _batched(name)) and (options.max_episode_steps or options.measures):
        raise UsageError(
            f"{name} has a time limit and measures of its own: leave out --max-episode-steps and --measures"
        )
    if name.startswith(ISAAC):
        if args:
            raise UsageError(f"{name} takes no --env.{next(iter(args))}: change the task's own configuration")
        place = "cuda:0" if device == "cuda" else device
        return IsaacConfig(name, place, options.headless, options.clip_actions, options.action_bounds)
    if _batched(name):
        return BatchedConfig(name, args, device, options.action_bounds, options.clip_actions)
    if options.action_bounds or options.clip_actions:
        raise UsageError(f"{name} has action bounds of its own: leave out --action-bounds and --clip-actions")
    plain = {key: value for key, value in dataclasses.asdict(options).items() if key in GymConfig.__dataclass_fields__}
    if cyborg.plays(name):
        check_red(args["red_agent"])
    return cyborg.world(name, args, plain) if name.startswith(cyborg.PREFIX) else GymConfig(id=name, args=args, **plain)


def _batched(name: str) -> bool:
    return name in registry.BATCHED or name.startswith(TORCH)


def _options(algo: str, mode: str) -> type[Any]:
    """The dataclass of all options of this algorithm in this mode: flat names, but for ppo.* and policy.*."""

    def flat(kind: type[Any]) -> Any:
        return Annotated[kind, tyro.conf.OmitArgPrefixes]

    parts = [("choices", flat(Choices), Choices), ("run", flat(RunConfig), RunConfig)]
    parts += [("collector", flat(MODES[mode]), MODES[mode]), (algo, ALGORITHMS[algo], ALGORITHMS[algo])]
    parts += [("policy", PolicyConfig, PolicyConfig), ("world", flat(WorldConfig), WorldConfig)]
    return dataclasses.make_dataclass(
        "Options", [(name, kind, field(default_factory=make)) for name, kind, make in parts]
    )


@functools.cache
def _all_options() -> Mapping[str, Any]:
    """Every option of any algorithm in any mode."""
    known: dict[str, Any] = {}
    for algo in ALGORITHMS:
        for mode in MODES:
            known |= flags.option_types(_options(algo, mode))
    return known


def _file(path: Path) -> flags.Layer:
    return flags.Layer(f"file {path}", _flags(flags.read_file(path), str(path)))


def _flags(data: Mapping[str, Any], where: str) -> flags.Flags:
    """Options as they stand in a file or in Python: nested or dotted, the environment's own under env_args."""
    args = data.get("env_args", {})
    if not isinstance(args, Mapping):
        raise UsageError(f"env_args in {where} must be a table of the environment's arguments, not {args!r}")
    plain = {
        ALIASES.get(flags.canonical(key), key): value
        for key, value in data.items()
        if key not in ("sources", "env_args")
    }
    flat = flags.flatten(plain | {f"{FREE}{key}": value for key, value in args.items()}, FREE)
    flags.check_names((name for name in flat if not name.startswith(FREE)), _all_options(), where)
    return {name: _tokens(name, value) for name, value in flat.items()}


def _known_as(word: str) -> str:
    """A flag by the name it has here."""
    name, equals, value = word.removeprefix("--").partition("=")
    alias = ALIASES.get(name.replace("-", "_")) if word.startswith("--") else None
    return word if alias is None else f"--{alias}{equals}{value}"


def _tokens(name: str, value: Any) -> flags.Tokens:
    if _all_options().get(name) is flags.Table and not isinstance(value, str):
        return (json.dumps(value, default=lambda array: array.tolist()),)
    if not name.startswith(FREE):
        return flags.tokens(value)
    try:
        return (json.dumps(value),)
    except TypeError:
        what = f"{name.removeprefix(FREE)}={value!r}"
        raise UsageError(
            f"the environment's argument {what} is not JSON; pass a function that makes the environment"
        ) from None


def _literal(word: str) -> Any:
    """An environment's argument: JSON where it is JSON, else the word itself."""
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(word, word)


def _preset(name: str) -> dict[str, Any]:
    known: dict[str, Any] = tomllib.loads(resources.files("freewheel.config").joinpath("presets.toml").read_text())
    if name not in known:
        raise UsageError(f"unknown preset '{name}'{nearest(name, known)}")
    preset: dict[str, Any] = known[name]
    return preset


def _last(layers: Sequence[flags.Layer], name: str, default: str = "") -> str:
    found = [layer.flags[name][0] for layer in layers if layer.flags.get(name)]
    return found[-1] if found else default


def _choice(layers: Sequence[flags.Layer], name: str, table: Mapping[str, Any], default: str) -> str:
    chosen = _last(layers, name, default)
    if chosen not in table:
        raise UsageError(f"unknown {name} '{chosen}'{nearest(chosen, table)}")
    return chosen
