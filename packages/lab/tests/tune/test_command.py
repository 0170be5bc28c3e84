"""Tests of the command `freewheel tune` from the user's point of view."""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from freewheel.cli import main as cli
from freewheel.config.resolve import from_argv
from freewheel_lab.tune import probe, trial
from freewheel_lab.tune.command import TuningProgress
from freewheel_lab.tune.search import TuningCandidate
from freewheel_lab.tune.trial import TuningTrial
from packages.lab.tests.tune.test_search import WAITING, probed
from tests.support.runs import IDENTITY

Capture: TypeAlias = pytest.CaptureFixture[str]
QUICK = ("--probe-seconds", "2", "--measure-seconds", "0")


def tuned(capfd: Capture, tmp_path: Path, *words: str) -> tuple[int, str, str]:
    code = cli.main(["tune", *words, "--out", str(tmp_path / "tuned.toml"), "--runs-dir", str(tmp_path / "runs")])
    out, err = capfd.readouterr()
    return code, out, err


def test_a_dry_run_says_what_would_be_measured(capfd: Capture, tmp_path: Path) -> None:
    code, out, _ = tuned(capfd, tmp_path, "CartPole-v1", "--dry-run", "--workers", "2")
    assert code == 0
    assert "modes    batch, continuous, episodes" in out
    assert "fixed    runs_dir, workers" in out
    assert "a worker with 1 env, 32 steps at once" in out
    assert "the best two settings for 8 s each" in out
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_hours_are_told_as_hours(capfd: Capture) -> None:
    with TuningProgress([("envs", 1.0), ("the policy", 3699.0)]) as progress:
        progress.next("envs", 1.0)
    assert capfd.readouterr().err == "measuring envs ... about 1:01:40 left\n"


def test_an_env_is_tuned_and_the_file_can_be_used(capfd: Capture, tmp_path: Path) -> None:
    code, out, err = tuned(capfd, tmp_path, IDENTITY, "--json", *QUICK)
    assert code == 0
    said = json.loads(out)
    assert said["ended"] == "complete"
    assert said["probe"]["rehearsals"], "a worker was measured"
    assert all(one["env"] > 0 and one["cpu"] > 0 and one["taken"] >= 0 for one in said["probe"]["rehearsals"])
    assert {one["options"]["mode"] for one in said["candidates"]} >= {"sequential", "batch", "continuous"}
    written = tomllib.loads((tmp_path / "tuned.toml").read_text())
    assert written == said["chosen"]["options"]
    assert from_argv(shlex.split(said["command"])[2:]).mode == written["mode"]
    assert "left" in err, "it says how long it will take"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("world", "said"),
    [
        ("Raises", "raised ValueError: boom"),
        ("Dies", r"was killed (SIGKILL) in "),
        ("Hangs", "did not return within 0.5 s from step 3"),
    ],
)
def test_an_env_that_fails_in_the_probe_is_named(capfd: Capture, tmp_path: Path, world: str, said: str) -> None:
    words = [f"tests.support.worlds:{world}", "--step-timeout", "0.5", *QUICK]
    code, out, err = tuned(capfd, tmp_path, *words)
    assert code not in (0, 130)
    assert f"tests.support.worlds:{world}" in err
    assert said in err
    assert ("Traceback" in err) == (world == "Raises")
    assert not out
    assert not (tmp_path / "tuned.toml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["freewheel/RoughDrone-v0"], "steps all its lanes at once on a device"),
        (["freewheel/RoughDrone-v0"], "--num-envs"),
        (["CartPole-v1", "--probe-seconds", "100"], "--probe-seconds"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_a_line(capfd: Capture, tmp_path: Path, words: list[str], said: str) -> None:
    code, _, err = tuned(capfd, tmp_path, *words)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_an_interrupt_leaves_what_is_known(capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[TuningCandidate] = []
    monkeypatch.setattr(probe, "probe", lambda *_: replace(probed(WAITING), acting=((1, 1e-5), (16, 8e-5))))

    def interrupted(candidate: TuningCandidate, seconds: float, **_: object) -> TuningTrial:
        ran.append(candidate)
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "run_trial", interrupted)
    code, out, _ = tuned(capfd, tmp_path, IDENTITY, "--measure-seconds", "1")
    assert code == 130
    assert len(ran) == 1
    assert "interrupted: predictions without all measurements" in out
    assert "5 µs per row with 16 envs at once" in out
    assert tomllib.loads((tmp_path / "tuned.toml").read_text())["mode"] == ran[0].mode
