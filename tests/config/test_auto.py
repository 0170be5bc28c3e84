"""Options that are auto until the world is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freewheel.config import flags
from freewheel.config.auto import settle
from freewheel.config.resolve import Config, from_argv, from_file, presets
from freewheel.core import ActionSpec, EnvSpec, Slice
from freewheel.learn.spec import ALGORITHMS

BOX = EnvSpec("Box-v0", 8, 3, "float32", (Slice("obs", 0, 3, (3,)),), ActionSpec("box", 1, (-1.0,), (1.0,)))
WORLDS = {
    "Box actions": BOX,
    "Discrete actions": replace(BOX, action=ActionSpec("discrete", 2)),
    "images": replace(BOX, obs_dtype="uint8"),
    "a batched simulator": replace(BOX, batched_on_device=True),
}
NAMES = ("num_steps_per_env", "ppo.minibatch", "ppo.reward_scale", "policy.normalize_obs")


def values(config: Config) -> dict[str, Any]:
    return flags.flatten({key: value for key, value in config.to_json().items() if key != "sources"})


@pytest.mark.parametrize(
    ("world", "words", "expected"),
    [
        ("Box actions", "", (256, 64, "returns", True)),
        ("Discrete actions", "", (256, 64, "none", False)),
        ("images", "", (256, 64, "returns", False)),
        ("a batched simulator", "", (64, 256, "none", False)),
        ("Box actions", "--num-steps-per-env 8192", (8192, 2048, "returns", True)),
        ("Box actions", "--num-steps-per-env 16", (16, 64, "returns", True)),
        ("Discrete actions", "--mode episodes --episodes-per-update 10", (256, "auto", "none", False)),
    ],
)
def test_what_ppo_does_in_a_world_where_little_is_given(world: str, words: str, expected: tuple[Any, ...]) -> None:
    settled = settle(from_argv(["X-v0", *words.split()]), WORLDS[world])
    assert tuple(values(settled)[name] for name in NAMES) == expected
    source = f"default for {'Box actions' if world == 'images' else world}"
    given = {"num_steps_per_env"} if "num-steps" in words else set()
    chosen = {name for name, value in zip(NAMES, expected, strict=True) if value != "auto"}
    assert {name for name, told in settled.sources.items() if told == source} == chosen - given


@pytest.mark.parametrize(
    ("lanes", "words", "steps"),
    [
        *[(1, "", 2048), (8, "", 256), (54, "", 38), (64, "", 32), (89, "", 23), (256, "", 8), (1024, "", 8)],
        *[(8, "--steps 1000", 125), (8, "--minutes 1", 256), (64, "--num-steps-per-env 100", 100)],
    ],
)
def test_rows_of_an_update_do_not_depend_on_the_number_of_lanes(lanes: int, words: str, steps: int) -> None:
    """But for rounding, the least number of steps and the end of the run."""
    assert settle(from_argv(["X-v0", *words.split()]), replace(BOX, lanes=lanes)).run.steps_per_env == steps


@pytest.mark.parametrize("algo", [name for name in ALGORITHMS if name != "ppo"])
@pytest.mark.parametrize("world", WORLDS)
def test_algorithms_with_a_replay_buffer_normalise_observations_and_fit_the_actions(algo: str, world: str) -> None:
    settled = settle(from_argv(["X-v0", "--algo", algo]), WORLDS[world])
    assert settled.policy.normalize_obs is (world.endswith("actions"))
    assert settled.policy.head == ("categorical" if world == "Discrete actions" else "squashed")


def test_what_is_given_stays(tmp_path: Path) -> None:
    given = "--num-steps-per-env 50 --ppo.minibatch 100 --ppo.reward-scale none --no-policy.normalize-obs"
    config = from_argv(["X-v0", *given.split()])
    assert settle(config, BOX) == config
    file = tmp_path / "config.json"
    options = {"ppo": {"minibatch": 100, "reward_scale": "none"}, "policy": {"normalize_obs": False}}
    file.write_text(json.dumps(options | {"num_steps_per_env": 50}))
    read = settle(from_argv(["X-v0", "--config", str(file)]), BOX)
    assert read == config
    assert {read.sources[name] for name in NAMES} == {f"file {file}"}


@pytest.mark.parametrize("preset", [name for name, options in presets().items() if "algo" in options])
def test_presets_with_a_replay_buffer_keep_what_they_were_published_with(preset: str) -> None:
    simulator = preset.startswith(("isaac", "drone", "async"))
    settled = settle(from_argv(["X-v0", "--preset", preset]), WORLDS["a batched simulator"] if simulator else BOX)
    assert settled.policy.normalize_obs is False
    assert getattr(settled.learner, "first_temperature", None) is not None


@pytest.mark.parametrize("preset", ["pendulum", "halfcheetah", "cartpole"])
def test_presets_keep_what_they_were_published_with(preset: str) -> None:
    world = WORLDS["Discrete actions"] if preset == "cartpole" else BOX
    known = {"cartpole": (32, 256, "none", False), "pendulum": (256, 64, "returns", False)}
    known["halfcheetah"] = (256, 256, "none", True)
    settled = settle(from_argv(["X-v0", "--preset", preset]), world)
    assert tuple(values(settled)[name] for name in NAMES) == known[preset]


def test_a_head_that_is_given_stays_with_a_replay_buffer() -> None:
    settled = settle(from_argv(["X-v0", "--algo", "sac", "--policy.head", "gaussian"]), BOX)
    assert (settled.policy.head, settled.sources["policy.head"]) == ("gaussian", "flag")


def test_a_run_that_is_read_back_has_the_same_values(tmp_path: Path) -> None:
    """Of the run as it was, and of what was printed before its world was known."""
    asked = from_argv(["X-v0"])
    settled, file = settle(asked, BOX), tmp_path / "config.json"
    for kept, world in ((settled, WORLDS["Discrete actions"]), (asked, BOX)):
        file.write_text(json.dumps(kept.to_json()))
        assert settle(from_file(file), world) == settled


@pytest.mark.parametrize(
    ("words", "expected"),
    [("", "auto"), ("--policy.normalize-obs", True), ("--no-policy.normalize-obs", False)]
    + [
        (f"--policy.normalize-obs{joint}{word}", value)
        for joint in "= "
        for word, value in (("true", True), ("auto", "auto"))
    ],
)
def test_a_switch_that_may_be_auto_is_read_as_any_switch(words: str, expected: bool | str) -> None:
    assert from_argv([*words.split(), "X-v0"]).policy.normalize_obs == expected
