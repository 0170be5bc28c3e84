"""A run on disk plays again exactly as it was evaluated, or says in a line why it cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import freewheel
from freewheel.config.resolve import from_file
from freewheel.core import NDArray
from freewheel.errors import SetupError, UsageError
from freewheel.run import checkpoint
from freewheel.run.saved import open_run
from freewheel.run.trainer import Result
from freewheel.testing.worlds import Identity


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run whose best weights are not its last: the step size wrecks what was learned."""
    runs = tmp_path_factory.mktemp("runs")
    sizes: dict[str, Any] = {"num_envs": 4, "num_steps_per_env": 16, "steps": 256, "evals": 4, "eval_episodes": 5}
    world, ppo = "freewheel.testing.worlds:Identity", {"lr": 1.0}
    return freewheel.train(world, quiet=True, runs_dir=runs, run="one", seed=2, eval_seed=77, ppo=ppo, **sizes)


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
    assert run.score(actor, 5).mean == result.summary[key]
    assert freewheel.score(str(result.path), episodes=5, which=which).mean == result.summary[key]


def test_other_seeds_are_other_episodes(result: Result) -> None:
    run = open_run(str(result.path))
    actor, _ = run.actor()
    assert run.score(actor, 20, seed=77) == run.score(actor, 20)
    assert run.score(actor, 20, seed=78) != run.score(actor, 20)


def test_the_policy_is_the_one_that_was_saved(result: Result) -> None:
    actor, _ = open_run(str(result.path)).actor("latest")
    logits = checkpoint.load(result.path / "checkpoints").params
    obs = np.eye(4, dtype=np.float32)
    hidden = obs
    for layer in range(2):
        hidden = np.tanh(hidden @ logits[f"actor.{layer}.weight"] + logits[f"actor.{layer}.bias"])
    expected = np.argmax(hidden @ logits["actor.2.weight"] + logits["actor.2.bias"], axis=1)
    np.testing.assert_array_equal(actor.act(obs, np.random.default_rng(0), greedy=True).action, expected)


def test_the_episodes_that_are_played_are_those_that_are_scored(result: Result) -> None:
    run = open_run(str(result.path))
    actor, _ = run.actor()
    played = [sum(run.play(actor, (77, number), None, lambda picture: None)) for number in range(3)]
    assert played == list(run.score(actor, 3).returns)


def test_an_unknown_run_is_refused_with_the_nearest(result: Result, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^no run 'onne' in .*; did you mean 'one'\?$"):
        open_run("onne", str(result.path.parent))
    with pytest.raises(UsageError, match=r"^no run 'one' in .*nowhere; train one first$"):
        open_run("one", str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["{", "[]", '{"env": "A-v0", "nonsense": 1}', '{"env": "A-v0", "steps": "many"}'])
def test_a_damaged_config_is_named(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(SetupError) as caught:
        open_run(str(copy))
    assert str(caught.value).startswith(f"{copy / 'config.json'} is damaged (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["__main__:World", "worlds:make.<locals>.World", "worlds:<lambda>"])
def test_a_world_that_cannot_be_found_again_is_said_to_be_so(copy: Path, name: str) -> None:
    kept = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**kept, "env": name}))
    with pytest.raises(
        SetupError, match=f"^{name} was defined in a script and cannot be imported; move it to a module"
    ):
        open_run(str(copy))


def test_a_class_of_a_module_is_found_again(tmp_path: Path) -> None:
    done = freewheel.train(Identity, quiet=True, runs_dir=tmp_path, steps=64, num_envs=1, evals=1, eval_episodes=2)
    assert freewheel.score(str(done.path), episodes=2).mean == done.summary["final_eval"]


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


def test_a_run_without_evaluations_plays_its_last_weights(tmp_path: Path) -> None:
    world = "freewheel.testing.worlds:Identity"
    done = freewheel.train(world, quiet=True, runs_dir=tmp_path, steps=64, num_envs=1, evals=0)
    _, warnings = open_run(str(done.path)).actor("best")
    assert warnings[-1] == "using step 64 instead of 'best'"


def test_a_callable_with_state_trains_but_is_not_found_again(tmp_path: Path) -> None:
    def make(n: int) -> gymnasium.Env[NDArray, Any]:
        return Identity(n)

    done = freewheel.train(lambda: make(3), quiet=True, runs_dir=tmp_path, steps=64, num_envs=1, evals=0)
    with pytest.raises(SetupError, match="was defined in a script and cannot be imported"):
        open_run(str(done.path))
