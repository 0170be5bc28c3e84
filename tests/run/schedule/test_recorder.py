"""The file of a schedule: what is written is read again, a disk that fails costs the run nothing, damage is one line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from freewheel.core import CAUSES, Transitions
from freewheel.errors import FileError
from freewheel.run.schedule import log
from freewheel.run.schedule import recorder as recording
from freewheel.run.schedule.answers import Answers, EndOfSchedule
from freewheel.run.schedule.log import (
    Act,
    Check,
    Checksums,
    Delivery,
    Drop,
    LogLine,
    Schedule,
    WorkerStart,
    as_json,
    checksums,
)
from freewheel.run.schedule.recorder import ScheduleRecorder
from tests.support.failing_disk import FailingDisk

PACKAGES = dict.fromkeys(("freewheel", "python", "numpy", "torch", "machine"), "")
HEADER = json.dumps({"schedule": 1, **PACKAGES, "limits": {"steps": 100}}) + "\n"
LINES = [
    LogLine(check=Check(0, 0, 0, "a" * 64)),
    LogLine(
        empty=3,
        oldest=(None, 4),
        polls=((0, 7, (2, 5)),),
        starts=(WorkerStart((1, 2), -1, (4, 5)),),
        events=(Act((1, 2), 3, 4, Checksums(5, 2**32 - 1), (8, 9)), Act((0, 0), 3, 2, None, ()), Drop(1, 0, "stale")),
        deliveries=(Delivery(1, 6, 1),),
    ),
    LogLine(chunks=((16, Checksums(1, 2)),), oldest=(7,)),
    LogLine(deliveries=()),
    LogLine(check=Check(9, 3, 100, "b" * 64), end="steps", empty=2, polls=((0, 9, ()), (1, 1, (1,)))),
]


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / log.FILE
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def schedule(path: Path) -> Schedule:
    return Schedule(path, workers=2, most_steps=16)


def rows(steps: int = 3, lanes: int = 2) -> Transitions:
    rng = np.random.default_rng(0)
    obs, after = rng.standard_normal((2, steps, lanes, 4)).astype(np.float32)
    reward, log_prob = rng.standard_normal((2, steps, lanes)).astype(np.float32)
    flags = np.zeros((3, steps, lanes), np.bool_)
    action = rng.integers(3, size=(steps, lanes))
    return Transitions(obs, action, log_prob, reward, flags[0], flags[1], after, ~flags[2])


def test_every_line_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = schedule(write(tmp_path, HEADER + "".join(map(as_json, LINES))))
    assert list(found) == LINES
    assert found.outline.end == "steps"
    assert found.outline.last == LINES[-1].check
    assert found.outline.loads == {3: 2}
    assert found.outline.acts == {(1, 2): 1, (0, 0): 1}
    assert found.outline.cut == ""


def test_every_question_gets_its_own_answers_in_order(tmp_path: Path) -> None:
    seen: list[LogLine] = []
    answers = Answers(schedule(write(tmp_path, HEADER + "".join(map(as_json, LINES)))), seen.append)
    assert [check.sha256 for check in answers.checks(0)] == ["a" * 64]
    assert [answers.oldest(), answers.oldest(), answers.oldest()] == [None, 4, 7], "read ahead of `collect`"
    assert [answers.collect() for _ in range(6)] == [None, None, None, *LINES[1:4]]
    assert [number for number in range(1, 10) if answers.poll(0)] == [2, 5]
    assert answers.poll(1)
    assert answers.end == "steps"
    assert [answers.collect(), answers.collect()] == [None, None]
    assert [check.turn for check in answers.checks(9)] == [9]
    assert seen == LINES
    for question in (answers.collect, answers.oldest, lambda: answers.poll(0)):
        with pytest.raises(EndOfSchedule):
            question()


@pytest.mark.parametrize("column", Transitions.__slots__)
def test_a_checksum_tells_who_is_to_blame(column: str) -> None:
    data, other = rows(), rows()
    values = getattr(other, column)
    values[1, 1] = ~values[1, 1] if values.dtype == np.bool_ else values[1, 1] + 1
    before, after = checksums(data), checksums(other)
    if column in ("action", "log_prob"):
        assert (before.answers, before.choices != after.choices) == (after.answers, True)
    else:
        assert (before.choices, before.answers != after.answers) == (after.choices, True)


def test_damage_is_found_and_what_is_before_it_is_used(tmp_path: Path) -> None:
    """Bytes are changed at random: lines up to the damaged one are the same, and nothing but FileError is raised."""
    text, rng = (HEADER + "".join(map(as_json, LINES))).encode(), random.Random(0)
    for _ in range(300):
        broken = bytearray(text)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        at = next((i for i, (one, two) in enumerate(zip(text, broken, strict=True)) if one != two), len(text))
        whole = max(0, text[:at].count(b"\n") - 1)
        try:
            found = list(schedule(write(tmp_path, bytes(broken))))
        except FileError:
            assert at < len(HEADER)
            continue
        assert found[:whole] == LINES[:whole]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"f":[[2,0,0,1,2,3]]}', "worker 2 of 2"),
        ('{"f":[[0,0,0,1000000000000,2,3]]}', "a fragment of 1000000000000 steps"),
        ('{"f":[[0,0,0,0,2,3]]}', "a fragment of 0 steps"),
        ('{"f":[[0,0,-1,1,2,3]]}', "natural numbers expected"),
        ('{"f":[[0,0,0,1.5,2,3]]}', "natural numbers expected"),
        (f'{{"f":[[0,0,{len(CAUSES)}]]}}', "out of range"),
        ('{"d":[[0,true,1]]}', "natural numbers expected"),
        ('{"w":1}', "'t'"),
        ("[]", "list"),
        ("7", ""),
        ("{" * 100_000, ""),
    ],
)
def test_numbers_that_no_run_can_have_end_the_schedule(tmp_path: Path, line: str, reason: str) -> None:
    found = schedule(write(tmp_path, HEADER + as_json(LINES[0]) + line + "\n" + as_json(LINES[1])))
    assert list(found) == LINES[:1]
    assert found.outline.cut.startswith("line 3 is damaged")
    assert reason in found.outline.cut


@pytest.mark.parametrize("text", ["", "{}\n", '{"schedule": 2}\n', "[]\n", "\x00\n", HEADER.replace("100", '"x"')])
def test_another_file_or_format_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FileError, match=r"schedule\.jsonl"):
        schedule(write(tmp_path, text))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    monkeypatch.setattr(recording, "WRITE_EVERY", 0.0)
    return FailingDisk(monkeypatch)


def begin(recorder: ScheduleRecorder, folder: Path, say: Callable[[str], None]) -> None:
    recorder.open(folder, say)
    assert recorder.file is not None
    recorder.file.add(HEADER)


def act(recorder: ScheduleRecorder, version: int) -> None:
    """A fragment comes and is dropped, so that there is something to write."""
    data = rows()
    recorder.acted(0, 0, version, data, ())
    recorder.dropped(0, data, "stale")
    recorder.collected((), serial=False)
    recorder.keep_up()


def versions(path: Path) -> list[int]:
    return [event.version for line in schedule(path) for event in line.events if isinstance(event, Act)]


def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path: Path, failing: FailingDisk) -> None:
    said: list[str] = []
    recorder = ScheduleRecorder()
    begin(recorder, tmp_path, said.append)
    act(recorder, 0)
    failing.failing = range(10**6)
    for version in range(1, 5):
        act(recorder, version)
    failing.failing = ()
    act(recorder, 5)
    recorder.close("steps")
    assert versions(tmp_path / log.FILE) == [0, 1, 2, 3, 4, 5]
    assert len(said) == 2, "it fails, and it works again"
    assert recorder.problems == []


def test_a_disk_that_fails_for_long_ends_the_recording_and_that_is_said(
    tmp_path: Path, failing: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_WAITING", 3)
    said: list[str] = []
    recorder = ScheduleRecorder()
    begin(recorder, tmp_path, said.append)
    act(recorder, 0)
    failing.failing = range(10**6)
    for version in range(1, 9):
        act(recorder, version)
    failing.failing = ()
    for version in range(9, 12):
        act(recorder, version)
    recorder.close("steps")
    assert versions(tmp_path / log.FILE) == list(range(5)), "what waited is written when that is possible"
    assert any("the schedule ends before the run" in text for text in said)
    assert len(recorder.problems) == 1
    assert schedule(tmp_path / log.FILE).outline.end == ""


def test_tickets_that_nobody_has_seen_end_the_recording(tmp_path: Path) -> None:
    said: list[str] = []
    recorder = ScheduleRecorder()
    begin(recorder, tmp_path, said.append)
    recorder.acted(0, 0, 0, rows(), [2, *[-1] * 14, 5, 7])
    recorder.acted(0, 0, 0, rows(), [20, *range(16)])
    recorder.close("steps")
    assert "18 episodes at once" in said[0]
