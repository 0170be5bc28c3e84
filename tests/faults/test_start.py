"""Signals while a run starts, and output that fails: quiet, the right exit code, and nothing is left behind or lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from freewheel.files.stdout import LossyStream
from tests.support.places import ROOT
from tests.support.runs import IDENTITY

#: The command line, interrupted when it begins to import a module.
IMPORTS = """
import signal, sys
wanted, number = sys.argv.pop(1), int(sys.argv.pop(1))

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            sys.meta_path.remove(self)
            signal.raise_signal(number)

sys.meta_path.insert(0, Finder())
from freewheel.__main__ import main
sys.exit(main())
"""
#: Sends a signal to the whole group of processes, as a terminal does, in the n-th call of a method in any process.
WORLD = """
import os, signal, time
import gymnasium, numpy as np

def call(method):
    wanted, count, number = os.environ["MOMENT"].split()
    if method != wanted:
        return
    for made in range(int(count)):
        try:
            os.close(os.open(f"call-{made}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if made == int(count) - 1:
            os.killpg(os.getsid(0), int(number))  # the survey leads a group of its own
            time.sleep(0.2)
        return

class Env(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32), gymnasium.spaces.Discrete(2)

    def __init__(self):
        call("construct")

    def reset(self, *, seed=None, options=None):
        call("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        call("step")
        time.sleep(0.003)
        return np.zeros(2, np.float32), 0.0, False, False, {}
"""


def freewheel(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in a session of its own, in this folder, with the usual signals: a job in the background has some ignored."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), **variables}
    command = ["env", "--default-signal=INT,HUP", sys.executable, *words]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=55, check=False, start_new_session=True
    )


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("importlib.metadata", signal.SIGHUP),
        ("numpy", signal.SIGINT),
        ("tyro", signal.SIGTERM),
        ("torch", signal.SIGINT),
    ],
)
def test_a_signal_while_modules_are_imported_is_quiet(tmp_path: Path, module: str, number: signal.Signals) -> None:
    argv = ["train", "CartPole-v1", "--steps", "64", "--evals", "0", "--runs-dir", "runs"]
    told = freewheel(tmp_path, "-c", IMPORTS, module, str(int(number)), *argv)
    assert (told.returncode, told.stderr) == (128 + number, "")
    assert not (tmp_path / "runs").exists()


@pytest.mark.system
@pytest.mark.parametrize(
    ("number", "method", "count"),
    [
        (signal.SIGINT, "construct", 1),  # while it is measured
        (signal.SIGINT, "construct", 4),  # while processes are created
        (signal.SIGTERM, "reset", 1),
        (signal.SIGHUP, "step", 60),
    ],
)
def test_a_signal_as_lockstep_starts_is_quiet(tmp_path: Path, number: signal.Signals, method: str, count: int) -> None:
    """It leaves either no run or a whole one; processes that stay are found by the fixture of all tests."""
    (tmp_path / "presses.py").write_text(WORLD)
    argv = ["presses:Env", "--placement", "processes", "--num-envs", "3", "--steps", "1000000000", "--evals", "0"]
    told = freewheel(tmp_path, "-m", "freewheel", "train", *argv, MOMENT=f"{method} {count} {int(number)}")
    assert (told.returncode, told.stderr) == (128 + number, "")
    assert (tmp_path / f"call-{count - 1}").exists()
    for run in (tmp_path / "runs").glob("*"):
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["exit_code"], summary["ended"]) == (128 + number, f"interrupted ({number.name})")


def test_a_hang_up_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As nohup starts a command."""
    script = "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from freewheel.run.stopping.stop import Stop\n"
    script += "with Stop().listening(): os.kill(os.getpid(), signal.SIGHUP)\nprint('on')"
    assert freewheel(tmp_path, "-c", script).stdout == "on\n"


Train: TypeAlias = Callable[[str, str], subprocess.CompletedProcess[str]]


@pytest.fixture
def trained(tmp_path: Path) -> Train:
    """Train in a shell, in this folder, with what follows the options."""

    def train(options: str, redirected: str) -> subprocess.CompletedProcess[str]:
        script = f"{sys.executable} -m freewheel train {options} {redirected}; exit ${{PIPESTATUS[0]}}"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}  # buffers fail a second time at the end
        command = ["bash", "-c", script]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=55, check=False)

    return train


SMALL = f"{IDENTITY} --num-envs 2 --num-steps-per-env 8 --steps 640 --log-every 0.000001 --evals 0 --run it"


@pytest.mark.system
@pytest.mark.parametrize(
    ("redirected", "told"),
    [
        ("| head -3", ""),
        ("> /dev/full", "freewheel: cannot print any more (No space left on device); the run continues without it\n"),
        ("> /dev/full 2> /dev/full", ""),
        ("<&- >&- 2>&-", ""),
    ],
)
def test_a_run_goes_on_without_its_output(tmp_path: Path, trained: Train, redirected: str, told: str) -> None:
    ended = trained(SMALL, redirected)
    assert (ended.returncode, ended.stderr) == (0, told)
    assert ended.stdout.count("\n") == (3 if "head" in redirected else 0)
    assert json.loads((tmp_path / "runs" / "it" / "summary.json").read_text())["env_steps"] == 640
    for line in (tmp_path / "runs" / "it" / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["env_steps"]  # nothing that is printed ends up in a file of the run


LOUD = """
from tests.support.worlds import Identity
class Loud(Identity):
    def judge(self, action):
        print("a step", flush=True)
        return super().judge(action)
"""


@pytest.mark.system
@pytest.mark.parametrize("mode", ["continuous --workers 1", "lockstep --placement processes"])
def test_an_environment_that_prints_to_nobody_does_not_fail(tmp_path: Path, trained: Train, mode: str) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    ended = trained(f"{SMALL.replace(IDENTITY, './loud.py:Loud')} --mode {mode}", "| head -1")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert set(json.loads((tmp_path / "runs" / "it" / "summary.json").read_text())["dropped"]) <= {"shutdown"}


def test_output_passes_everything_on_while_it_works(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w", encoding="utf-8") as file:
        output = LossyStream(file)
        assert output.write("text") == 4
        output.flush()
        assert (output.encoding, output.isatty(), output.fileno()) == ("utf-8", False, file.fileno())
    assert (tmp_path / "file").read_text() == "text"
