"""Signals that come when the summary of a run is already made: the run has ended well, and whoever started it is told."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import Kept, train


class Late(Kept):
    """Sends a signal to this process when it is closed, which is after the summary."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self._number = number

    def close(self, summary: Mapping[str, Any]) -> None:
        signal.raise_signal(self._number)


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The interrupts that a program around the run handles itself."""
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def heard() -> Iterator[None]:
    """A shell may have interrupts ignored in what runs in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ended_well(tmp_path: Path) -> bool:
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json"))
    return (summary["ended"], summary["exit_code"]) == ("steps", 0)


def test_a_late_signal_reaches_the_handler_of_the_program(tmp_path: Path, handled: list[int]) -> None:
    result = train(tmp_path, sinks=[Late(signal.SIGINT)])
    assert (handled, result.exit_code) == ([signal.SIGINT], 0)
    assert ended_well(tmp_path)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt()), (signal.SIGTERM, SystemExit(143))]
)
def test_unhandled_late_signals_end_the_program(tmp_path: Path, number: signal.Signals, raised: BaseException) -> None:
    with pytest.raises(type(raised)) as caught:
        train(tmp_path, sinks=[Late(number)])
    assert caught.value.args == raised.args
    assert ended_well(tmp_path)
