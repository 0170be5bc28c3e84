"""The same seed and number of lanes give the same weights, bit for bit, in every synchronous mode and every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import freewheel

#: A world with discrete actions, and one with continuous ones under the normaliser and reward scaling.
DISCRETE: dict[str, Any] = {"env": "CartPole-v1", "ppo": {"minibatch": 32, "entropy": 0.01}}
CONTINUOUS: dict[str, Any] = {
    "env": "Pendulum-v1",
    "max_episode_steps": 15,
    "ppo": {"minibatch": 32, "reward_scale": "returns", "lr_schedule": "linear"},
    "policy": {"normalize_obs": True, "hidden": [16]},
}
PLACES: dict[str, dict[str, Any]] = {
    "sequential": {"mode": "sequential"},
    "inline": {"mode": "lockstep", "placement": "inline"},
    "processes": {"mode": "lockstep", "placement": "processes"},
}


def weights(runs_dir: Path, world: dict[str, Any], **options: Any) -> str:
    """The fingerprint of three updates."""
    small: dict[str, Any] = {"num_envs": 3, "num_steps_per_env": 20, "steps": 180, "evals": 0, "seed": 5}
    result = freewheel.train(quiet=True, runs_dir=runs_dir, **small | world | options)
    assert result.summary["updates"] == 3
    return str(result.summary["weights_sha256"])


@pytest.mark.parametrize("world", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_every_synchronous_mode_is_the_same_program(tmp_path: Path, world: dict[str, Any]) -> None:
    found = {place: weights(tmp_path, world, **options) for place, options in PLACES.items()}
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("world", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_other_seeds_and_other_lanes_give_other_weights(tmp_path: Path, world: dict[str, Any]) -> None:
    changes: list[dict[str, Any]] = [{}, {"seed": 6}, {"num_envs": 2, "num_steps_per_env": 30}]
    assert len({weights(tmp_path, world, mode="sequential", **change) for change in changes}) == 3


@pytest.mark.parametrize("world", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_batch_is_repeatable(tmp_path: Path, world: dict[str, Any]) -> None:
    """The order of workers, the size of fragments and evaluations in another process make no difference."""
    changes: list[dict[str, Any]] = [{}, {"collection_batch_size": 7}, {"evals": 2, "eval_episodes": 2}]
    found = [weights(tmp_path, world, mode="batch", workers=3, **change) for change in changes]
    assert len(set(found)) == 1
    assert found[0] != weights(tmp_path, world, mode="batch", workers=1), "another random generator per worker"


def test_evaluations_and_logs_do_not_disturb_training(tmp_path: Path) -> None:
    plain = weights(tmp_path, DISCRETE)
    assert plain == weights(tmp_path, DISCRETE, evals=3, eval_episodes=5, log_every=1e-9)


SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_determinism import CONTINUOUS, DISCRETE, PLACES, weights
found = {f"{name} {place}": weights(Path(sys.argv[2]), world, **PLACES[place])
         for name, world in (("discrete", DISCRETE), ("continuous", CONTINUOUS)) for place in PLACES}
found["batch"] = weights(Path(sys.argv[2]), DISCRETE, mode="batch", workers=3)
print(json.dumps(found))
"""


def test_another_process_with_other_hashes_gives_the_same_weights(tmp_path: Path) -> None:
    def found(hash_seed: str) -> dict[str, str]:
        tests, root = Path(__file__).parent, Path(freewheel.__file__).parents[1]
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tests), str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        answer: dict[str, str] = json.loads(ended.stdout)
        return answer

    one, other = found("1"), found("2")
    assert one == other
    assert len(one) == 7
    assert len(set(one.values())) == 3
    assert one["discrete inline"] == weights(tmp_path, DISCRETE)
