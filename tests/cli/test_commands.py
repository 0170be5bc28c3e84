"""eval, play and doctor, as a person at a terminal meets them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import psutil
import pytest

import freewheel
from freewheel.cli import doctor, play
from freewheel.cli import main as cli
from freewheel.envs.family import Rendering
from freewheel.errors import EnvError
from freewheel.run.naming import Result
from freewheel_lab.bench.hardware import _gpu
from tests.support.pictures import decoded
from tests.support.places import ROOT

Capture: TypeAlias = pytest.CaptureFixture[str]


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


def test_eval_tells_the_score_of_the_best_weights(cartpole: Result, capfd: Capture) -> None:
    seed = str(cartpole.summary["eval_fresh_seed"])
    assert cli.main(["eval", str(cartpole.path), "--episodes", "4", "--seed", seed]) == 0
    out, err = capfd.readouterr()
    line = r"CartPole-v1: mean (\S+) ± \S+ over 4 greedy episodes \(min (\S+), max (\S+), length (\d+)\)\n"
    match = re.fullmatch(line, out)
    assert match, out
    mean, low, high, length = map(float, match.groups())
    assert mean == pytest.approx(cartpole.summary["best_eval"], abs=0.051)  # one digit is shown
    assert low <= mean <= high
    assert length == pytest.approx(mean, abs=0.5)  # a point a step
    assert err == ""


def test_eval_finds_a_run_by_name(cartpole: Result, capfd: Capture) -> None:
    assert cli.main(["eval", "--runs_dir", str(cartpole.path.parent), "--which=latest", "--seed", "3", "it"]) == 0
    assert "over 20 greedy episodes" in capfd.readouterr().out


def test_eval_as_json_prints_nothing_else(cartpole: Result, capfd: Capture) -> None:
    assert cli.main(["eval", str(cartpole.path), "--json", "--episodes", "3"]) == 0
    (score,) = json.loads(capfd.readouterr().out)
    assert (score["run"], score["env"], score["which"], score["episodes"]) == ("it", "CartPole-v1", "best", 3)
    assert score["mean"] == pytest.approx(sum(score["returns"]) / 3)
    assert len(score["lengths"]) == 3


def test_eval_of_several_runs_is_a_table(cartpole: Result, capfd: Capture) -> None:
    assert cli.main(["eval", str(cartpole.path), str(cartpole.path), "--episodes", "2"]) == 0
    head, *rows = (line.split() for line in capfd.readouterr().out.splitlines())
    assert head == ["run", "mean", "±", "min", "max", "length", "episodes"]
    assert [(row[0], row[-1]) for row in rows] == [("it", "2"), ("it", "2")]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        ("--out it.avi", 2, "--out it.avi: write a .gif, an .mp4 or a .png"),
        ("--render mp4 --out it.png", 2, "--render mp4 does not write it.png; leave out one of them"),
        ("--render ansi --out it.gif", 2, "--render ansi does not write it.gif; leave out one of them"),
        ("--video --out it.gif", 2, "--video does not write it.gif; leave out one of them"),
        ("--video --render gif", 2, "--video writes an mp4, --render gif does not; leave out one of them"),
        ("--record", 2, "there is no --record: say --video"),
        ("--gif", 2, "there is no --gif: say --render gif"),
        ("--video", 1, "films need ffmpeg: pip install imageio-ffmpeg, or use --render png, which needs nothing"),
        ("--render mp4", 1, "films need ffmpeg: pip install imageio-ffmpeg, or use --render png, which needs nothing"),
        ("--render gif", 1,
         "animated pictures need Pillow: pip install pillow, or use --render png, which needs nothing"),
    ],
)  # fmt: skip
def test_play_says_what_is_missing(
    cartpole: Result, capfd: Capture, monkeypatch: pytest.MonkeyPatch, argv: str, code: int, told: str
) -> None:
    find_spec = importlib.util.find_spec
    lacking = ("PIL", "imageio_ffmpeg")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in lacking else find_spec(name))
    assert cli.main(["play", str(cartpole.path), *argv.split()]) == code
    assert capfd.readouterr().err == f"freewheel: {told}\n"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("DependencyNotInstalled: pygame is not installed",
         "it draws with pygame: pip install 'gymnasium[classic-control]'"),
        ("FatalError: an OpenGL platform library has not been loaded",
         "MuJoCo finds no OpenGL here: set MUJOCO_GL=egl"),
        ("ImportError: cannot initialize a EGL device display", "MuJoCo finds no OpenGL here: set MUJOCO_GL=egl"),
    ],
)  # fmt: skip
def test_failures_to_draw_are_explained(text: str, remedy: str) -> None:
    assert str(play._explained(EnvError(text), "rgb_array")).startswith(f"cannot show it: {remedy}")
    assert str(play._explained(EnvError(text), None)) == text


def test_play_writes_the_file_that_was_asked_for(cartpole: Result, tmp_path: Path, capfd: Capture) -> None:
    assert cli.main(["play", str(cartpole.path), "--out", str(tmp_path / "films" / "it.gif"), "--episodes", "2"]) == 0
    assert sorted(path.name for path in (tmp_path / "films").iterdir()) == ["it-1.gif", "it-2.gif"]


def test_play_without_pictures_tells_the_score(cartpole: Result, capfd: Capture) -> None:
    assert cli.main(["play", str(cartpole.path), "--render", "none", "--episodes", "2"]) == 0
    line = r"episode {}: return \S+ in \d+ steps\n"
    assert re.fullmatch(line.format(1) + line.format(2), capfd.readouterr().out)
    assert not (cartpole.path / "play").exists()


@pytest.mark.parametrize("render", ["gif", "auto"])
def test_play_draws_an_animated_picture(cartpole: Result, capfd: Capture, render: str) -> None:
    from PIL import Image, ImageSequence

    assert cli.main(["play", str(cartpole.path), "--render", render, "--seed", "1000"]) == 0
    told, where = capfd.readouterr().out.splitlines()
    steps = int(told.split()[-2])
    assert where == f"  {cartpole.path / 'play' / 'episode-1.gif'}"
    with Image.open(cartpole.path / "play" / "episode-1.gif") as picture:
        frames = [frame.convert("RGB").tobytes() for frame in ImageSequence.Iterator(picture)]
    assert 1 < len(frames) <= steps
    assert len(set(frames)) > 1


def test_play_prints_text(tmp_path: Path, capfd: Capture) -> None:
    done = trained(tmp_path, "FrozenLake-v1", max_episode_steps=5)
    for render in ("ansi", "auto"):
        assert cli.main(["play", str(done.path), "--render", render]) == 0
        out = capfd.readouterr().out
        steps = int(out.split()[-2])
        assert out.count("FFFH") == steps + 1  # the second row of the lake, once a picture
        assert 1 <= steps <= 5
    assert not (done.path / "play").exists()


def test_play_says_what_a_world_can_show(cartpole: Result, capfd: Capture) -> None:
    assert cli.main(["play", str(cartpole.path), "--render", "ansi"]) == 1
    told = "CartPole-v1 cannot be shown as ansi; say --render human or gif or mp4 or png"
    assert capfd.readouterr().err == f"freewheel: {told}\n"


def test_play_of_a_world_without_pictures(tmp_path: Path, capfd: Capture) -> None:
    done = trained(tmp_path, "tests.support.worlds:Identity")
    assert cli.main(["play", str(done.path)]) == 0
    assert re.fullmatch(r"episode 1: return \S+ in 16 steps\n", capfd.readouterr().out)
    assert cli.main(["play", str(done.path), "--video"]) == 1
    told = r"freewheel: tests.support.worlds:Identity draws nothing; give it a render\(\) that returns a picture .*\n"
    assert re.fullmatch(told, capfd.readouterr().err)


@pytest.mark.parametrize(
    ("env", "options", "fps"),
    [
        ("CartPole-v1", "", 50),  # its render_fps
        ("CartPole-v1", "--fps 20", 20),
        ("freewheel/RoughDrone-v0", "", 10),
    ],
)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # imageio_ffmpeg leaves an unused pipe open
def test_how_fast_a_film_is(request: pytest.FixtureRequest, capfd: Capture, env: str, options: str, fps: float) -> None:
    import imageio_ffmpeg

    run = request.getfixturevalue("drone" if "Drone" in env else "cartpole")
    assert cli.main(["play", str(run.path), "--video", "--seed", "1000", *options.split()]) == 0
    told, where = capfd.readouterr().out.splitlines()
    assert where == f"  {run.path / 'play' / 'episode-1.mp4'}"
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(where.strip())
    assert frames == int(told.split()[-2]) + 1
    assert seconds == pytest.approx(frames / fps, abs=0.02)


@pytest.mark.parametrize(("fps", "shown", "milliseconds"), [(10, 9, 100), (50, 9, 20), (125, 3, 24), (30, 9, 30)])
def test_animated_pictures_play_at_the_right_speed(tmp_path: Path, fps: float, shown: int, milliseconds: int) -> None:
    """As exactly as the format knows: hundredths of a second."""
    from PIL import Image

    made = play.Animation(fps)
    for number in range(9):
        made.add(np.full((4, 4, 3), 25 * number, np.uint8))
    (tmp_path / "it.gif").write_bytes(made.close())
    with Image.open(tmp_path / "it.gif") as picture:
        assert getattr(picture, "n_frames", 1) == shown
        assert picture.info["duration"] == pytest.approx(milliseconds, abs=5)


class Declared:
    """An environment that says of its time what is given."""

    def __init__(self, metadata: dict[str, Any] | None = None, **attributes: Any) -> None:
        self.metadata = metadata
        self.__dict__ |= attributes


@pytest.mark.parametrize(
    ("env", "fps"),
    [
        (Declared({"render_fps": 12}), 12), (Declared({"render_fps": 12}, dt=0.5), 12),
        (Declared({"render_fps": None}, dt=0.02), 50), (Declared({}, unwrapped=Declared({}, step_dt=0.1)), 10),
        (Declared(), None), (Declared({"render_fps": 0}, dt=float("inf")), None),
    ],
)  # fmt: skip
def test_how_fast_time_passes_in_an_environment(env: Declared, fps: float | None) -> None:
    assert Rendering.of(env).fps == fps


def test_a_batched_simulator_scores_again_and_plays(tmp_path: Path, capfd: Capture) -> None:
    options = {"num_steps_per_env": 8, "steps": 16, "eval_max_steps": 20, "policy.hidden": [4], "device": "auto"}
    result = trained(tmp_path, "freewheel/RoughDrone-v0", mode="lockstep", **options)
    seed = str(result.summary["eval_fresh_seed"])
    assert cli.main(["eval", str(result.path), "--episodes", "4", "--seed", seed]) == 0
    assert f": mean {result.summary['final_eval']:.1f} ± " in capfd.readouterr().out


@pytest.fixture(scope="module")
def drone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    options = {"num_steps_per_env": 8, "steps": 16, "eval_max_steps": 6, "policy.hidden": [4]}
    return trained(tmp_path_factory.mktemp("drone"), "freewheel/RoughDrone-v0", mode="lockstep", **options)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # imageio_ffmpeg leaves an unused pipe open
@pytest.mark.system
def test_play_draws_the_drone(drone: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    """By name and from another directory; the picture of the whole flight is the last one of the film."""
    import imageio_ffmpeg

    monkeypatch.chdir(tmp_path)
    argv = ["play", "it", "--runs-dir", str(drone.path.parent), "--seed", "3", "--episodes", "2"]
    for name in "flight.mp4", "flight.png":
        assert cli.main([*argv, "--out", name]) == 0
    told = capfd.readouterr().out.splitlines()
    assert told[:4:2] == told[4::2]  # the same episodes
    assert told[1::2] == [f"  flight-{number}.{kind}" for kind in ("mp4", "png") for number in (1, 2)]
    for number in 1, 2:
        read = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", f"flight-{number}.mp4"]
        raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
        film = subprocess.run([*read, *raw], capture_output=True, check=True, timeout=50)
        frames = np.frombuffer(film.stdout, np.uint8).reshape(-1, 480, 960, 3)
        assert len(frames) == int(told[2 * number - 2].split()[-2]) + 1  # at the start, and after each step
        first, last = frames[0].astype(int), frames[-1].astype(int)
        picture = decoded(Path(f"flight-{number}.png").read_bytes())
        assert np.abs(last - picture).mean() < np.abs(first - picture).mean()
        assert np.abs(last - picture).mean() < 4  # a film is not exact


def test_play_prints_the_drone_as_a_map(drone: Result, capfd: Capture) -> None:
    assert cli.main(["play", str(drone.path), "--render", "ansi"]) == 0
    *maps, end = capfd.readouterr().out.splitlines()
    assert len(maps) == (int(end.split()[-2]) + 1) * 25  # 24 m and a line of figures, once a step
    assert {len(line) for line in maps if "return" not in line} == {48}


def test_a_film_that_cannot_be_written(drone: Result, tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["play", str(drone.path), "--out", str(tmp_path / "file" / "it.png")]) == 1
    told = r"freewheel: cannot write \S+/it.png: (Not a directory|File exists); choose another --out\n"
    assert re.fullmatch(told, capfd.readouterr().err)


def test_a_missing_checkpoint_is_passed_over_aloud(tmp_path: Path, capfd: Capture) -> None:
    done = trained(tmp_path, "tests.support.worlds:Identity", evals=0)
    for argv in (["eval", str(done.path)], ["play", str(done.path), "--render", "none"]):
        assert cli.main(argv) == 0
        told = "warning: no evaluation has chosen the best weights yet: using step 64 instead of 'best'\n"
        assert capfd.readouterr().out.startswith(told)


def test_a_run_of_a_script_asks_for_a_module(tmp_path: Path, capfd: Capture) -> None:
    done = trained(tmp_path, "tests.support.worlds:Identity")
    config = done.path / "config.json"
    config.write_text(config.read_text().replace("tests.support.worlds:Identity", "__main__:Identity"))
    assert cli.main(["eval", str(done.path), "--trust"]) == 1
    err, told = capfd.readouterr().err, "__main__:Identity was defined in a script and cannot be imported"
    assert err.startswith(f"freewheel: {told}; add env=Identity to this call in Python")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("good", "code"), [(True, 0), (False, 1)])
def test_doctor_prints_a_table(capfd: Capture, monkeypatch: pytest.MonkeyPatch, good: bool, code: int) -> None:
    found = [(True, "alpha", "1.2.3"), (good, "beta", "missing; pip install 'beta[all]'")]
    monkeypatch.setattr(doctor, "findings", lambda: iter(found))
    assert cli.main(["doctor"]) == code
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert lines == [["ok" if well else "!!", what, *how.split()] for well, what, how in found]


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "none (the CPU is fine for small networks)"),
        (1, "cuda:0 H200"),
        (2,
         "cuda:0 H200, cuda:1 H200; --device cuda:0,cuda:1 puts a batched simulator on the second, --learners 2 uses both"),
    ],
)  # fmt: skip
def test_doctor_names_every_gpu_as_device_does(monkeypatch: pytest.MonkeyPatch, count: int, shown: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "H200")
    assert [text for _, what, text in doctor.findings() if what == "gpu"] == [shown]
    assert _gpu() == {0: None, 1: "H200", 2: "2 × H200"}[count]


def test_doctor_tells_of_the_whole_machine(capfd: Capture) -> None:
    assert cli.main(["doctor"]) in (0, 1)  # 1: this machine lacks something
    told = [line.split()[1] for line in capfd.readouterr().out.splitlines() if line.split()[0] in ("ok", "!!")]
    assert told == [what for _, what, _ in doctor.findings()]
    assert {"python", "freewheel", "torch", "gymnasium", "cores", "memory", "gpu"} <= set(told)


def findings() -> dict[str, tuple[bool, str]]:
    return {what: (well, how) for well, what, how in doctor.findings()}


def test_every_package_is_told_with_its_version() -> None:
    found = findings()
    assert found["python"] == (True, f"{platform.python_version()} on {platform.system()} {platform.release()}")
    for name in doctor.REQUIRED:
        assert found[name] == (True, importlib.metadata.version(name))


def test_the_required_are_those_of_the_project() -> None:
    """typing-extensions comes with torch and is not worth a line."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block
    assert {*re.findall(r'"([\w-]+)', block[1])} - {"typing-extensions"} == {*doctor.REQUIRED}


def test_the_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * 2**30, total=16 * 2**30))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found = findings()
    assert found["cores"][1].startswith("3 usable of 8")
    assert found["memory"] == (True, "3.0 GB free of 16 GB")
    assert found["gpu"][0]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**29, total=16 * 2**30))
    assert findings()["memory"] == (False, "512 MB free of 16 GB")


def test_what_is_missing_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == "tyro":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = findings()
    assert found["tyro"] == (False, "missing: pip install tyro")
    assert found["gpu"] == (True, "unknown (torch is missing)")
    for name, purpose in doctor.OPTIONAL.items():
        assert found[name] == (True, f"not installed; for {purpose}")


@pytest.mark.parametrize(("text", "told"), [("max 9\n", ""), ("15 10\n", ", limited to 1.5 by the container")])
def test_a_containers_limit_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, told: str) -> None:
    limit = tmp_path / "cpu.max"
    limit.write_text(text)
    monkeypatch.setattr(doctor, "CPU_LIMIT", limit)
    assert findings()["cores"][1].endswith(f"of {os.cpu_count()}{told}")


def test_resume_goes_on_and_says_when_there_is_nothing_left(cartpole: Result, tmp_path: Path, capfd: Capture) -> None:
    path = shutil.copytree(cartpole.path, tmp_path / "it", symlinks=True)
    done = cartpole.summary["env_steps"]
    assert cli.main(["resume", "it", "--runs-dir", str(tmp_path)]) == 0
    assert "it has nothing left to do" in capfd.readouterr().out
    for words in ("resume", "train --resume", "train CartPole-v1 --resume"):
        done += 64
        assert cli.main([*words.split(), str(path), "--steps", str(done)]) == 0
        assert "continuing from step" in capfd.readouterr().out
        assert json.loads((path / "summary.json").read_text())["trained"] >= done


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        ("resume", 2, "which run? freewheel resume NAME"),
        ("resume RUN --lr 1", 2, "there is no --lr: a run continues with the options it has; resume takes --run, "),
        ("resume RUN --step-timeout 2", 2, "there is no --step-timeout: a run continues with the options it has"),
        ("resume RUN --stepss 2", 2, "unknown option --stepss; did you mean '--steps'?"),
        ("resume RUN --steps 0", 2, "--steps must be positive, not 0"),
        ("resume RUN --checkpoint best", 2, "--checkpoint best has weights only"),
        ("resume RUN@77", 2, "there is no checkpoint of step 77"),
        ("train --resume RUN --seeds 1..3", 2, "--resume continues one run"),
        ("train --resume RUN --num-envs 3", 2, "there is no --num-envs: a run continues with"),
        ("train A B --resume RUN", 2, "continues in one environment, not in A and B"),
        ("train A --env B --resume RUN", 2, "continues in one environment, not in A and B"),
        ("train --run other --resume RUN", 2, "give one run, not"),
        ("train Acrobot-v1 --resume RUN --steps 9999", 2, "is CartPole-v1, not Acrobot-v1: leave Acrobot-v1 out"),
        ("train ./b/o.py:Toy --resume RUN", 2, "--env ./b/o.py:Toy if it is the same one, moved or renamed, or begin"),
    ],
)
def test_resume_refuses_in_a_line(cartpole: Result, capfd: Capture, argv: str, code: int, told: str) -> None:
    assert cli.main([word.replace("RUN", str(cartpole.path)) for word in argv.split()]) == code
    (line,) = capfd.readouterr().err.splitlines()
    assert told in line


def test_eval_takes_any_checkpoint(cartpole: Result, capfd: Capture) -> None:
    steps = str(cartpole.summary["env_steps"])
    for name in (f"{cartpole.path}@{steps}", str(cartpole.path / "checkpoints" / steps)):
        assert cli.main(["eval", name, "--json", "--episodes", "1"]) == 0
        assert json.loads(capfd.readouterr().out)[0]["which"] == steps
