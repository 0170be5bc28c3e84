"""A Config as a person would ask for it: typed again, it is the same run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from freewheel.config.resolve import Config, from_argv, from_options
from freewheel.run.advice import predictions as command
from tests.support.worlds import Identity


def typed_again(config: Config, mode: str = "") -> Config:
    freewheel, train, *words = shlex.split(command.typed(config, mode))
    assert (freewheel, train) == ("freewheel", "train")
    return from_argv(words)


@pytest.mark.parametrize(
    "line",
    [
        "CartPole-v1",
        "CartPole-v1 --ppo.lr 1e-3 --policy.hidden 32 16 --minutes 2 --evals 0",
        "freewheel/Straggler-v0 --env.mean 0.005 --env.kind burn --env.length 7",
        "Pendulum-v1 --algo sac --sac.batch 64 --seed 3",
        "freewheel/Cage2-v0 --preset cage2 --steps 1000",
        "CartPole-v1 --context [[1,2],[3,4]] --measures count --mode batch --workers 3",
    ],
)
def test_a_command_line_is_written_as_it_was_given(line: str) -> None:
    config = from_argv(line.split())
    again = typed_again(config)
    assert again == config
    assert again.sources == config.sources


def test_another_mode_keeps_what_does_not_belong_to_the_first() -> None:
    words = ["CartPole-v1", "--num-envs", "16", "--placement", "inline", "--ppo.epochs", "4", "--run", "mine"]
    config = from_argv(words)
    assert command.typed(config, "continuous") == "freewheel train CartPole-v1 --mode continuous --ppo.epochs 4"
    assert command.in_mode(config, "continuous") == typed_again(config, "continuous")
    assert command.in_mode(config, "lockstep") == from_argv(["CartPole-v1", "--ppo.epochs", "4"])


def test_a_config_file_is_named_again(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"ppo": {"lr": 0.5}}))
    config = from_argv(["CartPole-v1", "--config", str(path)])
    assert command.typed(config, "lockstep") == f"freewheel train CartPole-v1 --config {path}"


def test_a_run_from_python_is_answered_in_python() -> None:
    config = from_options(Identity, {"num_envs": 2, "env_args": {"n": 3}, "ppo": {"lr": 0.1}})
    typed = "freewheel.train(Identity, mode='batch', ppo={'lr': 0.1}, env_args={'n': 3})"
    assert command.typed(config, "batch") == typed
    there = command.in_mode(config, "batch")
    assert there.env == config.env  # with the class itself
    assert there.mode == "batch"
    named = from_options("CartPole-v1", {"steps": 100})
    assert command.typed(named, "batch") == "freewheel.train('CartPole-v1', mode='batch', steps=100)"
