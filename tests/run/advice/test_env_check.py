"""What `freewheel check` finds in environments that break the contract in one way each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from freewheel.config.auto import settle
from freewheel.config.resolve import from_argv
from freewheel.envs.gym import GymConfig
from freewheel.errors import EnvError
from freewheel.run.advice.env_check import Finding, _scales, _tried, digest, inspect_env
from tests.config.test_auto import BOX
from tests.support import uneasy_worlds as worlds
from tests.support.costs import cost


def inspected(env: type[worlds.Sound]) -> list[Finding]:
    return list(inspect_env(GymConfig(env.__name__, factory=env), cost(1e-5)).findings)


def test_an_env_that_keeps_the_contract_is_sound_in_every_point() -> None:
    found = inspected(worlds.Sound)
    assert {finding.level for finding in found} == {"ok"}
    assert [finding.about for finding in found] == ["seeds", "numbers", "episodes", "answers"]
    assert found[0].text == "the same seed gives the same 200 steps, another seed gives others"


@pytest.mark.parametrize(
    ("env", "level", "about", "text", "remedy"),
    [
        (worlds.IgnoresSeed, "note", "seeds", "the same seed starts a different episode", "super().reset(seed=seed)"),
        (worlds.OneEpisode, "note", "seeds", "other seeds give the same 200 steps", "fine if nothing is random"),
        (worlds.NotANumber, "problem", "numbers", "a reward was nan", "training stops"),
        (worlds.Doubles, "note", "answers", "dtype", "training works"),
        (worlds.Endless, "note", "episodes", "none ended in 300 random steps", "--max-episode-steps"),
        (worlds.Frozen, "note", "numbers", "the observation never changed", "updated in step()"),
        (worlds.Integers, "note", "answers", "Expects `truncated` signal to be a boolean", "training works"),
    ],
)
def test_faults_are_told_with_a_remedy(env: type[worlds.Sound], level: str, about: str, text: str, remedy: str) -> None:
    found = [one for one in inspected(env) if one.level != "ok" and one.about == about and text in one.text]
    assert [one.level for one in found][:1] == [level], inspected(env)
    assert remedy in found[0].remedy


class Far(worlds.Sound):
    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        return np.array([-3e4, 0.1, 3], np.float32), -0.1, False, super().step(action)[3], {}


def test_the_scales_of_rewards_and_observations_are_told() -> None:
    far, sound = (inspect_env(GymConfig("", factory=world), cost(1e-5)) for world in (Far, worlds.Sound))
    options = ("--algo sac", "--policy.normalize-obs true", "")
    sac, given, ppo = (from_argv(["X-v0", *words.split()]) for words in options)
    rewards, scale = _scales(settle(sac, BOX), far)
    assert (rewards.level, rewards.text) == ("ok", "about 0.1 a step: the temperature begins at 0.05")
    told = "a column is about 30,000, far from 1: observations {} normalised"
    assert [scale] == _scales(given, far) == [Finding("ok", "scale", told.format("are"))]
    assert _scales(ppo, far) == [Finding("note", "scale", told.format("should be"), "--policy.normalize-obs true")]
    assert _scales(ppo, sound) == []


def test_steps_of_two_processes_are_compared_by_their_first_few() -> None:
    sound = GymConfig("Sound", factory=worlds.Sound)
    assert digest(sound) == inspect_env(sound, cost(1.0)).digest
    assert inspect_env(GymConfig("Other", factory=worlds.IgnoresSeed), cost(1.0)).digest == ""


@pytest.mark.parametrize(("failures", "level"), [(1, "note"), (0, "problem")])
def test_what_one_found_is_told_if_the_other_fails(failures: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def called(call: Any, **_: Any) -> Any:
        if call.func is digest:
            raise EnvError("it raised")
        return call()

    monkeypatch.setattr("freewheel.run.advice.env_check.call_in_process", called)
    config = from_argv(["X-v0"])
    config = replace(config, env=GymConfig("Sound", factory=worlds.Sound))
    seen, found = _tried(config, replace(cost(1e-5), failures=failures))
    assert seen is not None
    assert [(one.about, one.level) for one in found][-2:] == [("answers", "ok"), ("contract", level)]


def test_episodes_that_ended_while_it_was_measured_count() -> None:
    found = inspect_env(GymConfig("Endless", factory=worlds.Endless), replace(cost(1e-5), lengths=(500,))).findings
    assert Finding("ok", "episodes", "1 ended in 300 random steps, and the next ones began") in found


def test_a_vector_env_is_tried_through_its_adapter() -> None:
    found = inspect_env(from_argv(["freewheel/Cage2-v0"]).env, cost(1e-4)).findings
    assert [(one.level, one.about) for one in found] == [("ok", "seeds"), ("ok", "numbers"), ("ok", "episodes")]
