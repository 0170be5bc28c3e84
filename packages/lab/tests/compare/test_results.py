"""Tests of compare.json. It is read back as the same value, and other contents are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freewheel.errors import FileError
from freewheel_lab.compare.results import FILE, Results
from packages.lab.tests.support.comparison import measured


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    results = measured(timelines={"batch": {"kinds": ["step"], "rows": [], "seconds": 1.5}})
    assert results.write(tmp_path) == tmp_path / FILE
    assert Results.read(tmp_path) == Results.read(tmp_path / FILE) == results
    raw = json.loads((tmp_path / FILE).read_text())
    assert raw["format"] == 1
    assert raw["rows"][0]["curve"][-1] == [raw["rows"][0]["wall_s"], 20_480, 200.0]


def test_another_format_and_a_damaged_number_are_refused(tmp_path: Path) -> None:
    data = json.loads(json.dumps(measured().to_json()))
    data["rows"][2]["dropped"] = {"stale": "many"}
    damaged = r"'stale' in dropped of rows .* should be a whole number, not 'many'"
    for change, said in (({"format": 2}, "has format 2, which this version cannot read"), ({}, damaged)):
        (tmp_path / FILE).write_text(json.dumps(data | change))
        with pytest.raises(FileError, match=said):
            Results.read(tmp_path)


def test_a_mode_that_was_not_compared_is_not_there() -> None:
    assert measured().case("batch").workers == 8
    with pytest.raises(KeyError):
        measured().case("nonsense")
