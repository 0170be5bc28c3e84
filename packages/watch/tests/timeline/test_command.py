"""Tests of the command `freewheel timeline`."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import pytest

from freewheel.cli.main import main
from freewheel.timeline.chrome import TRACE, encode
from tests.support.timelines import made

Capture: TypeAlias = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text("{}")
    (tmp_path / "demo" / TRACE).write_bytes(encode(made()))
    return tmp_path


def timeline(runs: Path, *words: str) -> int:
    return main(["timeline", *words, "--runs-dir", str(runs)])


def test_it_is_drawn_and_says_who_waited_for_whom(runs: Path, capsys: Capture) -> None:
    assert timeline(runs, "demo") == 0
    out = capsys.readouterr().out
    assert "\nlearner " in out
    assert "mostly worker 3" in out


@pytest.mark.parametrize(
    ("words", "times"),
    [
        ((), ("0 s", "10 s")),
        (("--seconds", "2"), ("8 s", "10 s")),
        (("--begin", "3", "--seconds", "1"), ("3 s", "4 s")),
    ],
)
def test_a_part_of_it_can_be_shown(runs: Path, capsys: Capture, words: tuple[str, ...], times: tuple[str, ...]) -> None:
    assert timeline(runs, "demo", *words) == 0
    out = capsys.readouterr().out
    assert all(time in out for time in times)


def test_a_page_is_written(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    assert timeline(runs, "demo", "--html", str(tmp_path / "page.html")) == 0
    assert "freewheelGantt" in (tmp_path / "page.html").read_text()
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "which run?"),
        (("demo", "other"), "which run?"),
        (("dem",), "did you mean 'demo'"),
        (("demo", "--begin", "11"), "the timeline ends at 10.0 s"),
        (("demo", "--seconds", "0"), "--seconds"),
        (("demo", "--html", "/nowhere/page.html"), "choose another --html"),
    ],
)
def test_mistakes_are_told_in_one_line(runs: Path, capsys: Capture, words: tuple[str, ...], told: str) -> None:
    assert timeline(runs, *words) != 0
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_a_run_without_a_timeline_says_how_to_get_one(runs: Path, capsys: Capture) -> None:
    (runs / "demo" / TRACE).unlink()
    assert timeline(runs, "demo") != 0
    assert "train with --trace" in capsys.readouterr().err
