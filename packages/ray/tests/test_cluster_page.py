"""docs/cluster.md shows the newest measurements, its commands exist, and its walk-through works."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import _cluster_page
from freewheel.cli.main import main
from tests.support.places import LONG, ROOT

PAGE = (ROOT / "packages" / "ray" / "docs" / "cluster.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
TRAIN = [line for line in LINES if "freewheel train" in line]
STEPS = "2000"


def options(line: str) -> list[str]:
    """The words after `freewheel`."""
    words = shlex.split(line, comments=True)
    return words[words.index("freewheel") + 1 :]


def test_the_tables_are_those_that_the_rows_give() -> None:
    assert set(re.findall(r"<!-- table (\w+) -->", PAGE)) == set(_cluster_page.PARTS)
    assert _cluster_page.filled(PAGE) == PAGE, "python -m benchmarks.cluster_model"


@pytest.mark.parametrize("line", TRAIN)
def test_every_command_has_options_that_there_are(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options(line), "--print-config"]) == 0
    assert "CartPole-v1" in capsys.readouterr().out


class Walk:
    """A shell with its folder, its variables and its background processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.variables = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(folder / "ray")}
        self._running: list[subprocess.Popen[bytes]] = []

    def go(self, line: str) -> None:
        line = line.replace("6379", str(self.port)).replace("--steps 20000", f"--steps {STEPS}")
        words = shlex.split(line, comments=True)
        if words[:1] == ["export"]:
            self.variables |= {name: value.replace("$PWD", str(self.folder)) for name, value in pairs(words[1:])}
        elif words[:2] == ["ray", "start"]:
            self.start([str(Path(sys.executable).with_name("ray")), *words[1:], "--num-cpus", "2"])
        elif words[0] == "torchrun":
            self.run([sys.executable, "-m", "torch.distributed.run", *words[1:]])
        elif words[0] == "freewheel":
            self.run([sys.executable, "-m", "freewheel", *words[1:]])
        elif words[0] != "pip":
            self.run(["bash", "-c", line])

    def run(self, words: list[str]) -> None:
        done = subprocess.run(
            words, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"

    def start(self, words: list[str]) -> None:
        with (self.folder / "ray.log").open("ab") as log:
            process = subprocess.Popen(words, cwd=self.folder, env=self.variables, stdout=log, stderr=log)
        self._running.append(process)
        end = time.monotonic() + 30
        while not answers(self.port):
            assert time.monotonic() < end, (self.folder / "ray.log").read_text()
            assert process.poll() is None, (self.folder / "ray.log").read_text()
            time.sleep(0.1)

    def end(self) -> None:
        for process in self._running:
            with_children = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for one in with_children:
                one.send_signal(signal.SIGKILL)
            process.wait()
            psutil.wait_procs(with_children, timeout=20)


def pairs(words: list[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (word.partition("=") for word in words)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def walk() -> Iterator[Walk]:
    folder = Path(tempfile.mkdtemp(prefix="fw", dir="/tmp"))  # Ray's sockets need a short path
    walk = Walk(folder)
    try:
        yield walk
    finally:
        walk.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.long
@pytest.mark.skipif(not LONG, reason="a minute and a half: make soak")
@pytest.mark.timeout(300)
def test_the_walk_can_be_walked(walk: Walk) -> None:
    for line in LINES:
        walk.go(line)
    assert (walk.folder / "ray-token").stat().st_mode & 0o777 == 0o600
    runs = [path for path in (walk.folder / "runs").iterdir() if path.is_dir() and not path.is_symlink()]
    assert len(runs) == len(TRAIN)
    assert all((run / "summary.json").exists() for run in runs)
