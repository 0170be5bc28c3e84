"""Shared memory: arrays on separate cache lines, shared with child processes, freed with their last user."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.errors import SetupError
from freewheel.transport.shm.memory import LINE, SharedArrays, bytes_of, require_memory
from tests.support import children
from tests.transport.conftest import Pipe, Start

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from(["i8", "f4", "u1", "?", "i4"])
FIELDS = st.dictionaries(st.text("abc", min_size=1), st.tuples(SHAPES, DTYPES))


def ours() -> int:
    """Number of descriptors of this process for shared memory."""
    gc.collect()
    links = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return sum("freewheel" in link and ("memfd:" in link or tempfile.gettempdir() in link) for link in links)


def mapped_names() -> set[str]:
    """Names in /dev/shm that this process has mapped; other processes may have theirs there."""
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}


@given(FIELDS)
def test_arrays_start_on_lines_of_their_own_and_do_not_overlap(fields: dict[str, tuple[tuple[int, ...], str]]) -> None:
    with closing(SharedArrays(fields)) as memory:
        written = {}
        for value, (name, (shape, dtype)) in enumerate(fields.items(), start=1):
            array = memory[name]
            assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
            assert array.ctypes.data % LINE == 0 or not array.size
            assert not array.any(), "new memory is zero"
            array[...] = value
            written[name] = array.tobytes()
        assert {name: memory[name].tobytes() for name in fields} == written
        assert sum(array.nbytes for array in map(memory.__getitem__, fields)) <= memory.size == bytes_of(fields)


def test_the_size_is_whole_lines_of_each_array() -> None:
    assert bytes_of({}) == 64
    assert bytes_of({"a": ((1,), "u1"), "b": ((8,), "i8"), "c": ((3, 3), "f8"), "d": ((0,), "f8")}) == 64 + 64 + 128


def test_a_child_process_has_the_same_memory(start: Start, pipe: Pipe) -> None:
    ours_end, theirs = pipe
    with closing(SharedArrays({"words": ((3,), "f4"), "numbers": ((2, 4), "i8")})) as memory:
        memory["words"][:] = 1.5, 2.5, 3.5
        memory["numbers"][:] = np.arange(8).reshape(2, 4)
        start(children.double, memory, theirs)
        assert ours_end.poll(20.0)
        assert ours_end.recv() == {"words": [3.0, 5.0, 7.0], "numbers": [[0, 1, 2, 3], [4, 5, 7, 7]]}
        assert memory["words"].tolist() == [3.0, 5.0, 7.0]
        assert memory["numbers"].tolist() == [[0, 1, 2, 3], [4, 5, 7, 7]]


@pytest.fixture(params=["memfd", "file"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """With anonymous memory of the kernel, and with a file without a name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if request.param == "file":
        monkeypatch.delattr(os, "memfd_create")
    yield request.param
    assert os.listdir(tmp_path) == []


def test_closing_leaves_no_descriptor_and_no_name(kind: str) -> None:
    named, before = mapped_names(), ours()
    memory = SharedArrays({"words": ((3,), "f4")})
    assert ours() > before
    assert mapped_names() == named
    memory.close()
    memory.close()
    assert ours() == before
    with pytest.raises(KeyError):
        memory["words"]


def test_an_array_in_use_outlives_the_closing() -> None:
    before = ours()
    memory = SharedArrays({"words": ((3,), "f4")})
    words = memory["words"]
    words[:] = 4
    memory.close()
    assert words.tolist() == [4.0, 4.0, 4.0]
    del words
    assert ours() == before


def test_too_little_memory_is_a_setup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * 2**30))
    require_memory(8 * 2**30, "a queue")
    with pytest.raises(SetupError) as refusal:
        require_memory(8 * 2**30 + 1, "a queue")
    (line,) = str(refusal.value).splitlines()
    assert line.startswith("a queue needs 8.0 GB of memory but 10.0 GB are free; use a smaller --max-queue-size")


def test_a_process_that_runs_already_opens_it_by_its_path() -> None:
    with closing(SharedArrays({"words": ((2,), "i8")})) as memory:
        with closing(SharedArrays.opened(memory.fields, memory.path)) as again:
            again["words"][1] = 5
        assert memory["words"].tolist() == [0, 5]
    assert ours() == 0
