"""Tracks and what is kept of them: bounded, without overlaps, with exact sums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.core import WORKER_TIME
from freewheel.timeline import recording as recordings
from freewheel.timeline.chrome import RECENT, TRACE, read
from freewheel.timeline.merging import gathered
from freewheel.timeline.model import Row
from freewheel.timeline.recording import SpanRecording
from freewheel.timeline.track import BLOCK, NAMES, SHORT, Ring, Track, TurnTrack
from tests.support.timelines import Clock

MS = 1_000_000
USED = ("step", "infer", "write", "reset", "wait-credit")
STEP, INFER, WRITE, RESET, CREDIT = (WORKER_TIME.index(kind) for kind in USED)


def written(ring: Ring) -> list[tuple[str, int, int]]:
    spans, _ = ring.read(0)
    return [(NAMES[code & 255], begin, end) for begin, end, code in spans.tolist()]


def check_row(row: Row) -> None:
    """In order, none overlaps, none is empty."""
    for one, other in zip(row.spans, row.spans[1:], strict=False):
        assert one.t1_s <= other.t0_s + 1e-9, (row.name, one, other)
    assert all(span.seconds > 0 for span in row.spans)


def test_a_long_span_is_a_span_of_its_own_and_short_ones_share_a_block() -> None:
    ring = Ring.private()
    track = Track(ring)
    track.add("update", 0, 5 * MS)
    at = 5 * MS
    for _ in range(40):  # 300 us: 12 ms
        track.add("observe", at, at + MS // 10)
        track.add("other", at + MS // 10, at + 3 * MS // 10)
        at += 3 * MS // 10
    track.flush()
    assert written(ring)[:3] == [
        ("update", 0, 5 * MS),
        ("observe", 5 * MS, 5 * MS + 34 * MS // 10),
        ("other", 5 * MS + 34 * MS // 10, 5 * MS + 100 * MS // 10),
    ]
    assert sum(end - begin for kind, begin, end in written(ring) if kind == "observe") == 4 * MS


def test_a_ring_keeps_the_newest_spans_and_a_reader_misses_none_that_are_there() -> None:
    ring = Ring.private(capacity=8)
    track = Track(ring)
    for number in range(5):
        track.put(0, number, number + 1)
    spans, following = ring.read(0)
    assert spans[:, 0].tolist() == [0, 1, 2, 3, 4]
    for number in range(5, 20):
        track.put(0, number, number + 1)
    spans, following = ring.read(following)
    assert following == 20
    assert spans[:, 0].tolist() == [13, 14, 15, 16, 17, 18, 19], "the place of 12 may be being written"
    assert ring.last_end() == 20


def test_a_turn_of_long_steps_is_written_in_its_order() -> None:
    """infer 2 ms, step 30 ms, write 1 ms, 1 ms of nothing; then a wait of 20 ms that the Runner is told of afterwards."""
    ring, now = Ring.private(), 100 * MS
    track = TurnTrack(ring, now)
    counted = [0] * len(WORKER_TIME)
    counted[INFER], counted[STEP], counted[WRITE] = 2 * MS, 30 * MS, MS
    assert track.due == now + BLOCK
    assert track.cut(now + 34 * MS, counted) == now + 34 * MS + BLOCK
    track.waited(CREDIT, now + 36 * MS, now + 56 * MS, counted)
    counted[CREDIT] += 20 * MS
    counted[STEP] += 30 * MS
    track.taken(now + 86 * MS, counted)
    assert [(kind, (begin - now) / MS, (end - now) / MS) for kind, begin, end in written(ring)] == [
        ("infer", 0, 2), ("step", 2, 32), ("write", 32, 33), ("other", 33, 34),
        ("other", 34, 36), ("wait-credit", 36, 56), ("step", 56, 86),
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["step", "short", "wait", "reset"]), st.integers(1, 40 * MS)), max_size=60))
def test_whatever_a_worker_does_spans_cover_its_time_and_add_up_to_its_counts(script: list[tuple[str, int]]) -> None:
    """A worker as transport/shm/worker.py drives its track: cuts between steps, `taken` at the end of fragments of 4."""
    ring, now = Ring.private(), 1000 * MS
    track, began = TurnTrack(ring, now), now
    counted, total = [0] * len(WORKER_TIME), np.zeros(len(WORKER_TIME), np.int64)
    for number, (what, ns) in enumerate(script):
        if now >= track.due:
            track.cut(now, counted)
        if what == "wait":
            track.waited(CREDIT, now, now + ns, counted)
            counted[CREDIT] += ns
        elif what == "reset":
            counted[RESET] += ns
        else:
            ns = ns if what == "step" else ns % SHORT
            counted[STEP] += ns
        now += ns + 1000  # a microsecond between, which nobody counts
        if number % 4 == 3:
            track.taken(now, counted)
            total += counted
            counted = [0] * len(WORKER_TIME)
    track.cut(now, counted)
    total += counted
    spans = written(ring)
    ends = [began, *(end for _, _, end in spans)]
    assert [begin for _, begin, _ in spans] == ends[:-1], "no gap and no overlap"
    assert ends[-1] == now
    sums = dict.fromkeys(WORKER_TIME, 0)
    for kind, begin, end in spans:
        sums[kind] += end - begin
    for kind, ns in zip(WORKER_TIME, total.tolist(), strict=True):
        assert sums[kind] == (ns if kind != "other" else 1000 * len(script))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=200))
def test_gathered_spans_are_fewer_do_not_overlap_and_add_up_to_the_same(parts: list[tuple[int, int, int]]) -> None:
    at, rows = 0, []
    for code, length, gap in parts:
        rows.append((at + gap, at + gap + length, code))
        at += gap + length
    spans = np.array(rows, np.int64)
    for cell in (10, 40, 10_000):
        found = gathered(spans, cell)
        assert len(found) <= len(spans)
        assert (found[1:, 0] >= found[:-1, 1]).all()
        assert found[0, 0] == spans[0, 0]
        assert found[-1, 1] <= spans[-1, 1]
        for code in range(4):
            assert (found[found[:, 2] == code] @ [-1, 1, 0]).sum() == (spans[spans[:, 2] == code] @ [-1, 1, 0]).sum()
    assert len(gathered(spans, 10_000)) <= 4


def test_a_night_stays_within_its_bounds_with_its_last_minutes_in_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MOST", 2000)
    clock = Clock()
    recording = SpanRecording(now=clock)
    track = recording.track("learner", "learner")
    for _ in range(100):
        for _ in range(500):
            track.add("wait-data", *clock.passes(600 * MS))
            track.add("update", *clock.passes(400 * MS))
        recording.drain()
    timeline = recording.timeline()
    (row,) = timeline.rows
    check_row(row)
    assert len(row.spans) <= 2000
    assert timeline.seconds == pytest.approx(50_000)
    assert row.seconds() == pytest.approx({"wait-data": 30_000, "update": 20_000})
    assert [round(span.seconds, 6) for span in row.spans[-900:]] == [0.6, 0.4] * 450, "as it was"
    assert recording.recent().rows[0].seconds() == pytest.approx({"wait-data": 36, "update": 24})


def test_what_a_party_is_doing_now_is_shown_and_becomes_a_span_when_it_ends() -> None:
    clock = Clock()
    recording, ring = SpanRecording(now=clock), Ring.private()
    since = clock.now
    recording.attach({"worker 0": ring}, "envs", doing=lambda: {"worker 0": [("step", since, clock.now)]})
    clock.passes(300 * MS)
    (row,) = recording.timeline().rows
    assert row.seconds() == pytest.approx({"step": 0.3})
    Track(ring).add("step", since, clock.now)
    clock.passes(100 * MS)
    (row,) = recording.timeline().rows
    assert row.seconds() == pytest.approx({"step": 0.4})
    check_row(row)


def test_rings_that_go_away_leave_their_spans_and_new_ones_go_on_in_the_same_row() -> None:
    clock = Clock()
    recording = SpanRecording(now=clock)
    for _ in range(2):
        ring = Ring.private()
        recording.attach({"worker 0": ring}, "envs")
        Track(ring).add("step", *clock.passes(20 * MS))
        recording.detach(["worker 0"])
    (row,) = recording.timeline().rows
    assert [span.kind for span in row.spans] == ["step", "step"]
    check_row(row)


def test_the_files_of_a_run_are_written_whole_and_small(tmp_path: Path) -> None:
    clock = Clock()
    recording = SpanRecording({"update": "Gradient steps."}, clock)
    recording.begin(tmp_path)
    worker = recording.number("worker 0", "envs")
    learner, gpu = recording.track("learner", "learner"), recording.track("GPU updates", "gpu")
    for _ in range(3000):
        learner.add("wait-data", *clock.passes(60 * MS), party=worker)
        begin, end = clock.passes(40 * MS)
        learner.add("update", begin, end)
        gpu.add("update", begin, end)
        recording.drain()
    recording.write_recent()
    assert (tmp_path / RECENT).stat().st_size < 200_000
    recent = read(tmp_path / RECENT)
    assert (recent.begin_s, recent.end_s) == (240.0, 300.0)
    assert not (tmp_path / TRACE).exists()
    whole = recording.finished()
    recording.write(whole)
    assert read(tmp_path).rows[0].seconds() == pytest.approx(whole.rows[0].seconds())
    assert read(tmp_path).rows[0].spans[0].waits_for == "worker 0"
    assert [row.name for row in whole.rows] == ["learner", "GPU updates"], "a row without spans is left out"
    assert sorted(path.name for path in tmp_path.iterdir()) == [RECENT, TRACE]


def test_a_session_that_goes_on_keeps_what_came_before_its_checkpoint(tmp_path: Path) -> None:
    clock = Clock()
    first = SpanRecording(now=clock)
    first.begin(tmp_path)
    track = first.track("learner", "learner")
    for _ in range(10):
        track.add("update", *clock.passes(1000 * MS))
    first.write(first.finished())
    clock.passes(3_600_000 * MS)
    second = SpanRecording(now=clock)
    second.begin(tmp_path, earlier_s=6.5)
    second.track("learner", "learner").add("save", *clock.passes(500 * MS))
    timeline = second.timeline()
    assert timeline.end_s == pytest.approx(7.0)
    assert timeline.rows[0].seconds() == pytest.approx({"update": 6.5, "save": 0.5})
    (tmp_path / TRACE).write_text("{")
    SpanRecording(now=clock).begin(tmp_path, earlier_s=6.5)
