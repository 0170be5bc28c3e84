"""--mode auto: which mode a run gets, and that it keeps it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import freewheel
from freewheel.config.resolve import Config, from_argv, from_file, from_options
from freewheel.errors import UsageError
from freewheel.rollout.probe import EnvCost
from freewheel.run.advice import auto_mode, predictions
from freewheel.run.advice.auto_mode import plan_run
from freewheel.run.advice.throughput import PolicyTimes
from freewheel.run.plan import Plan
from tests.support.costs import SPEC
from tests.support.runs import IDENTITY

WAITING = EnvCost(spec=SPEC, wall=0.005, row=0.005, cpu=0.0001, times=(0.002,) * 8 + (0.017,) * 2, steps=100)
QUICK = EnvCost(spec=SPEC, wall=1e-6, row=1e-6, cpu=1e-6, steps=100)


def auto(tmp_path: Path, words: str = "") -> Config:
    return from_argv([IDENTITY, "--mode", "auto", *words.split(), "--runs-dir", str(tmp_path)])


def planned(monkeypatch: pytest.MonkeyPatch, config: Config, cost: EnvCost, learn: float = 5e-5) -> Plan:
    """As if the environment and the policy had been measured so."""
    monkeypatch.setattr("freewheel.run.planning.survey_env", lambda *_, **__: cost)
    monkeypatch.setattr(auto_mode, "PolicyClock", lambda: lambda _: PolicyTimes(act=1e-6, learn=learn))
    return plan_run(config)


def test_a_waiting_env_gets_workers_and_a_slow_learner_no_lag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, auto(tmp_path), WAITING)
    assert plan.config.mode == "continuous"
    assert plan.path.name.endswith("-ppo-continuous")
    assert plan.remarks[0].startswith("--mode auto is continuous: about ")
    assert "waits for the envs" in plan.remarks[0]
    assert plan.config.to_json()["mode"] == "continuous"
    assert plan.config.sources["mode"] == "auto"
    slow = planned(monkeypatch, auto(tmp_path), QUICK, learn=0.01)
    assert slow.config.mode == "sequential", "no mode is faster than its learner: the one without lag"


def test_options_of_a_mode_restrict_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted([one.mode for one in auto(tmp_path, "--workers 3").among]) == ["batch", "continuous", "episodes"]
    assert [one.mode for one in auto(tmp_path, "--placement processes").among] == ["lockstep"]
    plan = planned(monkeypatch, auto(tmp_path, "--workers 3 --max-lag 1"), QUICK, learn=0.01)
    assert plan.config.mode == "continuous"
    assert (plan.workers, plan.max_lag) == (3, 1)
    with pytest.raises(UsageError, match=r"no mode has all of --overflow, --wave; leave out one of them"):
        auto(tmp_path, "--overflow block --wave")
    with pytest.raises(UsageError, match=r"7 envs cannot be divided evenly over 2 workers"):
        auto(tmp_path, "--workers 2 --num-envs 7")


def test_an_env_that_cannot_be_sent_stays_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, auto(tmp_path), replace(WAITING, portable=False))
    assert plan.config.mode in ("sequential", "lockstep")
    assert plan.worker_config is None


def test_it_is_understood_in_files_and_python_and_written_back(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text('env = "CartPole-v1"\nmode = "auto"\n')
    given = [from_file(file), from_options("CartPole-v1", {"mode": "auto", "workers": 2})]
    given.append(from_argv(["--config", str(file)]))
    assert all(len(config.among) >= 3 for config in given)
    written = tmp_path / "written.json"
    written.write_text(json.dumps(given[1].to_json()))
    assert json.loads(written.read_text())["mode"] == "auto"
    again = from_file(written)
    assert {one.mode for one in again.among} >= {one.mode for one in given[1].among}
    assert all(getattr(one.collector, "workers", 2) == 2 for one in again.among)


def test_what_to_type_for_a_chosen_mode_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--mode continuous" in predictions.typed(planned(monkeypatch, auto(tmp_path), WAITING).config)


def test_a_real_run_keeps_the_mode_that_was_chosen(tmp_path: Path) -> None:
    made = freewheel.train(
        IDENTITY, mode="auto", steps=256, num_steps_per_env=16, evals=0, quiet=True, runs_dir=tmp_path
    )
    config = json.loads((made.path / "config.json").read_text())
    assert config["mode"] in ("sequential", "lockstep", "batch", "continuous", "episodes")
    assert config["sources"]["mode"] == "auto"
    again = freewheel.resume(made.path, steps=512, quiet=True)
    assert json.loads((again.path / "config.json").read_text())["mode"] == config["mode"]
    assert again.summary["env_steps"] >= 512
