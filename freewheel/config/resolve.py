"""Config: a run as one value, made from defaults, preset, file and flags; and the options that every run has."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from freewheel.collect.mode import MODES, ModeConfig
from freewheel.config import flags
from freewheel.core import NO_CONTEXT, Auto, Compile, NDArray
from freewheel.envs.family import WORLDS, EnvConfig, WorldFamily, family_of, read_presets
from freewheel.envs.gym import GymConfig
from freewheel.errors import UsageError, nearest, require_positive
from freewheel.learn.spec import ALGORITHMS, AlgorithmConfig
from freewheel.metrics.meter import Budget
from freewheel.policies.spec import PolicyConfig

DEFAULT_STEPS = 100_000
DEFAULTS = {"algo": "ppo", "mode": "lockstep"}
FREE = "env."  # --env.KEY VALUE is a keyword argument of the environment
#: Names that options have in other libraries.
ALIASES = {"num_collectors": "workers", "n_workers": "workers", "task": "env"}


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """When the run ends: at the first of these limits."""

    steps: int | None = None
    """Stop after this many environment steps (default: 100000, if no other limit is given)."""
    minutes: float | None = None
    """Stop after this many minutes."""
    episodes: int | None = None
    """Stop after this many finished episodes."""

    def __post_init__(self) -> None:
        require_positive(steps=self.steps, minutes=self.minutes, episodes=self.episodes)


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Evaluation during training: episodes of the greedy policy."""

    evals: int = 5
    """Number of evaluations, evenly spaced over the run; the last one is at its end, on fresh seeds. 0: none."""
    eval_share: float = 0.1
    """Part of the time that evaluations may take, where it is more than 2 seconds: those that do not fit are skipped. The last
    one may take a minute, and with --minutes as much of them as it needs, up to half."""
    eval_episodes: int = 20
    """Episodes of each evaluation."""
    eval_max_steps: int = 10_000
    """Stop an evaluation episode after this many steps, for environments without a time limit."""
    eval_seed: int = 1000
    """Seed of the evaluation episodes during training; the same seed gives the same episodes in every mode and algorithm."""

    def __post_init__(self) -> None:
        require_positive(
            eval_episodes=self.eval_episodes, eval_max_steps=self.eval_max_steps, eval_share=self.eval_share
        )
        if self.eval_share > 1:
            raise UsageError(f"--eval-share must be at most 1, not {self.eval_share}")
        _require_natural(evals=self.evals, eval_seed=self.eval_seed)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What the run writes, and where."""

    name: Annotated[str, flags.named("run")] = ""
    """Name of the run, which is its directory under --runs-dir (default: env-algo-mode, numbered)."""
    runs_dir: str = "runs"
    """The directory that contains all runs."""
    log_every: float = 1.0
    """Seconds between two rows of metrics."""
    console: Literal["live", "classic"] = "live"
    """live: a panel that is updated on a terminal, plain lines elsewhere; classic: one line of counters per row of metrics
    ([AsyncMBPO] step=1000 ...)."""
    sinks: tuple[str, ...] = ()
    """Sinks to write metrics to in addition to the usual ones, by name (those of installed packages)."""

    def __post_init__(self) -> None:
        require_positive(log_every=self.log_every)
        if "/" in self.name or self.name.startswith("."):
            raise UsageError(f"--run '{self.name}' must be a plain name; --runs-dir chooses the directory")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The hardware that the learner uses."""

    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where the learner computes; auto: on a GPU if there is one."""
    threads: int = 1
    """CPU threads of the learner; small networks are fastest with one."""
    compile: Compile = "graphs"
    """graphs: on a GPU, record operations of fixed shape as CUDA graphs and replay them; off: launch every operation."""

    def __post_init__(self) -> None:
        require_positive(threads=self.threads)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run."""

    seed: int = 0
    """Seed of all random numbers of the run."""
    num_steps_per_env: int | Auto = "auto"
    """Steps of each environment in one on-policy update; with a replay buffer: between two versions of the acting policy. auto:
    as many as give PPO 2,048 rows an update, however many environments there are (no more than --steps, at least 8 steps); 64
    with a batched simulator."""
    init: str = ""
    """Start with the weights of another run, given as a name under --runs-dir or a path: its best weights, or RUN@latest, or
    RUN@STEP."""
    context: flags.Table = ()
    """Contexts as JSON, one per row ([[1,0],[0,1]]). Every episode gets one, chosen by its seed: reset() receives it as
    options["context"], and the observation must contain it under "context"."""
    hooks: tuple[str, ...] = ()
    """Hooks that are called during the run, each as package.module:Name or path/to/file.py:Name; see docs/hooks.md."""
    limits: LimitOptions = field(default_factory=LimitOptions)
    evaluation: EvalOptions = field(default_factory=EvalOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)

    def __post_init__(self) -> None:
        require_positive(num_steps_per_env=None if self.num_steps_per_env == "auto" else self.num_steps_per_env)
        _require_natural(seed=self.seed)

    @property
    def steps_per_env(self) -> int:
        """Of an update, after planning."""
        assert self.num_steps_per_env != "auto", "call settle() first"
        return self.num_steps_per_env

    @property
    def contexts(self) -> NDArray:
        """[K, C] float32."""
        return np.array(self.context, np.float32) if self.context else NO_CONTEXT

    @property
    def budget(self) -> Budget:
        """The limits, with the default where none is given."""
        steps, minutes, episodes = self.limits.steps, self.limits.minutes, self.limits.episodes
        return Budget(DEFAULT_STEPS if steps is minutes is episodes is None else steps, minutes, episodes)


@dataclass(frozen=True)
class Config:
    """Everything about a run. `sources` has the source of every value that is not a default."""

    algo: str
    mode: str
    env: EnvConfig
    run: RunConfig
    learner: AlgorithmConfig
    policy: PolicyConfig
    collector: ModeConfig
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        fading = self.learner.schedules_need_steps
        if fading and self.run.budget.steps is None:
            raise UsageError(f"{self.algo}.{fading[0]} linear needs --steps; add it, or set the schedule to constant")
        if not self.learner.on_policy and self.collector.episodes_per_update:
            raise UsageError(f"{self.algo} learns from single rows of a replay buffer; leave out --episodes-per-update")

    def to_json(self) -> dict[str, Any]:
        """Every option by name, in the form that `--config` reads."""
        world = flags.option_types(family_of(self.env.name).options, flat=True)
        return {
            "env": self.env.name,
            "env_args": dict(self.env.args),
            "algo": self.algo,
            "mode": self.mode,
            **{name: value for name, value in flags.values(self.env).items() if name in world},
            **flags.values(self.collector),
            **flags.values(self.run),
            self.algo: flags.values(self.learner),
            "policy": flags.values(self.policy),
            "sources": dict(self.sources),
        }


def from_argv(argv: Sequence[str]) -> Config:
    """The run that a command line describes."""
    positional, given = read_options(argv)
    if len(positional) > 1:
        raise UsageError(f"give one environment, not {' '.join(positional)}")
    if positional and "env" in given:
        raise UsageError(f"which environment, {positional[0]} or {given['env'][0]}? leave out one of them")
    if positional:
        given["env"] = (positional[0],)
    return _resolve(flags.Layer("flag", given))


def from_options(env: str | Callable[..., Any], options: Mapping[str, Any]) -> Config:
    """The run that Python arguments describe; nested mappings and dotted names both work."""
    return _of(env, _flags(options, "train()"))


def from_file(path: Path, env: str | Callable[..., Any] | None = None) -> Config:
    """The run that a config.json describes, perhaps with another environment."""
    return _resolve(flags.Layer("file", {}), _file(path)) if env is None else _of(env, {}, _file(path))


def _of(env: str | Callable[..., Any], given: flags.Flags, *files: flags.Layer) -> Config:
    """With an environment from Python: its name, or what makes it."""
    if not isinstance(env, str) and (not callable(env) or hasattr(type(env), "step")):
        made = type(getattr(env, "unwrapped", env)).__name__
        what = "is already made, but every lane needs its own" if hasattr(env, "step") else "makes no environment"
        remedy = f"pass the class or a function that makes one, e.g. lambda: {made}(...)"
        raise UsageError(f"train() was given an instance of {made}, which {what}: {remedy}")
    name = env if isinstance(env, str) else f"{env.__module__}:{getattr(env, '__qualname__', type(env).__qualname__)}"
    layer = flags.Layer("argument", {"env": (name,), **given})
    if isinstance(env, str):
        return _resolve(layer, *files)
    config = _resolve(layer, *files, family=WORLDS["gym"])
    assert isinstance(config.env, GymConfig), "the gym family builds these"
    return dataclasses.replace(config, env=dataclasses.replace(config.env, factory=env))


def read_options(argv: Sequence[str]) -> tuple[list[str], flags.Flags]:
    """The positional arguments of a command line, and its options of any world, algorithm and mode."""
    return flags.read_argv([_unaliased(word) for word in argv], _all_options(), FREE)


def options_type(argv: Sequence[str]) -> type[Any]:
    """The dataclass of all options, for the environment, algorithm and mode that a command line names."""
    words = [part for word in argv for part in word.split("=", 1)]
    named = dict(itertools.pairwise(words))
    algo, mode = (
        named[f"--{kind}"] if named.get(f"--{kind}") in table else DEFAULTS[kind]
        for kind, table in (("algo", ALGORITHMS), ("mode", MODES))
    )
    others = [word for word, before in zip(words, ["", *words], strict=False) if not before.startswith("--")]
    name = next((word for word in [named.get("--env", ""), *others] if word and not word.startswith("-")), "")
    family = family_of(name)
    options = options_of(algo, mode, family)
    options.__doc__ = (
        "Train an agent on ENV. --env.KEY VALUE is a keyword argument of the environment. "
        + "".join(f"{one.flags.help} " for one in WORLDS.values() if one.flags.help)
        + f"Shown are the options of {algo} in mode {mode} on {family.name} environments; "
        "name ENV, --algo and --mode beside --help to see those of others."
    )
    return options


def presets() -> dict[str, dict[str, Any]]:
    """All presets by name: the general ones, and those of the world families."""
    packages = ["freewheel.config", *(one.flags.presets for one in WORLDS.values() if one.flags.presets)]
    return {name: options for package in packages for name, options in read_presets(package).items()}


def _resolve(given: flags.Layer, *files: flags.Layer, family: WorldFamily | None = None) -> Config:
    """General defaults < those of the algorithm < those of the world < preset < file < given."""
    layers = [*files, given]
    if path := _last(layers, "config"):
        layers.insert(0, _file(Path(path)))
    if name := _last(layers, "preset"):
        if name not in (known := presets()):
            raise UsageError(f"unknown preset '{name}'{nearest(name, known)}")
        layers.insert(0, flags.Layer(f"preset {name}", _flags(known[name], f"preset {name}")))
    algorithm = ALGORITHMS[_last(layers, "algo")]
    family = family or family_of(_last(layers, "env"))
    for kind, chosen, usual in ("world", family, family.flags.defaults), ("algorithm", algorithm, algorithm.defaults):
        source = f"{kind} {chosen.name}"
        layers.insert(0, flags.Layer(source, _flags(usual, source)))
    mode = MODES[_last(layers, "mode")]
    options = options_of(algorithm.name, mode.name, family)
    types = flags.option_types(options)
    merged, sources = flags.merge(layers)
    if not merged.get("env", ("",))[0]:
        raise UsageError("which environment? e.g. freewheel train CartPole-v1")
    _check_given(given, types, algorithm.name, mode.name, merged["env"][0])
    args = {name.removeprefix(FREE): literal(words[0]) for name, words in merged.items() if name.startswith(FREE)}
    built: Any = flags.build(options, {name: words for name, words in merged.items() if name in types})
    env = family.build(built.choices.env, args, built.world, built.run.machine.device)
    kept = {name: source for name, source in sources.items() if name in types or name.startswith(FREE)}
    learner = getattr(built, algorithm.name)
    return Config(algorithm.name, mode.name, env, built.run, learner, built.policy, built.collector, kept)


def _check_given(given: flags.Layer, known: Mapping[str, Any], algo: str, mode: str, env: str) -> None:
    """Refuse options that belong to another world, algorithm or mode. In files they are ignored: one file may serve many."""
    of_worlds = {name for one in WORLDS.values() for name in flags.option_types(one.options, flat=True)}
    for name in given.flags:
        if name not in known and not name.startswith(FREE):
            where = env if name in of_worlds else f"{algo} in mode {mode}"
            raise UsageError(f"--{name.replace('_', '-')} does not belong to {where}; leave it out")


@functools.cache
def _choices() -> type[Any]:
    """The options that choose from the registries, with what there is to choose from in their descriptions."""
    families = sorted(WORLDS.values(), key=lambda family: family.name != "gym")
    worlds = "; ".join(family.flags.env_help for family in families if family.flags.env_help)
    algorithms = "; ".join(f"{name}: {str(ALGORITHMS[name].config.__doc__).rstrip('.')}" for name in ALGORITHMS)
    modes = "; ".join(f"{mode.name}: {mode.summary}" for mode in MODES.values())
    texts = {
        "env": f"The environment, also as the first or last word: {worlds}.",
        "algo": f"The algorithm. {algorithms}.",
        "mode": f"How experience is collected. {modes}.",
        "preset": f"Named options to start from: {', '.join(presets())}.",
        "config": "A JSON or TOML file with options, for example the config.json of another run.",
    }
    kinds = {name: Annotated[str, flags.named(description=text)] for name, text in texts.items()}
    fields = [(name, kind, DEFAULTS.get(name, "")) for name, kind in kinds.items()]
    choices = dataclasses.make_dataclass("Choices", fields, frozen=True)
    choices.__doc__ = "What to run."
    return choices


def options_of(algo: str, mode: str, family: WorldFamily) -> type[Any]:
    """The dataclass of all options of this algorithm in this mode: names have no prefix, except ppo.* and policy.*."""
    flat = {"choices": _choices(), "run": RunConfig, "collector": MODES[mode].config, "world": family.options}
    parts: dict[str, tuple[Any, Any]] = {name: (Annotated[kind, flags.FLAT], kind) for name, kind in flat.items()}
    parts |= {name: (kind, kind) for name, kind in ((algo, ALGORITHMS[algo].config), ("policy", PolicyConfig))}
    fields: list[Any] = [(name, kind, field(default_factory=make)) for name, (kind, make) in parts.items()]
    return dataclasses.make_dataclass("Options", fields)


@functools.cache
def _all_options() -> Mapping[str, Any]:
    """Every option of any algorithm, mode and world."""
    choices = [(algo, mode, family) for algo in ALGORITHMS for mode in MODES for family in WORLDS.values()]
    return {name: kind for choice in choices for name, kind in flags.option_types(options_of(*choice)).items()}


def _file(path: Path) -> flags.Layer:
    return flags.Layer(f"file {path}", _flags(flags.read_file(path), str(path)))


def _flags(data: Mapping[str, Any], where: str) -> flags.Flags:
    """Options from a file or from Python: nested or dotted, keyword arguments of the environment under env_args."""
    args = data.get("env_args", {})
    if not isinstance(args, Mapping):
        raise UsageError(f"env_args in {where} must be a table of the environment's arguments, not {args!r}")
    aliases, other = _aliases(), data.keys() - {"sources", "env_args"}
    plain = {aliases.get(flags.canonical(key), key): value for key, value in data.items() if key in other}
    flat = flags.flatten(plain | {f"{FREE}{key}": value for key, value in args.items()}, FREE)
    flags.check_names((name for name in flat if not name.startswith(FREE)), _all_options(), where)
    return {name: _tokens(name, value) for name, value in flat.items()}


@functools.cache
def _aliases() -> Mapping[str, str]:
    own = [family.flags.aliases for family in WORLDS.values()]
    return ALIASES | {name: option for aliases in own for name, option in aliases.items()}


def _unaliased(word: str) -> str:
    """A flag with an alias replaced by the name of the option."""
    name, equals, value = word.removeprefix("--").partition("=")
    option = _aliases().get(flags.canonical(name)) if word.startswith("--") else None
    return word if option is None else f"--{option}{equals}{value}"


def _tokens(name: str, value: Any) -> flags.Tokens:
    if _all_options().get(name) is flags.Table and not isinstance(value, str):
        return (json.dumps(value, default=lambda array: array.tolist()),)
    if not name.startswith(FREE):
        return flags.tokens(value)
    try:
        return (json.dumps(value),)
    except TypeError:
        what = f"the environment's argument {name.removeprefix(FREE)}={value!r}"
        raise UsageError(f"{what} cannot be written as JSON; pass a function that makes the environment") from None


def literal(word: str) -> Any:
    """An environment's argument: JSON if the word is valid JSON, else the word itself."""
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(word, word)


def _last(layers: Sequence[flags.Layer], name: str) -> str:
    found = [layer.flags[name][0] for layer in layers if layer.flags.get(name)]
    return found[-1] if found else DEFAULTS.get(name, "")


def _require_natural(**options: int) -> None:
    for name, value in options.items():
        if value < 0:
            raise UsageError(f"--{name.replace('_', '-')} must not be negative, but is {value}")
