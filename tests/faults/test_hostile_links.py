"""R17: a run directory that somebody made leads nowhere else: nothing outside of it is changed through a link in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from freewheel.cli import main as cli
from tests.support.runs import good_run

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_run(tmp_path_factory.mktemp("runs"), trace=True)


@pytest.fixture
def here(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a run, and a folder of somebody else's."""
    shutil.copytree(good, tmp_path / "runs" / "one", symlinks=True)
    shutil.copytree(good, tmp_path / "other", symlinks=True)
    (tmp_path / "other" / "messages.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(folder: Path) -> dict[str, bytes | str]:
    return {str(path): os.readlink(path) if path.is_symlink() else path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file()}  # fmt: skip


def linked(name: str, target: str = "", *, hard: bool = False) -> Callable[[Path], None]:
    """A file or folder of the run is one of the other folder's."""

    def change(run: Path) -> None:
        there, path = run.parents[1] / "other" / (target or name), run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        os.link(there, path) if hard else path.symlink_to(there)

    return change


RESUME = ["resume", "one", "--steps", "128"]
PLAY = ["play", "one", "--render", "png"]
#: What is done to the run, the command, and what it says; nothing: it replaces the link and goes on.
CASES = {
    "metrics": (linked("metrics.jsonl"), RESUME, "one/metrics.jsonl is a link and is not followed"),
    "metrics, a hard link": (linked("metrics.jsonl", hard=True), RESUME, "metrics.jsonl has a second name, a hard link"),
    "messages": (linked("messages.jsonl"), RESUME, "one/messages.jsonl is a link and is not followed"),
    "checkpoints": (linked("checkpoints"), RESUME, "one/checkpoints is a link and is not followed"),
    "checkpoints, read": (linked("checkpoints"), ["eval", "one"], "one/checkpoints is a link and is not followed"),
    "the lock": (linked(".lock"), RESUME, "one/.lock is a link and is not followed"),
    "parts": (linked(".part-status.json", "status.json"), RESUME, ""),
    "the summary": (linked("summary.json"), RESUME, "one/summary.json is a link and is not followed"),
    "a picture": (linked("play/episode-1.png", "config.json"), PLAY, ""),
    "pictures": (linked("play", "checkpoints"), PLAY, "one/play is a link and is not followed"),
    "the timeline": (linked("page.html", "config.json"), ["timeline", "one", "--html", "runs/one/page.html"], ""),
    "the export": (linked("export", "checkpoints"), ["export", "one"], "export exists and is not"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_nothing_outside_of_a_run_is_changed(name: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change, command, said = CASES[name]
    change(here / "runs" / "one")
    before = content(here / "other")
    code = cli.main(command)
    text = capfd.readouterr().err
    assert content(here / "other") == before
    assert (code, len(text.splitlines())) == ((1, 1) if said else (0, 0)) or "export" in said, text
    assert said in text


def test_the_folder_of_all_runs_may_be_reached_through_a_link(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "elsewhere").symlink_to(here / "runs")
    place = ["--runs-dir", "elsewhere"]
    new = ["CartPole-v1", "--mode", "sequential", "--steps", "64", "--evals", "0", "--checkpoint-every", "0", "--trace"]
    for command in (RESUME, PLAY, ["eval", "one"], ["timeline", "one", "--html", "elsewhere/one/page.html"],
                    ["export", "one"], ["doctor", "--why-stuck", "one"], ["train", *new]):  # fmt: skip
        assert cli.main([*command, *place]) == 0, capfd.readouterr().err
    assert cli.main(["runs", "elsewhere"]) == 0
    assert cli.main(["export", "elsewhere/one/checkpoints/latest", "--out", "elsewhere/out"]) == 0
    assert "64" in capfd.readouterr().out
