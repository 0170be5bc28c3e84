"""`--record-durations FILE`: a line of JSON a test with the seconds of its phases, fixtures included, and their causes.

Causes exclude each other: a survey inside a training counts as a survey. What is left of a phase has no name.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.tiers import tier_of


def timed() -> dict[str, list[tuple[Any, str]]]:
    """Causes, and the functions that belong to each; they are imported only where durations are recorded."""
    from freewheel.run import planning, trainer
    from freewheel.transport import forkserver

    return {
        "survey": [(planning, "survey_env")],
        "training": [(trainer, "run")],
        "process start": [(forkserver, "start"), (forkserver, "prepare")],
        "command": [(subprocess.Popen, "wait"), (subprocess.Popen, "communicate")],
        "sleep": [(time, "sleep")],
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", metavar="FILE", help="append what each test took and for what, to this file")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("record_durations"):
        config.pluginmanager.register(Recorder(Path(path)))


class Recorder:
    """Charges the time of a test to its causes."""

    def __init__(self, path: Path) -> None:
        self._path, self._inside, self._spent, self._since = path, list[str](), dict[str, float](), 0.0
        self._phases: dict[str, dict[str, float]] = {}
        for cause, functions in timed().items():
            for owner, name in functions:
                setattr(owner, name, self._charged(cause, getattr(owner, name)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._phases, began = {}, sum(os.times()[:4])
        result = yield
        cpu = round(sum(os.times()[:4]) - began, 3)
        with self._path.open("a") as file:
            file.write(json.dumps({"test": item.nodeid, "tier": tier_of(item), "cpu": cpu, **self._phases}) + "\n")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        return (yield from self._phase("setup"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        return (yield from self._phase("call"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        return (yield from self._phase("teardown"))

    def _phase(self, name: str) -> Generator[None, object, object]:
        self._spent.clear()
        self._inside.clear()
        began = self._since = time.perf_counter()
        try:
            return (yield)
        finally:
            self._switch()
            causes = {cause: round(seconds, 3) for cause, seconds in self._spent.items() if seconds >= 0.001 and cause}
            self._phases[name] = {"wall": round(time.perf_counter() - began, 3), **causes}

    def _switch(self) -> None:
        """Charge the time since the last change to what was going on."""
        now = time.perf_counter()
        cause = self._inside[-1] if self._inside else ""
        self._spent[cause] = self._spent.get(cause, 0.0) + now - self._since
        self._since = now

    def _charged(self, cause: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def charged(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return call(*args, **kwargs)
            self._switch()
            self._inside.append(cause)
            try:
                return call(*args, **kwargs)
            finally:
                self._switch()
                self._inside.pop()

        return charged
