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

import numpy as np
import pytest

import freewheel
from freewheel.learn.mbpo.fitting import Fit, Fitter
from freewheel.run.trainer import Result
from tests.support.runs import IDENTITY, assert_balanced, rows_of
from tests.support.worlds import Counter

WORLD = "tests.support.worlds:Wandering"
MBPO: Mapping[str, Any] = {
    "learning_starts": 20, "batch": 8, "updates_per_row": 0.5, "buffer": 500, "members": 2, "elites": 1, "model_hidden": [8],
    "model_every": 20, "model_batch": 16, "max_epochs": 2, "rollouts_per_row": 0.5, "termination": "never",
}  # fmt: skip
CLOCKS = ("serial", "async")
Work = Callable[[], None]


def train(tmp_path: Path, *, clock: str = "serial", mode: str = "sequential", **options: Any) -> Result:
    given: dict[str, Any] = {
        "steps": 60, "num_envs": 1, "num_steps_per_env": 4, "evals": 0, "policy": {"hidden": [8]}, "seed": 1, "mode": mode,
        "mbpo": {**MBPO, "clock": clock}, **options,
    }  # fmt: skip
    return freewheel.train(WORLD, quiet=True, runs_dir=tmp_path, run="it", algo="mbpo", **given)


def slow_fits(seconds: float, monkeypatch: pytest.MonkeyPatch, work: Work = lambda: None) -> None:
    """Fits take so much longer, wherever they run; `work` is done a tenth of a second after a fit has begun."""

    def make(*args: Any) -> Callable[[Any], Generator[None, None, Fit]]:
        fitter = Fitter(*args)

        def fit(rows: Any) -> Generator[None, None, Fit]:
            began, waits = time.monotonic(), iter((0.1,))
            while time.monotonic() < began + seconds:
                time.sleep(0.01)
                yield
                if time.monotonic() > began + 0.1 and next(waits, None):
                    work()
            return (yield from fitter.in_steps(rows))

        return fit

    monkeypatch.setattr("freewheel.learn.mbpo.learner._fitter", make)


@pytest.mark.parametrize(("clock", "kind"), [("serial", "fit"), ("async", "wait-model")])
def test_a_long_fit_has_its_own_share_and_rows_come_all_the_same(
    tmp_path: Path, clock: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_fits(1.3, monkeypatch)
    result = train(tmp_path, clock=clock, log_every=0.5, steps=41)
    shares, wall = result.summary["shares"]["learner"], result.summary["wall_s"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares[kind] * wall >= 2.3, "two fits"
    assert shares["rollout"] > 0
    assert shares["update"] * wall < 0.5
    rows = rows_of(result)
    for row in rows:
        assert_balanced(row)
        assert sum(part for name, part in row.items() if name.startswith("time/learner_")) == pytest.approx(1)
    gaps = [after["wall_s"] - before["wall_s"] for before, after in itertools.pairwise(rows[:-1])]
    assert len(gaps) >= 3
    assert max(gaps) < 0.85
    waiting = [row for row in rows if row[f"time/learner_{kind.replace('-', '_')}"] > 0.9]
    assert len(waiting) >= 2
    assert all(row["learner_busy"] > 0.9 if clock == "serial" else row["learner_busy"] < 0.1 for row in waiting)


@pytest.mark.parametrize(
    ("mode", "clock"), [("sequential", "serial"), ("continuous", "async"), ("batch", "serial"), ("batch", "async")]
)
def test_minutes_are_over_during_the_first_fit(
    tmp_path: Path, mode: str, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_fits(60, monkeypatch)
    seconds = 1.5
    result = train(tmp_path, clock=clock, mode=mode, steps=None, minutes=seconds / 60)
    assert (result.summary["ended"], result.summary["exit_code"]) == ("minutes", 0)
    assert 0.9 * seconds < result.summary["wall_s"] < 1.1 * seconds + 0.2
    assert result.summary["updates"] == 0
    assert (result.path / "checkpoints" / "latest" / "learner.safetensors").exists(), "it can be resumed"


def test_minutes_are_used_although_every_fit_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the loop that can be ended at any time is no reason to end a run early."""
    slow_fits(0.9, monkeypatch)
    seconds = 2.5
    result = train(tmp_path, steps=None, minutes=seconds / 60)
    assert result.summary["ended"] == "minutes"
    assert seconds <= result.summary["wall_s"] < 1.1 * seconds + 0.2


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_signal_ends_the_first_fit_and_the_run_goes_on_as_if_it_had_not(
    tmp_path: Path, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.getpid()
    with monkeypatch.context() as patched:
        slow_fits(60, patched, lambda: os.kill(here, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "stopped", clock=clock)
    stopped = tmp_path / "stopped" / "it"
    summary = json.loads((stopped / "summary.json").read_text())
    assert (summary["ended"], summary["updates"]) == ("interrupted (SIGINT)", 0)
    assert summary["wall_s"] < 10, "it waited for the fit"
    if clock == "serial":
        last, straight = freewheel.resume(stopped, quiet=True), train(tmp_path / "straight")
        assert last.summary["weights_sha256"] == straight.summary["weights_sha256"]


@pytest.mark.parametrize("gradient", ["analytic", "autograd"])
def test_rows_come_during_a_long_update_of_ppo(tmp_path: Path, gradient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One update of 20 gradient steps, each of which takes a tenth of a second."""
    module, step = {
        "analytic": ("numpy_engine.NumpyEngine", "gradient"),
        "autograd": ("torch_engine.TorchEngine", "_gradient"),
    }[gradient]
    name = f"freewheel.learn.ppo.{module}.{step}"
    real = pkgutil.resolve_name(f"freewheel.learn.ppo.{module.replace('.', ':')}.{step}")

    def slow(*args: Any) -> Any:
        time.sleep(0.1)
        return real(*args)

    monkeypatch.setattr(name, slow)
    ppo: dict[str, Any] = {"epochs": 5, "minibatch": 8, "gradient": gradient}
    options: dict[str, Any] = {
        "ppo": ppo,
        "steps": 32,
        "num_envs": 1,
        "num_steps_per_env": 32,
        "log_every": 0.5,
        "evals": 0,
    }
    rows = rows_of(freewheel.train(IDENTITY, quiet=True, runs_dir=tmp_path, mode="sequential", **options))
    amid = [row for row in rows if row["time/learner_update"] > 0.9]
    assert len(amid) >= 2
    assert all((row["updates"], row["queued"]) == (0, 32) for row in amid[:2])
    for row in rows:
        assert_balanced(row)


class Slow(Counter):
    """Steps that take a while, in the learner's own process."""

    def step(self, action: Any) -> Any:
        time.sleep(0.05)
        return super().step(action)


def test_rows_come_during_the_steps_of_a_slow_env_in_this_process(tmp_path: Path) -> None:
    result = freewheel.train(
        Slow, quiet=True, runs_dir=tmp_path, mode="sequential", num_envs=1, num_steps_per_env=50, steps=50,
        log_every=0.5, evals=0,
    )  # fmt: skip
    rows = rows_of(result)
    assert len(rows) >= 4
    for row in rows:
        assert_balanced(row)
    assert np.diff([row["wall_s"] for row in rows[:-1]]).max() < 0.85
    assert any(row["open"] for row in rows), "no row was written amid a chunk"
