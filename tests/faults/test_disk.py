"""R14: a disk that fails at any call, for a while or for good, and run directories that are removed. Training goes on."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.errors import DiskError, SetupError
from freewheel.run.naming import Result
from tests.support.failing_disk import FailingDisk
from tests.support.places import LONG
from tests.support.runs import train
from tests.support.surveys import survey_once

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
STEPS = list(range(64, 321, 64))  # of the rows of metrics
START, MOST = 6, 200  # calls before a run has begun, and of a whole run, at most


class Notes:
    direct = True

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.rows: list[Any] = []
        self.summary: dict[str, Any] = {}

    def write(self, row: Any) -> None:
        self.rows.append(row)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self, summary: Any) -> None:
        self.summary = dict(summary)

    @property
    def warnings(self) -> list[str]:
        return [note for note in self.notes if "cannot write" in note or "cannot save" in note]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    survey_once(monkeypatch)


def run(folder: Path, **options: Any) -> tuple[Result, Notes]:
    """Five updates, a row of metrics for each, and one evaluation on the way."""
    notes = Notes()
    small: dict[str, Any] = {"steps": STEPS[-1], "evals": 2, "eval_episodes": 1, "run": "one"}
    return train(folder, sinks=[notes], **small | options), notes


def assert_whole(path: Path, notes: Notes) -> dict[str, Any]:
    """The directory of a run as it should be; its summary."""
    lines = (path / "metrics.jsonl").read_text()
    assert lines.endswith("\n")
    assert [json.loads(line) for line in lines.splitlines()] == notes.rows, "a row is missing, doubled or torn"
    assert sorted({row["env_steps"] for row in notes.rows}) == STEPS
    assert freewheel.load(path, which="latest").step == STEPS[-1]
    assert [left for left in path.rglob("*") if ".part" in left.name] == []
    assert json.loads((path / "config.json").read_text())
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
    return summary


def attempt(folder: Path) -> tuple[Result, Notes] | None:
    """A run on a disk that fails; None: it was refused before anything was started."""
    try:
        return run(folder)
    except SetupError as error:
        assert str(error).startswith("cannot ")  # noqa: PT017 - create, or write in, its directory
        assert not list(folder.rglob("metrics.jsonl"))
        return None


def assert_told_once(notes: Notes) -> None:
    """One warning an outage, which is over at the end."""
    places = [warning.split(":")[0] for warning in notes.warnings]
    assert len(places) == len(set(places))
    assert len([note for note in notes.notes if "again" in note and "cannot" not in note]) == len(places)


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.__getitem__)
def test_one_failed_write_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """The n-th call fails, for every n: it is made good at once."""
    disk = FailingDisk(monkeypatch)
    disk.error = error
    step = 1 if LONG else 3 * len(ERRORS)
    for number in range(ERRORS.index(error) % step, MOST, step):
        disk.calls, disk.failing = 0, {number}
        if (ended := attempt(tmp_path / str(number))) is None:
            assert number < START
            continue
        result, notes = ended
        assert (result.exit_code, assert_whole(result.path, notes)["problems"]) == (0, []), number
        assert_told_once(notes)
        if disk.calls <= number:
            return
    pytest.fail(f"a run makes {disk.calls} calls; raise the limit")


@pytest.mark.parametrize("length", [3, 20])
def test_an_outage_is_told_once_and_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Every call from n to m fails; the last calls of the run do not, because no save in the background changes their number."""
    disk = FailingDisk(monkeypatch)
    run(tmp_path / "calm", checkpoint_every=0)
    last = disk.calls
    ended = list[int]()
    for first in range(START, last - 25, 1 if LONG else 12):
        disk.calls, disk.failing = 0, range(first, first + length)
        result, notes = run(tmp_path / str(first), checkpoint_every=0)
        assert (result.exit_code, assert_whole(result.path, notes)["problems"]) == (0, []), first
        assert_told_once(notes)
        ended.append(first)
    assert len(ended) >= 2


def test_a_disk_that_never_takes_anything_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, notes = FailingDisk(monkeypatch), Notes()
    disk.failing = range(10**6)
    with pytest.raises(DiskError, match=r"^the last weights could not be saved: .*No space left on device") as caught:
        train(tmp_path, steps=STEPS[-1], evals=0, run="one", sinks=[notes])
    assert caught.value.exit_code == notes.summary["exit_code"] == 1
    assert notes.summary["env_steps"] == notes.summary["trained"] == STEPS[-1], "it has trained to the end"
    told = " ".join(notes.summary["problems"])
    for missing in ("metrics.jsonl: 5 rows are not written", "config.json", "summary"):
        assert missing in told
    assert [left for left in (tmp_path / "one").rglob("*") if ".part" in left.name] == []


class Remove:
    """Removes the run directory after the second update; `instead`: a file takes its place."""

    def __init__(self, *, instead: bool = False) -> None:
        self.instead = instead

    def on_update(self, run: freewheel.Run, metrics: Any) -> None:
        if run.version == 2:
            shutil.rmtree(run.path)
            if self.instead:
                run.path.write_text("not yours")


def test_a_run_directory_that_is_removed_midway_is_made_again(tmp_path: Path) -> None:
    result, notes = run(tmp_path, hooks=[Remove()], checkpoint_every=0)  # or a save comes in between
    summary = assert_whole(result.path, notes)
    assert (summary["exit_code"], summary["problems"]) == (0, [])
    told = f"{result.path.absolute()} was removed while the run was writing to it; it is created again"
    assert [note for note in notes.notes if "removed" in note] == [told]
    assert result.path.stat().st_mode & 0o777 == 0o700


def test_a_run_directory_that_cannot_be_made_again_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"^the last weights could not be saved"):
        run(tmp_path, hooks=[Remove(instead=True)], checkpoint_every=0)
    assert (tmp_path / "one").read_text() == "not yours"


class FileLimit:
    """Files cannot grow in updates 2 and 3: the kernel takes a part of a line and refuses the rest."""

    def __init__(self) -> None:
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_update(self, run: freewheel.Run, metrics: Any) -> None:
        if run.version == 2:
            size = (run.path / "metrics.jsonl").stat().st_size + 100
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, self.limits[1]))
        if run.version == 4:
            self.lift()

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


@pytest.fixture
def limit() -> Iterator[FileLimit]:
    limit = FileLimit()
    yield limit
    limit.lift()


def test_a_limit_of_the_kernel_is_an_outage(tmp_path: Path, limit: FileLimit) -> None:
    result, notes = run(tmp_path, evals=0, hooks=[limit])
    assert assert_whole(result.path, notes)["problems"] == []
    (told,) = [warning for warning in notes.warnings if "metrics.jsonl" in warning]
    assert told.endswith("metrics.jsonl: File too large; training continues, 1 rows wait")


class Filler:
    """Fills the disk of a run after its first update, and frees it after its third."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "filler"

    def on_update(self, run: freewheel.Run, metrics: Any) -> None:
        if run.version == 1:
            descriptor = os.open(self.file, os.O_CREAT | os.O_WRONLY)
            try:
                for size in itertools.chain.from_iterable([1 << power] * 99 for power in (12, 6, 0)):
                    os.write(descriptor, b"x" * size)
                while True:
                    os.write(descriptor, b"x" * 65536)
            except OSError:
                os.close(descriptor)
        if run.version == 3:
            self.file.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=4m", "freewheel-test", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, capture_output=True)


def test_a_real_disk_that_is_full_for_a_while(small_disk: Path) -> None:
    result, notes = run(small_disk, hooks=[Filler(small_disk)])
    summary = assert_whole(result.path, notes)
    assert (summary["exit_code"], summary["problems"]) == (0, [])
    assert all("No space left on device" in warning for warning in notes.warnings)
    places = [warning.split(":")[0] for warning in notes.warnings]
    assert len(places) == len(set(places)) >= 1
