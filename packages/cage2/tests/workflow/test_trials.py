"""Trials of a workflow: their stop rules, the files of a search, and the runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freewheel.core import Episode
from freewheel.errors import SetupError
from freewheel.run.checkpoints import checkpoint
from freewheel_cage2.workflow import trials
from freewheel_cage2.workflow.envs import CANONICAL, FAST, ORDERS, encode
from freewheel_cage2.workflow.search import Proposal, SearchRules, TrialOutcome, WorkflowSearch, WorkflowTrial
from freewheel_cage2.workflow.trials import EpisodeScores, SearchFiles, StopRules, TrialEpisodes, TrialRunner, means
from packages.cage2.tests.support.tables import rows_of

STOPS = StopRules(threshold=0.9, window=4, patience=2)


def episode(env_return: float = -10.0, compliance: float = 0.5, alignment: float = 15.0) -> Episode:
    return Episode(0, 0, 0, (), env_return + alignment, 100, 0.1, (env_return, alignment, compliance, 3.0))


def test_means_leave_out_what_does_not_apply() -> None:
    rows = [EpisodeScores(-5.0, -20.0, 15.0, 0.5, 4.0), EpisodeScores(-8.0, -8.0, 0.0, math.nan, 0.0)]
    rows.append(EpisodeScores(11.0, -10.0, 21.0, 0.7, 5.0))
    assert means(rows) == pytest.approx(EpisodeScores(-2 / 3, -38 / 3, 12.0, 0.6, 3.0))
    assert means(rows[1:2]).compliance is None


LOW, HIGH, NO_FIX = episode(compliance=0.0), episode(compliance=1.0), episode(compliance=math.nan)
NO_PATIENCE = StopRules(threshold=0.9, window=4, patience=0)
ALIGNED = [episode(-10.0, alignment=float(step)) for step in range(0, 36, 3)]


@pytest.mark.parametrize(
    ("stops", "episodes", "ended"),
    [
        (STOPS, [episode(compliance=0.9)] * 4, "threshold"),  # as soon as a window is full
        (NO_PATIENCE, [LOW] * 4 + [HIGH] * 4, "threshold"),  # the last window counts
        (StopRules(0.0, 4, 0), [NO_FIX] * 8, ""),  # compliance does not apply
        (StopRules(0.0, 4, 0), [NO_FIX] * 8 + [LOW], "threshold"),
        (STOPS, [episode(-10.0)] * 12, "plateau"),  # the first window is the best, and two more are not better
        (STOPS, [episode(-10.0)] * 4 + [episode(-9.7)] * 8, ""),  # an improvement below 2 % does not count
        (STOPS, [episode(-10.0)] * 4 + [episode(-9.9)] * 8, "plateau"),
        (STOPS, [episode(-10.0)] * 4 + [episode(-11.0)] * 8, "plateau"),
        (STOPS, ALIGNED, "plateau"),  # only the environment's return counts
        (NO_PATIENCE, [episode()] * 40, ""),
    ],
)
def test_when_a_trial_ends(stops: StopRules, episodes: list[Episode], ended: str) -> None:
    progress = TrialEpisodes(stops)
    assert [progress.take([one]) for one in episodes] == [""] * (len(episodes) - 1) + [ended]
    assert progress.last == means(progress.played[-4:])


def test_fixed_episodes_end_by_no_rule_and_many_at_once_fill_many_windows() -> None:
    progress = TrialEpisodes(STOPS, fixed=True)
    assert {progress.take([HIGH]) for _ in range(40)} == {""}
    assert progress.last.compliance == 1.0
    progress = TrialEpisodes(STOPS)
    assert progress.take([episode(-10.0)] * 13) == "plateau"
    assert progress.take([]) == "plateau"


RULES = SearchRules("gp", 1000, 100, 10, 0.8)
EXPECTED = Proposal(1, ORDERS[3], 100, "000-a", False, -3.25, 0.1, -3.05, 0.75)
FINISHED = [
    WorkflowTrial(Proposal(0, ORDERS[7], 100), TrialOutcome(-12.345678901234567, 27.0, 0.9, 60, "threshold", "000-a")),
    WorkflowTrial(EXPECTED, TrialOutcome(-20.5, 3.0, 0.1, 100, "plateau", "001-b")),
    WorkflowTrial(Proposal(2, None, 50, fixed=True), TrialOutcome(-7.0, 0.0, None, 50, "episodes", "002-none")),
]


def training_row(trial: int, update: int = 1) -> dict[str, Any]:
    return dict.fromkeys(trials.TRAINING_COLUMNS, 0) | {"trial": trial, "update": update, "compliance": None}


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    book = SearchFiles(tmp_path / "deep" / "search")
    assert not book.exists
    book.save({"options": {"seed": 3}}, WorkflowSearch(RULES, FINISHED))
    assert book.exists
    assert book.read() == ({"options": {"seed": 3}}, FINISHED)
    assert json.loads((book.folder / trials.STATE).read_text())["best"]["run"] == "000-a"


def test_the_table_of_decisions_has_predictions_and_outcomes(tmp_path: Path) -> None:
    SearchFiles(tmp_path).save({}, WorkflowSearch(RULES, FINISHED))
    first, second, third = rows_of(tmp_path / trials.SAMPLING)
    assert (first["chosen"], first["mean"], first["failed"]) == ("-".join(ORDERS[7]), "", "False")
    assert (second["mean"], second["std"], second["ucb"], second["feasibility"]) == ("-3.25", "0.1", "-3.05", "0.75")
    assert (second["init"], second["ended"], second["failed"]) == ("000-a", "plateau", "True")
    assert (third["chosen"], third["compliance"]) == ("none", "")
    assert [row["total_episodes"] for row in (first, second, third)] == ["60", "160", "210"]
    for row in (first, second, third):
        assert float(row["env_return"]) + float(row["alignment"]) == pytest.approx(float(row["total_reward"]))


def test_the_training_log_keeps_the_rows_of_finished_trials_alone(tmp_path: Path) -> None:
    book = SearchFiles(tmp_path)
    book.begin_training(0)
    for trial in (0, 0, 1, 2):
        book.train(training_row(trial))
    with (tmp_path / trials.TRAINING).open("a") as file:
        file.write("1,half a ro")  # a row that a kill has cut off
    book.begin_training(2)
    assert [row["trial"] for row in rows_of(tmp_path / trials.TRAINING)] == ["0", "0", "1"]
    book.train(training_row(2))
    assert [row["trial"] for row in rows_of(tmp_path / trials.TRAINING)] == ["0", "0", "1", "2"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 9, "asked": {}, "trials": []}', '{"format": 1}'])
def test_a_damaged_state_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / trials.STATE).write_text(text)
    with pytest.raises(SetupError, match=r"search\.json is missing or damaged"):
        SearchFiles(tmp_path).read()


def test_a_kill_while_writing_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = SearchFiles(tmp_path)
    book.save({}, WorkflowSearch(RULES, FINISHED[:1]))

    def killed(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        book.save({}, WorkflowSearch(RULES, FINISHED))
    assert book.read()[1] == FINISHED[:1]


ORDER = CANONICAL["critical-first"]
NEVER_STOP = StopRules(threshold=1.0, window=8, patience=0)
WORLD: Mapping[str, Any] = {"env": FAST, "env_args": {"red_agent": "B_lineAgent", "alignment_lambda": 20.0}}
SIZES: Mapping[str, Any] = {"max_episode_steps": 20, "num_envs": 4, "num_steps_per_env": 20, "evals": 0, "seed": 3}
OPTIONS = {**WORLD, **SIZES, "mode": "lockstep", "placement": "inline"}


def training(folder: Path, rows: list[Mapping[str, Any]], stops: StopRules = NEVER_STOP, **options: Any) -> TrialRunner:
    return TrialRunner({**OPTIONS, **options}, folder, stops, rows.append, length=20)


def summary(folder: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / trials.TRIALS / run / "summary.json").read_text())
    return found


def weights(folder: Path, run: str) -> dict[str, Any]:
    return checkpoint.load(folder / trials.TRIALS / run / "checkpoints").params


def test_trials_are_runs_under_their_orders_and_the_log_accounts_for_every_episode_and_reward(tmp_path: Path) -> None:
    rows: list[Mapping[str, Any]] = []
    train = training(tmp_path, rows)
    first, second = train(Proposal(0, ORDER, 12)), train(Proposal(1, None, 8, fixed=True))
    config = json.loads((tmp_path / trials.TRIALS / first.run / "config.json").read_text())
    assert first.run == "000-op_server-enterprise-defender-op_host-user"
    assert (first.episodes, first.ended, summary(tmp_path, first.run)["episodes"]) == (12, "episodes", 12)
    assert config["context"] == [encode(ORDER).tolist()]
    assert 0 < first.alignment <= 20.0 * (first.compliance or 0.0) + 1e-4, "an episode without a fix has no compliance"
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
    outcome = TrialRunner(options, tmp_path, NEVER_STOP, rows.append, length=20)(Proposal(0, ORDER, 4))
    assert rows[-1]["episodes"] == outcome.episodes
    assert outcome.episodes >= 4


def test_a_trial_begins_with_the_weights_it_is_given(tmp_path: Path) -> None:
    """With step size 0 the weights do not change."""
    train = training(tmp_path, [], ppo={"lr": 1e-30})
    for proposal in (Proposal(0, ORDER, 4), Proposal(1, ORDER[::-1], 4)):
        train(proposal)
    again = train(Proposal(2, ORDER[::-1], 4, init="000-op_server-enterprise-defender-op_host-user"))
    runs = sorted(path.name for path in (tmp_path / trials.TRIALS).iterdir())
    first, second, third = (weights(tmp_path, run) for run in runs)
    assert runs[2] == again.run
    assert all(np.allclose(first[name], third[name], atol=1e-9) for name in first)
    assert not all(np.allclose(second[name], third[name], atol=1e-3) for name in first)


@pytest.mark.parametrize(
    ("stops", "ended", "episodes"),
    [
        (StopRules(0.0, 8, 0), "threshold", 8),
        (StopRules(1.0, 4, 2), "plateau", None),
        (StopRules(1.0, 8, 0), "episodes", 60),
    ],
)
def test_rules_end_a_run(tmp_path: Path, stops: StopRules, ended: str, episodes: int | None) -> None:
    """Red sleeps and the weights do not change, so the return is constant."""
    world = {"red_agent": "SleepAgent", "alignment_lambda": 1.0}
    outcome = training(tmp_path, [], stops, env_args=world, ppo={"lr": 1e-30})(Proposal(0, ORDER, 60))
    assert outcome.ended == ended
    assert summary(tmp_path, outcome.run)["ended"] in (ended, "steps")
    assert outcome.episodes == episodes if episodes else outcome.episodes < 60


def test_every_trial_has_a_different_seed(tmp_path: Path) -> None:
    train = training(tmp_path, [])
    seeds = [train.config(Proposal(number, ORDER, 4)).run.seed for number in range(3)]
    assert len(set(seeds)) == 3
    assert seeds == [training(tmp_path, []).config(Proposal(number, ORDER, 4)).run.seed for number in range(3)]
