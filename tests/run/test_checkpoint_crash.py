"""Checkpoints under a failing disk: every call of a save fails once, and what is there afterwards is whole."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freewheel.files import disk
from freewheel.run.checkpoints.checkpoint import (
    COLLECTOR,
    LEARNER,
    MANIFEST,
    POLICY,
    PROGRESS,
    WEIGHTS,
    Content,
    Linked,
    encode_arrays,
    encode_json,
    load,
    load_state,
    names,
    read_arrays,
)
from freewheel.run.checkpoints.store import Store, Written

NEVER = 10**9
SEGMENTS = "replay-0.safetensors", "replay-1.safetensors"  # closed, open


def store(root: Path, step: int, before: Written | None = None) -> Written:
    """A full checkpoint whose contents follow from its step; the closed segment is that of the one before."""
    closed: Content = encode_arrays({"rows": np.arange(5)})
    if before is not None:
        closed = Linked(before.folder / SEGMENTS[0], before.files[SEGMENTS[0]])
    state: Mapping[str, Content] = {
        LEARNER: encode_arrays({"w": np.arange(50) - step}),
        COLLECTOR: encode_arrays({"lanes": np.full(3, step)}),
        PROGRESS: encode_json({"env_steps": step}),
        SEGMENTS[0]: closed,
        SEGMENTS[1]: encode_arrays({"rows": np.full(4, step)}),
    }
    return Store(root).save(step, {"w": np.arange(50) + step}, {"contents": step}, state)


def whole(root: Path) -> int:
    """The step that would be resumed, after a look at all of its contents; 0: there is none."""
    if not names(root):  # nothing there, rather than something damaged
        return 0
    found, state = load_state(root)
    step = found.step
    assert (found.about, state.progress, found.warnings) == ({"contents": step}, {"env_steps": step}, ())
    assert load(root).step in (step - 1, step)  # weights are those that `latest` points to
    closed, still_open = (read_arrays(part)["rows"] for part in state.segments["replay"])
    for array, expected in (
        (found.params["w"], np.arange(50) + step),
        (state.learner["w"], np.arange(50) - step),
        (state.collector["lanes"], np.full(3, step)),
        (closed, np.arange(5)),
        (still_open, np.full(4, step)),
    ):
        np.testing.assert_array_equal(array, expected)
    return step


class Crash(BaseException):
    """The process is gone: nothing in it may catch this and go on."""


class Disk:
    """Every call that changes the disk, counted; from number `limit` on they fail, a write after half of its bytes."""

    CALLS = ("mkdir", "rename", "replace", "symlink", "link", "unlink", "rmdir", "fsync")

    def __init__(self, patch: pytest.MonkeyPatch, limit: int, fault: BaseException, *, once: bool) -> None:
        self.events: list[str] = []
        self._limit = limit
        self._fault = fault
        self._once = once
        for name in self.CALLS:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        patch.setattr(disk, "write", self._write)

    def _step(self, event: str) -> None:
        self.events.append(event)
        if len(self.events) == self._limit or (len(self.events) > self._limit and not self._once):
            raise self._fault

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            target = args[1] if name in ("rename", "replace", "symlink", "link") else args[0]
            path = os.readlink(f"/proc/self/fd/{target}") if name == "fsync" else target
            self._step(f"{name} {Path(path).name}")
            return call(*args, **named)

        return counted

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        self._step(f"open {path.name}")
        with path.open("xb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            self._step(f"write {path.name}")
            file.write(data[len(data) // 2 :])
            file.flush()
            os.fsync(file.fileno())


def saved(save: Callable[[], object], fault: BaseException, limit: int, *, once: bool) -> list[str]:
    """Save on a failing disk; what happened up to the end or the fault."""
    with pytest.MonkeyPatch.context() as patch:
        failing = Disk(patch, limit, fault, once=once)
        try:
            save()
        except type(fault):
            assert len(failing.events) >= limit
    return failing.events


def test_order_of_calls(tmp_path: Path) -> None:
    """Contents before names, names before links, links before removals; each on the disk before the next begins."""
    first = store(tmp_path, 1)
    second = store(tmp_path, 2, first)
    events = saved(lambda: store(tmp_path, 3, second), Crash(), NEVER, once=False)
    new = [WEIGHTS, POLICY, LEARNER, COLLECTOR, PROGRESS]
    written = [f"{call} {name}" for name in new for call in ("open", "write", "fsync")]
    written += [f"link {SEGMENTS[0]}"]
    written += [f"{call} {name}" for name in (SEGMENTS[1], MANIFEST) for call in ("open", "write", "fsync")]
    named = ["fsync .part-3", "replace 3", "unlink .part-3", f"fsync {tmp_path.name}"]
    linked = ["unlink .part-latest", "symlink .part-latest", "replace latest", f"fsync {tmp_path.name}"]
    kept = ["unlink .part-3", "mkdir .part-3", *written, *named, *linked]
    assert events[: len(kept)] == kept
    removed, *gone = events[len(kept) :]
    assert removed == "replace .part-1"
    assert sorted(gone) == sorted(["rmdir .part-1", *(f"unlink {name}" for name in (*new, *SEGMENTS, MANIFEST))])


#: Steps there are before the save that fails, the step that is saved, and what may be there afterwards.
SITUATIONS: dict[str, tuple[list[int], int, set[int]]] = {
    "the first save": ([], 1, {0, 1}),
    "a later save": ([1, 2], 3, {2, 3}),
}


@pytest.mark.parametrize("once", [False, True], ids=["killed", "disk full"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_after_a_fault_at_any_call_the_old_or_the_new_one_is_there(tmp_path: Path, situation: str, once: bool) -> None:
    before, step, expected = SITUATIONS[situation]

    def prepared(name: str) -> tuple[Path, Written | None]:
        root, newest = tmp_path / name / "checkpoints", None
        for old in before:
            newest = store(root, old, newest)
        return root, newest

    outcomes = []
    root, newest = prepared("count")
    total = len(saved(lambda: store(root, step, newest), Crash(), NEVER, once=False))
    for limit in range(1, total + 1):
        root, newest = prepared(str(limit))
        fault = OSError(errno.ENOSPC, "disk full") if once else Crash()
        saved(lambda: store(root, step, newest), fault, limit, once=once)  # noqa: B023 - called at once
        outcomes.append(whole(root))
        store(root, 4)
        assert whole(root) == 4
        assert not list(root.glob(".*"))  # leftovers went
    assert total > 25
    assert once or outcomes == sorted(outcomes)  # where a file cannot be linked it is copied
    assert set(outcomes) == expected


def test_where_files_cannot_be_linked_they_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store(tmp_path, 1)
    linked = store(tmp_path, 2, first)
    assert (linked.folder / SEGMENTS[0]).stat().st_ino == (first.folder / SEGMENTS[0]).stat().st_ino

    def refuse(old: Path, new: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(disk, "link", refuse)
    copied = store(tmp_path, 3, linked)
    assert (copied.folder / SEGMENTS[0]).stat().st_ino != (linked.folder / SEGMENTS[0]).stat().st_ino
    assert whole(tmp_path) == 3


@pytest.mark.system
def test_killed_at_random(tmp_path: Path) -> None:
    """The independent check: a real process, a real SIGKILL."""
    program = (
        "import itertools, pathlib, sys, numpy as np\n"
        "from freewheel.run.checkpoints.store import Store\n"
        "store = Store(pathlib.Path(sys.argv[1]))\n"
        "for step in itertools.count(1):\n"
        "    store.save(step, {'w': np.full(20_000, step)}, {'step': step})\n"
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
