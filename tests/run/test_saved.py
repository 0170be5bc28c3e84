"""A run on disk: played again exactly as it was evaluated, and the start of another run, or a line that says why not."""

from __future__ import annotations

import json
import shutil
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
from freewheel.errors import FileError, SetupError, UsageError
from freewheel.learn.spec import Services
from freewheel.run.checkpoints import checkpoint
from freewheel.run.naming import Result
from freewheel.run.planning import plan
from freewheel.run.saved import open_run
from freewheel.transport.executors import SerialExecutor
from tests.support.runs import train
from tests.support.worlds import Identity


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run whose best weights are not its last: the step size wrecks what was learned."""
    sizes: dict[str, Any] = {"steps": 256, "evals": 4, "eval_episodes": 5}
    return train(tmp_path_factory.mktemp("runs"), run="one", seed=2, eval_seed=77, ppo={"lr": 1.0}, **sizes)


@pytest.fixture
def copy(result: Result, tmp_path: Path) -> Path:
    shutil.copytree(result.path, tmp_path / "one", symlinks=True)
    return tmp_path / "one"


def test_a_run_is_found_by_name_or_path(result: Result) -> None:
    by_name, by_path = open_run("one", str(result.path.parent)), open_run(str(result.path))
    assert by_name == by_path
    assert by_name.config == from_file(result.path / "config.json")


@pytest.mark.parametrize(("which", "key"), [("best", "best_eval"), ("latest", "final_eval"), ("256", "final_eval")])
def test_a_run_scores_again_what_it_scored(result: Result, which: str, key: str) -> None:
    run = open_run(str(result.path))
    actor, warnings = run.actor(which)
    assert warnings == []
    seed = result.summary["eval_fresh_seed"]
    assert run.score(actor, 5, seed).mean == result.summary[key]
    assert freewheel.score(str(result.path), episodes=5, which=which, seed=seed).mean == result.summary[key]


def test_other_seeds_are_other_episodes(result: Result) -> None:
    run = open_run(str(result.path))
    actor, _ = run.actor()
    usual, chosen_by, closing = (run.score(actor, 20, seed) for seed in (None, 77, result.summary["eval_fresh_seed"]))
    assert usual == run.score(actor, 20)
    assert len({usual.returns, chosen_by.returns, closing.returns}) == 3, "every use has episodes of its own"


def test_the_episodes_that_are_played_are_those_that_are_scored(result: Result) -> None:
    run = open_run(str(result.path))
    actor, _ = run.actor()
    played = [sum(run.play(actor, (77, number), None, lambda picture: None)) for number in range(3)]
    assert played == list(run.score(actor, 3, 77).returns)


def test_an_unknown_run_is_refused_with_the_nearest(result: Result, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^no run 'onne' in .*; did you mean 'one'\?$"):
        open_run("onne", str(result.path.parent))
    with pytest.raises(UsageError, match=r"^no run 'one' in .*nowhere; train one first$"):
        open_run("one", str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["{", "[]", '{"env": "A-v0", "nonsense": 1}', '{"env": "A-v0", "steps": "many"}'])
def test_a_damaged_config_is_named(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises((SetupError, FileError)) as caught:
        open_run(str(copy))
    assert str(caught.value).startswith(f"{copy / 'config.json'} is damaged")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["__main__:World", "worlds:make.<locals>.World", "worlds:<lambda>"])
def test_a_world_that_cannot_be_found_again_is_said_to_be_so(copy: Path, name: str) -> None:
    (copy / "config.json").write_text(json.dumps({**json.loads((copy / "config.json").read_text()), "env": name}))
    with pytest.raises(SetupError, match=f"^{name} was defined in a script and cannot be imported; add env="):
        open_run(str(copy), trust=True)


def test_a_class_is_found_again_but_not_a_function_without_a_name(tmp_path: Path) -> None:
    done = train(tmp_path, Identity, steps=64, evals=1)
    again = freewheel.score(str(done.path), episodes=3, seed=done.summary["eval_fresh_seed"])
    assert again.mean == done.summary["final_eval"]
    done = train(tmp_path, lambda: Identity(3), steps=64, evals=0)
    with pytest.raises(SetupError, match="was defined in a script and cannot be imported"):
        open_run(str(done.path))


def test_a_damaged_checkpoint_is_passed_over_loudly(copy: Path, result: Result) -> None:
    best = (copy / "checkpoints" / "best").resolve()
    weights = best / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    _, (damage, fallback) = open_run(str(copy)).actor("best")
    assert str(weights) in damage.replace("best/", f"{best.name}/")
    assert fallback.startswith("using step ")
    with pytest.warns(UserWarning, match=r"damaged|using step") as told:
        freewheel.score(str(copy), episodes=1)
    assert [str(warning.message) for warning in told] == [damage, fallback]


DISCRETE, DRONE = "tests.support.worlds:Identity", "freewheel/RoughDrone-v0"
BOX = f"{DISCRETE}Box"
NORMALISED = {"hidden": [8], "normalize_obs": True}
SMALL: Mapping[str, Any] = {"num_envs": 2, "steps": 96, "evals": 3, "eval_episodes": 2, "policy": NORMALISED}
REPLAYING = {"learning_starts": 32, "batch": 8, "updates_per_row": 0.25}
DREAMING = {"members": 2, "elites": 1, "model_hidden": [8], "model_every": 32, "max_epochs": 1, "rollouts_per_row": 1}
SIMULATED = {"env_args": {"lidar": False, "episode_seconds": 0.4, "levels": 1, "tiles_per_level": 1}, "device": "cpu"}
WORLDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "ppo": (DISCRETE, {"algo": "ppo", "ppo": {"lr": 0.01}}),
    "sac": (BOX, {"algo": "sac", "sac": REPLAYING}),
    "mbpo": (BOX, {"algo": "mbpo", "mbpo": {**REPLAYING, **DREAMING, "clock": "serial"}}),
    "ppo on a simulator": (DRONE, {"algo": "ppo", **SIMULATED}),
    "sac on a simulator": (DRONE, {"algo": "sac", "sac": REPLAYING, **SIMULATED}),
}
ALGORITHMS = ["ppo", "sac", "mbpo"]
SIMULATORS = [pytest.param(f"{algorithm} on a simulator", marks=pytest.mark.system) for algorithm in ("ppo", "sac")]


def start(runs: Path, env: str, **options: Any) -> Result:
    return train(runs, env, **{**SMALL, **options})


def first_weights(runs: Path, env: str, **options: Any) -> str:
    """The fingerprint of what a run would publish before it has learned anything."""
    planned = plan(from_options(env, {**SMALL, "num_steps_per_env": 16, "runs_dir": runs, **options}))
    services = Services(executors=SerialExecutor)
    snapshot: Snapshot = planned.config.learner.build(replace(planned.learner_spec, services=services)).snapshot()
    assert snapshot.version == 0
    return checkpoint.fingerprint({name: to_numpy(value) for name, value in snapshot.params.items()})


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *SIMULATORS])
def test_the_first_weights_are_the_others_to_the_bit(tmp_path: Path, algorithm: str) -> None:
    env, options = WORLDS[algorithm]
    source = start(tmp_path, env, run="source", **options)
    best, latest = (checkpoint.load(source.path / "checkpoints", which) for which in ("best", "latest"))
    assert np.abs(latest.params["norm.mean"]).max() > 0, "statistics have come together"
    for name, saved in {
        "source": best, "source@best": best, "source@latest": latest, f"{source.path}@{latest.step}": latest,
    }.items():  # fmt: skip
        assert first_weights(tmp_path, env, init=name, **options) == checkpoint.fingerprint(saved.params)
    assert first_weights(tmp_path, env, **options) != checkpoint.fingerprint(latest.params)
    done = start(tmp_path, env, init="source@latest", run="heir", **options)
    assert done.exit_code == 0
    assert done.summary["weights_sha256"] != source.summary["weights_sha256"], "and it learns on"


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *SIMULATORS])
def test_statistics_go_on_from_where_they_were(tmp_path: Path, algorithm: str) -> None:
    """Its first rows weigh as much as they are many beside those of the run before: the normaliser does not jump."""
    env, options = WORLDS[algorithm]
    source = start(tmp_path, env, run="source", **{**options, "steps": 640, "evals": 0})
    saved = checkpoint.load(source.path / "checkpoints")
    heir = start(tmp_path, env, init="source", **{**options, "seed": 9, "steps": 64, "evals": 0, "run": "heir"})
    fresh = start(tmp_path, env, **{**options, "seed": 9, "steps": 64, "evals": 0, "run": "fresh"})
    after, alone = (checkpoint.load(result.path / "checkpoints") for result in (heir, fresh))
    share = after.step / (after.step + saved.step)
    old, own, mean = (np.asarray(found.params["norm.mean"], float) for found in (saved, alone, after))
    if env != DRONE:  # where what is seen does not depend on what is done
        np.testing.assert_allclose(mean, (1 - share) * old + share * own, atol=1e-6)
    else:
        assert np.abs(mean - old).max() < 3 * share * np.abs(own - old).max() + 1e-6


def test_it_is_kept_in_the_config_and_shown_in_the_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = start(tmp_path, DISCRETE, run="source", policy={})
    argv = ["train", DISCRETE, "--init", "source", "--runs-dir", str(tmp_path), "--steps", "64", "--evals", "0"]
    assert cli.main([*argv, "--dry-run"]) == 0
    best = checkpoint.load(source.path / "checkpoints", "best").step
    assert f"init     {source.path / 'checkpoints' / str(best)}" in capfd.readouterr().out
    assert cli.main([*argv, "--run", "heir"]) == 0
    assert json.loads((tmp_path / "heir" / "config.json").read_text())["init"] == "source"
    assert from_file(tmp_path / "heir" / "config.json").run.init == "source"
    capfd.readouterr()
    (source.path / "checkpoints" / "best").unlink()
    assert cli.main(argv) == 0
    assert "no evaluation has chosen the best weights yet: using step 96" in capfd.readouterr().out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return start(tmp_path_factory.mktemp("runs"), DISCRETE, run="source")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"env_args": {"n": 5}}, "obs_size is 4 there and 5 here"),
        ({"policy": {**NORMALISED, "hidden": [16]}}, "hidden is (8,) there and (16,) here"),
        ({"policy": {**NORMALISED, "activation": "relu"}}, "activation is tanh there and relu here"),
        ({"policy": {"hidden": [8], "normalize_obs": False}}, "normalised is ((0, 4),) there and () here"),
    ],
    ids=["world", "sizes", "activation", "statistics"],
)
def test_another_network_is_refused_in_a_line_before_start(source: Result, options: dict[str, Any], text: str) -> None:
    before = sorted(source.path.parent.iterdir())
    with pytest.raises(SetupError) as caught:
        start(source.path.parent, DISCRETE, init="source", **options)
    assert str(caught.value) == f"init source has another network ({text}): use the same environment and policy options"
    assert sorted(source.path.parent.iterdir()) == before


def test_observations_are_normalised_as_the_first_weights_expect_unless_the_user_decides(source: Result) -> None:
    options = {"init": "source", "runs_dir": str(source.path.parent), "num_envs": 2, "policy": {"hidden": [8]}}
    planned = plan(from_options(DISCRETE, options))
    assert planned.policy.normalised == ((0, 4),)
    assert planned.config.sources["policy.normalize_obs"] == "init source"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sauce", "no run 'sauce' in {}; did you mean 'source'?"),
        ("source@7", "there is no checkpoint of step 7 in {}/source/checkpoints; available: "),
        ("source@first", "no run 'source@first' in {}"),
    ],
)
def test_a_start_that_is_not_there_is_named(source: Result, name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        start(source.path.parent, DISCRETE, init=name)
    assert str(caught.value).startswith(text.format(source.path.parent))
