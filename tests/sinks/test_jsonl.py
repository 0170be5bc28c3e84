"""metrics.jsonl on a disk that fails, and in a directory that is removed: no row is lost, none is torn, one warning an outage."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from freewheel.files import lines
from freewheel.sinks import jsonl
from freewheel.sinks.jsonl import JsonlSink
from freewheel.sinks.sink import Sink
from tests.support.failing_disk import FailingDisk


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    return FailingDisk(monkeypatch)


def rows(path: Path) -> list[int]:
    """The numbers of the rows; every line has to be whole."""
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line)["n"] for line in text.splitlines()]


def write(sink: JsonlSink, *numbers: int) -> None:
    for number in numbers:
        sink.write({"n": number, "text": "x" * 50})


ROW = {"wall_s": 1.5, "return_mean": None, "dropped": {"stale": 2}}


def test_there_is_one_line_a_row_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink: Sink = JsonlSink(path)
    assert path.read_text() == ""
    sink.write(ROW)
    assert path.read_text() == '{"wall_s": 1.5, "return_mean": null, "dropped": {"stale": 2}}\n'
    sink.note("a worker died")
    sink.write(ROW | {"note": "two\nlines"})
    sink.close({"exit_code": 0})
    later = JsonlSink(path)  # it appends
    with pytest.raises(ValueError, match="not JSON compliant"):
        later.write(ROW | {"return_mean": float("nan")})
    later.write(ROW)
    later.close({})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [ROW, ROW | {"note": "two\nlines"}, ROW]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_rows_wait_for_a_full_disk_and_are_written_in_order(tmp_path: Path, failing: FailingDisk, error: int) -> None:
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, said.append)
    write(sink, 0, 1)
    failing.failing, failing.error = range(1000), error
    write(sink, 2, 3, 4)
    reason = os.strerror(error)
    assert said == [f"cannot write to {path}: {reason}; training continues, 1 rows wait"]
    assert sink.problem == f"{path}: 3 rows are not written (cannot write to {path}: {reason})"
    failing.failing = ()
    write(sink, 5)
    assert rows(path) == [0, 1, 2, 3, 4, 5]
    assert said[1:] == [f"{path} can be written to again, 4 rows that waited are written"]
    sink.close({})
    assert sink.problem == ""


def test_every_single_call_may_fail(tmp_path: Path, failing: FailingDisk) -> None:
    """One fault is made good at once and is not worth a word."""
    said: list[str] = []
    for number in range(8):
        path = tmp_path / f"{number}.jsonl"
        failing.calls, failing.failing = 0, {number}
        sink = JsonlSink(path, said.append)
        write(sink, *range(5))
        sink.close({})
        assert (rows(path), sink.problem) == ([0, 1, 2, 3, 4], "")
    assert said == []


def test_over_a_limit_old_rows_are_lost(tmp_path: Path, failing: FailingDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "KEPT", 3)
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    failing.failing = range(1000)
    write(sink, *range(10))
    failing.failing = ()
    write(sink, 10)
    assert rows(tmp_path / "metrics.jsonl") == [8, 9, 10]
    assert "8 rows are lost" in sink.problem
    sink.close({})


def test_a_torn_line_of_an_earlier_process_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    for text, kept in (('{"n": 1}\n{"n": 2}\n{"n"', [1, 2]), ('{"n', []), ("", [])):
        for block in (2, 1 << 20):
            monkeypatch.setattr(lines, "BLOCK", block)
            path.write_text(text)
            sink = JsonlSink(path)
            write(sink, 7)
            sink.close({})
            assert rows(path) == [*kept, 7]


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_the_file_is_made_again_with_all_its_rows(tmp_path: Path, how: str) -> None:
    folder, said = tmp_path / "run", list[str]()
    folder.mkdir()
    sink = JsonlSink(folder / "metrics.jsonl", said.append)
    write(sink, 0, 1, 2)
    if how == "replaced":  # by an editor, say
        (tmp_path / "new").write_text('{"n": 0}\n')
        (tmp_path / "new").rename(folder / "metrics.jsonl")
    elif how == "moved":
        folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder)
    if how != "replaced":
        write(sink, 3)  # it is the run directory's affair to be there
        (line,) = said
        assert line.partition(": ")[2] == "No such file or directory; training continues, 1 rows wait"
        folder.mkdir()
    write(sink, 4)
    sink.close({})
    assert rows(folder / "metrics.jsonl") == ([0, 4] if how == "replaced" else [0, 1, 2, 3, 4])


def test_making_it_again_may_fail_as_well(tmp_path: Path, failing: FailingDisk) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    write(sink, 0, 1, 2)
    path.unlink()
    first = failing.calls
    failing.failing = {first + 1, first + 4}  # both copies are torn
    write(sink, 3)
    failing.failing = ()
    write(sink, 4)
    sink.close({})
    assert rows(path) == [0, 1, 2, 3, 4]
