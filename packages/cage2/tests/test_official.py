"""The challenge's evaluation: the order of play, the scores and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freewheel
from freewheel.cli import main as cli
from freewheel.config.resolve import from_options
from freewheel.core import Decision, NDArray, Snapshot
from freewheel.envs.legacy import GlobalRandom
from freewheel.errors import UsageError
from freewheel_cage2 import official
from freewheel_cage2.cyborg_package import PACKAGE
from freewheel_cage2.official import ScoreBoard, ScoreCell
from freewheel_cage2.scenario import ACTIONS, RED_AGENTS

LENGTHS, EPISODES = (4, 7), 2


class Whim:
    """An actor whose action depends on every observation."""

    state_size = 0

    def act(self, obs: NDArray, rng: np.random.Generator, *, state: Any = None, greedy: bool = False) -> Decision:
        assert greedy
        return Decision(np.array([whim(row) for row in obs]), np.zeros(len(obs), np.float32), np.zeros((len(obs), 0)))

    def load(self, snapshot: Snapshot) -> None: ...


def whim(obs: NDArray) -> int:
    return int(17 * np.dot(obs[:52], np.arange(1, 53))) % len(ACTIONS)


def the_challenges_script(stream: GlobalRandom) -> list[float]:
    """Play like evaluation.py: one seed, one environment for each cell, and a reset after every episode."""
    returns = []
    with stream:
        for steps in LENGTHS:
            for red_agent in RED_AGENTS:
                game = PACKAGE.wrap(PACKAGE.start(PACKAGE.reds[red_agent]))
                observation, _ = game.reset()
                for _ in range(EPISODES):
                    total = 0.0
                    for _ in range(steps):
                        observation, reward, *_ = game.step(whim(observation))
                        total += reward
                    returns.append(total)
                    observation, _ = game.reset()
    return returns


@pytest.mark.system
@pytest.mark.parametrize("world", ["cyborg:Scenario2", "freewheel/Cage2-v0"])
def test_it_is_the_challenges_script_to_the_last_number_drawn(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = GlobalRandom(official.SEED), GlobalRandom(153)
    monkeypatch.setattr(official, "LENGTHS", LENGTHS)
    monkeypatch.setattr(official, "GlobalRandom", {153: ours}.__getitem__)
    shown: list[ScoreCell] = []
    config = from_options(world, {"red_agent": "mixture", "max_episode_steps": 9})
    board = official.evaluate(config, Whim(), EPISODES, show=shown.append)
    returns = [value for cell in board.cells for value in cell.returns]
    assert returns == pytest.approx(the_challenges_script(theirs), abs=1e-4)
    assert ours.state == theirs.state
    assert shown == list(board.cells)
    assert [(cell.steps, cell.red_agent) for cell in shown] == [(steps, red) for steps in LENGTHS for red in RED_AGENTS]
    assert any(value < 0 for value in returns)


def test_the_runs_own_arguments_go_along_and_green_sleeps() -> None:
    stream = GlobalRandom(0)
    config = from_options("freewheel/Cage2-v0", {"env_args": {"green": True, "memory": True}, "measures": ["x"]})
    world = official.on_simulator(config, "SleepAgent", 50, stream)
    assert (world.id, world.max_episode_steps, world.measures) == ("cyborg:Scenario2", 50, ())
    assert world.args == {"memory": True, "red_agent": "SleepAgent", "stream": stream}


def test_the_total_is_the_sum_of_all_means_and_the_spread_is_that_of_a_sample() -> None:
    cells = tuple(ScoreCell(steps, red, (-1.0, -2.0, -6.0)) for steps in (30, 50, 100) for red in RED_AGENTS)
    board = ScoreBoard(cells, 3, 153)
    assert board.total == pytest.approx(-27.0)
    assert cells[0].spread == pytest.approx(np.std((1, 2, 6), ddof=1))
    assert ScoreCell(30, "SleepAgent", (0.0,)).spread == 0.0
    assert json.loads(json.dumps(board.to_json()))["cells"][1]["mean"] == pytest.approx(-3.0)
    names = [who for who, _ in official.comparison(board)]
    assert names[0] == official.THIS
    assert names[1:3] == ["CardiffUni, 1st*", "Keeping it RL, 2nd*"]
    assert "CardiffUni" in names


def test_published_totals_are_sums_too() -> None:
    """Two authors count the cost of restoring while red sleeps; the others round."""
    for (who, _), (*scores, total) in official.PUBLISHED.items():
        slack = {"React-Restore": 170.0, "random": 20.0}.get(who, 0.06)
        assert total <= sum(scores) + 1e-9
        assert sum(scores) - total < slack


@pytest.mark.system
def test_eval_official_shows_a_table_and_keeps_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small: dict[str, Any] = {"num_envs": 2, "num_steps_per_env": 16, "steps": 32, "evals": 0, "policy": {"hidden": [4]}}
    defended = freewheel.train("freewheel/Cage2-v0", quiet=True, runs_dir=tmp_path, **small).path
    monkeypatch.setattr(official, "LENGTHS", (2, 3, 4))
    assert cli.main(["eval", str(defended), "--official", "--episodes", "2", "--which", "latest"]) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[0].startswith("B_lineAgent        2 steps: mean ")
    assert sum("standard deviation" in line for line in lines) == 9
    assert any(line.startswith("sleeping*") and line.split()[-1] == "-3112.2" for line in lines)
    assert "* on older code" in out
    kept = json.loads((defended / "official.json").read_text())
    assert (kept["run"], kept["which"], kept["episodes"], kept["seed"]) == (defended.name, "latest", 2, 153)
    assert [cell["steps"] for cell in kept["cells"]] == [2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert kept["simulator"] == PACKAGE.name
    ours = next(line for line in lines if line.startswith(official.THIS))
    assert float(ours.split()[-1]) == pytest.approx(kept["total"], abs=0.06)


def test_other_worlds_are_refused_in_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small: dict[str, Any] = {"num_envs": 1, "num_steps_per_env": 8, "steps": 8, "evals": 0}
    run = freewheel.train("CartPole-v1", quiet=True, runs_dir=tmp_path, **small)
    assert cli.main(["eval", str(run.path), "--official", "--which", "latest"]) == 2
    assert "--official is for runs on cyborg:Scenario2 or freewheel/Cage2-v0, not" in capfd.readouterr().err
    other = from_options("torch:tests.support.device_story:build", {})
    with pytest.raises(UsageError):
        official.on_simulator(other, "SleepAgent", 30, GlobalRandom(0))
