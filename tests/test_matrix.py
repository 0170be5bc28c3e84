"""Every algorithm in every mode: every row is accounted for, equal data means equal updates, and equal seeds equal weights."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

import freewheel
from freewheel.cli import main as cli
from freewheel.config.resolve import from_file
from freewheel.errors import FreewheelError, SetupError, UsageError
from freewheel.run.naming import Result
from freewheel.run.planning import plan
from freewheel.run.saved import open_run
from tests.support.frozen import LENGTH, LookedAt
from tests.support.runs import MODES, assert_balanced, python, rows_of
from tests.support.runs import train as small_run

DRONE, PLANTED = "freewheel/RoughDrone-v0", "torch:tests.support.device_story:build"
ROWS, STEPS = 32, 224  # of an update or a publication, and of the run
IN_TURN, BESIDE = ("sequential", "lockstep"), ("batch", "continuous")
RATIO, STARTS = 0.5, 64
REPLAYING = {"learning_starts": STARTS, "batch": 16, "updates_per_row": RATIO, "lr": 1e-3}
ALGORITHMS: Mapping[str, dict[str, Any]] = {
    "ppo": {"epochs": 2, "minibatch": 16},
    "sac": REPLAYING,
    "mbpo": REPLAYING
    | {"members": 2, "elites": 1, "model_hidden": [8], "model_every": ROWS, "model_batch": 16, "max_epochs": 2}
    | {"rollouts_per_row": 1.0, "clock": "serial"},
}


def train(tmp_path: Path, env: str, algo: str, mode: str, **options: Any) -> Result:
    small: dict[str, Any] = {"seed": 3, "steps": STEPS, "evals": 1, "num_steps_per_env": 8, "policy": {"hidden": [8]}}
    return small_run(tmp_path, env, **small | {"algo": algo, "mode": mode, algo: ALGORITHMS[algo]} | options)


def simulated(tmp_path: Path, algo: str, mode: str, **options: Any) -> Result:
    """Eight drones for four steps: 32 rows. Episodes of eight steps, and little ground to grow."""
    world = {"lidar": False, "episode_seconds": 0.4, "levels": 1, "tiles_per_level": 1}
    return train(tmp_path, DRONE, algo, mode, **{"num_envs": 8, "num_steps_per_env": 4, "env_args": world} | options)


def assert_well(result: Result, algo: str, mode: str) -> None:
    summary = result.summary
    assert (result.exit_code, summary["ended"]) == (0, "steps")
    for row in (*rows_of(result), summary):
        assert_balanced(row)
    assert summary["trained"] >= STEPS
    assert summary["dropped"].keys() <= ({"shutdown"} if mode not in IN_TURN else set())
    assert math.isfinite(summary["final_eval"])
    assert_equal_updates(summary, algo, mode)


def assert_equal_updates(summary: Mapping[str, Any], algo: str, mode: str) -> None:
    trained, updates = summary["trained"], summary["updates"]
    if algo == "ppo":
        assert (updates, trained % ROWS) == (trained // ROWS, 0)
        return
    wanted = int(RATIO * (trained - STARTS))
    if mode in IN_TURN:
        assert updates == wanted
    else:  # the run may end before the updates of the last publication, and of what came with it, are done
        assert wanted - 2 * RATIO * ROWS <= updates <= wanted


def greatest_lag(result: Result, algo: str) -> float:
    """Of rows that were learned from, or for a replay buffer of rows that were stored."""
    stored = [row["replay/lag_max"] for row in rows_of(result) if "replay/lag_max" in row]
    assert bool(stored) != (algo == "ppo")
    assert (result.summary["lag_max"] is None) != (algo == "ppo")
    return max(stored) if stored else float(result.summary["lag_max"])


def pairs(modes: Iterable[str], *unit: tuple[str, str]) -> list[ParameterSet]:
    """All algorithms in these modes; PPO and some others in tier unit."""
    return [
        pytest.param(algo, mode, marks=[pytest.mark.system] * (algo != "ppo" and (algo, mode) not in unit))
        for algo in ALGORITHMS
        for mode in modes
    ]


@pytest.mark.parametrize(("algo", "mode"), pairs(MODES, ("sac", "continuous"), ("mbpo", "lockstep")))
def test_every_algorithm_runs_in_every_mode(tmp_path: Path, algo: str, mode: str) -> None:
    world = "tests.support.worlds:Drifting" if algo == "ppo" else "tests.support.worlds:IdentityBox"
    result = train(tmp_path, world, algo, mode, **MODES[mode])
    assert_well(result, algo, mode)
    assert greatest_lag(result, algo) <= {"sequential": 0, "lockstep": 0, "batch": 1}.get(mode, math.inf)


@pytest.mark.parametrize(("algo", "mode"), [("sac", "lockstep"), ("mbpo", "continuous")])
def test_algorithms_with_a_replay_buffer_take_discrete_actions_and_masks(tmp_path: Path, algo: str, mode: str) -> None:
    """Where nothing is said about the head."""
    world = {"env": "tests.support.worlds:Wandering", "env_args": {"discrete": 5, "length": 16}}
    result = train(tmp_path, algo=algo, mode=mode, **MODES[mode] | world)
    assert_well(result, algo, mode)
    kept = json.loads((result.path / "config.json").read_text())
    assert (kept["policy"]["head"], kept["sources"]["policy.head"]) == ("categorical", "default for Discrete actions")
    assert result.summary["dropped"].keys() <= {"shutdown"}


@pytest.mark.parametrize(("algo", "mode"), pairs((*IN_TURN, *BESIDE), ("sac", "batch"), ("mbpo", "continuous")))
def test_every_algorithm_runs_on_a_batched_simulator(tmp_path: Path, algo: str, mode: str) -> None:
    result = simulated(tmp_path, algo, mode)
    assert_well(result, algo, mode)
    assert greatest_lag(result, algo) <= {"sequential": 0, "lockstep": 0, "batch": 1}.get(mode, math.inf)
    assert result.summary["episodes"] >= 8


@pytest.mark.parametrize("algo", ["ppo", pytest.param("sac", marks=pytest.mark.system)])
def test_modes_in_turn_are_the_same_run_on_a_batched_simulator(tmp_path: Path, algo: str) -> None:
    """And a batch ahead is another run, but the same one every time."""
    in_turn = [simulated(tmp_path, algo, mode, evals=0).summary["weights_sha256"] for mode in IN_TURN]
    ahead = [simulated(tmp_path, algo, "batch", evals=0).summary["weights_sha256"] for _ in range(2)]
    assert in_turn[0] == in_turn[1] != ahead[0]
    if algo == "ppo":
        assert ahead[0] == ahead[1]


def test_the_number_of_workers_makes_no_difference_to_a_simulation(tmp_path: Path) -> None:
    runs = [simulated(tmp_path, "ppo", "batch", workers=workers, evals=0) for workers in (1, 4)]
    assert len({run.summary["weights_sha256"] for run in runs}) == 1


@pytest.mark.system
def test_a_model_is_fitted_beside_the_updates(tmp_path: Path) -> None:
    """In a process of its own, and no more than two fits' worth of rows behind."""
    result = simulated(tmp_path, "mbpo", "continuous", mbpo=ALGORITHMS["mbpo"] | {"clock": "async"}, evals=0)
    lags = [row["model/lag_rows"] for row in rows_of(result) if "model/lag_rows" in row and row["model/version"] > 0]
    assert lags
    assert max(lags) <= 2 * ROWS + ROWS
    assert_equal_updates(result.summary, "mbpo", "continuous")


def refused(tmp_path: Path, env: str, algo: str, mode: str, **options: Any) -> FreewheelError:
    with pytest.raises(FreewheelError) as caught:
        train(tmp_path, env, algo, mode, **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    return caught.value


@pytest.mark.parametrize("env", [DRONE, PLANTED])
def test_a_batched_simulator_has_no_episodes_of_its_own(tmp_path: Path, env: str) -> None:
    error = refused(tmp_path, env, "ppo", "episodes", num_envs=1)
    assert isinstance(error, UsageError)
    assert str(error) == f'{env} steps all its lanes at once: use mode="continuous" instead of episodes'


@pytest.mark.parametrize("algo", ["sac", "mbpo"])
def test_where_actions_have_no_bounds_the_option_is_named(tmp_path: Path, algo: str) -> None:
    error = refused(tmp_path, PLANTED, algo, "lockstep", num_envs=4, env_args={"bounded": False})
    assert isinstance(error, SetupError)
    assert "action_bounds" in str(error)
    given = train(tmp_path, PLANTED, algo, "lockstep", num_envs=4, env_args={"bounded": False}, action_bounds=2.0)
    assert given.exit_code == 0


@pytest.mark.parametrize(
    ("mode", "every"), [("batch", ROWS // 2), ("batch", 2 * ROWS), ("continuous", 4 * ROWS), ("episodes", 3 * ROWS)]
)
def test_publications_that_nobody_could_wait_for_are_refused(tmp_path: Path, mode: str, every: int) -> None:
    """A batch ahead waits for its version; others have rows for a few updates under way."""
    sac = {**REPLAYING, "publish_every": every}
    error = refused(tmp_path, "tests.support.worlds:IdentityBox", "sac", mode, **MODES[mode] | {"sac": sac})
    assert str(error).startswith(f"sac.publish_every {every} ")
    assert "leave it out" in str(error)


@pytest.mark.parametrize(("mode", "every"), [("lockstep", 3 * ROWS), ("batch", ROWS), ("continuous", ROWS // 2)])
def test_other_publications_are_fine(tmp_path: Path, mode: str, every: int) -> None:
    result = simulated(tmp_path, "sac", mode, sac={**REPLAYING, "publish_every": every}, evals=0)
    assert result.exit_code == 0
    assert result.summary["updates"] > 0


def test_isaac_lab_is_missing_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "--task", "isaaclab:Isaac-Ant-Direct", "--steps", "64", "--runs-dir", str(tmp_path / "runs")]
    assert cli.main(argv) == 1
    out, err = capfd.readouterr()
    assert out == "loading ...\nopening isaaclab:Isaac-Ant-Direct ...\n"
    assert err.startswith("freewheel: isaaclab:Isaac-Ant-Direct needs Isaac Lab, which is not installed: pip install ")
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("mode", ["lockstep", "continuous"])
def test_a_factory_of_ones_own_is_a_batched_simulator(tmp_path: Path, mode: str) -> None:
    result = train(tmp_path, PLANTED, "ppo", mode, num_envs=4, env_args={"has_final_obs": False})
    assert_well(result, "ppo", mode)
    kept = json.loads((result.path / "config.json").read_text())
    assert (kept["env"], kept["env_args"], kept["num_envs"]) == (PLANTED, {"has_final_obs": False}, 4)


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_a_config_reloads_and_makes_the_same_run_again(tmp_path: Path, algo: str) -> None:
    first = simulated(tmp_path, algo, "lockstep", evals=0)
    again = freewheel.train(DRONE, quiet=True, config=first.path / "config.json")
    assert again.path != first.path
    assert again.summary["weights_sha256"] == first.summary["weights_sha256"]
    assert from_file(first.path / "config.json") == from_file(again.path / "config.json")
    assert plan(from_file(first.path / "config.json")).spec.batched_on_device


def test_a_run_of_drones_is_evaluated_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On the episodes it was evaluated on itself: its score is the same."""
    result = simulated(tmp_path, "ppo", "lockstep", eval_episodes=10)
    saved = open_run(str(result.path))
    seed = result.summary["eval_fresh_seed"]
    score = saved.score(saved.actor("latest")[0], 10, seed)
    assert score.mean == pytest.approx(result.summary["final_eval"], abs=1e-6)
    assert len(set(score.returns)) == 10
    assert cli.main(["eval", str(result.path), "--episodes", "10", "--seed", str(seed)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert f"{score.mean:.1f}" in out


#: A world with discrete actions, and one with continuous ones under the normaliser and reward scaling.
WORLDS: Mapping[str, dict[str, Any]] = {
    "discrete": {"env": "CartPole-v1", "ppo": {"minibatch": 32, "entropy": 0.01}},
    "continuous": {"env": "Pendulum-v1", "max_episode_steps": 15, "policy": {"normalize_obs": True, "hidden": [16]},
                   "ppo": {"minibatch": 32, "reward_scale": "returns", "lr_schedule": "linear"}},
}  # fmt: skip
PLACES: dict[str, dict[str, Any]] = {"sequential": {"mode": "sequential"}}
PLACES |= {place: {"mode": "lockstep", "placement": place} for place in ("inline", "processes")}


def weights(runs_dir: Path, world: dict[str, Any], **options: Any) -> str:
    """The fingerprint of three updates."""
    small: dict[str, Any] = {"num_envs": 3, "num_steps_per_env": 20, "steps": 180, "evals": 0, "seed": 5}
    result = freewheel.train(quiet=True, runs_dir=runs_dir, **small | world | options)
    assert result.summary["updates"] == 3
    return str(result.summary["weights_sha256"])


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_every_synchronous_mode_is_the_same_program(tmp_path: Path, world: dict[str, Any]) -> None:
    found = {place: weights(tmp_path, world, **options) for place, options in PLACES.items()}
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_other_seeds_and_other_lanes_give_other_weights(tmp_path: Path, world: dict[str, Any]) -> None:
    changes: list[dict[str, Any]] = [{}, {"seed": 6}, {"num_envs": 2, "num_steps_per_env": 30}]
    assert len({weights(tmp_path, world, mode="sequential", **change) for change in changes}) == 3


@pytest.mark.parametrize("name", ["discrete", pytest.param("continuous", marks=pytest.mark.system)])
def test_batch_is_repeatable(tmp_path: Path, name: str) -> None:
    """The order of workers, the size of fragments and evaluations in another process make no difference."""
    world = WORLDS[name]
    changes: list[dict[str, Any]] = [{}, {"collection_batch_size": 7}, {"evals": 2, "eval_episodes": 2}]
    found = [weights(tmp_path, world, mode="batch", workers=3, **change) for change in changes]
    assert len(set(found)) == 1
    assert found[0] != weights(tmp_path, world, mode="batch", workers=1), "another random generator per worker"


def test_evaluations_and_logs_do_not_disturb_training(tmp_path: Path) -> None:
    plain = weights(tmp_path, WORLDS["discrete"])
    assert plain == weights(tmp_path, WORLDS["discrete"], evals=3, eval_episodes=5, log_every=1e-9)


SCRIPT = """
import json, sys
from pathlib import Path
from tests.test_matrix import all_weights
print(json.dumps(all_weights(Path(sys.argv[1]))))
"""


def all_weights(runs: Path) -> dict[str, str]:
    """Of every world in every place."""
    found = {
        f"{name} {place}": weights(runs, world, **options)
        for name, world in WORLDS.items()
        for place, options in PLACES.items()
    }
    return found | {"batch": weights(runs, WORLDS["discrete"], mode="batch", workers=3)}


@pytest.mark.system
def test_another_process_with_other_hashes_gives_the_same_weights(tmp_path: Path) -> None:
    ended, here = python("-c", SCRIPT, str(tmp_path), PYTHONHASHSEED="1"), all_weights(tmp_path)
    assert ended.stderr == ""
    assert json.loads(ended.stdout) == here
    assert len(set(here.values())) == 3


UPDATES = 2  # 8 episodes: measures are over the newest 10


@pytest.mark.parametrize("mode", [*MODES, "lockstep, in processes"])
def test_a_world_that_is_warmed_up_is_kept_from_the_garbage_collector(mode: str, tmp_path: Path) -> None:
    """Its pauses make slow steps. In turn with the learner the first rows are the warm-up; evaluation is frozen as well."""
    before = gc.get_freeze_count()
    name, _, processes = mode.partition(", in ")
    where: dict[str, Any] = {"placement": processes or "inline"} if name == "lockstep" else {}
    if name not in IN_TURN:
        where = {"workers": 2 if name == "episodes" else 1}
    run = small_run(
        tmp_path, LookedAt, mode=name, measures=["frozen"], evals=1, num_envs=2, num_steps_per_env=2 * LENGTH,
        steps=UPDATES * 4 * LENGTH, policy={"hidden": [4]}, **where,
    )  # fmt: skip
    assert rows_of(run)[-1]["measure/frozen"] == pytest.approx(1 - 1 / UPDATES if mode in IN_TURN else 1.0)
    assert run.summary["eval/frozen"] == 1.0
    assert gc.get_freeze_count() == before


def test_the_world_can_tell() -> None:
    world = LookedAt()
    for frozen in (0.0, 1.0, 0.0):
        if frozen:
            gc.freeze()
        world.reset()
        info = [world.step(0)[4] for _ in range(LENGTH)][-1]
        gc.unfreeze()
        assert info == {"frozen": frozen}
