"""Several learners of one run, in processes of their own: what they learn, how they end, and how they go on."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy

import freewheel
from freewheel.core import Metrics, NDArray
from freewheel.errors import FreewheelError, PeerLostError
from freewheel.run.hooks import Run
from freewheel.run.learners.versions import agreed_of, newest_of_all
from freewheel.run.naming import Result
from tests.support.places import ROOT
from tests.support.runs import IDENTITY, assert_balanced, rows_of, train
from tests.support.worlds import Identity

OFTEN = 1e-6  # minutes between two checkpoints


def weights(folder: Path) -> dict[str, NDArray]:
    return safetensors.numpy.load_file(folder / "checkpoints/latest/weights.safetensors")


def assert_same_bits(run: Path) -> None:
    """In both learners."""
    own, theirs = weights(run), weights(run / "learners/1")
    assert all(own[name].tobytes() == theirs[name].tobytes() for name in own)


def learner(run: Path, rank: int = 1) -> int:
    """The process of a learner."""
    return int(json.loads((run / f"learners/{rank}/status.json").read_text())["pid"])


class At:
    """Does something after so many updates, as soon as all learners can be seen."""

    def __init__(self, updates: int, action: Callable[[Run], None]) -> None:
        self._updates, self._action = updates, action

    def on_update(self, run: Run, metrics: Metrics) -> None:
        if run.updates >= self._updates and (run.path / "learners/1/status.json").is_file():
            self._updates = 10**9
            self._action(run)


def endless(tmp_path: Path, hook: Any, **options: Any) -> Result:
    return train(tmp_path, learners=2, steps=10**9, evals=0, hooks=[hook], **options)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_two_learners_have_ray_actors_of_their_own(tmp_path: Path) -> None:
    result = train(tmp_path, learners=2, mode="ray", workers=2, num_envs=2, steps=320, evals=0)
    summary = result.summary
    assert (summary["ended"], summary["exit_code"]) == ("steps", 0)
    assert_balanced(summary)
    assert [one["trained"] for one in summary["learners"]] == [160, 160]
    assert_same_bits(result.path)


def test_two_learners_train_one_run(tmp_path: Path) -> None:
    result = train(tmp_path, learners=2)
    summary = result.summary
    assert (summary["ended"], summary["exit_code"], summary["env_steps"], summary["trained"]) == ("steps", 0, 640, 640)
    assert_balanced(summary)
    assert [one["env_steps"] for one in summary["learners"]] == [320, 320]
    assert [one["trained"] for one in summary["learners"]] == [320, 320]
    assert all(0 < one["wait_share"] < 1 for one in summary["learners"])
    assert summary["episodes"] == 40
    assert summary["eval_fresh"], "the first learner evaluates"
    for row in rows_of(result):
        assert_balanced(row)
    config = json.loads((result.path / "config.json").read_text())
    assert (config["learners"], config["num_envs"]) == (2, 4), "options describe the whole run"
    assert json.loads((result.path / "learners/1" / "summary.json").read_text())["env_steps"] == 320
    assert_same_bits(result.path)


@pytest.mark.system
def test_they_learn_what_one_learner_would(tmp_path: Path) -> None:
    """Workers of mode batch have own generators: two learners play as one; with one minibatch the order of rows is no matter."""
    options: dict[str, Any] = {"mode": "batch", "workers": 4, "evals": 0, "steps": 256, "ppo": {"minibatch": 64}}
    one = weights(train(tmp_path, **options).path)
    two = weights(train(tmp_path, learners=2, **options).path)
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mode", [pytest.param("lockstep", marks=pytest.mark.system), pytest.param("batch", marks=pytest.mark.long)]
)
def test_stopped_and_resumed_they_equal_learners_that_were_not(tmp_path: Path, mode: str) -> None:
    options: dict[str, Any] = {"learners": 2, "mode": mode, "evals": 0}
    straight = train(tmp_path, **options)
    begun = train(tmp_path, **options, steps=320)
    assert freewheel.resume(begun.path, quiet=True).summary["env_steps"] == 320, "nothing is left to do"
    resumed = freewheel.resume(begun.path, steps=640, quiet=True)
    assert resumed.summary["weights_sha256"] == straight.summary["weights_sha256"]
    for name in ("env_steps", "trained", "episodes", "updates"):
        assert resumed.summary[name] == straight.summary[name], name
    assert_balanced(resumed.summary)


@pytest.mark.system
def test_a_learner_that_is_killed_ends_the_run_which_then_goes_on(tmp_path: Path) -> None:
    def kill(run: Run) -> None:
        if set(agreed_of(run.path)) & set(agreed_of(run.path / "learners/1")):
            os.kill(learner(run.path), signal.SIGKILL)
        else:
            hook.__init__(run.updates + 1, kill)  # type: ignore[misc] # nothing was saved by both yet

    hook = At(5, kill)
    told = r"^learner 1 was killed \(SIGKILL\): .*freewheel resume .* continues from step"
    with pytest.raises(PeerLostError, match=told):
        endless(tmp_path, hook, checkpoint_every=OFTEN)
    (run,) = tmp_path.iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["ended"], summary["exit_code"]) == ("failed", 1)
    step = int(newest_of_all(run, 2).partition("-")[0])
    again = freewheel.resume(run, steps=step + 640, quiet=True)
    assert (again.summary["ended"], again.summary["exit_code"]) == ("steps", 0)
    assert again.summary["env_steps"] >= step + 640
    assert_balanced(again.summary)
    assert len({one["env_steps"] for one in again.summary["learners"]}) == 1


@pytest.mark.system
@pytest.mark.parametrize("who", ["first", "other"])
def test_a_signal_to_any_learner_ends_all_between_the_same_two_updates(tmp_path: Path, who: str) -> None:
    number = signal.SIGINT if who == "first" else signal.SIGTERM

    def interrupt(run: Run) -> None:
        os.kill(os.getpid() if who == "first" else learner(run.path), number)

    hook = At(3, interrupt)
    if who == "first":
        with pytest.raises(KeyboardInterrupt):
            endless(tmp_path, hook)
    else:
        assert endless(tmp_path, hook).exit_code == 128 + signal.SIGTERM
    (run,) = tmp_path.iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ended"] == f"interrupted ({number.name})"
    assert_balanced(summary)
    first, other = (max(agreed_of(folder)) for folder in (run, run / "learners/1"))
    assert first == other, "they have saved at the same exchange"
    assert_same_bits(run)


class FailsElsewhere(Identity):
    """Cannot be made in a learner but the first."""

    def __init__(self) -> None:
        super().__init__()
        if multiprocessing.current_process().name.startswith("freewheel-learner"):
            raise ValueError("no licence for a second one")


@pytest.mark.system
def test_the_failure_of_one_learner_is_told_once_by_the_first(tmp_path: Path) -> None:
    with pytest.raises(FreewheelError, match=r"^learner 1: .*no licence for a second one") as caught:
        train(tmp_path, FailsElsewhere, learners=2)
    assert type(caught.value) is FreewheelError
    assert not [process for process in psutil.Process().children() if "learner" in process.name()]


@pytest.mark.system
def test_a_hook_stops_all_and_what_it_assigns_reaches_all(tmp_path: Path) -> None:
    class Hook:
        def on_update(self, run: Run, metrics: Metrics) -> None:
            run.learning_rate = 1e-3 / run.updates
            if run.updates == 4:
                run.stop("enough")

    result = endless(tmp_path, Hook())
    assert (result.summary["ended"], result.summary["env_steps"]) == ("enough", 4 * 64)
    assert_same_bits(result.path)


@pytest.mark.system
def test_torchrun(tmp_path: Path) -> None:
    words = ["train", IDENTITY, "--num-envs", "4", "--num-steps-per-env", "16", "--steps", "128", "--evals", "0"]
    started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "freewheel"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *started, *words, "--runs-dir", str(tmp_path)]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("saved in") == 1, "the others are silent"
    (run,) = tmp_path.iterdir()
    assert [one["env_steps"] for one in json.loads((run / "summary.json").read_text())["learners"]] == [64, 64]
    config = json.loads((run / "config.json").read_text())
    assert (config["learners"], config["sources"]["learners"]) == (2, "torchrun")
