"""What a run leaves behind, how it ends, and that it learns: the public contract of DESIGN 6."""

from __future__ import annotations

import itertools
import json
import os
import textwrap
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.config.resolve import from_file, from_options
from freewheel.core import LEARNER_TIME, WORKER_TIME
from freewheel.errors import NothingLearnedError, SetupError, UsageError
from freewheel.run.checkpoints import checkpoint
from freewheel.run.naming import Result
from freewheel.run.planning import plan
from tests.support.runs import IDENTITY, assert_balanced, python, rows_of, train
from tests.support.worlds import Identity

ALWAYS = set(
    """wall_s env_steps episodes updates steps_per_s episodes_per_s updates_per_s return_mean
    return_episodes length_mean lag_mean lag_max
    queue_util buffer_util cpu_util gpu_util env_busy learner_busy produced trained queued open dropped""".split()  # noqa: SIM905
)
SUMMARY = set(
    """run ended exit_code error wall_s env_steps episodes updates steps_per_s episodes_per_s updates_per_s return_mean
    return_episodes length_mean lag_max best_eval best_eval_std best_step episodes_trained final_eval final_eval_std eval_episodes
    eval_fresh eval_fresh_seed eval_note evals_skipped produced trained queued open dropped shares worker_restarts out_of_space
    first_step_s training_s graphs_fallback checkpoints slept_s weights_sha256 path problems advice""".split()  # noqa: SIM905
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("runs"), run="one")


def test_every_row_of_metrics_has_these_keys_and_balances(result: Result) -> None:
    rows = [
        next(of) for _, of in itertools.groupby(rows_of(result), itemgetter("updates"))
    ]  # slow evaluations have more
    assert [row["env_steps"] for row in rows] == list(range(64, 641, 64))
    assert [row["updates"] for row in rows] == list(range(1, 11))
    assert [row["episodes"] for row in rows] == list(range(4, 41, 4))
    for number, row in enumerate(rows):
        extra = row.keys() - ALWAYS
        assert row.keys() >= ALWAYS
        assert ("eval_return" in extra) == (number >= 4)
        assert extra >= {"loss/policy", "loss/value", "memory/trainer_mb", "time/learner_update", "time/worker_step"}
        assert_balanced(row)
        assert row["produced"] == row["trained"] == row["env_steps"]
        assert (row["lag_mean"], row["lag_max"], row["length_mean"]) == (0.0, 0.0, 16.0)
        assert row["queue_util"] is row["gpu_util"] is None
        assert row["steps_per_s"] == pytest.approx(row["env_steps"] / row["wall_s"])
    assert rows_of(result)[-1]["eval_return"] == result.summary["final_eval"]


def test_mistakes_found_while_planning_are_told_of_as_keyword_arguments(tmp_path: Path) -> None:
    told = r'^steps=500 would end .* \(sac=\{"learning_starts": ...\} takes 1,001 rows\): use more steps or fewer sac='
    with pytest.raises(UsageError, match=told):
        freewheel.train(
            "Pendulum-v1", algo="sac", sac={"learning_starts": 1000}, steps=500, quiet=True, runs_dir=tmp_path
        )
    with pytest.raises(SetupError, match=r'^device="cuda:99": torch sees .* here; use device="(cuda|cpu)"$'):
        freewheel.train(IDENTITY, device="cuda:99", quiet=True, runs_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_summary_has_these_keys_and_adds_up(result: Result) -> None:
    summary = json.loads((result.path / "summary.json").read_text())
    assert summary.pop("sha256")
    assert summary == result.summary
    assert summary.keys() == SUMMARY
    assert (summary["run"], summary["path"], result.path.name) == ("one", str(result.path), "one")
    assert (summary["ended"], summary["exit_code"], summary["error"]) == ("steps", 0, None)
    assert (summary["env_steps"], summary["updates"], summary["episodes"]) == (640, 10, 40)
    assert (summary["produced"], summary["trained"], summary["dropped"]) == (640, 640, {})
    assert_balanced(summary)
    assert summary["steps_per_s"] == pytest.approx(640 / summary["wall_s"])
    assert summary["worker_restarts"] == 0
    for party, kinds in (("worker", WORKER_TIME), ("learner", LEARNER_TIME)):
        shares = summary["shares"][party]
        assert tuple(shares) == kinds
        assert sum(shares.values()) == pytest.approx(1.0)
        assert min(shares.values()) >= 0.0
    for kind in ("update", "wait-data", "eval", "save"):
        assert summary["shares"]["learner"][kind] > 0.0


def test_the_weights_are_saved_and_verify(result: Result) -> None:
    root = result.path / "checkpoints"
    assert os.readlink(root / "latest") == "640"
    latest = checkpoint.load(root, "latest")
    assert (latest.step, latest.warnings, latest.about["version"]) == (640, (), 10)
    assert checkpoint.fingerprint(latest.params) == result.summary["weights_sha256"]
    data = {"config.json", "metrics.jsonl", "summary.json", "messages.jsonl", "status.json", "targets.json"}
    assert set(os.listdir(result.path)) == {*data, "checkpoints", ".lock"}


def test_the_config_is_kept_and_makes_the_same_run_again(tmp_path: Path) -> None:
    first = train(tmp_path, ppo={"lr": 0.01}, evals=0)
    again = freewheel.train(IDENTITY, quiet=True, config=first.path / "config.json")
    assert again.path == tmp_path / f"{first.path.name}-2"
    assert again.summary["weights_sha256"] == first.summary["weights_sha256"]
    kept = json.loads((first.path / "config.json").read_text())
    assert kept["sources"]["ppo.lr"] == "argument"
    assert "ppo.gamma" not in kept["sources"]
    assert from_file(first.path / "config.json") == from_file(again.path / "config.json")


@pytest.mark.parametrize(
    ("budget", "steps", "episodes", "ended"),
    [
        ({"steps": 129}, 192, 12, "steps"),  # updates are whole
        ({"episodes": 9}, 192, 12, "episodes"),
        ({"steps": 10_000, "episodes": 4, "minutes": 5}, 64, 4, "episodes"),
    ],
)
def test_the_first_limit_ends_it(tmp_path: Path, budget: dict[str, Any], steps: int, episodes: int, ended: str) -> None:
    summary = train(tmp_path, **{"steps": None, "evals": 1} | budget).summary
    assert (summary["env_steps"], summary["updates"], summary["episodes"]) == (steps, steps // 64, episodes)
    assert summary["ended"] == ended


def seesaw() -> type[Identity]:
    """A class that cannot be imported."""

    class Seesaw(Identity):
        """Reward `weight` for the side that is shown."""

        def __init__(self, weight: float = 1.0) -> None:
            super().__init__(n=2, length=8)
            self.weight = weight

        def judge(self, action: Any) -> float:
            return self.weight * super().judge(action)

    return Seesaw


@pytest.mark.parametrize("placement", ["inline", "processes"])
def test_three_lines_of_python_train_a_class(tmp_path: Path, placement: str) -> None:
    result = train(tmp_path, seesaw(), placement=placement, env_args={"weight": 2.5}, steps=128, evals=1)
    assert result.exit_code == 0
    assert result.summary["return_mean"] * 10 / 2.5 in range(1, 81)  # of the newest 10 episodes, 8 steps each
    assert json.loads((result.path / "config.json").read_text())["env_args"] == {"weight": 2.5}


def test_a_run_prints_its_progress_unless_it_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, steps=64)
    assert capfd.readouterr() == ("", "")
    freewheel.train(IDENTITY, runs_dir=tmp_path, num_envs=2, steps=128, evals=1, eval_episodes=2, run="x")
    out, err = capfd.readouterr()
    assert "step 128/128" in out
    assert str(tmp_path / "x") in out.replace("\n", "")
    assert err == ""


def test_the_classic_console_prints_counters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    freewheel.train(IDENTITY, runs_dir=tmp_path, num_envs=2, steps=128, evals=0, run="x", console="classic")
    lines = capfd.readouterr().out.splitlines()
    last = [line for line in lines if line.startswith("[")][-1]
    assert last == "[PPO] step=1 real_data=128 model_data=0 agent_updates=1 dynamics_updates=0"
    assert lines[-1].startswith("  saved in ")


@pytest.mark.system
def test_a_script_without_a_guard_trains_its_own_class_in_processes(tmp_path: Path) -> None:
    """Children must not run the script again."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import gymnasium, numpy as np
            import freewheel

            with open("ran", "a") as file:
                file.write("once\\n")

            class World(gymnasium.Env):
                observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
                action_space = gymnasium.spaces.Box(-2, 2, (1,), np.float32)

                def reset(self, *, seed=None, options=None):
                    super().reset(seed=seed)
                    self.count = 0
                    return np.zeros(2, np.float32), {}

                def step(self, action):
                    self.count += 1
                    return np.zeros(2, np.float32), -float(action[0] ** 2), False, self.count == 4, {}

            result = freewheel.train(World, placement="processes", num_envs=2, num_steps_per_env=8, steps=32, evals=1, quiet=True)
            print(result.summary["env_steps"], result.summary["exit_code"])
        """)
    )
    ended = python(script.name, cwd=tmp_path)
    assert (ended.stdout, ended.stderr) == ("32 0\n", "")
    assert (tmp_path / "ran").read_text() == "once\n"
    (kept,) = (tmp_path / "runs").iterdir()
    assert json.loads((kept / "config.json").read_text())["env"] == "__main__:World"


def test_it_learns_to_name_what_it_sees(tmp_path: Path) -> None:
    result = train(tmp_path, steps=6400, evals=1, eval_episodes=10, ppo={"lr": 3e-3}, log_every=1)
    assert result.summary["final_eval"] > 0.9 * 16
    assert result.summary["updates"] == 100


@pytest.mark.parametrize("placement", ["inline", "processes"])
def test_a_masked_action_is_never_taken(tmp_path: Path, placement: str) -> None:
    summary = train(tmp_path, "tests.support.worlds:Forbidden", placement=placement, steps=256, evals=1).summary
    assert (summary["ended"], summary["env_steps"]) == ("steps", 256)


def test_a_plan_says_what_would_happen(tmp_path: Path) -> None:
    options = {"num_envs": 4, "num_steps_per_env": 16, "steps": 1_000_000, "minutes": 1.5, "policy.hidden": [3, 4]}
    planned = plan(from_options(IDENTITY, {**options, "runs_dir": tmp_path, "run": "x"}))
    assert planned.lines() == [
        "world    tests.support.worlds:Identity: 4 observation columns (obs), 4 actions to choose from",
        "policy   MLP 3 - 4 tanh, categorical head",
        "collect  lockstep: 4 envs x 16 steps = 64 rows an update",
        "learn    ppo on cpu, 10 epochs of minibatches of 64",
        "budget   1,000,000 steps or 1.5 minutes",
        "updates  15,625",
        f"run      {tmp_path / 'x'}",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_learned_nothing_in_its_whole_time_has_failed_and_can_be_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"algo": "sac", "num_envs": 1, "mode": "sequential", "evals": 0, "run": "one"}
    options |= {"steps": None, "episodes": 1, "policy": {"hidden": [8]}, "sac": {"learning_starts": 210}}
    with pytest.raises(NothingLearnedError, match=r"^nothing was learned: --episodes ran out after 2\d\d env steps, "):
        train(tmp_path, "Pendulum-v1", **options)
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert (summary["exit_code"], summary["updates"]) == (1, 0)
    assert freewheel.resume(tmp_path / "one", episodes=2, quiet=True).exit_code == 0
