"""Trials by training: what a run is told, when it ends, and that its log adds up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freewheel.run import checkpoint
from freewheel.worlds.cage2.workflow.envs import FAST
from freewheel.worlds.cage2.workflow.orders import CANONICAL, encode
from freewheel.worlds.cage2.workflow.records import Stops
from freewheel.worlds.cage2.workflow.search import Proposal
from freewheel.worlds.cage2.workflow.trials import TRIALS, Training

ORDER = CANONICAL["critical-first"]
STOPS = Stops(threshold=1.0, window=8, patience=0)
OPTIONS: Mapping[str, Any] = {
    "env": FAST,
    "env_args": {"red_agent": "B_lineAgent", "alignment_lambda": 20.0},
    "max_episode_steps": 20,
    "mode": "lockstep",
    "placement": "inline",
    "num_envs": 4,
    "num_steps_per_env": 20,
    "evals": 0,
    "seed": 3,
}


def training(folder: Path, rows: list[Mapping[str, Any]], stops: Stops = STOPS, **options: Any) -> Training:
    return Training({**OPTIONS, **options}, folder, stops, rows.append, length=20)


def summary(folder: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / TRIALS / run / "summary.json").read_text())
    return found


def weights(folder: Path, run: str) -> dict[str, Any]:
    return checkpoint.load(folder / TRIALS / run / "checkpoints").params


def test_a_trial_is_a_run_under_its_order(tmp_path: Path) -> None:
    outcome = training(tmp_path, [])(Proposal(4, ORDER, 12))
    config = json.loads((tmp_path / TRIALS / outcome.run / "config.json").read_text())
    assert outcome.run == "004-op_server-enterprise-defender-op_host-user"
    assert (outcome.episodes, outcome.ended) == (12, "episodes")
    assert config["context"] == [encode(ORDER).tolist()]
    assert summary(tmp_path, outcome.run)["episodes"] == 12
    assert outcome.alignment == pytest.approx(20.0 * (outcome.compliance or 0.0), abs=1e-4)


def test_the_log_accounts_for_every_episode_and_every_reward(tmp_path: Path) -> None:
    rows: list[Mapping[str, Any]] = []
    train = training(tmp_path, rows)
    first, second = train(Proposal(0, ORDER, 12)), train(Proposal(1, None, 8, fixed=True))
    assert [row["trial"] for row in rows] == [0, 0, 0, 1, 1]
    assert [row["episodes"] for row in rows] == [4, 8, 12, 4, 8]
    assert [row["total_episodes"] for row in rows] == [4, 8, 12, 16, 20]
    assert [row["update"] for row in rows] == [1, 2, 3, 1, 2]
    for row in rows:
        assert row["env_return"] + row["alignment"] == pytest.approx(row["total_reward"], abs=1e-3)
    assert first.env_return == pytest.approx((rows[1]["env_return"] + rows[2]["env_return"]) / 2, abs=1e-4)
    assert (second.compliance, second.alignment, rows[-1]["compliance"]) == (None, 0.0, None)


def test_episodes_that_no_update_has_used_are_in_the_log(tmp_path: Path) -> None:
    rows: list[Mapping[str, Any]] = []
    way = {"mode": "episodes", "placement": None, "num_envs": "auto", "workers": 1, "episodes_per_update": 3}
    options = {name: value for name, value in {**OPTIONS, **way}.items() if value is not None}
    outcome = Training(options, tmp_path, STOPS, rows.append, length=20)(Proposal(0, ORDER, 4))
    assert rows[-1]["episodes"] == outcome.episodes
    assert outcome.episodes >= 4


def test_a_trial_begins_with_the_weights_it_is_given(tmp_path: Path) -> None:
    """With no step size at all, weights end as they begin."""
    train = training(tmp_path, [], ppo={"lr": 1e-30})
    for proposal in (Proposal(0, ORDER, 4), Proposal(1, ORDER[::-1], 4)):
        train(proposal)
    again = train(Proposal(2, ORDER[::-1], 4, init="000-op_server-enterprise-defender-op_host-user"))
    runs = sorted(path.name for path in (tmp_path / TRIALS).iterdir())
    first, second, third = (weights(tmp_path, run) for run in runs)
    assert runs[2] == again.run
    assert all(np.allclose(first[name], third[name], atol=1e-9) for name in first)
    assert not all(np.allclose(second[name], third[name], atol=1e-3) for name in first)


@pytest.mark.parametrize(
    ("stops", "ended", "episodes"),
    [(Stops(0.0, 8, 0), "threshold", 8), (Stops(1.0, 4, 2), "plateau", None), (Stops(1.0, 8, 0), "episodes", 200)],
)
def test_rules_end_a_run(tmp_path: Path, stops: Stops, ended: str, episodes: int | None) -> None:
    """Red is asleep and weights stand still: the return stays where it is."""
    world = {"red_agent": "SleepAgent", "alignment_lambda": 1.0}
    outcome = training(tmp_path, [], stops, env_args=world, ppo={"lr": 1e-30})(Proposal(0, ORDER, 200))
    assert outcome.ended == ended
    assert summary(tmp_path, outcome.run)["ended"] in (ended, "steps")
    assert outcome.episodes == episodes if episodes else outcome.episodes < 200


def test_a_fixed_trial_has_all_its_episodes(tmp_path: Path) -> None:
    outcome = training(tmp_path, [], Stops(0.0, 4, 1))(Proposal(0, ORDER, 20, fixed=True))
    assert (outcome.episodes, outcome.ended) == (20, "episodes")


def test_a_trial_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    proposal = Proposal(0, ORDER, 8)
    whole = training(tmp_path / "whole", [])(proposal)
    left = tmp_path / "cut" / TRIALS / whole.run
    left.mkdir(parents=True)
    (left / "config.json").write_text("{")
    again = training(tmp_path / "cut", [])(proposal)
    assert again == whole
    assert (
        summary(tmp_path / "cut", again.run)["weights_sha256"]
        == summary(tmp_path / "whole", whole.run)["weights_sha256"]
    )


def test_every_trial_has_a_seed_of_its_own(tmp_path: Path) -> None:
    train = training(tmp_path, [])
    seeds = [train.config(Proposal(number, ORDER, 4)).run.seed for number in range(3)]
    assert len(set(seeds)) == 3
    assert seeds == [training(tmp_path, []).config(Proposal(number, ORDER, 4)).run.seed for number in range(3)]
