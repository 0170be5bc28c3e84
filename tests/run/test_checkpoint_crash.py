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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

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
    read,
    read_arrays,
)
from freewheel.run.checkpoints.store import Store, WrittenCheckpoint

NEVER = 10**9
SEGMENTS = "replay-0.safetensors", "replay-1.safetensors"  # closed, open


def store(root: Path, step: int, before: WrittenCheckpoint | None = None) -> WrittenCheckpoint:
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
    assert load(root).step == step  # also where the kill came before `latest` pointed to it
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
    second = store(tmp_path, 2, store(tmp_path, 1))
    events = saved(lambda: store(tmp_path, 3, second), Crash(), NEVER, once=False)
    new = [WEIGHTS, POLICY, LEARNER, COLLECTOR, PROGRESS]
    written = [f"{call} {name}" for name in new for call in ("open", "write", "fsync")]
    written += [f"link {SEGMENTS[0]}"]
    written += [f"{call} {name}" for name in (SEGMENTS[1], MANIFEST) for call in ("open", "write", "fsync")]
    named = ["fsync .part-3", "replace 3", f"fsync {tmp_path.name}"]
    linked = ["symlink .part-latest", "replace latest", f"fsync {tmp_path.name}"]
    kept = ["mkdir .part-3", *written, *named, *linked]
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

    def prepared(name: str) -> tuple[Path, WrittenCheckpoint | None]:
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


class Saves(RuleBasedStateMachine):
    """Saves of one run in any order: at the step of the one before, at an earlier one after going back, killed at any call."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.root = Path(self.folder.name) / "checkpoints"
        self.store, self.step, self.count = Store(self.root), 0, 0
        self.newest = {0}  # full checkpoints, one of which the run would go on from; 0: none
        self.known = dict[str, int]()  # of every name that there was, which save has made it

    @rule(more=st.integers(0, 2), killed=st.none() | st.integers(1, 45))
    def save(self, more: int, killed: int | None) -> None:
        """The run, after so many more steps."""
        self.step, self.count = self.step + more, self.count + 1
        state: Mapping[str, Content] = {
            **{name: encode_arrays({"save": np.array(self.count)}) for name in (LEARNER, COLLECTOR)},
            PROGRESS: encode_json({"save": self.count}),
        }
        save = partial(self.store.save, self.step, {"save": np.array(self.count)}, {"save": self.count}, state)
        done = len(saved(save, Crash(), killed or NEVER, once=False)) < (killed or NEVER)
        self.newest = {self.count} if done else self.newest | {self.count}
        if not done:
            self.start()

    @rule(back=st.integers(0, 2))
    def best(self, back: int) -> None:
        """Weights alone, perhaps of some steps before."""
        self.count += 1
        weights = {"save": np.array(self.count)}
        self.store.save(max(0, self.step - back), weights, {"save": self.count}, best=True)

    @rule(older=st.booleans())
    def start(self, older: bool = False) -> None:
        """Another session, which goes on from the newest, or by wish from the oldest there is."""
        self.store = Store(self.root)
        full = [name for name in names(self.root) if (self.root / str(name) / LEARNER).is_file()]
        if not full:
            self.store.go_back_to(None)
            self.step = 0
            return
        found = load_state(self.root, str(full[-1]) if older else "latest")[0]
        assert older or found.about["save"] in self.newest, "an older one is taken"
        self.store.go_back_to(found.path)
        self.step = found.step
        if not older:
            self.newest = {found.about["save"]}

    @invariant()
    def agree(self) -> None:
        """The weights of `latest` are those that the run would go on with, and nothing has the name of something else."""
        for name in map(str, names(self.root)):
            save = read(self.root / name).about["save"]
            assert self.known.setdefault(name, save) == save, f"{name} is used again"
        if self.newest != {0} and any((self.root / str(name) / LEARNER).is_file() for name in names(self.root)):
            found, state = load_state(self.root)
            assert found.about == state.progress == load(self.root).about
            assert found.about["save"] in self.newest
            assert not found.warnings

    def teardown(self) -> None:
        self.folder.cleanup()


def test_what_was_saved_last_is_the_newest_whatever_was_saved_and_killed_before() -> None:
    run_state_machine_as_test(Saves, settings=settings(max_examples=25, stateful_step_count=12, deadline=None))


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
