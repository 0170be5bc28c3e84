"""Warm start: a run begins with another run's weights, to the bit, or says why it cannot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freewheel
from freewheel.cli import main as cli
from freewheel.config.resolve import from_file, from_options
from freewheel.core import Snapshot, to_numpy
from freewheel.errors import SetupError, UsageError
from freewheel.learn.spec import Services
from freewheel.run import checkpoint
from freewheel.run.plan import plan
from freewheel.run.trainer import Result
from freewheel.transport.executors import SerialExecutor

DISCRETE, BOX, DRONE = (
    "freewheel.testing.worlds:Identity",
    "freewheel.testing.worlds:IdentityBox",
    "freewheel/RoughDrone-v0",
)
SMALL: Mapping[str, Any] = {"num_envs": 2, "num_steps_per_env": 16, "steps": 96, "evals": 3, "eval_episodes": 2}
NORMALISED = {"hidden": [8], "normalize_obs": True}
REPLAYING = {"learning_starts": 32, "batch": 8, "updates_per_row": 0.25}
DREAMING = {"members": 2, "elites": 1, "model_hidden": [8], "model_every": 32, "max_epochs": 1, "rollouts_per_row": 1}
SIMULATED = {"env_args": {"lidar": False, "episode_seconds": 0.4, "levels": 1, "tiles_per_level": 1}, "device": "cpu"}
ALGORITHMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "ppo": (DISCRETE, {"algo": "ppo", "ppo": {"lr": 0.01}}),
    "sac": (BOX, {"algo": "sac", "sac": REPLAYING}),
    "mbpo": (BOX, {"algo": "mbpo", "mbpo": {**REPLAYING, **DREAMING, "clock": "serial"}}),
    "ppo on a simulator": (DRONE, {"algo": "ppo", **SIMULATED}),
    "sac on a simulator": (DRONE, {"algo": "sac", "sac": REPLAYING, **SIMULATED}),
}


def train(runs: Path, env: str, **options: Any) -> Result:
    return freewheel.train(
        env, quiet=True, runs_dir=runs, **{**SMALL, "mode": "lockstep", "policy": NORMALISED, **options}
    )


def first_snapshot(runs: Path, env: str, **options: Any) -> Snapshot:
    """What a run would publish before it has learned anything."""
    given = {**SMALL, "mode": "lockstep", "policy": NORMALISED, "runs_dir": runs, **options}
    planned = plan(from_options(env, given))
    return planned.config.learner.build(
        replace(planned.learner_spec, services=Services(executors=SerialExecutor))
    ).snapshot()


def assert_same(snapshot: Snapshot, saved: checkpoint.Checkpoint) -> None:
    assert snapshot.version == 0
    weights = {name: to_numpy(value) for name, value in snapshot.params.items()}
    assert checkpoint.fingerprint(weights) == checkpoint.fingerprint(saved.params)


@pytest.mark.parametrize(("env", "options"), ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_the_first_weights_are_the_others_to_the_bit(tmp_path: Path, env: str, options: dict[str, Any]) -> None:
    source = train(tmp_path, env, run="source", **options)
    best, latest = (checkpoint.load(source.path / "checkpoints", which) for which in ("best", "latest"))
    assert np.abs(latest.params["norm.mean"]).max() > 0, "statistics have come together"
    assert_same(first_snapshot(tmp_path, env, init="source", **options), best)
    assert_same(first_snapshot(tmp_path, env, init="source@best", **options), best)
    assert_same(first_snapshot(tmp_path, env, init="source@latest", **options), latest)
    assert_same(first_snapshot(tmp_path, env, init=f"{source.path}@{latest.step}", **options), latest)
    assert checkpoint.fingerprint(
        {name: to_numpy(value) for name, value in first_snapshot(tmp_path, env, **options).params.items()}
    ) != checkpoint.fingerprint(latest.params)
    done = train(tmp_path, env, init="source@latest", run="heir", **options)
    assert done.exit_code == 0
    assert done.summary["weights_sha256"] != source.summary["weights_sha256"], "and it learns on"


@pytest.mark.parametrize(("env", "options"), ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_statistics_go_on_from_where_they_were(tmp_path: Path, env: str, options: dict[str, Any]) -> None:
    """Its first rows weigh as much as they are many beside those of the run before: the normaliser does not jump."""
    source = train(tmp_path, env, run="source", **{**options, "steps": 640, "evals": 0})
    saved = checkpoint.load(source.path / "checkpoints")
    heir = train(tmp_path, env, init="source", **{**options, "seed": 9, "steps": 64, "evals": 0, "run": "heir"})
    fresh = train(tmp_path, env, **{**options, "seed": 9, "steps": 64, "evals": 0, "run": "fresh"})
    after, alone = (checkpoint.load(result.path / "checkpoints") for result in (heir, fresh))
    share = after.step / (after.step + saved.step)
    old, own, mean = (np.asarray(found.params["norm.mean"], float) for found in (saved, alone, after))
    if env != DRONE:  # where what is seen does not depend on what is done
        np.testing.assert_allclose(mean, (1 - share) * old + share * own, atol=1e-6)
    else:
        assert np.abs(mean - old).max() < 3 * share * np.abs(own - old).max() + 1e-6


def test_an_heir_is_the_policy_that_it_begins_with(tmp_path: Path) -> None:
    """Seen by what it is worth before it has changed."""
    source = train(tmp_path, DISCRETE, run="source", steps=1280, evals=1, eval_episodes=10, ppo={"lr": 0.01})
    frozen = train(tmp_path, DISCRETE, init="source@latest", steps=32, evals=1, eval_episodes=10, ppo={"lr": 1e-12})
    assert frozen.summary["final_eval"] == pytest.approx(source.summary["final_eval"], abs=1.0)
    assert (
        frozen.summary["final_eval"] > train(tmp_path, DISCRETE, steps=32, eval_episodes=10).summary["final_eval"] + 3
    )


def test_it_is_kept_in_the_config_and_shown_in_the_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = train(tmp_path, DISCRETE, run="source", policy={})
    argv = ["train", DISCRETE, "--init", "source", "--runs-dir", str(tmp_path), "--steps", "64", "--evals", "0"]
    assert cli.main([*argv, "--dry-run"]) == 0
    best = checkpoint.load(source.path / "checkpoints", "best").step
    assert f"init     {source.path / 'checkpoints' / str(best)}" in capfd.readouterr().out
    assert cli.main([*argv, "--run", "heir"]) == 0
    assert json.loads((tmp_path / "heir" / "config.json").read_text())["init"] == "source"
    assert from_file(tmp_path / "heir" / "config.json").run.init == "source"


def test_what_had_to_be_passed_over_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, DISCRETE, run="source", policy={}, evals=0)
    argv = ["train", DISCRETE, "--init", "source", "--runs-dir", str(tmp_path), "--steps", "64", "--evals", "0"]
    assert cli.main(argv) == 0
    assert "using step 96 instead of 'best'" in capfd.readouterr().out


# ------------------------------------------------------------------------------------------------------------ what is refused


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("runs"), DISCRETE, run="source")


@pytest.mark.parametrize(
    ("env", "options", "text"),
    [
        (DISCRETE, {"env_args": {"n": 5}}, "obs_size is 4 there and 5 here"),
        (DISCRETE, {"policy": {**NORMALISED, "hidden": [16]}}, "hidden is (8,) there and (16,) here"),
        (DISCRETE, {"policy": {**NORMALISED, "activation": "relu"}}, "activation is tanh there and relu here"),
        (DISCRETE, {"policy": {"hidden": [8]}}, "normalised is ((0, 4),) there and () here"),
    ],
    ids=["world", "sizes", "activation", "statistics"],
)
def test_another_network_is_refused_in_one_line_before_anything_starts(
    source: Result, env: str, options: dict[str, Any], text: str
) -> None:
    before = sorted(source.path.parent.iterdir())
    with pytest.raises(SetupError) as caught:
        train(source.path.parent, env, init="source", **options)
    wanted = f"--init source has another network ({text}): use the same environment and --policy options"
    assert str(caught.value) == wanted
    assert sorted(source.path.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sauce", "no run 'sauce' in {}; did you mean 'source'?"),
        ("source@7", "there is no checkpoint of step 7 in {}/source/checkpoints; there is "),
        ("source@first", "no run 'source@first' in {}"),
    ],
)
def test_a_start_that_is_not_there_is_named(source: Result, name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        train(source.path.parent, DISCRETE, init=name)
    assert str(caught.value).startswith(text.format(source.path.parent))
