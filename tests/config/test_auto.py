"""Options that are auto until the world is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freewheel.config import flags
from freewheel.config.auto import settle
from freewheel.config.resolve import Config, from_argv, from_file
from freewheel.core import ActionSpec, EnvSpec, Slice
from freewheel.learn.spec import ALGORITHMS

BOX = EnvSpec("Box-v0", 8, 3, "float32", (Slice("obs", 0, 3, (3,)),), ActionSpec("box", 1, (-1.0,), (1.0,)))
WORLDS = {
    "Box actions": BOX,
    "Discrete actions": replace(BOX, action=ActionSpec("discrete", 2)),
    "images": replace(BOX, obs_dtype="uint8"),
    "a batched simulator": replace(BOX, batched_on_device=True),
}
NAMES = ("ppo.minibatch", "ppo.reward_scale", "policy.normalize_obs")


def values(config: Config) -> dict[str, Any]:
    return flags.flatten({key: value for key, value in config.to_json().items() if key != "sources"})


@pytest.mark.parametrize(
    ("world", "rows", "expected"),
    [
        ("Box actions", 2048, (64, "returns", True)),
        ("Discrete actions", 2048, (64, "none", False)),
        ("images", 2048, (64, "returns", False)),
        ("a batched simulator", 98_304, (256, "none", False)),
        ("Box actions", 65_536, (2048, "returns", True)),
        ("Box actions", 128, (64, "returns", True)),
        ("Discrete actions", None, ("auto", "none", False)),
    ],
)
def test_what_ppo_does_in_a_world_where_nothing_is_given(
    world: str, rows: int | None, expected: tuple[Any, ...]
) -> None:
    settled = settle(from_argv(["X-v0"]), WORLDS[world], rows)
    assert tuple(values(settled)[name] for name in NAMES) == expected
    source = f"default for {'Box actions' if world == 'images' else world}"
    chosen = {name for name, value in zip(NAMES, expected, strict=True) if value != "auto"}
    assert {name for name, told in settled.sources.items() if told == source} == chosen


@pytest.mark.parametrize("algo", [name for name in ALGORITHMS if name != "ppo"])
@pytest.mark.parametrize("world", WORLDS)
def test_algorithms_with_a_replay_buffer_leave_observations_as_they_are(algo: str, world: str) -> None:
    settled = settle(from_argv(["X-v0", "--algo", algo]), WORLDS[world], 8)
    assert settled.policy.normalize_obs is False


def test_what_is_given_stays(tmp_path: Path) -> None:
    given = ["--ppo.minibatch", "100", "--ppo.reward-scale", "none", "--no-policy.normalize-obs"]
    config = from_argv(["X-v0", *given])
    assert settle(config, BOX, 2048) == config
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"ppo": {"minibatch": 100, "reward_scale": "none"}, "policy": {"normalize_obs": False}}))
    read = settle(from_argv(["X-v0", "--config", str(file)]), BOX, 2048)
    assert read == config
    assert {read.sources[name] for name in NAMES} == {f"file {file}"}


@pytest.mark.parametrize("preset", ["pendulum", "halfcheetah", "cartpole"])
def test_presets_keep_what_they_were_published_with(preset: str) -> None:
    world = WORLDS["Discrete actions"] if preset == "cartpole" else BOX
    known = {"cartpole": (256, "none", False), "pendulum": (64, "returns", False), "halfcheetah": (256, "none", True)}
    settled = settle(from_argv(["X-v0", "--preset", preset]), world, 2048)
    assert tuple(values(settled)[name] for name in NAMES) == known[preset]


def test_a_run_that_is_read_back_has_the_same_values(tmp_path: Path) -> None:
    """Of the run as it was, and of what was printed before its world was known."""
    asked = from_argv(["X-v0"])
    settled, file = settle(asked, BOX, 2048), tmp_path / "config.json"
    for kept, world in ((settled, WORLDS["Discrete actions"]), (asked, BOX)):
        file.write_text(json.dumps(kept.to_json()))
        assert settle(from_file(file), world, 2048) == settled


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
