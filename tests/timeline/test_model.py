"""Rows of spans: windows, sums, the compact form for pages, trace.json, and the drawings of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from freewheel.core import LEARNER_TIME, WORKER_TIME
from freewheel.errors import FileError
from freewheel.timeline.chrome import TRACE, encode, read
from freewheel.timeline.model import KINDS, WAITS_FOR, Row, Span, Timeline, is_wait
from freewheel.timeline.terminal import busy, draw, longest_waits, shares
from tests.support.timelines import made


def test_every_kind_of_time_can_be_shown_and_every_wait_is_for_somebody() -> None:
    assert set(WORKER_TIME) | set(LEARNER_TIME) <= set(KINDS)
    assert {kind for kind in KINDS if is_wait(kind)} == set(WAITS_FOR)
    assert len({look.mark for look in KINDS.values()}) == len(KINDS)


def test_a_window_cuts_spans_at_its_ends() -> None:
    row = Row("worker 0", "envs", [Span("step", 0.0, 1.0), Span("wait-slot", 1.0, 3.0), Span("step", 3.0, 4.0)])
    assert row.window(0.5, 2.5).spans == [Span("step", 0.5, 1.0), Span("wait-slot", 1.0, 2.5)]
    assert Timeline([row], end_s=4.0).last(1.5).rows[0].seconds() == {"wait-slot": 0.5, "step": 1.0}


def test_the_compact_form_comes_back_the_same() -> None:
    timeline = made()
    again = Timeline.from_json(json.loads(json.dumps(timeline.to_json())))
    assert again == timeline.from_json(timeline.to_json())
    assert [row.name for row in again.rows] == [row.name for row in timeline.rows]
    assert again.about == {kind: timeline.about.get(kind, "") for kind in timeline.kinds()}
    for one, other in zip(again.rows, timeline.rows, strict=True):
        assert one.group == other.group
        for ours, theirs in zip(one.spans, other.spans, strict=True):
            assert (ours.kind, ours.waits_for) == (theirs.kind, theirs.waits_for)
            assert ours[1:3] == pytest.approx(theirs[1:3], abs=1e-5)


def test_a_span_that_waits_for_a_known_row_names_it_by_its_number() -> None:
    data = made(workers=2, rounds=1).to_json()
    learner = next(row for row in data["rows"] if row["name"] == "learner")
    assert data["rows"][learner["spans"][0][3]]["name"] == "worker 1"


def test_a_trace_has_the_events_that_perfetto_needs_and_is_read_back(tmp_path: Path) -> None:
    timeline = made()
    (tmp_path / TRACE).write_bytes(encode(timeline))
    events = json.loads((tmp_path / TRACE).read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {row.name for row in timeline.rows}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "Envs", "Learner", "GPU", "Sync",
    }  # fmt: skip
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == sum(len(row.spans) for row in timeline.rows)
    assert all(event["dur"] >= 0 and {"name", "ts", "pid", "tid"} <= set(event) for event in complete)
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(10e6)

    again = read(tmp_path)
    assert (again.begin_s, again.end_s, again.about) == (0.0, 10.0, timeline.about)
    for one, other in zip(again.rows, timeline.rows, strict=True):
        assert (one.name, one.group) == (other.name, other.group)
        assert [span.waits_for for span in one.spans] == [span.waits_for for span in other.spans]
        assert one.seconds() == pytest.approx(other.seconds())


@pytest.mark.parametrize(
    "text",
    [
        '{"kinds": [], "rows": 3}',
        '{"kinds": ["step"], "rows": [{"name": "a", "group": "envs", "spans": [[0, 1, 7]]}], "seconds": 1}',
        '{"kinds": [], "rows": [{"name": "a", "group": "moon", "spans": []}], "seconds": 1}',
        '{"traceEvents": [{"ph": "X"}]}',
        '{"traceEvents": 3}',
    ],
)
def test_a_file_that_is_something_else_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "timeline.json").write_text(text)
    with pytest.raises(FileError, match=r"^[^\n]*timeline.json is not a t[^\n]*$"):
        read(tmp_path / "timeline.json")


def test_columns_hold_the_seconds_of_what_lies_in_them() -> None:
    row = Row("worker 0", "envs", [Span("step", 0.0, 1.5), Span("reset", 1.5, 2.0)])
    assert shares([row], 0.0, 2.0, 2) == [{"step": 1.0}, {"step": 0.5, "reset": 0.5}]
    assert shares([row], 1.0, 1.0, 2) == [{}, {}]


def test_the_four_bars_show_how_busy_their_rows_are() -> None:
    timeline = made(workers=4, rounds=5)
    levels, rows = busy("GPU", timeline, 5)
    assert rows == 1
    assert levels == pytest.approx([0.2] * 5)
    levels, rows = busy("Envs", timeline, 5)
    assert rows == 4
    assert levels == pytest.approx([(0.2 + 0.4 + 0.6 + 0.8) / 4 - 0.02] * 5)
    assert busy("CPU", timeline, 5)[0] == pytest.approx([0.0] * 5), "its updates are on the GPU"


def test_the_drawing_has_a_line_for_each_party_and_says_who_waits_for_whom() -> None:
    text = str(draw(made(workers=4), 100))
    for name in ("CPU", "GPU", "Envs", "Sync", "worker 0", "worker 3", "learner", "collector"):
        assert re.search(rf"^{name} ", text, re.MULTILINE), name
    assert "80 % wait-data (mostly worker 3): Waits for rows" in text
    assert max(map(len, text.splitlines()[:12])) <= 100
    assert "and 88 more workers" in str(draw(made(workers=100, rounds=1), 100))


def test_an_empty_timeline_can_be_drawn() -> None:
    assert "none in this run" in str(draw(Timeline([]), 60))
    assert list(longest_waits(Timeline([]))) == []
