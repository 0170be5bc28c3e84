"""The heartbeats: each worker's phase and its age, and its reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

from freewheel.transport.workers.heartbeats import PHASES, REPORT_BYTES, REPORTS, RESET, STEP, WAIT, Heartbeats, kind
from tests.support import children
from tests.transport.conftest import Start


@pytest.fixture
def heartbeats() -> Iterator[Heartbeats]:
    with closing(Heartbeats(3, 2)) as heartbeats:
        yield heartbeats


def test_a_phase_ages_from_when_it_was_entered(heartbeats: Heartbeats, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10_000_000_000]
    monkeypatch.setattr("freewheel.transport.workers.heartbeats.time", SimpleNamespace(monotonic_ns=lambda: clock[0]))
    heartbeats.enter(0, STEP)
    clock[0] += 1_500_000_000
    heartbeats.enter(2, RESET)
    clock[0] += 250_000_000
    heartbeats.enter(1, WAIT)
    assert [PHASES[phase] for phase in heartbeats.memory["phase"]] == ["step", "wait", "reset"]
    assert heartbeats.age().tolist() == pytest.approx([1.75, 0.0, 0.25])


def test_reports_are_read_as_written(heartbeats: Heartbeats) -> None:
    assert heartbeats.last_report(1) == ""
    texts = ["a long report – with a dash", "short", "two\nlines"]
    for text in texts:
        heartbeats.report(1, text)
    assert list(heartbeats.reports(1, 0)) == texts
    assert list(heartbeats.reports(1, 2)) == texts[2:]
    assert list(heartbeats.reports(1, 3)) == []
    assert [heartbeats.last_report(worker) for worker in range(3)] == ["", "two\nlines", ""]


def test_the_last_reports_are_kept(heartbeats: Heartbeats) -> None:
    texts = ["!" * number for number in range(2 * REPORTS + 3, 0, -1)]  # each is shorter than the one before
    for text in texts:
        heartbeats.report(0, text)
    assert list(heartbeats.reports(0, 0)) == texts[-REPORTS:]
    assert list(heartbeats.reports(0, len(texts) - 1)) == [heartbeats.last_report(0)] == ["!"]


def test_a_long_report_is_cut(heartbeats: Heartbeats) -> None:
    """Its beginning and its end stay; bytes are cut too, perhaps through a letter."""
    heartbeats.report(0, "begin" + "x" * REPORT_BYTES + "end")
    shown = heartbeats.last_report(0)
    assert (shown[:6], shown[-4:], len(shown) <= REPORT_BYTES) == ("beginx", "xend", True)
    assert " characters left out ...] " in shown
    heartbeats.report(0, "–" * REPORT_BYTES)
    assert len(heartbeats.last_report(0).encode()) <= REPORT_BYTES + 2
    heartbeats.report(0, "a\ud800b")
    assert heartbeats.last_report(0) == "a\\ud800b"
    assert heartbeats.last_report(2) == ""


def test_a_death_during_a_report_does_not_affect_the_replacement(heartbeats: Heartbeats, start: Start) -> None:
    heartbeats.report(1, "before")
    start(children.die_in_report, heartbeats, 1).join(20.0)
    assert list(heartbeats.reports(1, 0)) == ["before"]
    heartbeats.report(1, "after")
    assert list(heartbeats.reports(1, 0)) == ["before", "after"]


@pytest.mark.parametrize(
    ("report", "about"),
    [
        ("lane 3 of X raised\nTraceback\nValueError: boom at 0x7f12", "ValueError: boom at #"),
        ("lane 3 of X observed nan at step 17, seed 99", "lane 3 of X observed nan at step # seed #"),
    ],
)
def test_reports_that_differ_in_numbers_are_of_one_kind(report: str, about: str) -> None:
    assert kind(report) == about


def test_all_processes_see_the_stop(heartbeats: Heartbeats, start: Start) -> None:
    assert not heartbeats.stopping
    process = start(children.wait_for_stop, heartbeats)
    heartbeats.stop()
    assert heartbeats.stopping
    process.join(20.0)
    assert process.exitcode == 0
