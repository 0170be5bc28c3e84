"""Checkpoints under a failing disk: every call of a save fails once, and what is there afterwards is whole."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from freewheel.errors import CheckpointError
from freewheel.run import checkpoint
from freewheel.run.checkpoint import MANIFEST, POLICY, WEIGHTS, load, save

NEVER = 10**9


def store(root: Path, step: int, contents: int | None = None) -> Path:
    """A checkpoint whose contents follow from its step, or are given."""
    value = step if contents is None else contents
    return save(root, step, {"w": np.arange(50) + value}, {"contents": value})


def whole(root: Path) -> int:
    """The contents that are loaded, after a look at all of them."""
    found = load(root)
    np.testing.assert_array_equal(found.params["w"], np.arange(50) + found.about["contents"])
    return int(found.about["contents"])


class Crash(BaseException):
    """The process is gone: nothing in it may catch this and go on."""


class Disk:
    """Every call that changes the disk, counted; from number `limit` on they fail, a write after half of its bytes."""

    CALLS = ("mkdir", "rename", "replace", "symlink", "unlink", "rmdir", "fsync")

    def __init__(self, patch: pytest.MonkeyPatch, limit: int, fault: BaseException, *, once: bool) -> None:
        self.events: list[str] = []
        self._limit = limit
        self._fault = fault
        self._once = once
        for name in self.CALLS:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        patch.setattr(checkpoint, "open", self._open, raising=False)

    def _step(self, event: str) -> None:
        self.events.append(event)
        if len(self.events) == self._limit or (len(self.events) > self._limit and not self._once):
            raise self._fault

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            target = args[1] if name in ("rename", "replace", "symlink") else args[0]
            path = os.readlink(f"/proc/self/fd/{target}") if name == "fsync" else target
            self._step(f"{name} {Path(path).name}")
            return call(*args, **named)

        return counted

    def _open(self, path: Path, mode: str) -> Torn:
        self._step(f"open {path.name}")
        return Torn(path, lambda: self._step(f"write {path.name}"))


class Torn:
    """A file whose writes may fail half-way."""

    def __init__(self, path: Path, half_way: Callable[[], None]) -> None:
        self._file = path.open("xb")
        self._half_way = half_way
        self.flush = self._file.flush
        self.fileno = self._file.fileno

    def write(self, data: bytes) -> None:
        middle = len(data) // 2
        self._file.write(data[:middle])
        self._file.flush()
        self._half_way()
        self._file.write(data[middle:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def saved(root: Path, step: int, fault: BaseException, limit: int, *, once: bool) -> list[str]:
    """Save on a failing disk; what happened up to the end or the fault."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, limit, fault, once=once)
        try:
            store(root, step)
        except type(fault):
            assert len(disk.events) >= limit
        else:
            assert len(disk.events) < limit
    return disk.events


def test_order_of_calls(tmp_path: Path) -> None:
    """Contents before names, names before links, links before removals; each on the disk before the next begins."""
    store(tmp_path, 1)
    store(tmp_path, 2)
    events = saved(tmp_path, 3, Crash(), NEVER, once=False)
    written = [f"{call} {name}" for name in (WEIGHTS, POLICY, MANIFEST) for call in ("open", "write", "fsync")]
    named = ["fsync .part-3", "rename 3", "unlink .part-3", f"fsync {tmp_path.name}"]
    linked = ["unlink .part-latest", "symlink .part-latest", "replace latest", f"fsync {tmp_path.name}"]
    kept = ["unlink .part-3", "mkdir .part-3", *written, *named, *linked]
    assert events[: len(kept)] == kept
    removed, *gone = events[len(kept) :]
    assert removed == "rename .part-1"
    assert sorted(gone) == ["rmdir .part-1", *(f"unlink {name}" for name in (MANIFEST, POLICY, WEIGHTS))]


#: What is there before the save that fails: steps and contents; the step that is saved; and what is there afterwards.
SITUATIONS: dict[str, tuple[dict[int, int], int, set[int]]] = {
    "the first save": ({}, 1, {0, 1}),
    "a later save": ({1: 1, 2: 2}, 3, {2, 3}),
    "a step that is replaced": ({1: 1, 2: 100}, 2, {1, 2, 100}),
}


@pytest.mark.parametrize("once", [False, True], ids=["killed", "disk full"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_after_a_fault_at_any_call_the_old_or_the_new_one_is_there(tmp_path: Path, situation: str, once: bool) -> None:
    before, step, expected = SITUATIONS[situation]

    def prepared(name: str) -> Path:
        root = tmp_path / name / "checkpoints"
        for old, contents in before.items():
            store(root, old, contents)
        return root

    outcomes = []
    total = len(saved(prepared("count"), step, Crash(), NEVER, once=False))
    for limit in range(1, total + 1):
        root = prepared(str(limit))
        saved(root, step, OSError(errno.ENOSPC, "disk full") if once else Crash(), limit, once=once)
        try:
            outcomes.append(whole(root))
            assert step != 3 or load(root).warnings == ()  # never even a doubt
        except CheckpointError:
            outcomes.append(0)
        store(root, 4)
        assert whole(root) == 4
        assert not list(root.glob(".*"))  # leftovers went
    assert total > 15
    if step == 2:  # killed between two renames: the previous step takes over
        assert outcomes.count(1) == (0 if once else 1)
        assert set(outcomes) | {1} == expected
    else:
        assert outcomes == sorted(outcomes)
        assert set(outcomes) == expected


def test_killed_at_random(tmp_path: Path) -> None:
    """The independent check: a real process, a real SIGKILL."""
    program = (
        "import itertools, pathlib, sys, numpy as np\n"
        "from freewheel.run.checkpoint import save\n"
        "for step in itertools.count(1):\n"
        "    save(pathlib.Path(sys.argv[1]), step, {'w': np.full(20_000, step)}, {'step': step})\n"
        "    print(step, flush=True)\n"
    )
    rng = random.Random(0)
    for trial in range(4):
        root = tmp_path / str(trial)
        with subprocess.Popen([sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"1\n"
            time.sleep(rng.uniform(0.0, 0.1))  # the moment is the test's input
            child.send_signal(signal.SIGKILL)
            saved_steps = [1, *map(int, child.stdout.read().split())]
        found = load(root)
        assert found.warnings == ()
        assert found.step in (saved_steps[-1], saved_steps[-1] + 1)
        assert found.about == {"step": found.step}
        np.testing.assert_array_equal(found.params["w"], np.full(20_000, found.step))
