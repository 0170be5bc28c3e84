"""What a run leaves behind, how it ends, and that it learns: the public contract of DESIGN 6."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import freewheel
from freewheel.collect.mode import MODES
from freewheel.config.resolve import from_file, from_options
from freewheel.core import LEARNER_TIME, WORKER_TIME, Episode, NDArray, Tick
from freewheel.evaluate import evaluators as examiners
from freewheel.evaluate.episodes import Score
from freewheel.run import checkpoint
from freewheel.run import trainer as run
from freewheel.run.plan import plan
from freewheel.run.trainer import Result
from freewheel.testing.worlds import Counter

ALWAYS = set(
    """wall_s env_steps episodes updates steps_per_s episodes_per_s updates_per_s return_mean length_mean lag_mean lag_max
    queue_util buffer_util cpu_util gpu_util env_busy learner_busy produced trained queued open dropped""".split()  # noqa: SIM905
)
SUMMARY = set(
    """run ended exit_code error wall_s env_steps episodes updates steps_per_s episodes_per_s updates_per_s return_mean lag_max
    best_eval episodes_trained final_eval produced trained queued open dropped shares worker_restarts
    graphs_fallback weights_sha256 path""".split()  # noqa: SIM905
)
IDENTITY = "freewheel.testing.worlds:Identity"  # episodes of 16 steps, at most 1 a step


def train(tmp_path: Path, env: str | Callable[..., Any] = IDENTITY, **options: Any) -> Result:
    """Four lanes of 16 steps: S = 64."""
    small = {"num_envs": 4, "num_steps_per_env": 16, "log_every": 1e-9, "evals": 2, "eval_episodes": 3, "steps": 640}
    return freewheel.train(env, quiet=True, runs_dir=tmp_path, **small | options)


def rows_of(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]


def assert_balanced(rows: Mapping[str, Any]) -> None:
    assert rows["produced"] == rows["trained"] + rows["queued"] + rows["open"] + sum(rows["dropped"].values())


# ------------------------------------------------------------------------------------------------------- the run directory


def test_every_row_of_metrics_has_these_keys_and_balances(tmp_path: Path) -> None:
    result = train(tmp_path)
    rows = rows_of(result)
    assert [row["env_steps"] for row in rows] == list(range(64, 641, 64))
    assert [row["updates"] for row in rows] == list(range(1, 11))
    assert [row["episodes"] for row in rows] == list(range(4, 41, 4))
    for number, row in enumerate(rows):
        extra = row.keys() - ALWAYS
        assert row.keys() >= ALWAYS
        assert {key for key in extra if not key.startswith("loss/")} == ({"eval_return"} if number >= 4 else set())
        assert extra >= {"loss/policy", "loss/value", "loss/entropy"}
        assert_balanced(row)
        assert row["produced"] == row["trained"] == row["env_steps"]
        assert (row["lag_mean"], row["lag_max"], row["length_mean"]) == (0.0, 0.0, 16.0)
        assert row["queue_util"] is row["gpu_util"] is None
    for before, after in itertools.pairwise(rows):
        assert after["steps_per_s"] == pytest.approx(64 / (after["wall_s"] - before["wall_s"]))


def test_the_last_row_carries_the_last_evaluation(tmp_path: Path) -> None:
    result = train(tmp_path)
    assert rows_of(result)[-1]["eval_return"] == result.summary["final_eval"]


def test_the_summary_has_these_keys_and_adds_up(tmp_path: Path) -> None:
    result = train(tmp_path, run="one")
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert summary == result.summary
    assert summary.keys() == SUMMARY
    assert (summary["run"], summary["path"], result.path) == ("one", str(tmp_path / "one"), tmp_path / "one")
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


def test_the_weights_are_saved_and_verify(tmp_path: Path) -> None:
    result = train(tmp_path)
    root = result.path / "checkpoints"
    assert os.readlink(root / "latest") == "640"
    latest = checkpoint.load(root, "latest")
    assert (latest.step, latest.warnings, latest.about["version"]) == (640, (), 10)
    assert checkpoint.fingerprint(latest.params) == result.summary["weights_sha256"]
    assert json.loads((root / "640" / "manifest.json").read_text())["files"].keys() == {
        "weights.safetensors",
        "policy.json",
    }
    assert {path.name for path in result.path.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
    }


def test_the_config_is_kept_and_makes_the_same_run_again(tmp_path: Path) -> None:
    first = train(tmp_path, ppo={"lr": 0.01}, evals=0)
    again = freewheel.train(IDENTITY, quiet=True, config=first.path / "config.json")
    assert again.path == tmp_path / f"{first.path.name}-2"
    assert again.summary["weights_sha256"] == first.summary["weights_sha256"]
    kept = json.loads((first.path / "config.json").read_text())
    assert kept["sources"]["ppo.lr"] == "argument"
    assert "ppo.gamma" not in kept["sources"]
    assert from_file(first.path / "config.json") == from_file(again.path / "config.json")


def test_best_is_the_best_evaluation_and_latest_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    means = iter([1.0, 5.0, 5.0, 3.0])

    def scripted(*_: Any) -> Score:
        return Score((next(means),), (1,))

    monkeypatch.setattr(examiners, "evaluate", scripted)
    result = train(tmp_path, evals=4, steps=512)
    links = {name: os.readlink(result.path / "checkpoints" / name) for name in ("best", "latest")}
    assert links == {"best": "256", "latest": "512"}
    assert (result.summary["best_eval"], result.summary["final_eval"]) == (5.0, 3.0)
    assert next(means, None) is None
    best = checkpoint.load(result.path / "checkpoints", "best")
    assert best.about["version"] == 4
    assert checkpoint.fingerprint(best.params) != result.summary["weights_sha256"]


def test_without_evaluations_there_is_no_best(tmp_path: Path) -> None:
    result = train(tmp_path, evals=0, steps=64)
    assert result.summary["best_eval"] is result.summary["final_eval"] is None
    assert not any("eval_return" in row for row in rows_of(result))
    assert not (result.path / "checkpoints" / "best").exists()
    assert result.summary["shares"]["learner"]["eval"] == 0.0


# ---------------------------------------------------------------------------------------------------------------- budgets


def test_steps_count_rows_delivered_and_updates_are_whole(tmp_path: Path) -> None:
    summary = train(tmp_path, steps=129, evals=0).summary
    assert (summary["env_steps"], summary["updates"], summary["ended"]) == (192, 3, "steps")


def test_a_budget_of_episodes(tmp_path: Path) -> None:
    summary = train(tmp_path, steps=None, episodes=9, evals=1).summary
    assert (summary["episodes"], summary["env_steps"], summary["ended"]) == (12, 192, "episodes")


def test_a_budget_of_minutes(tmp_path: Path) -> None:
    summary = train(tmp_path, steps=None, minutes=0.3 / 60, evals=0).summary
    assert summary["ended"] == "minutes"
    assert 0.3 <= summary["wall_s"] < 3.0


@pytest.mark.parametrize("mode", ["sequential", "lockstep", "batch", "continuous", "episodes"])
def test_a_reason_of_ones_own_ends_the_run_in_order(tmp_path: Path, mode: str) -> None:
    """It is asked once a turn, with all that has ended in it, and the end is an ordinary one."""
    seen: list[tuple[int, int]] = []
    steps: list[int] = []

    def until(episodes: Sequence[Episode], tick: Tick) -> str:
        assert [one for chunk in tick.chunks for one in chunk.episodes] == list(episodes)
        seen.extend((one.lane, one.number) for one in episodes)
        steps.append(tick.env_steps)
        return "good enough" if len(seen) >= 20 else ""

    workers: dict[str, Any] = {} if mode in ("sequential", "lockstep") else {"workers": 2}
    result = train(tmp_path, mode=mode, until=until, steps=100_000, evals=1, num_envs=2, **workers)
    summary = result.summary
    assert (summary["ended"], result.exit_code) == ("good enough", 0)
    assert (summary["episodes"], summary["env_steps"]) == (len(seen), steps[-1])
    assert len(set(seen)) == len(seen)
    assert summary["final_eval"] is not None
    assert_balanced(summary)
    saved = checkpoint.load(result.path / "checkpoints")
    assert (saved.step, checkpoint.fingerprint(saved.params)) == (steps[-1], summary["weights_sha256"])


def test_a_reason_of_ones_own_comes_before_the_budget(tmp_path: Path) -> None:
    asked = itertools.count(1)
    assert train(tmp_path, steps=64, until=lambda episodes, tick: "mine").summary["ended"] == "mine"
    assert train(tmp_path, steps=64, until=lambda episodes, tick: next(asked) and "").summary["ended"] == "steps"
    assert next(asked) == 2, "once, for there was one turn"


def test_what_a_reason_raises_is_raised_when_all_is_written_down(tmp_path: Path) -> None:
    def until(episodes: Sequence[Episode], tick: Tick) -> str:
        raise ZeroDivisionError("of yours")

    with pytest.raises(ZeroDivisionError, match="of yours"):
        train(tmp_path, until=until, run="one")
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["ended"] == "failed"


def test_the_first_limit_ends_the_run(tmp_path: Path) -> None:
    assert train(tmp_path, steps=10_000, episodes=4, minutes=5, evals=0).summary["ended"] == "episodes"


# ------------------------------------------------------------------------------------------------------------ from Python


def seesaw() -> type[gymnasium.Env[NDArray, Any]]:
    """A class that is found nowhere but here."""

    class Seesaw(gymnasium.Env[NDArray, Any]):
        """Choose the side that is not up; `weight` is what it pays."""

        def __init__(self, weight: float = 1.0) -> None:
            self.observation_space, self.action_space = Box(-1, 1, (1,), np.float32), Discrete(2)
            self.weight = weight

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray, dict[str, Any]]:
            super().reset(seed=seed)
            self.count = 0
            return self.see(), {}

        def see(self) -> NDArray:
            self.side = int(self.np_random.integers(2))
            return np.array([2 * self.side - 1], np.float32)

        def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
            reward = self.weight * (action != self.side)
            self.count += 1
            return self.see(), reward, False, self.count == 8, {}

    return Seesaw


@pytest.mark.parametrize("placement", ["inline", "processes"])
def test_three_lines_of_python_train_a_class(tmp_path: Path, placement: str) -> None:
    result = train(tmp_path, seesaw(), placement=placement, env_args={"weight": 2.5}, steps=128, evals=1)
    assert result.exit_code == 0
    assert result.summary["return_mean"] * 16 / 2.5 in range(1, 129)  # of 16 episodes and 128 steps
    assert json.loads((result.path / "config.json").read_text())["env_args"] == {"weight": 2.5}


def test_a_quiet_run_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, steps=64)
    assert capfd.readouterr() == ("", "")


def test_a_run_tells_how_it_goes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    freewheel.train(IDENTITY, runs_dir=tmp_path, num_envs=2, steps=128, evals=1, eval_episodes=2, run="told")
    out, err = capfd.readouterr()
    assert "step 128/128" in out
    assert str(tmp_path / "told") in out.replace("\n", "")
    assert err == ""


def test_a_run_tells_it_in_counters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    freewheel.train(IDENTITY, runs_dir=tmp_path, num_envs=2, steps=128, evals=0, run="told", console="classic")
    lines = capfd.readouterr().out.splitlines()
    last = [line for line in lines if line.startswith("[")][-1]
    assert last == "[PPO] step=1 real_data=128 model_data=0 agent_updates=1 dynamics_updates=0"
    assert lines[-1].startswith("  saved in ")


@pytest.mark.parametrize("algo", ["sac", "mbpo"])
@pytest.mark.parametrize("mode", MODES)
def test_counters_say_whether_anybody_waits(mode: str, algo: str, capfd: pytest.CaptureFixture[str]) -> None:
    told = run._console(from_options("X-v0", {"algo": algo, "mode": mode, "console": "classic"}))
    told.write({"env_steps": 7, "updates": 3})
    name = ("Async" if mode in ("continuous", "episodes") else "") + algo.upper()
    assert capfd.readouterr().out.startswith(f"[{name}] step=3 real_data=7 ")


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
    root = Path(freewheel.__file__).parents[1]
    told = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (told.returncode, told.stdout, told.stderr) == (0, "32 0\n", "")
    assert (tmp_path / "ran").read_text() == "once\n"
    (kept,) = (tmp_path / "runs").iterdir()
    assert json.loads((kept / "config.json").read_text())["env"] == "__main__:World"


# ---------------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("mode", ["sequential", "lockstep"])
def test_it_learns_to_say_what_it_sees(tmp_path: Path, mode: str) -> None:
    result = train(tmp_path, mode=mode, steps=6400, evals=1, eval_episodes=10, ppo={"lr": 3e-3}, log_every=1)
    assert result.summary["final_eval"] > 0.9 * 16
    assert result.summary["updates"] == 100


def forbidden() -> type[gymnasium.Env[NDArray, Any]]:
    """A class whose instances are strict."""

    class Forbidden(gymnasium.Env[NDArray, Any]):
        """Five actions of which two are allowed, others at every step; the rest raise."""

        def __init__(self) -> None:
            self.observation_space, self.action_space = Box(0, 1, (2,), np.float32), Discrete(5)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray, dict[str, Any]]:
            super().reset(seed=seed)
            self.count = 0
            return self.see()

        def see(self) -> tuple[NDArray, dict[str, Any]]:
            self.mask = np.zeros(5, np.int8)
            self.mask[self.np_random.choice(5, 2, replace=False)] = 1
            return self.np_random.random(2, np.float32), {"action_mask": self.mask}

        def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
            if not self.mask[action]:
                raise ValueError(f"action {action} is not allowed by {self.mask}")
            self.count += 1
            observation, info = self.see()
            return observation, float(action), False, self.count == 6, info

    return Forbidden


@pytest.mark.parametrize("placement", ["inline", "processes"])
def test_a_masked_action_is_never_taken(tmp_path: Path, placement: str) -> None:
    summary = train(tmp_path, forbidden(), placement=placement, steps=256, evals=1).summary
    assert (summary["ended"], summary["env_steps"]) == ("steps", 256)


# ------------------------------------------------------------------------------------------------------------------- plans


def test_a_plan_tells_what_would_happen(tmp_path: Path) -> None:
    options = {
        "num_envs": 4,
        "num_steps_per_env": 16,
        "steps": 1_000_000,
        "minutes": 1.5,
        "runs_dir": tmp_path,
        "run": "x",
    }
    planned = plan(from_options(IDENTITY, {**options, "policy.hidden": [3, 4]}))
    assert planned.lines() == [
        "world    freewheel.testing.worlds:Identity: 4 observation columns (obs), 4 actions to choose from",
        "policy   MLP 3 - 4 tanh, categorical head",
        "collect  lockstep: 4 envs x 16 steps = 64 rows an update",
        "learn    ppo on cpu, 10 epochs of minibatches of 64",
        "budget   1,000,000 steps or 1.5 minutes",
        "updates  15,625",
        f"run      {tmp_path / 'x'}",
    ]
    assert list(tmp_path.iterdir()) == []


def test_runs_without_a_name_are_numbered(tmp_path: Path) -> None:
    names = [train(tmp_path, steps=64, evals=0).path.name for _ in range(3)]
    base = "freewheel.testing.worlds_Identity-ppo-lockstep"
    assert names == [base, f"{base}-2", f"{base}-3"]


class Interrupts(Counter):
    """Presses Ctrl-C in its third step."""

    def judge(self, action: Any) -> float:
        if self.count == 2:
            signal.raise_signal(signal.SIGINT)
        return super().judge(action)


def test_ctrl_c_ends_a_python_script_too_and_leaves_a_whole_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        freewheel.train(
            Interrupts, quiet=True, mode="sequential", steps=500, run="cut", runs_dir=str(tmp_path), evals=0
        )
    summary = json.loads((tmp_path / "cut" / "summary.json").read_text())
    assert (summary["exit_code"], summary["ended"]) == (130, "interrupted (SIGINT)")
