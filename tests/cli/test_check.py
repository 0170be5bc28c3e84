"""`freewheel check` as a person meets it: what it shows, its exit codes, and that its advice can be typed."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any, TypeAlias

import pytest

from freewheel.cli import main as cli
from freewheel.config.resolve import from_argv
from freewheel.rollout.probe import usable_cores

Capture: TypeAlias = pytest.CaptureFixture[str]
WORLDS = "tests.support.uneasy_worlds"


def checked(capfd: Capture, *words: str) -> tuple[int, str]:
    return cli.main(["check", *words]), capfd.readouterr().out


@pytest.mark.system
def test_a_slow_env_is_measured_and_the_advice_can_be_typed(capfd: Capture) -> None:
    code, out = checked(capfd, f"{WORLDS}:Sleeps", "--ppo.epochs", "2", "--json")
    said: dict[str, Any] = json.loads(out)
    assert (code, said["fine"]) == (0, True)
    assert (said["spaces"]["obs_size"], said["spaces"]["action"]["kind"]) == (3, "discrete")
    assert said["cost"]["median"] > 0.003
    assert set(said["cost"]["lengths"]) <= {25}
    assert all(finding["level"] == "ok" for finding in said["findings"]), said["findings"]
    about = ["seeds", "numbers", "episodes", "answers", "processes"]
    assert [finding["about"] for finding in said["findings"]] == about
    rates = {mode["mode"]: mode["steps_per_s"] for mode in said["modes"]}
    assert list(rates) == ["sequential", "lockstep", "batch", "continuous", "episodes"]
    assert rates["sequential"] < rates["lockstep"] < rates["batch"]
    assert said["default"]["mode"] == "lockstep"
    advice = said["advice"]
    assert advice["gain"] == pytest.approx(advice["steps_per_s"] / rates["lockstep"])
    freewheel, train, *words = shlex.split(advice["command"])
    config = from_argv(words)
    assert (freewheel, train, config.mode) == ("freewheel", "train", advice["mode"])
    assert config.learner == from_argv([f"{WORLDS}:Sleeps", "--ppo.epochs", "2"]).learner


def test_it_is_readable_without_colour_at_80_columns(capfd: Capture) -> None:
    code, out = checked(capfd, f"{WORLDS}:Sound")
    assert code == 0
    assert all(len(line) <= 80 or "freewheel train" in line for line in out.splitlines())
    assert "\x1b" not in out
    assert re.search(r"observation +3 columns of float32", out)
    assert re.search(r"action +2 to choose from", out)
    assert re.search(r"memory +[\d.]+ MB for one env", out)
    assert re.search(r"lockstep +8 in turn +[\d,]+ +the learner", out)
    assert out.splitlines()[-1].startswith(f"  freewheel train {WORLDS}:Sound")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (f"{WORLDS}:NotANumber", "a reward was nan"),
        (f"{WORLDS}:Raises", "raised RuntimeError: the pump is broken"),
        (f"{WORLDS}:Sound --policy.head gaussian", "policy.head gaussian does not fit the actions"),
        ("NoSuchEnv-v0", "unknown environment 'NoSuchEnv-v0'"),
        (f"{WORLDS}:Hangs --step-timeout 0.5", "did not return within 0.5 s"),
    ],
)
def test_what_stops_training_is_named_and_exits_with_1(capfd: Capture, words: str, text: str) -> None:
    code, out = checked(capfd, *words.split())
    assert code == 1
    assert text in " ".join(out.split())
    assert "!!" in out
    assert "training would fail" in out


def test_what_to_mend_is_told_and_does_not_fail(capfd: Capture) -> None:
    code, out = checked(capfd, f"{WORLDS}:OfItsProcess", "--json")
    said = json.loads(out)
    assert (code, said["cores"]) == (0, usable_cores())
    found = {one["about"]: one for one in said["findings"] if one["level"] == "note"}
    assert found.keys() == {"episodes", "processes", "scale"}
    assert "--max-episode-steps" in found["episodes"]["remedy"]
    assert "different steps under the same seed" in found["processes"]["text"]


def test_an_env_that_seldom_raises_would_train(capfd: Capture) -> None:
    code, out = checked(capfd, f"{WORLDS}:RaisesSeldom", "--json")
    found = {one["about"]: one for one in json.loads(out)["findings"]}
    assert (code, found["contract"]["level"], found["failures"]["level"]) == (0, "note", "note")
    assert found["failures"]["remedy"] == "each failure costs one episode"


def test_a_simulator_of_all_lanes_says_what_is_not_measured(capfd: Capture) -> None:
    code, out = checked(capfd, "freewheel/RoughDrone-v0")
    assert code == 0
    assert "cost, seeds and speeds are not measured" in " ".join(out.split())
