"""A clock for runs in this process: the real time, and what a test adds to it in place of waiting."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace

import pytest

from freewheel.metrics.meter import Meter
from freewheel.run import session, trainer
from freewheel.run.stopping import stop, watched


class Clock:
    """From when it is made, rows, shares and the budget of minutes follow it; time-outs of environments do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._added = 0.0
        for module in (session, stop, watched):
            monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | {"monotonic": self.monotonic}))
        monkeypatch.setattr(trainer, "Meter", partial(Meter, now=lambda: time.perf_counter() + self._added))

    def monotonic(self) -> float:
        return time.monotonic() + self._added

    def add(self, seconds: float) -> None:
        self._added += seconds
