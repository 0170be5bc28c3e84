"""What the clocks of a run promise while its learner is busy with a model: rows on time, named waiting, an end in time."""

from __future__ import annotations

import itertools
import json
import os
import pkgutil
import signal
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.errors import NothingLearnedError
from freewheel.learn.mbpo.fitting import Fit, Fitter
from freewheel.run.naming import Result
from tests.support.clocks import Clock
from tests.support.runs import IDENTITY, assert_balanced, rows_of
from tests.support.worlds import Counter

WORLD, COUNTER = "tests.support.worlds:Wandering", "tests.support.worlds:Counter"
MBPO: Mapping[str, Any] = {
    "learning_starts": 20, "batch": 8, "updates_per_row": 0.5, "buffer": 500, "members": 2, "elites": 1, "model_hidden": [8],
    "model_every": 20, "model_batch": 16, "max_epochs": 2, "rollouts_per_row": 0.5, "termination": "never",
}  # fmt: skip
LOG_EVERY = 10.0  # seconds, most of which a Clock adds
STEP = 1.0  # seconds of a Clock between two looks of the run at the time
LATEST = LOG_EVERY + STEP + 5.0  # between two rows on a machine that may stand still for seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def train(tmp_path: Path, *, clock: str = "serial", mode: str = "sequential", **options: Any) -> Result:
    given: dict[str, Any] = {
        "steps": 60, "num_envs": 1, "num_steps_per_env": 4, "evals": 0, "policy": {"hidden": [8]}, "seed": 1, "mode": mode,
        "mbpo": {**MBPO, "clock": clock}, **options,
    }  # fmt: skip
    return freewheel.train(WORLD, quiet=True, runs_dir=tmp_path, run="it", algo="mbpo", **given)


def learned_nothing(tmp_path: Path, **options: Any) -> dict[str, Any]:
    """The summary of a training whose time is over before its first update: it has failed, and can be resumed."""
    with pytest.raises(NothingLearnedError, match="--minutes ran out"):
        train(tmp_path, **options)
    summary: dict[str, Any] = json.loads((tmp_path / "it" / "summary.json").read_text())
    assert (summary["exit_code"], summary["updates"]) == (1, 0)
    assert (tmp_path / "it" / "checkpoints" / "latest" / "learner.safetensors").exists()
    return summary


def slow_fits(monkeypatch: pytest.MonkeyPatch, looks: int, wait: Callable[[float], None] = time.sleep) -> None:
    """Before a fit the run may look at the time so often; between two looks a fit waits for STEP seconds."""

    def make(*args: Any) -> Callable[[Any], Generator[None, None, Fit]]:
        fitter = Fitter(*args)

        def fit(rows: Any) -> Generator[None, None, Fit]:
            for _ in range(looks):
                wait(STEP)
                yield
            return (yield from fitter.in_steps(rows))

        return fit

    monkeypatch.setattr("freewheel.learn.mbpo.learner._fitter", make)


def assert_on_time(rows: list[dict[str, Any]]) -> None:
    """All of them add up, and come every LOG_EVERY seconds; the last one comes with the end."""
    for row in rows:
        assert_balanced(row)
        assert sum(part for name, part in row.items() if name.startswith("time/learner_")) == pytest.approx(1)
    assert max([after["wall_s"] - before["wall_s"] for before, after in itertools.pairwise(rows[:-1])]) < LATEST


def test_a_long_fit_has_its_share_and_rows_come(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_fits(monkeypatch, 50, clock.add)
    result = train(tmp_path, log_every=LOG_EVERY, steps=41)
    shares, wall = result.summary["shares"]["learner"], result.summary["wall_s"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["fit"] * wall >= 100, "two fits"
    assert shares["rollout"] > 0
    assert shares["update"] < 0.2
    rows = rows_of(result)
    assert_on_time(rows)
    fitting = [row for row in rows if row["time/learner_fit"] > 0.7]
    assert len(fitting) >= 6
    assert all(row["learner_busy"] > 0.7 for row in fitting)


@pytest.mark.system
def test_a_fit_beside_the_run_is_waited_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which really takes this long."""
    slow_fits(monkeypatch, 12, lambda _: time.sleep(0.1))
    result = train(tmp_path, clock="async", log_every=0.4, steps=30)
    assert result.summary["shares"]["learner"]["wait-model"] * result.summary["wall_s"] >= 0.8
    waiting = [row for row in rows_of(result) if row["time/learner_wait_model"] > 0.7]
    assert waiting, "no row was written in the middle of the fit"
    assert all(row["learner_busy"] < 0.3 for row in waiting)


@pytest.mark.parametrize("mode", ["sequential", "batch"])
def test_minutes_end_in_a_first_fit(tmp_path: Path, mode: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_fits(monkeypatch, 1000, clock.add)
    assert 0.9 * 120 < learned_nothing(tmp_path, mode=mode, steps=None, minutes=2)["wall_s"] < 1.1 * 120 + 5


@pytest.mark.parametrize("mode", ["batch", "continuous"])
def test_minutes_end_in_a_first_fit_beside_the_run(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_fits(monkeypatch, 600)
    assert learned_nothing(tmp_path, clock="async", mode=mode, steps=None, minutes=1.5 / 60)["wall_s"] > 0.4


def test_minutes_are_used_though_fits_take_long(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the loop that can be ended at any time is no reason to end a run early."""
    slow_fits(monkeypatch, 45, clock.add)
    result = train(tmp_path, steps=None, minutes=2)
    assert result.summary["ended"] == "minutes"
    assert 120 <= result.summary["wall_s"] < 1.1 * 120 + 5


@pytest.mark.parametrize("clock", ["serial", "async"])
def test_a_signal_ends_the_first_fit_without_trace(tmp_path: Path, clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [os.getpid()]

    def interrupt(_: float) -> None:
        if left:
            os.kill(left.pop(), signal.SIGINT)
        time.sleep(0.1)

    with monkeypatch.context() as patched:
        slow_fits(patched, 6000, interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "stopped", clock=clock)
    stopped = tmp_path / "stopped" / "it"
    summary = json.loads((stopped / "summary.json").read_text())
    assert (summary["ended"], summary["updates"]) == ("interrupted (SIGINT)", 0)
    if clock == "serial":
        last, straight = freewheel.resume(stopped, quiet=True), train(tmp_path / "straight")
        assert last.summary["weights_sha256"] == straight.summary["weights_sha256"]


@pytest.mark.parametrize("step", ["numpy_engine:NumpyEngine.gradient", "torch_engine:TorchEngine._gradient"])
def test_rows_come_while_ppo_updates(tmp_path: Path, step: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """One update of 60 gradient steps."""
    name = f"freewheel.learn.ppo.{step}"
    real = pkgutil.resolve_name(name)

    def slow(*args: Any) -> Any:
        clock.add(STEP)
        return real(*args)

    monkeypatch.setattr(name.replace(":", "."), slow)
    gradient = "analytic" if step.startswith("numpy") else "autograd"
    options: dict[str, Any] = {"ppo": {"epochs": 15, "minibatch": 8, "gradient": gradient}, "log_every": LOG_EVERY}
    small: dict[str, Any] = {"mode": "sequential", "steps": 32, "num_envs": 1, "num_steps_per_env": 32, "evals": 0}
    rows = rows_of(freewheel.train(IDENTITY, quiet=True, runs_dir=tmp_path, **small, **options))
    assert_on_time(rows)
    amid = [row for row in rows if row["time/learner_update"] > 0.7]
    assert len(amid) >= 4
    assert all((row["updates"], row["queued"]) == (0, 32) for row in amid[:4])


def test_rows_come_in_slow_steps_in_this_process(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Counter.step

    def slow(self: Counter, action: Any) -> Any:
        clock.add(STEP)
        return real(self, action)

    monkeypatch.setattr(Counter, "step", slow)
    small: dict[str, Any] = {"mode": "sequential", "num_envs": 1, "num_steps_per_env": 50, "steps": 50, "evals": 0}
    rows = rows_of(freewheel.train(COUNTER, quiet=True, runs_dir=tmp_path, log_every=LOG_EVERY, **small))
    assert len(rows) >= 4
    assert_on_time(rows)
    assert any(row["open"] for row in rows), "no row was written amid a chunk"
