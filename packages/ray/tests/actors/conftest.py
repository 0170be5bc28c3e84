"""Fixtures for tests that connect their own process to Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the handlers of signals and of breakpoint(), which Ray replaces and does not restore."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv("PYTHONBREAKPOINT", os.environ.get("PYTHONBREAKPOINT", ""))
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
