"""Following a run: every row once, whatever is cut back, half written, removed or not there yet."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from freewheel.files.lock import FileLock
from freewheel.run.live import following
from freewheel.run.live.following import Follower


def line(number: int, session: int = 0) -> bytes:
    return json.dumps({"wall_s": number + 0.25 * session, "env_steps": 10 * number}).encode() + b"\n"


class Reader:
    """Keeps the rows of a run as the page and the terminal view do."""

    def __init__(self, path: Path) -> None:
        self.follower, self.rows = Follower(path), list[Any]()

    def look(self) -> list[float]:
        news = self.follower.poll()
        del self.rows[news.kept :]
        self.rows += news.rows
        return [row["wall_s"] for row in self.rows]


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_rows_come_once_and_half_a_row_waits(tmp_path: Path, metrics: Path) -> None:
    reader = Reader(tmp_path)
    assert reader.look() == []
    metrics.write_bytes(line(0) + line(1) + line(2)[:7])
    assert reader.look() == [0, 1]
    assert reader.follower.poll()[:2] == (2, [])
    metrics.write_bytes(line(0) + line(1) + line(2) + line(3))
    news = reader.follower.poll()
    assert (news.kept, [row["wall_s"] for row in news.rows]) == (2, [2, 3])


@pytest.mark.parametrize("again", range(6))
def test_rows_that_a_resume_has_cut_are_replaced(tmp_path: Path, metrics: Path, again: int) -> None:
    """Also where as many bytes as before, or more, are there at the next look."""
    reader = Reader(tmp_path)
    metrics.write_bytes(b"".join(map(line, range(5))))
    assert reader.look() == [0, 1, 2, 3, 4]
    metrics.write_bytes(line(0) + line(1) + b"".join(line(2 + number, 1) for number in range(again)))
    assert reader.look() == [0, 1, *(2.25 + number for number in range(again))]


def test_a_directory_that_is_removed_and_made_again(tmp_path: Path, metrics: Path) -> None:
    reader = Reader(tmp_path)
    metrics.write_bytes(line(0) + line(1))
    assert reader.look() == [0, 1]
    metrics.unlink()
    assert reader.look() == []
    metrics.write_bytes(line(7))
    assert reader.look() == [7]


def test_lines_that_are_no_rows_are_left_out_and_told_of(tmp_path: Path, metrics: Path) -> None:
    reader = Reader(tmp_path)
    deep = b"[" * 10_000 + b"]" * 10_000 + b"\n"
    metrics.write_bytes(line(0) + b"\xff\xfe\n[1]\n\n" + deep + b'{"wall_s": 1, "loss": NaN}\n')
    assert reader.look() == [0, 1]
    assert reader.rows[1]["loss"] is None
    assert "not rows" in reader.follower.problems["metrics.jsonl"]
    metrics.write_bytes(line(0) + b"\xff\xfe\n" + line(5))
    assert reader.look() == [0, 5]


def test_a_large_file_comes_in_parts(tmp_path: Path, metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MOST", 100)
    monkeypatch.setattr(following, "LONGEST", 50)
    metrics.write_bytes(b"".join(map(line, range(10))) + b"x" * 250 + b"\n" + line(10))
    reader, looks = Reader(tmp_path), 0
    while reader.look()[-1:] != [10]:
        looks += 1
        assert looks < 10
    assert looks > 3
    assert [row["wall_s"] for row in reader.rows] == list(range(11))


def test_small_files_are_read_when_they_change(tmp_path: Path) -> None:
    config, summary = tmp_path / "config.json", tmp_path / "summary.json"
    follower = Follower(tmp_path)
    assert (follower.poll().changed, follower.state) == (frozenset(), "starting")
    config.write_text('{"env": "A"}')
    with FileLock(tmp_path / ".lock"):
        assert follower.poll().changed == {"config", "state"}
        assert (follower.config, follower.state) == ({"env": "A"}, "running")
        assert follower.poll().changed == frozenset()
        config.write_text('{"env": "other"}')
        assert follower.poll().changed == {"config"}
    summary.write_text('{"ended": "steps", "exit_code": 0}')
    assert follower.poll().changed == {"summary", "state"}
    assert (follower.summary, follower.state) == ({"ended": "steps", "exit_code": 0}, "ended")
    summary.unlink()  # a resume
    assert follower.poll().changed == {"summary", "state"}
    assert (follower.summary, follower.state) == (None, "gone")


@pytest.mark.parametrize(
    ("ended", "code", "state"),
    [
        ("steps", 0, "ended"), ("minutes", 3, "ended"), ("failed", 1, "failed"),
        ("interrupted (SIGTERM)", 143, "interrupted"), (None, None, "failed"),
    ],
)  # fmt: skip
def test_how_a_run_has_ended(tmp_path: Path, ended: str | None, code: int | None, state: str) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"ended": ended, "exit_code": code}))
    follower = Follower(tmp_path)
    follower.poll()
    assert follower.state == state


def test_what_cannot_be_understood_leaves_what_was_known(tmp_path: Path) -> None:
    follower, config = Follower(tmp_path), tmp_path / "config.json"
    config.write_text('{"env": "A"}')
    follower.poll()
    config.write_text('{"env": ')
    follower.poll()
    assert follower.config == {"env": "A"}
    assert "not JSON" in follower.problems["config.json"]
    (tmp_path / "status.json").write_text('{"format": 2}')
    config.write_text('{"env": "B"}')
    follower.poll()
    assert (follower.config, follower.status) == ({"env": "B"}, None)
    assert [*follower.problems] == ["status.json"]
    assert "another version" in follower.problems["status.json"]
    os.mkfifo(tmp_path / "summary.json")
    follower.poll()
    assert "not a regular file" in follower.problems["summary.json"]


def test_metrics_that_are_a_pipe_are_never_waited_for(tmp_path: Path, metrics: Path) -> None:
    os.mkfifo(metrics)
    assert Reader(tmp_path).look() == []


def test_lines_cost_little_and_a_look_reads_few(tmp_path: Path, metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MOST_ROWS", 100)
    monkeypatch.setattr(following, "ALL_ROWS", 250)
    metrics.write_bytes(b"\n" * 150 + line(1) * 150)
    reader = Reader(tmp_path)
    looks = [reader.follower.poll() for _ in range(4)]
    assert [len(news.rows) for news in looks] == [0, 50, 100, 0]
    assert [news.more for news in looks] == [True, True, True, False]
    assert "has more than 250 rows" in reader.follower.problems["metrics.jsonl"]
