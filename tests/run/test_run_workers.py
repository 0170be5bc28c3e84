"""Runs whose workers are processes: their run directories, plans, evaluations and ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.config.resolve import from_argv, from_options
from freewheel.core import LEARNER_TIME, WORKER_TIME
from freewheel.errors import UsageError
from freewheel.run import planning
from freewheel.run.checkpoints import checkpoint
from freewheel.run.naming import Result
from tests.support.runs import IDENTITY, assert_balanced, rows_of, train
from tests.support.surveys import REAL

MODES = ("continuous", "batch", "episodes")


@pytest.fixture(scope="module", params=MODES)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("runs"), mode=request.param, workers=4, ppo={"lr": 0.01})


def test_a_run_is_complete_and_adds_up(result: Result) -> None:
    summary = json.loads((result.path / "summary.json").read_text())
    assert summary.pop("sha256")
    assert summary == result.summary
    assert (summary["ended"], summary["exit_code"], summary["error"]) == ("steps", 0, None)
    assert summary["env_steps"] >= 640
    assert summary["trained"] == 64 * summary["updates"]
    assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values())
    mode = json.loads((result.path / "config.json").read_text())["mode"]
    assert set(summary["dropped"]) <= ({"shutdown"} if mode == "batch" else set()), "no row was acted in vain"
    assert (summary["worker_restarts"], summary["workers_lost"]) == (0, 0)
    for party, kinds in (("worker", WORKER_TIME), ("learner", LEARNER_TIME)):
        shares = summary["shares"][party]
        assert tuple(shares) == kinds
        assert sum(shares.values()) == pytest.approx(1.0)
    latest = checkpoint.load(result.path / "checkpoints", "latest")
    assert checkpoint.fingerprint(latest.params) == summary["weights_sha256"]
    for row in rows_of(result):
        assert_balanced(row)
        assert 0.0 <= row["queue_util"] <= 1.0

    produced, trained = summary["episodes_produced"], summary["episodes_trained"]
    assert (produced["length_mean"], trained["length_mean"]) == (16.0, 16.0)
    assert trained["count"] == summary["episodes"] > 0
    assert produced["count"] >= trained["count"]
    workers = summary["workers"]
    assert [worker["worker"] for worker in workers] == [0, 1, 2, 3]
    assert sum(worker["steps"] for worker in workers) == summary["produced"]
    assert all(worker["step_s"] > 0 and worker["reset_s"] > 0 for worker in workers if worker["episodes"])


@pytest.mark.parametrize("mode", ["continuous", "episodes"])
def test_a_workers_means_are_of_all_that_it_did(tmp_path: Path, mode: str) -> None:
    """Also of its last fragment, which nobody learns from, and of the reset after it. Every step and every reset takes 3 ms."""
    slow = {"env_args": {"seconds": 0.003, "at": 0, "length": 16}, "steps": 64, "evals": 0}
    workers = train(tmp_path, "tests.support.worlds:Crawls", mode=mode, workers=4, **slow).summary["workers"]
    played = [worker for worker in workers if worker["episodes"]]
    assert [worker["episodes"] for worker in workers] == [worker["steps"] // 16 for worker in workers]
    assert played
    assert all(worker["step_s"] >= 0.003 and worker["reset_s"] >= 0.003 for worker in played)


def test_saved_weights_score_as_they_did_in_the_run(result: Result) -> None:
    assert result.summary["best_eval"] >= result.summary["final_eval"] > 0
    seed = result.summary["eval_fresh_seed"]
    for which, score in (("best", "best_eval"), ("latest", "final_eval")):
        assert freewheel.score(str(result.path), episodes=3, which=which, seed=seed).mean == result.summary[score]


@pytest.mark.parametrize("world", ["CartPole-v1", "tests.support.worlds:Crawls"])
def test_batch_with_auto_workers_is_repeatable(tmp_path: Path, world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the environment is measured twice, and it may be found that other numbers of workers are best."""
    monkeypatch.setattr(planning, "survey_env", REAL)
    args = {"seconds": 0.003, "at": 0} if world.endswith("Crawls") else {}
    small: dict[str, Any] = {"mode": "batch", "steps": 256, "num_envs": 4, "num_steps_per_env": 16, "evals": 0}
    first = freewheel.train(world, quiet=True, runs_dir=tmp_path / "first", env_args=args, **small)
    kept = json.loads((first.path / "config.json").read_text())
    assert kept["workers"] * kept["envs_per_worker"] == kept["num_envs"] == 4
    for again in (
        freewheel.train(world, quiet=True, runs_dir=tmp_path / "again", env_args=args, **small),
        freewheel.train(world, quiet=True, config=first.path / "config.json"),
    ):
        assert again.summary["weights_sha256"] == first.summary["weights_sha256"]
    assert first.summary["updates"] > 1


@pytest.mark.parametrize("flag", ["--workers", "--num-collectors", "--n-workers", "--num_collectors"])
def test_workers_have_several_names(flag: str) -> None:
    config = from_argv([IDENTITY, "--mode", "continuous", flag, "3"])
    assert config.collector == from_options(IDENTITY, {"mode": "continuous", flag.strip("-"): 3}).collector
    assert getattr(config.collector, "workers", None) == 3
    assert config == from_argv([IDENTITY, "--mode", "continuous", f"{flag}=3"])


def test_the_plan_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("collect.workers", "run.plan"):
        monkeypatch.setattr(f"freewheel.{module}.usable_cores", lambda: 4)
    monkeypatch.setattr("freewheel.run.advice.keeping_up.update_cost", lambda planned: 0.0)
    planned = planning.plan(from_options(IDENTITY, {"mode": "continuous", "runs_dir": tmp_path, "num_envs": 9}))
    assert planned.defaults_line == "Discrete actions: 2,052 rows an update in 10 epochs of minibatches of 64"
    lines = planned.lines()
    assert "workers  3 workers x 3 envs, a thread each, on 4 cores; the learner has a core" in lines
    assert "collect  continuous: 9 envs x 228 steps = 2052 rows an update" in lines


def test_the_plan_of_episodes(tmp_path: Path) -> None:
    options = {"mode": "episodes", "runs_dir": tmp_path, "num_envs": 2, "episodes_per_update": 5}
    planned = planning.plan(from_options(IDENTITY, options))
    assert "collect  episodes: 2 envs, 5 episodes an update" in planned.lines()
    assert not any(line.startswith("updates") for line in planned.lines())
    assert (planned.workers, planned.learner_spec.batch.episodes, planned.max_lag) == (2, 5, None)


def test_impossible_numbers_are_refused_before_anything_starts() -> None:
    for argv, text in (
        (["--workers", "3", "--num-envs", "8"], "8 envs cannot be divided evenly over 3 workers; use --num-envs 6"),
        (["--workers", "0"], "--workers must be positive"),
        (["--workers", "some"], "--workers must be a whole number or one of auto, not some"),
        (["--max-lag", "-1"], "--max-lag must not be negative"),
    ):
        with pytest.raises(UsageError, match=text):
            from_argv([IDENTITY, "--mode", "continuous", *argv])
    with pytest.raises(UsageError, match="--max-lag is an option of mode continuous, episodes or ray, not of batch"):
        from_argv([IDENTITY, "--mode", "batch", "--max-lag", "1"])
