"""The pulse: what a worker does and since when, and its last words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from freewheel.transport.pulse import PHASES, REPORT, RESET, SAYINGS, STEP, WAIT, Pulse, kind
from tests.transport import children

if TYPE_CHECKING:
    from tests.transport.conftest import Start


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    with closing(Pulse(3, 2)) as pulse:
        yield pulse


def test_a_phase_ages_from_when_it_was_entered(pulse: Pulse, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10_000_000_000]
    monkeypatch.setattr("freewheel.transport.pulse.time", SimpleNamespace(monotonic_ns=lambda: clock[0]))
    pulse.enter(0, STEP)
    clock[0] += 1_500_000_000
    pulse.enter(2, RESET)
    clock[0] += 250_000_000
    pulse.enter(1, WAIT)
    assert [PHASES[phase] for phase in pulse.memory["phase"]] == ["step", "wait", "reset"]
    assert pulse.age().tolist() == pytest.approx([1.75, 0.0, 0.25])


def test_words_are_heard_as_they_were_said(pulse: Pulse) -> None:
    assert pulse.last_words(1) == ""
    said = ["a long complaint – with a dash", "short", "two\nlines"]
    for text in said:
        pulse.say(1, text)
    assert list(pulse.heard(1, 0)) == said
    assert list(pulse.heard(1, 2)) == said[2:]
    assert list(pulse.heard(1, 3)) == []
    assert [pulse.last_words(worker) for worker in range(3)] == ["", "two\nlines", ""]


def test_of_many_sayings_the_last_ones_are_kept(pulse: Pulse) -> None:
    said = ["!" * number for number in range(2 * SAYINGS + 3, 0, -1)]  # each is shorter than the one before
    for text in said:
        pulse.say(0, text)
    assert list(pulse.heard(0, 0)) == said[-SAYINGS:]
    assert list(pulse.heard(0, len(said) - 1)) == [pulse.last_words(0)] == ["!"]


def test_too_many_words_are_cut(pulse: Pulse) -> None:
    pulse.say(0, "x" * (REPORT - 1) + "–")  # the cut goes through the dash
    assert pulse.last_words(0)[:-1] == "x" * (REPORT - 1)
    assert pulse.last_words(2) == ""


def test_who_died_speaking_does_not_silence_its_heir(pulse: Pulse, start: Start) -> None:
    pulse.say(1, "before")
    process = start(children.die_speaking, pulse, 1)
    process.join(20.0)
    assert list(pulse.heard(1, 0)) == ["before"]
    pulse.say(1, "what the heir says")
    assert list(pulse.heard(1, 0)) == ["before", "what the heir says"]


@pytest.mark.parametrize(
    ("report", "about"),
    [
        ("lane 3 of X raised\nTraceback\nValueError: boom at 0x7f12", "ValueError: boom at #"),
        ("lane 3 of X observed nan at step 17, seed 99", "lane 3 of X observed nan at step # seed #"),
    ],
)
def test_reports_that_differ_in_numbers_are_of_one_kind(report: str, about: str) -> None:
    assert kind(report) == about


def test_stopping_is_seen_by_all(pulse: Pulse, start: Start) -> None:
    assert not pulse.stopping
    process = start(children.wait_for_stop, pulse)
    pulse.stop()
    assert pulse.stopping
    process.join(20.0)
    assert process.exitcode == 0
