"""metrics.jsonl: rows, the whole rows and nothing but the rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freewheel.core import Sink
from freewheel.sinks.sink import JsonlSink

ROW = {"wall_s": 1.5, "return_mean": None, "dropped": {"stale": 2}}


def test_one_line_a_row_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink: Sink = JsonlSink(path)
    assert path.read_text() == ""
    sink.write(ROW)
    assert path.read_text() == '{"wall_s": 1.5, "return_mean": null, "dropped": {"stale": 2}}\n'
    sink.note("a worker died")
    sink.write(ROW | {"wall_s": 3.0, "note": "two\nlines"})
    sink.close({"exit_code": 0})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        ROW,
        ROW | {"wall_s": 3.0, "note": "two\nlines"},
    ]


def test_a_second_sink_appends(tmp_path: Path) -> None:
    for _ in range(2):
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        sink.write(ROW)
        sink.close({})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_number_that_json_has_not_got_is_refused_and_leaves_no_half_line(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        sink.write(ROW | {"return_mean": float("nan")})
    sink.close({})
    assert (tmp_path / "metrics.jsonl").read_text() == ""
