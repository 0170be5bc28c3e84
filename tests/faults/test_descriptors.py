"""An environment that opens files and does not close them: the run is saved and has its summary, one line names the limit."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from freewheel.core import Metrics
from freewheel.errors import EnvError, FreewheelError, SetupError
from freewheel.run.checkpoints import checkpoint
from freewheel.run.hooks import Run
from freewheel.run.stopping.ending import without_descriptors
from tests.support.runs import assert_balanced, train
from tests.support.worlds import Identity

LIMIT = 200  # open files of this process


class Hoard:
    """Descriptors that environments hold; a hook that lets them take all, after the second update."""

    def __init__(self) -> None:
        self.taken, self.begun = list[int](), False

    def on_update(self, run: Run, metrics: Metrics) -> None:
        self.begun = run.version >= 2

    def take(self) -> None:
        while True:
            self.taken.append(os.open(os.devnull, os.O_RDONLY))

    def free(self) -> None:
        while self.taken:
            os.close(self.taken.pop())


@pytest.fixture
def hoard() -> Iterator[Hoard]:
    before, hoard = resource.getrlimit(resource.RLIMIT_NOFILE), Hoard()
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, before[1]))
    yield hoard
    hoard.free()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Hoards(Identity):
    def __init__(self, hoard: Hoard, *, silent: bool) -> None:
        super().__init__()
        self.hoard, self.silent = hoard, silent

    def step(self, action: Any) -> Any:
        if self.hoard.begun:
            with suppress(*[OSError] * self.silent):
                self.hoard.take()
        return super().step(action)


@pytest.mark.system
@pytest.mark.parametrize("silent", [False, True])
def test_the_run_is_saved_and_the_limit_is_named(tmp_path: Path, hoard: Hoard, *, silent: bool) -> None:
    failure: FreewheelError | None = None
    try:
        train(tmp_path, lambda: Hoards(hoard, silent=silent), mode="sequential", evals=0, run="it", hooks=[hoard])
    except (EnvError, SetupError) as error:
        failure = error
    summary = json.loads((tmp_path / "it" / "summary.json").read_text())
    assert silent or failure is not None
    assert failure is None or "(ulimit -n)" in str(failure)
    assert summary["problems"] == [] or silent
    assert_balanced(summary)
    hoard.free()
    found, state = checkpoint.load_state(tmp_path / "it" / "checkpoints")
    assert (found.step, found.warnings) == (state.progress["env_steps"], ())
    assert found.step == summary["env_steps"]


def test_only_a_process_without_descriptors_is_told_so() -> None:
    other = OSError(errno.ENOSPC, "No space left on device")
    assert without_descriptors(other, "Toy") is other
    told = without_descriptors(OSError(errno.EMFILE, "Too many open files"), "Toy")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert str(told).startswith(f"this process has reached its limit of {limit:,} open files (ulimit -n): does Toy")
