"""Config: a run as one value, made from defaults, preset, file and flags; and the options that every run has."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from freewheel.collect.mode import MODES, ModeConfig
from freewheel.config import flags, synonyms, translation
from freewheel.config.machine import MachineOptions, listed
from freewheel.config.translation import FREE, Chosen
from freewheel.config.trust import Consent, Use
from freewheel.core import NO_CONTEXT, Auto, NDArray
from freewheel.envs.family import WORLDS, EnvConfig, WorldFamily, family_of, find_stand_in, read_presets
from freewheel.envs.gym import GymConfig
from freewheel.errors import COUNT, SEED, Range, SetupError, UsageError, check_ranges, nearest
from freewheel.files.signatures import CHECKSUM, FIELD, made_here
from freewheel.learn.spec import ALGORITHMS, AlgorithmConfig
from freewheel.metrics.meter import Budget
from freewheel.policies.spec import PolicyConfig
from freewheel.registry import require_package

DEFAULT_STEPS = 100_000
LONGEST_NAME = 4096  # characters, as in the longest path of a file
AUTO = "auto"  # instead of a mode: the one that suits the environment, chosen after it has been measured
DEFAULTS = {"algo": "ppo", "mode": "lockstep"}


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """The limits of a run, which ends at the first one that it reaches."""

    steps: Annotated[int | None, Range(least=1, most=10**15)] = None
    """Stop after this many environment steps (default: 100000, if no other limit is given)."""
    minutes: Annotated[float | None, Range(above=0, most=1e7)] = None
    """Stop after this many minutes."""
    episodes: Annotated[int | None, COUNT] = None
    """Stop after this many finished episodes."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Evaluation during training: episodes of the greedy policy."""

    evals: Annotated[int, Range(least=0, most=10**6)] = 5
    """Number of evaluations, evenly spaced over the run; the last one is at its end, on fresh seeds. 0: none."""
    eval_share: Annotated[float, Range(above=0, most=1)] = 0.1
    """Share of the time that evaluations may take, but at least 2 seconds; evaluations that do not fit are skipped. The
    last one may take a minute. With --minutes, the time that it needs is reserved, up to half of them."""
    eval_episodes: Annotated[int, Range(least=1, most=10**6)] = 20
    """Episodes of each evaluation."""
    eval_max_steps: Annotated[int, Range(least=1, most=10**9)] = 10_000
    """Stop an evaluation episode after this many steps, for environments without a time limit."""
    eval_seed: Annotated[int, SEED] = 1000
    """Seed of the evaluation episodes during training; the same seed gives the same episodes in every mode and algorithm."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The output of a run, and its place."""

    name: Annotated[str, flags.named("run")] = ""
    """Name of the run, which is its directory under --runs-dir (default: env-algo-mode, numbered)."""
    runs_dir: str = "runs"
    """The directory that contains all runs."""
    log_every: Annotated[float, Range(above=0, most=1e6)] = 1.0
    """Seconds between two rows of metrics."""
    checkpoint_every: Annotated[float, Range(least=0, most=1e6)] = 5.0
    """Minutes between two checkpoints from which the run can be resumed, written in the background; the first two come with
    the first update and after half a minute. 0: only at the end."""
    console: Literal["live", "classic"] = "live"
    """live: a panel that is updated on a terminal, plain lines elsewhere; classic: counters per row of metrics ([AsyncMBPO]
    step=1000 ...), with --episodes their progress (10/100 episodes (15.2 eps/sec), update 3 complete (0.3 s))."""
    sinks: tuple[str, ...] = ()
    """Sinks to write metrics to in addition to the usual ones, by name: tensorboard, wandb, and those of installed packages."""
    tensorboard: bool = False
    """Write event files for TensorBoard, in the folder tensorboard of the run; the same as --sinks tensorboard."""
    wandb: bool = False
    """Write to Weights & Biases; where no key is configured, to files of the run that `wandb sync` uploads later. The same as
    --sinks wandb."""
    wandb_project: str = "freewheel"
    """The project that --wandb writes to."""
    record_schedule: bool = False
    """Record the order in which workers acted and the learner got their rows, in schedule.jsonl of the run: freewheel
    replay RUN then repeats the learning, bit for bit."""
    trace: bool = False
    """Record what every worker, the collector and the learner do and wait for, in trace.json of the run: for
    ui.perfetto.dev, and for freewheel timeline RUN."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if "/" in self.name or self.name.startswith("."):
            raise UsageError(f"--run '{self.name}' must be a plain name; --runs-dir chooses the directory")

    @property
    def all_sinks(self) -> tuple[str, ...]:
        """The sinks of --sinks, and those with a separate flag."""
        return (*self.sinks, *(name for name in ("tensorboard", "wandb") if getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The options that every run has."""

    seed: Annotated[int, SEED] = 0
    """Seed of all random numbers of the run."""
    num_steps_per_env: Annotated[int | Auto, Range(least=1, most=10**7)] = "auto"
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
        check_ranges(self)

    @property
    def steps_per_env(self) -> int:
        """Steps of each environment in an update; 1, the least possible, until config.auto.settle has chosen them."""
        return 1 if self.num_steps_per_env == "auto" else self.num_steps_per_env

    @property
    def contexts(self) -> NDArray:
        """The contexts as float32 [K, C]."""
        return np.array(self.context, np.float32) if self.context else NO_CONTEXT

    @property
    def budget(self) -> Budget:
        """The limits; if none is given, the default limit of steps."""
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
    notes: tuple[str, ...] = field(default=(), compare=False)  # about options that were not taken literally
    among: tuple[Config, ...] = field(default=(), compare=False)  # --mode auto: this run in each possible mode

    def __post_init__(self) -> None:
        fading = self.learner.schedules_need_steps
        if fading and self.horizon is None:
            raise UsageError(f"{self.algo}.{fading[0]} linear needs --steps; add it, or set the schedule to constant")
        if not self.learner.on_policy and self.collector.episodes_per_update:
            raise UsageError(f"{self.algo} learns from single rows of a replay buffer; leave out --episodes-per-update")

    @property
    def horizon(self) -> int | None:
        """Steps over which schedules fall: --steps, or the most that --episodes can take; None: unknown."""
        budget, limit = self.run.budget, self.env.episode_limit
        if budget.steps is not None or budget.episodes is None or limit is None:
            return budget.steps
        return budget.episodes * limit

    def to_text(self) -> str:
        """Return `to_json` as text, for people."""
        return json.dumps(self.to_json(), indent=2) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return every option by name, in the form that `--config` reads."""
        world = flags.option_types(family_of(self.env.name).options, flat=True)
        collector = flags.values(self.collector)
        if self.among:  # the mode is not chosen yet: of the options of modes, keep the given ones
            collector = {name: value for name, value in collector.items() if name in self.sources}
        return {
            "env": self.env.name,
            "env_args": dict(self.env.args),
            "algo": self.algo,
            "mode": AUTO if self.among else self.mode,
            **{name: value for name, value in flags.values(self.env).items() if name in world},
            **collector,
            **flags.values(self.run),
            self.algo: flags.values(self.learner),
            "policy": flags.values(self.policy),
            "sources": dict(self.sources),
        }


def from_argv(argv: Sequence[str], *, trust: bool = False, use: Use = "train") -> Config:
    """Return a command line's run. trust: code that a file names may be imported; use: the purpose of the config."""
    positional, given = read_options(argv)
    if len(positional) > 1:
        raise UsageError(f"give one environment, not {flags.shortened(' '.join(positional))}")
    if positional and "env" in given.flags:
        both = flags.shortened(f"{positional[0]} or {given.flags['env'][0]}")
        raise UsageError(f"which environment, {both}? leave out one of them")
    if positional:
        given.flags["env"] = (positional[0],)
    return _resolve(given, [], Consent(trust, use))


def from_options(env: str | Callable[..., Any], options: Mapping[str, Any], *, trust: bool = False) -> Config:
    """Return the run that Python arguments describe; nested mappings and dotted names both work."""
    return _of(env, _layer("argument", options, "train()"), [], Consent(trust))


@contextmanager
def answers_in_python() -> Iterator[None]:
    """For freewheel.train(): rewrite errors that name options so that they name keyword arguments."""
    try:
        yield
    except (UsageError, SetupError) as error:
        error.args = (translation.in_python(str(error), all_names()),)
        raise


def from_file(
    path: Path, env: str | Callable[..., Any] | None = None, *, trust: bool = False, use: Use = "train"
) -> Config:
    """Return the run that a config.json describes, perhaps with another environment."""
    consent, given = Consent(trust, use), flags.Layer("file" if env is None else "argument", {})
    files = [_file(path, consent)]
    return _resolve(given, files, consent) if env is None else _of(env, given, files, consent)


def _of(env: str | Callable[..., Any], given: flags.Layer, files: Sequence[flags.Layer], consent: Consent) -> Config:
    """Return a run whose environment comes from Python: as a name, or as a callable that makes it."""
    if not isinstance(env, str) and (not callable(env) or hasattr(type(env), "step")):
        made = type(getattr(env, "unwrapped", env)).__name__
        what = "is already made, but every lane needs its own" if hasattr(env, "step") else "makes no environment"
        remedy = f"pass the class or a function that makes one, e.g. lambda: {made}(...)"
        raise UsageError(f"train() was given an instance of {made}, which {what}: {remedy}")
    name = env if isinstance(env, str) else f"{env.__module__}:{getattr(env, '__qualname__', type(env).__qualname__)}"
    given.flags["env"] = (name,)
    if isinstance(env, str):
        return _resolve(given, files, consent)
    config = _resolve(given, files, consent, family=WORLDS["gym"])
    assert isinstance(config.env, GymConfig), "the gym family builds these"
    return dataclasses.replace(config, env=dataclasses.replace(config.env, factory=env))


def read_options(argv: Sequence[str]) -> tuple[list[str], flags.Layer]:
    """Return the positional arguments of a command line, and its options of any world, algorithm and mode."""
    positional, given = flags.read_argv(argv, all_names(), FREE, synonyms.ANSWERS)
    return positional, translation.renamed("flag", given, _all_options())


def options_type(argv: Sequence[str]) -> type[Any]:
    """Return the dataclass of all options for the environment, algorithm and mode that a command line names."""
    parts = [part for word in argv for part in word.split("=", 1)]
    named = dict(itertools.pairwise(parts))
    asked = ((kind, named.get(f"--{kind}", ""), table) for kind, table in (("algo", ALGORITHMS), ("mode", MODES)))
    wanted = ((kind, synonyms.MODES.get(word.lower(), word.lower()), table) for kind, word, table in asked)
    algo, mode = (word if word in table else DEFAULTS[kind] for kind, word, table in wanted)
    others = [word for word, before in zip(parts, ["", *parts], strict=False) if not before.startswith("--")]
    name = next((word for word in [named.get("--env", ""), *others] if word and not word.startswith("-")), "")
    family = family_of(name)
    options = options_of(algo, mode, family)
    options.__doc__ = (
        "Train an agent on ENV. --env.KEY VALUE is a keyword argument of the environment. "
        + "".join(f"{one.flags.help} " for one in WORLDS.values() if one.flags.help)
        + f"Shown are the options of {algo} in mode {mode} on {family.name} environments; "
        "add ENV, --algo and --mode to --help to see those of others."
    )
    return options


def presets() -> dict[str, dict[str, Any]]:
    """Return all presets by name: the general ones, and those of the world families."""
    packages = ["freewheel.config", *(one.flags.presets for one in WORLDS.values() if one.flags.presets)]
    return {name: options for package in packages for name, options in read_presets(package).items()}


def _resolve(
    given: flags.Layer, files: Sequence[flags.Layer], consent: Consent, family: WorldFamily | None = None
) -> Config:
    """Merge the layers, of which later ones win: algorithm's defaults < world's defaults < preset < file < given."""
    layers = [*files, given]
    if path := _last(layers, "config"):
        layers.insert(0, _file(Path(path), consent, typed="config" in given.flags))
    if name := _last(layers, "preset"):
        if name not in (known := presets()):
            require_package("presets", name, f"the preset '{name}'")
            raise UsageError(f"unknown preset '{name}'{nearest(name, known)}")
        layers.insert(0, _layer(f"preset {name}", known[name]))
    notes = _substitute(layers)
    algorithm = ALGORITHMS.choose(_last(layers, "algo"), synonyms.ALGORITHMS)
    family = family or family_of(_last(layers, "env"))
    for kind, chosen, usual in ("world", family, family.flags.defaults), ("algorithm", algorithm, algorithm.defaults):
        layers.insert(0, _layer(f"{kind} {chosen.name}", usual))
    layers = [translation.for_algorithm(one, algorithm.name, _all_options(), strict=one is given) for one in layers]
    if _last(layers, "mode") == AUTO:
        return _in_any_mode(given, files, consent, family)
    mode = MODES.choose(_last(layers, "mode"), {}, AUTO)
    options = options_of(algorithm.name, mode.name, family)
    types = flags.option_types(options)
    merged, sources = flags.merge(layers)
    if not "".join(merged.get("env", ())):
        raise UsageError("which environment? name one, e.g. CartPole-v1 or ./file.py:MyEnv")
    if len(name := merged["env"][0]) > LONGEST_NAME:
        raise UsageError(f"--env must be the name of an environment, not {flags.shortened(name)}")
    consent.check(layers, family)
    names = Chosen(algorithm.name, mode.name, merged["env"][0])
    with translation.naming_words(layers[-1]):
        idle = translation.check_given(layers[-1], types, names, _all_options())
        built: Any = flags.build(options, {name: value for name, value in merged.items() if name in types})
    free = {name.removeprefix(FREE): value[0] for name, value in merged.items() if name.startswith(FREE)}
    args = {name: translation.literal(word) for name, word in free.items()}
    env = family.build(built.choices.env, args, built.world, built.run.machine.devices.names[-1])
    kept = {name: source for name, source in sources.items() if name in types or name.startswith(FREE)}
    learner = getattr(built, algorithm.name)
    if read := [f"{word} as {option}" for layer in layers for word, option in layer.words.items()]:
        notes.append(f"read {', '.join(read)}")
    notes += idle
    return Config(algorithm.name, mode.name, env, built.run, learner, built.policy, built.collector, kept, tuple(notes))


def _in_any_mode(given: flags.Layer, files: Sequence[flags.Layer], consent: Consent, family: WorldFamily) -> Config:
    """Resolve the run in every mode that has the given options; the first one stands for all until one is chosen."""
    found, refused = list[Config](), list[UsageError]()
    for mode in sorted(translation.modes_with(given), key=lambda name: name != DEFAULTS["mode"]):
        layer = dataclasses.replace(given, flags={**given.flags, "mode": (mode,)}, words=dict(given.words))
        try:
            one = _resolve(layer, files, consent, family)
        except UsageError as error:
            refused.append(error)
        else:
            found.append(dataclasses.replace(one, sources={**one.sources, "mode": AUTO}))
    if not found:
        raise refused[0]
    return dataclasses.replace(found[0], among=tuple(found))


def _substitute(layers: Sequence[flags.Layer]) -> list[str]:
    """With --substitute, replace an environment that cannot run here; return notes about it."""
    if _last(layers, "substitute").lower() != "true" or (found := find_stand_in(_last(layers, "env"))) is None:
        return []
    next(layer for layer in reversed(layers) if layer.flags.get("env")).flags["env"] = (found[0],)
    return [f"{found[1]}: this run uses {found[0]}"]


@functools.cache
def _choices() -> type[Any]:
    """Return the dataclass of the options that choose from the registries; their descriptions list the choices."""
    families = sorted(WORLDS.values(), key=lambda family: family.name != "gym")
    worlds = "; ".join(family.flags.env_help for family in families if family.flags.env_help)
    algorithms = "; ".join(f"{name}: {str(ALGORITHMS[name].config.__doc__).rstrip('.')}" for name in ALGORITHMS)
    modes = "; ".join(f"{mode.name}: {mode.summary}" for mode in MODES.values())
    others = ", ".join(f"{word} ({mode})" for word, mode in synonyms.MODES.items())
    texts = {
        "env": f"The environment, also as the first or last word: {worlds}.",
        "algo": f"The algorithm. {algorithms}.",
        "mode": f"How experience is collected. {modes}; auto: the best of these here. Also understood: {others}.",
        "preset": f"Named options to start from: {', '.join(presets())}.",
        "config": "A JSON or TOML file with options, for example the config.json of another run.",
    }
    kinds = {name: Annotated[str, flags.named(description=text)] for name, text in texts.items()}
    fields = [(name, kind, DEFAULTS.get(name, "")) for name, kind in kinds.items()]
    choices = dataclasses.make_dataclass("Choices", fields, frozen=True)
    choices.__doc__ = "What to run."
    return choices


def options_of(algo: str, mode: str, family: WorldFamily) -> type[Any]:
    """Return the dataclass of all options of this algorithm in this mode; only ppo.* and policy.* have a prefix."""
    flat = {"choices": _choices(), "run": RunConfig, "collector": MODES[mode].config, "world": family.options}
    parts: dict[str, tuple[Any, Any]] = {name: (Annotated[kind, flags.FLAT], kind) for name, kind in flat.items()}
    parts |= {name: (kind, kind) for name, kind in ((algo, ALGORITHMS[algo].config), ("policy", PolicyConfig))}
    fields: list[Any] = [(name, kind, field(default_factory=make)) for name, (kind, make) in parts.items()]
    return dataclasses.make_dataclass("Options", fields)


@functools.cache
def _all_options() -> Mapping[str, Any]:
    """Return every option of any algorithm, mode and world, with its type."""
    choices = [(algo, mode, family) for algo in ALGORITHMS for mode in MODES for family in WORLDS.values()]
    return {name: kind for choice in choices for name, kind in flags.option_types(options_of(*choice)).items()}


@functools.cache
def all_names() -> Mapping[str, Any]:
    """Return every option of any algorithm, mode and world, and every word for one, with its type."""
    return translation.types_of_all(_all_options())


def _file(path: Path, consent: Consent, *, typed: bool = False) -> flags.Layer:
    data = flags.read_file(path, typed=typed)
    data.pop(CHECKSUM, None)  # checked for runs only (run/saved.py): a file that is typed may be a changed copy
    signed = data.pop(FIELD, None)
    trusted = consent.trust or made_here("config", data, signed)
    return dataclasses.replace(_layer(f"file {path}", data, str(path)), trusted=trusted)


def _layer(source: str, data: Mapping[str, Any], where: str = "") -> flags.Layer:
    """Return a layer of options from a file or Python, nested or dotted; env_args are the environment's arguments."""
    where = where or source
    args = data.get("env_args", {})
    if not isinstance(args, Mapping):
        raise UsageError(f"env_args in {where} must be a table of the environment's arguments, not {args!r}")
    plain = {key: value for key, value in data.items() if key not in ("sources", "env_args")}
    flat = flags.flatten(plain | {f"{FREE}{key}": value for key, value in args.items()}, FREE)
    flags.check_names((name for name in flat if not name.startswith(FREE)), all_names(), where, synonyms.ANSWERS)
    return translation.renamed(
        source,
        {name: _tokens(translation.aliases().get(name, name), value) for name, value in flat.items()},
        _all_options(),
    )


def _tokens(name: str, value: Any) -> flags.Tokens:
    if _all_options().get(name) is flags.Table and not isinstance(value, str):
        return (json.dumps(value, default=lambda array: array.tolist()),)
    if name == "device" and isinstance(value, (list, tuple)):
        return (listed(value),)
    if not name.startswith(FREE):
        return (translation.place_of(name, value),) if callable(value) else flags.tokens(value)
    try:
        return (json.dumps(value),)
    except TypeError:
        what = f"the environment's argument {name.removeprefix(FREE)}={value!r}"
        raise UsageError(f"{what} cannot be written as JSON; pass a function that makes the environment") from None


def _last(layers: Sequence[flags.Layer], name: str) -> str:
    found = [layer.flags[name][0] for layer in layers if layer.flags.get(name)]
    return found[-1] if found else DEFAULTS.get(name, "")
