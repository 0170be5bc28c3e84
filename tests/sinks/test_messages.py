"""What a run has told can be read in its directory."""

from __future__ import annotations

import json
from pathlib import Path

from freewheel.sinks.messages import FILE, LONGEST, MOST, MessagesSink
from tests.support.runs import train


def test_messages_are_lines_with_the_time_of_the_run(tmp_path: Path) -> None:
    sink = MessagesSink(tmp_path / FILE)
    assert not (tmp_path / FILE).exists()
    sink.note("first\nof two lines")
    sink.write({"wall_s": 2.5})
    sink.note("x" * (LONGEST + 1))
    sink.close({})
    told = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [(one["wall_s"], one["text"]) for one in told] == [(0.0, "first\nof two lines"), (2.5, "x" * LONGEST)]


def test_there_are_only_so_many_and_a_disk_that_takes_nothing_ends_nothing(tmp_path: Path) -> None:
    sink = MessagesSink(tmp_path / FILE)
    sink._told = MOST - 1
    sink.note("the last one")
    sink.note("one too many")
    assert len((tmp_path / FILE).read_text().splitlines()) == 1
    MessagesSink(tmp_path / "missing" / FILE).note("lost")
    assert not (tmp_path / "missing").exists()


def test_a_run_keeps_what_it_says(tmp_path: Path) -> None:
    result = train(tmp_path, eval_max_steps=8)  # episodes have 16
    told = [json.loads(line)["text"] for line in (result.path / FILE).read_text().splitlines()]
    assert "3 evaluation episodes were cut at 8 steps (--eval-max-steps)" in told
