"""Tests of the command itself: its output, its errors, and its end."""

from __future__ import annotations

import signal
import socket
import sys
import tomllib
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from freewheel.cli.main import main
from tests.support.places import ROOT
from tests.support.watching import LIMIT, row, until, watch, write_run

Capture: TypeAlias = pytest.CaptureFixture[str]


def test_it_ends_by_ctrl_c_with_pages_open_at_lower_priority(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first", [row(1)])
    with watch(tmp_path / "runs", quick=False) as page:
        page.enter()
        with page.events("first") as events:
            until(events, "run")
            assert psutil.Process(page.process.pid).nice() >= 10
            page.process.send_signal(signal.SIGINT)
            assert page.process.wait(LIMIT) == 0


def test_a_run_elsewhere_is_opened_by_its_path_among_its_neighbours(tmp_path: Path) -> None:
    for name in ("old", "new"):
        write_run(tmp_path / "elsewhere" / name, [row(1)])
    (tmp_path / "runs").mkdir()
    with watch(tmp_path / "runs", str(tmp_path / "elsewhere" / "old")) as page:
        page.enter()
        with page.events() as events:
            told = until(events, "runs")
    assert told["newest"] == "old"
    assert {run["name"] for run in told["runs"]} == {"old", "new"}


def test_a_directory_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    with watch(tmp_path / "runs") as page:
        page.enter()
        with page.events() as events:
            assert until(events, "runs")["runs"] == []
            write_run(tmp_path / "runs" / "first", [row(1)])
            assert until(events, "runs")["newest"] == "first"


def test_every_file_of_the_page_is_part_of_the_package() -> None:
    project = tomllib.loads((ROOT / "packages" / "watch" / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["freewheel_watch"]
    package = ROOT / "packages" / "watch" / "src" / "freewheel_watch"
    static = package / "static"
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert {path for path in static.rglob("*") if path.is_file()} <= packed
    assert (static / "uplot" / "LICENSE").read_text().startswith("The MIT License")


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["watch", "--runs-dir", str(tmp_path), "--port", str(port)]) == 1
    assert f"cannot listen on port {port}: Address already in use; choose another --port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "70000"], "--port must be at most 65,535, not 70,000"),
        (["--host", "0.0.0.0"], "there is no --host: leave it out: the page is for this machine alone"),
        (["nothing"], "no run 'nothing' in"),
        (["one", "two"], "give one run, not one two; the page compares several"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(argv: list[str], said: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["watch", *argv, "--runs-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_missing_extra_says_what_to_install(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["watch", "--runs-dir", str(tmp_path)]) == 1
    assert "pip install 'freewheel-watch[dash]', or use --tui\n" in capsys.readouterr().err
