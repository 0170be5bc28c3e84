"""eval, play and doctor, as a person at a terminal meets them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.cli import doctor
from freewheel.cli import main as cli
from freewheel.run.trainer import Result


def trained(runs: Path, env: str, **options: Any) -> Result:
    small = {"num_envs": 2, "num_steps_per_env": 32, "steps": 64, "evals": 1, "eval_episodes": 4}
    return freewheel.train(env, quiet=True, runs_dir=runs, run="it", **small | options)


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return trained(tmp_path_factory.mktemp("cartpole"), "CartPole-v1")


@pytest.fixture(autouse=True)
def no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)


def test_eval_tells_the_score_of_the_best_weights(cartpole: Result, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(cartpole.path), "--episodes", "4"]) == 0
    out, err = capfd.readouterr()
    line = r"CartPole-v1: mean (\S+) ± \S+ over 4 greedy episodes \(min (\S+), max (\S+), length (\d+)\)\n"
    match = re.fullmatch(line, out)
    assert match, out
    mean, low, high, length = map(float, match.groups())
    assert mean == pytest.approx(cartpole.summary["best_eval"], abs=0.05)
    assert low <= mean <= high
    assert length == pytest.approx(mean, abs=0.5)  # a point a step
    assert err == ""


def test_eval_finds_a_run_by_name(cartpole: Result, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["eval", "--runs_dir", str(cartpole.path.parent), "--which=latest", "--seed", "3", "it"]
    assert cli.main(argv) == 0
    assert "over 20 greedy episodes" in capfd.readouterr().out


def test_play_without_pictures_tells_the_score(cartpole: Result, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["play", str(cartpole.path), "--render", "none", "--episodes", "2"]) == 0
    assert re.fullmatch(
        r"episode 1: return \S+ in \d+ steps\nepisode 2: return \S+ in \d+ steps\n", capfd.readouterr().out
    )
    assert not (cartpole.path / "play").exists()


@pytest.mark.parametrize("render", ["gif", "auto"])
def test_play_draws_an_animated_picture(cartpole: Result, capfd: pytest.CaptureFixture[str], render: str) -> None:
    from PIL import Image, ImageSequence

    assert cli.main(["play", str(cartpole.path), "--render", render, "--seed", "1000"]) == 0
    told, where = capfd.readouterr().out.splitlines()
    steps = int(told.split()[-2])
    assert where == f"  {cartpole.path / 'play' / 'episode-1.gif'}"
    with Image.open(cartpole.path / "play" / "episode-1.gif") as picture:
        frames = [frame.convert("RGB").tobytes() for frame in ImageSequence.Iterator(picture)]
    assert 1 < len(frames) <= steps
    assert len(set(frames)) > 1


def test_play_prints_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = trained(tmp_path, "FrozenLake-v1", max_episode_steps=5)
    for render in ("ansi", "auto"):
        assert cli.main(["play", str(done.path), "--render", render]) == 0
        out = capfd.readouterr().out
        steps = int(out.split()[-2])
        assert out.count("FFFH") == steps + 1  # the second row of the lake, once a picture
        assert 1 <= steps <= 5
    assert not (done.path / "play").exists()


def test_play_says_what_a_world_can_show(cartpole: Result, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["play", str(cartpole.path), "--render", "ansi"]) == 1
    assert capfd.readouterr().err == "freewheel: CartPole-v1 cannot render ansi; it offers human, rgb_array\n"


def test_play_of_a_world_without_pictures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = trained(tmp_path, "freewheel.testing.worlds:Identity")
    assert cli.main(["play", str(done.path)]) == 0
    assert re.fullmatch(r"episode 1: return \S+ in 16 steps\n", capfd.readouterr().out)


def test_a_batched_simulator_scores_again_and_plays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"num_steps_per_env": 8, "steps": 16, "eval_max_steps": 20, "policy.hidden": [4], "device": "auto"}
    result = trained(tmp_path, "freewheel/RoughDrone-v0", mode="lockstep", **options)
    assert cli.main(["eval", str(result.path), "--episodes", "4"]) == 0
    assert f": mean {result.summary['final_eval']:.1f} ± " in capfd.readouterr().out
    assert cli.main(["play", str(result.path)]) == 0
    assert re.fullmatch(r"episode 1: return \S+ in \d+ steps\n", capfd.readouterr().out)
    assert cli.main(["play", str(result.path), "--render", "ansi"]) == 1
    assert "freewheel/RoughDrone-v0 cannot render ansi; it offers nothing" in capfd.readouterr().err


def test_a_missing_checkpoint_is_passed_over_aloud(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = trained(tmp_path, "freewheel.testing.worlds:Identity", evals=0)
    for argv in (["eval", str(done.path)], ["play", str(done.path), "--render", "none"]):
        assert cli.main(argv) == 0
        out = capfd.readouterr().out
        assert out.startswith("warning: ")
        assert "\nwarning: using step 64 instead of 'best'\n" in out


def test_a_run_of_a_script_asks_for_a_module(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = trained(tmp_path, "freewheel.testing.worlds:Identity")
    config = done.path / "config.json"
    config.write_text(config.read_text().replace("freewheel.testing.worlds:Identity", "__main__:Identity"))
    assert cli.main(["eval", str(done.path)]) == 1
    err = capfd.readouterr().err
    assert err.startswith(
        "freewheel: __main__:Identity was defined in a script and cannot be imported; move it to a module"
    )
    assert err.count("\n") == 1


def test_doctor_prints_a_table(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [(True, "alpha", "1.2.3"), (True, "beta", "not installed; pip install 'beta[all]'")]
    monkeypatch.setattr(doctor, "findings", lambda: iter(findings))
    assert cli.main(["doctor"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["ok", what, *how.split()] for _, what, how in findings]


def test_doctor_tells_of_the_whole_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) in (0, 1)  # 1: this machine lacks something
    told = [line.split()[1] for line in capfd.readouterr().out.splitlines() if line.split()[0] in ("ok", "!!")]
    assert told == [what for _, what, _ in doctor.findings()]
    assert {"python", "freewheel", "torch", "gymnasium", "cores", "memory", "gpu"} <= set(told)


def test_doctor_fails_where_something_needed_is_missing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "findings", lambda: iter([(True, "alpha", "1"), (False, "beta", "missing: pip install beta")])
    )
    assert cli.main(["doctor"]) == 1
    assert "!!  beta   missing: pip install beta" in capfd.readouterr().out
