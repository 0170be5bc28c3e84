"""CAGE Challenge 2 as a plug-in: its flags and defaults, and a core that does not know it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.cli import main as cli
from freewheel.config.resolve import from_argv, from_file, from_options
from freewheel.errors import UsageError

PACKAGE = Path(freewheel.__file__).parent
WORDS = re.compile(r"cage.?2|cage challenge|cyborg|red.?agent|scenario.?2|official|workflow", re.IGNORECASE)


def test_no_file_of_the_core_names_it() -> None:
    listed = PACKAGE / "packages.toml"  # what to install for which name
    files = [path for kind in ("*.py", "*.toml", "*.c") for path in PACKAGE.rglob(kind) if path != listed]
    assert len(files) > 50
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if WORDS.search(line)
    ]
    assert found == []


def refusal(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        from_argv(argv)
    return str(caught.value)


@pytest.mark.parametrize("world", ["cyborg:Scenario2", "freewheel/Cage2-v0"])
def test_who_attacks_is_a_flag_and_an_argument_of_the_world(world: str, tmp_path: Path) -> None:
    """Both options mean the same, the last one wins, and config.json names the agent."""
    assert from_argv([world]).env.args == {"red_agent": "B_lineAgent"}
    for spelling in ("--red-agent", "--red_agent", "--env.red_agent"):
        chosen = from_argv([world, spelling, "RedMeanderAgent"])
        assert chosen.env.args == {"red_agent": "RedMeanderAgent"}
    assert chosen == from_options(world, {"red_agent": "RedMeanderAgent"})
    assert chosen == from_options(world, {"env_args": {"red_agent": "RedMeanderAgent"}})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(chosen.to_json()))
    assert from_file(file) == chosen
    assert json.loads(file.read_text())["env_args"] == {"red_agent": "RedMeanderAgent"}
    for spelling in ("--red-agent=mixture", "--env.red_agent=mixture"):
        assert from_argv([world, "--config", str(file), spelling]).env.args == {"red_agent": "mixture"}


@pytest.mark.parametrize("world", ["cyborg:Scenario2", "freewheel/Cage2-v0"])
def test_short_names_are_understood_and_unknown_ones_refused_with_the_nearest(world: str) -> None:
    message = "unknown red agent 'RedMaender'; did you mean 'RedMeanderAgent'?"
    assert refusal(world, "--red-agent", "RedMaender") == message
    assert refusal(world, "--env.red_agent", "RedMaender") == message
    for short, red in SHORT.items():
        assert from_argv([world, "--red-agent", short]).env.args == {"red_agent": red}


SHORT = dict.fromkeys(("b_line", "bline", "B_line", "B-line"), "B_lineAgent") | {"sleep": "SleepAgent"}
SHORT |= dict.fromkeys(("meander", "Meander", "RedMeander"), "RedMeanderAgent")


def test_the_real_one_has_a_hundred_steps_unless_asked_otherwise() -> None:
    assert from_argv(["cyborg:Scenario2"]).to_json()["max_episode_steps"] == 100
    assert from_argv(["cyborg:Scenario2", "--max-episode-steps", "30"]).to_json()["max_episode_steps"] == 30
    assert refusal("cyborg:Scenario1") == "unknown scenario 'cyborg:Scenario1'; did you mean 'cyborg:Scenario2'?"


def test_eval_measures_a_defender_by_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small: dict[str, Any] = {"num_envs": 2, "num_steps_per_env": 32, "steps": 64, "evals": 1, "eval_episodes": 4}
    game: dict[str, Any] = {"max_episode_steps": 30, "red_agent": "RedMeanderAgent"}
    done = freewheel.train("freewheel/Cage2-v0", quiet=True, runs_dir=tmp_path, **small, **game)
    assert cli.main(["eval", str(done.path), "--episodes", "4"]) == 0
    first, *others = capfd.readouterr().out.splitlines()
    mean = float(first.split("mean ")[1].split()[0])
    scores = {who.strip(): float(score) for score, who in (line.split(None, 1) for line in others)}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert scores["this run"] == pytest.approx(mean, abs=0.05)
    assert scores["asleep, measured now"] == pytest.approx(-40, abs=4)  # the real one: -39.1
    assert scores["CardiffUni, 1st, published (older code)"] == -5.6
