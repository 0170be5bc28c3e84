"""The rows of a buffer in segments: what is written once, what is copied, and that no row changes while it is being saved."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freewheel.core import NDArray, Snapshot
from freewheel.errors import CheckpointError, DivergedError
from freewheel.files import disk
from freewheel.files.outage import Outage
from freewheel.files.read import parse_arrays
from freewheel.learn.replay.buffer import ReplayBuffer
from freewheel.learn.replay.rows import Columns
from freewheel.run.checkpoints import checkpoint, segments
from freewheel.run.checkpoints.run_progress import Earlier, RunProgress
from freewheel.run.checkpoints.saver import Saver
from freewheel.run.checkpoints.segments import Segments, restore, segment_rows
from freewheel.run.checkpoints.store import Store

COLUMNS = Columns(1, 1)  # six numbers a row
ROWS = 16  # of a segment, in these tests


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", ROWS * COLUMNS.width * 4)


def replay_of(capacity: int, device: str = "cpu") -> ReplayBuffer:
    return ReplayBuffer(capacity, COLUMNS, device, 0)


def numbered(first: int, end: int) -> torch.Tensor:
    return torch.arange(first, end, dtype=torch.float32)[:, None].expand(-1, COLUMNS.width)


def add(replay: ReplayBuffer, rows: int) -> None:
    replay.add(numbered(replay.added, replay.added + rows))


def content(given: checkpoint.Content) -> bytes:
    assert not isinstance(given, checkpoint.Linked)
    return given if isinstance(given, bytes) else given()


def row_numbers(data: bytes) -> list[int]:
    arrays = parse_arrays(bytearray(data), "it")
    numbers = [int(number) for number in arrays["rows"][:, 0]]
    assert numbers[0] == int(arrays["first"])
    return numbers


@pytest.mark.parametrize(("row_bytes", "rows"), [(24, 16), (23, 16), (25, 8), (384, 1), (9999, 1)])
def test_a_segment_is_a_power_of_two_rows(row_bytes: int, rows: int) -> None:
    assert segment_rows(row_bytes) == rows


def test_hopper_sized_rows_have_segments_of_65536(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert segment_rows(26 * 4) == 65_536


def test_rows_are_cut_at_multiples_of_the_segment(tmp_path: Path) -> None:
    replay = replay_of(40)
    add(replay, 70)  # rows 30 to 70 are stored
    cut = Segments("replay", replay).cut()
    found = {name: row_numbers(content(given)) for name, given in cut.files.items()}
    spans = {1: (30, 32), 2: (32, 48), 3: (48, 64), 4: (64, 70)}
    assert found == {f"replay-{number}.safetensors": list(range(*span)) for number, span in spans.items()}


def test_rows_that_are_overwritten_while_they_are_saved_are_kept_as_they_were() -> None:
    replay = replay_of(48)
    add(replay, 48)
    cut = Segments("replay", replay).cut()
    add(replay, 1)  # overwrites row 0
    add(replay, 20)  # and rows up to 20, of the first two segments
    found = [row_numbers(content(given)) for given in cut.files.values()]
    assert found == [list(range(16)), list(range(16, 32)), list(range(32, 48))]
    cut.close()
    assert replay.before_overwriting is None


def test_memory_is_bounded_by_what_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The open segment is copied at once; of the closed ones only those are that would be overwritten, and each once."""
    replay, copied = replay_of(48), list[tuple[int, int]]()
    add(replay, 56)
    read = replay.read

    def counted(first: int, end: int) -> NDArray:
        copied.append((first, end))
        return read(first, end)

    monkeypatch.setattr(replay, "read", counted)
    cut = Segments("replay", replay).cut()
    assert copied == [(48, 56)]
    for _ in range(8):
        add(replay, 1)
    assert copied == [(48, 56), (8, 16)]
    add(replay, 1)
    assert copied == [(48, 56), (8, 16), (16, 32)]
    cut.close()
    add(replay, 48)
    assert len(copied) == 3


def test_a_thread_that_reads_never_finds_rows_of_two_moments() -> None:
    """The learner adds as fast as it can while another thread takes segments."""
    replay = replay_of(256)
    add(replay, 256)
    for _ in range(30):
        first = replay.added - replay.count
        cut = Segments("replay", replay).cut()
        names, found, over = list(cut.files), list[int](), threading.Event()

        def take(cut: Any = cut, names: list[str] = names, found: list[int] = found, over: Any = over) -> None:
            for name in names:
                found.extend(row_numbers(content(cut.files[name])))
            over.set()

        thread = threading.Thread(target=take)
        thread.start()
        while not over.is_set():
            add(replay, 5)
        thread.join(10)
        cut.close()
        assert found == list(range(first, first + 256))


def test_a_gpu_buffer_is_copied_at_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory must not be read by another thread, which would come in the way of a graph that is being captured."""
    monkeypatch.setattr(ReplayBuffer, "shared", False)
    replay = replay_of(48)
    add(replay, 40)
    cut = Segments("replay", replay).cut()
    assert replay.before_overwriting is None
    add(replay, 48)
    found = [row_numbers(content(given)) for given in cut.files.values()]
    assert found == [list(range(16)), list(range(16, 32)), list(range(32, 40))]


class Learner:
    """A learner that only has a buffer. Implements core.Learner as far as a Saver needs it."""

    def __init__(self, capacity: int = 64) -> None:
        self.replay, self.version = replay_of(capacity), 0

    def buffers(self) -> dict[str, ReplayBuffer]:
        return {"replay": self.replay}

    def snapshot(self) -> Snapshot:
        return Snapshot(self.version, {"w": np.full(3, self.version, np.float32)})

    def state_dict(self) -> dict[str, Any]:
        return {"version": np.array(self.version), **self.replay.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = int(state["version"])
        self.replay.load_state_dict({name: value for name, value in state.items() if name != "version"})


class Collector:
    def state_dict(self) -> dict[str, Any]:
        return {"lanes": np.arange(3)}


class Directory:
    """Implements saver.Directory."""

    def __init__(self, root: Path) -> None:
        self.store, self.about = Store(root / "checkpoints"), dict[str, Any]()
        self.said: list[str] = []
        self.outages = {"checkpoints": Outage("checkpoints", self.said.append)}

    def keep(self) -> None:
        """Nothing to keep."""

    def save(self, step: int, snapshot: Snapshot, *, best: bool = False) -> Path | None:
        return None


class Saving:
    """A learner whose checkpoints are saved under `root`, as often as a test asks for it."""

    def __init__(self, root: Path, capacity: int = 64) -> None:
        self.learner, self.directory = Learner(capacity), Directory(root)
        self.replay, self.root = self.learner.replay, root
        saver: Any = Saver(self.directory, self.learner, every_s=1e-9)  # type: ignore[arg-type] # as far as it needs them
        saver.collector, self.saver = Collector(), saver
        saver.progress = lambda ended: RunProgress({"env_steps": self.replay.added, "ended": ended})

    def save(self, rows: int = 0) -> Path:
        """After so many more rows; in the background."""
        add(self.replay, rows)
        self.saver.begin()
        folder = None
        while folder is None and self.saver._writing is not None:
            folder = self.saver.look(5.0)
        assert folder is not None
        return Path(folder)

    def again(self) -> Saving:
        """A learner that goes on from the newest checkpoint."""
        other = Saving(self.root, self.replay.capacity)
        other.saver.go_on_from(Earlier(self.root, *checkpoint.load_state(self.directory.store.root)))
        return other

    @property
    def stored(self) -> list[int]:
        return [int(number) for number in self.replay.newest(self.replay.count)[:, 0].tolist()]


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Saving]:
    one = Saving(tmp_path)
    yield one
    one.saver.close()


def stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("replay-*"))


def test_closed_segments_are_linked_and_only_the_open_one_is_written(saving: Saving) -> None:
    folders = [saving.save(rows) for rows in (40, 5, 30)]
    inodes = [{path.stem: path.stat().st_ino for path in folder.glob("replay-*")} for folder in folders[1:]]
    assert [sorted(one) for one in inodes] == [
        [f"replay-{k}" for k in range(count)] for count in (3, 5)
    ]  # rows 11 to 75
    assert {name for name in inodes[0] if inodes[0][name] == inodes[1][name]} == {"replay-0", "replay-1"}
    assert not folders[0].exists()  # two are kept
    assert saving.again().stored == list(range(11, 75))


def test_what_the_buffer_has_dropped_is_not_linked(saving: Saving) -> None:
    saving.save(40)
    assert stems(saving.save(70)) == [f"replay-{number}" for number in range(2, 7)]
    assert saving.again().stored == list(range(46, 110))


def test_expired_rows_are_not_saved(saving: Saving) -> None:
    saving.replay.add(numbered(0, 20), 1)
    saving.replay.add(numbered(20, 50), 2)
    saving.replay.expire(2)
    assert stems(saving.save()) == ["replay-1", "replay-2", "replay-3"]
    after = saving.again()
    assert after.stored == list(range(20, 50))
    assert after.replay.expire(3) == 30


def test_a_resumed_run_links_the_segments_of_the_one_before(saving: Saving) -> None:
    before = saving.save(40)
    later = saving.again()
    after = later.save(10)
    later.saver.close()
    for name in ("replay-0.safetensors", "replay-1.safetensors"):
        assert (before / name).stat().st_ino == (after / name).stat().st_ino
    assert saving.again().stored == list(range(50))


def test_a_second_save_that_falls_due_is_skipped_and_counted(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), disk.write

    def slow(path: Path, data: bytes | memoryview) -> None:
        assert gate.wait(10)
        write(path, data)

    monkeypatch.setattr(disk, "write", slow)
    saver = saving.saver
    add(saving.replay, 20)
    saver.begin()
    for _ in range(3):
        assert saver.due
        saver.begin()
        assert saver.look() is None
    gate.set()
    saver.close()
    assert (saver.counts.saved, saver.counts.skipped, saver.counts.failed) == (1, 3, 0)


def test_a_disk_that_fails_costs_one_message_and_nothing_else(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, directory = saving.saver, saving.directory
    saving.save(40)
    with monkeypatch.context() as patch:

        def full(path: Path, data: bytes | memoryview) -> None:
            path.touch()
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(disk, "write", full)
        for _ in range(3):
            add(saving.replay, 30)
            saver.begin()
            while saver._writing is not None:
                assert saver.look(5.0) is None
        assert saver.now("steps") is None
    (told,) = directory.said
    assert told.startswith("cannot write to checkpoints: No space left on device; training continues")
    assert [str(name) for name in checkpoint.names(directory.store.root)] == ["40"]
    assert not list(directory.store.root.glob(".*"))
    assert saving.replay.before_overwriting is None
    assert saver.counts.failed == 5
    saving.save()
    assert directory.said[1:] == ["checkpoints can be written to again"]
    assert saving.again().stored == list(range(66, 130))


def test_segments_that_somebody_has_removed_are_written_again(saving: Saving) -> None:
    saving.save(40)
    disk.remove(saving.directory.store.root)
    saving.save(8)
    assert saving.again().stored == list(range(48))


def test_weights_that_are_not_finite_are_not_saved(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving.learner, "snapshot", lambda: Snapshot(1, {"w": np.array([1.0, np.nan])}))
    with pytest.raises(DivergedError, match="the weights 'w' of step 0 are not finite"):
        saving.saver.begin()
    assert not (saving.root / "checkpoints").exists()


#: Which of the four segments are found: one is missing, one is another's, none.
@pytest.mark.parametrize("found", [[0, 2, 3], [0, 1, 2, 0], []], ids=str)
def test_rows_that_are_missing_are_noticed(saving: Saving, found: list[int]) -> None:
    saving.save(60)
    _, state = checkpoint.load_state(saving.root / "checkpoints")
    files, fresh = list(state.segments["replay"]), Learner()
    fresh.load_state_dict(state.learner)
    with pytest.raises(CheckpointError, match=r"rows [\d,]+ to 60 of 'replay' are missing"):
        restore("replay", fresh.replay, [files[number] for number in found])


def test_the_learner_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`begin` returns before anything is written: the disk stands still meanwhile."""
    gate, make = threading.Event(), disk.make_folder

    def late(path: Path, mode: int = 0o700) -> None:
        assert gate.wait(10)
        make(path, mode)

    monkeypatch.setattr(disk, "make_folder", late)
    saving = Saving(tmp_path, 4_096)
    add(saving.replay, 4_096)
    saving.saver.begin()
    assert not (tmp_path / "checkpoints").exists()
    add(saving.replay, 100)  # training goes on
    gate.set()
    saving.saver.close()
    assert saving.again().stored == list(range(4_096))
