"""A run as one value: where each option came from, that it can be written down and read back, and what is refused."""

from __future__ import annotations

import functools
import json
import typing
from pathlib import Path
from typing import Any, Literal

import gymnasium
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.collect.lockstep import LockstepConfig
from freewheel.collect.mode import MODES
from freewheel.collect.sequential import SequentialConfig
from freewheel.config import flags
from freewheel.config.machine import MachineOptions
from freewheel.config.resolve import Config, RunConfig, from_argv, from_file, from_options, presets
from freewheel.envs.batched import SimulatorOptions
from freewheel.envs.gym import GymConfig, GymOptions
from freewheel.errors import UsageError
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.spec import ALGORITHMS
from freewheel.metrics.meter import Budget
from freewheel.policies.spec import PolicyConfig
from freewheel.rollout.factory import Timeouts
from tests.support.places import LONG

PRESETS = presets()
DRONE = "freewheel/RoughDrone-v0"
NEEDS_STEPS = "linear needs --steps; add it, or set the schedule to constant"
NOT_BOTH = "not both: bounded actions are clipped anyway"


def train(*argv: str) -> Config:
    return from_argv(["CartPole-v1", *argv])


def refusal(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        from_argv(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_options_everything_is_a_default() -> None:
    plain = train()
    parts = (GymConfig("CartPole-v1"), RunConfig(), PPOConfig(), PolicyConfig(), LockstepConfig())
    assert plain == Config("ppo", "lockstep", *parts)
    assert plain.run.budget == Budget(steps=100_000)
    assert plain.sources == {"env": "flag"}


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"preset": "cartpole", "num_envs": 3, "ppo": {"epochs": 7, "lr": 0.5}, "seed": 4}))
    mixed = train("--config", str(file), "--ppo.lr", "0.25")
    assert isinstance(mixed.learner, PPOConfig)
    assert mixed.learner.lr == 0.25
    assert (mixed.learner.epochs, mixed.collector.lanes, mixed.run.seed) == (7, 3, 4)
    assert (mixed.learner.gamma, mixed.run.num_steps_per_env) == (0.98, 32)
    assert (mixed.learner.value, mixed.run.machine) == (PPOConfig.value, MachineOptions())
    assert mixed.sources["ppo.lr"] == "flag"
    assert mixed.sources["ppo.epochs"] == mixed.sources["num_envs"] == f"file {file}"
    assert mixed.sources["ppo.gamma"] == mixed.sources["num_steps_per_env"] == "preset cartpole"
    assert not {"ppo.value", "threads"} & mixed.sources.keys()
    assert mixed.to_json()["sources"] == mixed.sources


def test_a_preset_on_the_command_line_replaces_the_files(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text('preset = "cartpole"')
    learner = train("--config", str(file), "--preset", "pendulum").learner
    assert isinstance(learner, PPOConfig)
    assert learner.gamma == PRESETS["pendulum"]["ppo"]["gamma"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_made_of_valid_options_and_takes_effect(name: str) -> None:
    env = ["isaaclab:Isaac-Cartpole-Direct"] if name.startswith("isaac-") else []
    settled = from_argv([*env, "--preset", name]) if env or "env" in PRESETS[name] else train("--preset", name)
    written = flags.flatten(settled.to_json())
    assert PRESETS[name]
    for option, value in flags.flatten(PRESETS[name]).items():
        assert written[option] == (tuple(value) if isinstance(value, list) else value)
        assert settled.sources[option.replace("env_args.", "env.")] == f"preset {name}"


def test_toml_and_json_files_say_the_same(tmp_path: Path) -> None:
    options = {"env": "X-v0", "ppo": {"lr": 0.1}, "policy.hidden": [3], "env_args": {"g": [1, 2]}}
    (tmp_path / "a.json").write_text(json.dumps(options))
    (tmp_path / "a.toml").write_text('env = "X-v0"\nppo.lr = 0.1\npolicy.hidden = [3]\n[env_args]\ng = [1, 2]')
    one, other = from_file(tmp_path / "a.json"), from_file(tmp_path / "a.toml")
    assert one == other
    assert (one.env.args, one.policy.hidden) == ({"g": [1, 2]}, (3,))


def test_python_options_are_nested_or_dotted() -> None:
    nested = from_options("X-v0", {"ppo": {"lr": 0.1}, "policy": {"hidden": (3, 4)}, "steps": 1e4, "minutes": None})
    assert nested == from_options("X-v0", {"ppo.lr": 0.1, "policy.hidden": [3, 4], "steps": 10_000})
    assert nested.sources["ppo.lr"] == "argument"
    assert nested.run.budget == Budget(steps=10_000)


def test_a_class_in_place_of_a_name_is_kept() -> None:
    class World(gymnasium.Env[int, int]):
        pass

    settled = from_options(World, {})
    assert isinstance(settled.env, GymConfig)
    assert settled.env.factory is World
    assert settled.env.id == f"{__name__}:{World.__qualname__}"
    assert from_options(functools.partial(World), {}).env.id == "functools:partial"


def test_the_environment_comes_first_or_last() -> None:
    ways = ("X-v0 --seed=3", "--seed 3 X-v0", "--env X-v0 --seed=3")
    first, last, flag = (from_argv(words.split()) for words in ways)
    assert first == last == flag


def test_environment_arguments_are_json_or_words() -> None:
    words = ["--env.a", "1", "--env.b=2.5", "--env.c", "true", "--env.d", "[1, 2]", "--env.e", "8x8", "--env.f", "null"]
    words += ["--env.g", "False", "--env.some-key", '{"x": "y"}', "--env.h", '"1"']
    expected = {"a": 1, "b": 2.5, "c": True, "d": [1, 2], "e": "8x8", "f": None, "g": False, "h": "1"}
    expected |= {"some_key": {"x": "y"}}
    settled = train(*words)
    assert settled.env.args == expected
    assert settled.sources["env.some_key"] == "flag"
    assert settled.to_json()["env_args"] == expected


def test_environment_arguments_are_layered_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"env": "X-v0", "env_args": {"a": 1, "b": 2}}')
    assert from_argv(["--config", str(tmp_path / "a.json"), "--env.b", "3"]).env.args == {"a": 1, "b": 3}


def test_environment_arguments_that_no_file_could_hold_are_refused() -> None:
    with pytest.raises(UsageError, match=r"argument a=<object .* cannot be written as JSON; pass a function"):
        from_options("X-v0", {"env_args": {"a": object()}})


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an option's type that every option of that type accepts."""
    parts = typing.get_args(kind)
    if kind is flags.Table:
        numbers = st.floats(-1e9, 1e9)
        return st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(numbers, min_size=n, max_size=n), max_size=3))
    if typing.get_origin(kind) is Literal:
        return st.sampled_from(parts)
    if typing.get_origin(kind) is tuple:
        return st.lists(values_of(parts[0]), max_size=3)
    if parts:
        return st.one_of(*map(values_of, parts))
    letters = st.characters(codec="utf-8", exclude_characters="/.-", exclude_categories=["Cc", "Cs"])
    known: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(1, 1_000),
        float: st.floats(0, 1, exclude_min=True),
        bool: st.booleans(),
        str: st.text(letters, max_size=8),
        type(None): st.none(),
    }
    return known[kind]


OPTIONS = {
    **flags.option_types(RunConfig, flat=True),
    **flags.option_types(GymOptions, flat=True),
    **flags.option_types(LockstepConfig),
    **{f"ppo.{name}": kind for name, kind in flags.option_types(PPOConfig).items()},
    **{f"policy.{name}": kind for name, kind in flags.option_types(PolicyConfig).items()},
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
CHOICES = st.fixed_dictionaries(
    {"steps": st.integers(1, 10**15)},
    optional={name: values_of(kind) for name, kind in OPTIONS.items() if name not in ("steps", "device")}
    | {"device": st.sampled_from(["auto", "cpu", "cuda", "cuda:1"])},
)
ARGUMENTS = st.dictionaries(st.text("ab_.", min_size=1, max_size=4), JSON, max_size=2)


@settings(max_examples=200 if LONG else 10)  # tyro reads the source of every option, every time
@given(options=CHOICES, args=ARGUMENTS)
def test_a_config_is_read_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], args: dict[str, Any]
) -> None:
    settled = from_options("X-v0", {**options, "env_args": args})
    file = tmp_path_factory.getbasetemp() / "config.json"
    file.write_text(json.dumps(settled.to_json()), encoding="utf-8")
    written = flags.flatten(json.loads(file.read_text(encoding="utf-8")), "env_args.")
    assert written | options == written
    assert settled.env.args == args
    assert from_argv(["--config", str(file)], trust=True) == settled  # an argument may look like a path


FOR_REPLAY = {"num_steps_per_env", "policy.hidden", "policy.activation"}
FOR_SIMULATORS = {"num_envs", "workers", "device"}


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("world", ["X-v0", DRONE, "torch:X-v0", "isaaclab:X-v0"])
def test_every_algorithm_in_every_kind_of_world_is_read_back(algo: str, world: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"algo": algo, "mode": "continuous", "seed": 3, f"{algo}.gamma": 0.5}
    options |= {} if world == "X-v0" else {"clip_actions": 2.5}
    options |= {"env_args": {"size": 3}} if world == DRONE else {}
    options |= {"mbpo.rollout_schedule": [1, 2, 3, 4], "mbpo.model_hidden": (5, 6)} if algo == "mbpo" else {}
    settled = from_options(world, options)
    assert (settled.algo, settled.env.name) == (algo, world)
    assert settled.to_json()[algo]["gamma"] == 0.5
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settled.to_json()))
    assert from_file(file) == settled
    assert set(from_file(file).sources.values()) == {f"file {file}"}


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("world", ["X-v0", DRONE])
def test_what_is_usual_for_an_algorithm_and_a_world_lies_below_everything_else(algo: str, world: str) -> None:
    settled = from_argv([world, "--algo", algo, "--mode", "continuous", "--preset", "drone-ppo"])
    assert settled.algo == algo
    by_source: dict[str, set[str]] = {}
    for name, source in settled.sources.items():
        by_source.setdefault(source, set()).add(name)
    preset = set(flags.flatten(PRESETS["drone-ppo"]))
    usual = set() if algo == "ppo" else FOR_REPLAY - preset
    assert by_source.get(f"algorithm {algo}", set()) == usual
    assert by_source.get("world drone", set()) == (FOR_SIMULATORS - preset if world == DRONE else set())
    assert settled.policy.hidden == (256, 128, 64)


def test_every_option_of_every_mode_is_written_down() -> None:
    for mode in MODES.values():
        written = flags.flatten(train("--mode", mode.name).to_json())
        assert written.keys() >= flags.option_types(mode.config).keys()
    assert written.keys() >= OPTIONS.keys() - flags.option_types(LockstepConfig).keys()


def test_a_file_of_another_mode_keeps_what_both_have(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(train("--num-envs", "3", "--placement", "inline").to_json()))
    assert from_argv(["--config", str(file), "--mode", "sequential"]).collector == SequentialConfig(num_envs=3)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("A-v0 --env B-v0", "which environment, A-v0 or B-v0? leave out one of them"),
        ("A-v0 --mode lockstp", "unknown mode 'lockstp'; did you mean 'lockstep'?"),
        ("A-v0 --mode zzz", "unknown mode 'zzz'; choose from auto, batch, continuous, episodes, lockstep, ray, sequential"),
        ("A-v0 --algo zzz", "unknown algorithm 'zzz'; choose from mbpo, ppo, sac"),
        ("A-v0 --preset cartpol", "unknown preset 'cartpol'; did you mean 'cartpole'?"),
        ("A-v0 --stepz 3", "unknown option --stepz; did you mean '--steps'?"),
        ("A-v0 --ppo.gae_lamda 3", "unknown option --ppo.gae-lamda; did you mean '--ppo.gae-lambda'?"),
        ("A --mode sequential --placement x",
         "--placement is an option of mode lockstep or ray, not of sequential; add --mode lockstep or leave it out"),
        ("A-v0 --minutes 1 --ppo.lr-schedule linear", f"ppo.lr_schedule {NEEDS_STEPS}"),
        ("A-v0 --episodes 9 --ppo.clip-schedule linear", f"ppo.clip_schedule {NEEDS_STEPS}"),
        ("A-v0 --steps 0", "--steps must be positive, not 0"),
        ("A-v0 --steps -5", "--steps must be positive, not -5"),
        ("A-v0 --minutes nan", "--minutes must be positive, not nan"),
        ("A-v0 --log-every -1", "--log-every must be positive, not -1.0"),
        ("A-v0 --num-envs 0", "--num-envs must be positive, not 0"),
        ("A-v0 --num-steps-per-env=0", "--num-steps-per-env must be positive, not 0"),
        ("A-v0 --seed -1", "--seed must not be negative, but is -1"),
        ("A-v0 --evals -1", "--evals must not be negative, but is -1"),
        ("A-v0 --step-timeout inf", "--step-timeout must be positive, not inf"),
        ("A-v0 --max-episode-steps 0", "--max-episode-steps must be positive, not 0"),
        ("A-v0 --ppo.lr -0.1", "--ppo.lr must be positive, not -0.1"),
        ("A-v0 --ppo.gamma 1.5", "--ppo.gamma must lie in 0..1, not 1.5"),
        ("A-v0 --ppo.lr 1,5", "--ppo.lr must be a number, not 1,5"),
        ("A-v0 --steps k", "--steps must be a whole number or none, not k"),
        ("A-v0 --run a/b", "--run 'a/b' must be a plain name; --runs-dir chooses the directory"),
        ("A-v0 --clip-actions 2",
         "--clip-actions is an option of batched, isaaclab or drone environments, and A-v0 is none of them; leave it out"),
        (f"{DRONE} --measures x",
         f"--measures is an option of gym, straggler or cage2 environments, and {DRONE} is none of them; leave it out"),
        (f"{DRONE} --clip-actions 2 --action-bounds 1", f"use --clip-actions or --action-bounds, {NOT_BOTH}"),
        ("isaaclab:X-v0 --env.a 1", "isaaclab:X-v0 does not accept --env.a: change the configuration of the task"),
        ("A-v0 --run ..", "--run '..' must be a plain name; --runs-dir chooses the directory"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_a_line(argv: str, text: str) -> None:
    assert refusal(*argv.split()) == text


def test_linear_schedules_go_with_the_default_budget_and_with_steps_among_others() -> None:
    assert train("--ppo.lr-schedule", "linear").run.budget.steps == 100_000
    assert train("--ppo.lr-schedule", "linear", "--steps", "9", "--minutes", "1").run.budget == Budget(9, 1.0)


def test_what_a_file_python_or_a_preset_has_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"ppo": {"lrr": 1}}')
    assert refusal("A-v0", "--config", str(file)) == f"unknown option ppo.lrr in {file}; did you mean 'ppo.lr'?"
    file.write_text('{"mode": []}')
    assert refusal("A-v0", "--config", str(file)) == "--mode must be a word, not nothing"
    file.write_text('{"env_args": 3}')
    expected = f"env_args in {file} must be a table of the environment's arguments, not 3"
    assert refusal("A-v0", "--config", str(file)) == expected
    with pytest.raises(UsageError, match=r"^unknown option num_env in train\(\); did you mean 'num_envs'\?$"):
        from_options("A-v0", {"num_env": 3})
    monkeypatch.setattr("freewheel.config.resolve.presets", lambda: {"mine": {"ppo": {"lamda": 1}}})
    assert refusal("A-v0", "--preset", "mine").startswith("unknown option ppo.lamda in preset mine; ")


def test_a_file_with_options_of_another_world_is_read(tmp_path: Path) -> None:
    """A config.json of an earlier version has the options of every world."""
    file = tmp_path / "config.json"
    file.write_text('{"env": "A-v0", "clip_actions": null, "headless": true, "step_timeout": 7.5, "run": "mine"}')
    settled = from_file(file)
    assert settled.env == GymConfig("A-v0", timeouts=Timeouts(step=7.5))
    written = settled.to_json()
    assert (settled.run.output.name, written["run"], written["step_timeout"]) == ("mine", "mine", 7.5)
    assert not settled.to_json().keys() & flags.option_types(SimulatorOptions).keys()
