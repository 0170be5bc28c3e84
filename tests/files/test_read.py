"""Files that others wrote: read as data, or refused in one line that names the file; nothing is allocated that does not fit."""

from __future__ import annotations

import json
import os
import random
import re
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.numpy

from freewheel.errors import FileError
from freewheel.files import memory, read
from tests.support.places import LONG

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)
ARRAYS = {"a": MATRIX, "b": np.array([True, False]), "c": np.zeros((0, 4), np.int64)}


def one_line(error: BaseException, *words: str) -> None:
    text = str(error)
    assert "\n" not in text, text
    assert len(text) < 500, text
    for word in words:
        assert word in text, text


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert read.content(tmp_path / "x", 3) == b"abc"
    with pytest.raises(FileError, match=r"x has 3 bytes; such a file has at most 2"):
        read.content(tmp_path / "x", 2)


def test_only_regular_files_are_read_and_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "real").write_text("{}")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "link", "loop", ".", "none", "real/below"):
        with pytest.raises(FileError) as caught:
            read.content(tmp_path / name, 10)
        one_line(caught.value, str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0)
    with pytest.raises(FileError, match="secret cannot be read: Permission denied"):
        read.content(tmp_path / "secret", 10)


def test_a_file_larger_than_the_free_memory_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "free_memory", lambda: 23 << 30)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(40 << 30)
    with pytest.raises(FileError, match=r"sparse has 40 GB, but 23 GB of memory are free"):
        read.content(tmp_path / "sparse")


def test_free_memory_is_that_of_the_container_if_it_has_less(tmp_path: Path) -> None:
    for name, text in {"memory.current": "3000", "memory.max": "5000", "memory.stat": "inactive_file 1000\n"}.items():
        (tmp_path / name).write_text(text)
    assert memory.free_memory(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max")
    assert memory.free_memory(tmp_path) > 3000


BAD_JSON = {
    "empty": b"",
    "not json": b"{nope}",
    "binary": b"\x80\x04\x95\x10",
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "list": b"[1]",
    "number": b"3",
    "nan": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
    "overflow": b'{"a": 1e999}',
    "huge": b'{"a": 1' + b"0" * 5000 + b"}",
    "twice": b'{"a": 1, "a": 2}',
    "twice below": b'{"a": {"b": 1, "b": 1}}',
    "deep lists": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
    "deep, but not too deep for Python": b'{"a": ' * 60 + b"1" + b"}" * 60,
    "surrogate": b'{"a": "\\ud800"}',
    "surrogate in a key": b'{"\\ud800": 1}',
}


@pytest.mark.parametrize("data", BAD_JSON.values(), ids=BAD_JSON.keys())
def test_what_is_no_plain_object_of_json_is_refused_with_the_name_of_the_file(data: bytes) -> None:
    with pytest.raises(FileError) as caught:
        read.parse_json(data, "runs/x/config.json")
    one_line(caught.value, "runs/x/config.json")


KEYS = ",".join(f'"{key:x}":1' for key in range(320_000))
#: Files that take a computer long to read, or much of its memory, and what is said of them.
BOMBS = {
    "many keys, the last twice": (f'{{{KEYS},"4e1ff":1}}', "has '4e1ff' twice"),
    "many keys, the first twice": (f'{{{KEYS},"0":1}}', "has '0' twice"),
    "more bytes than any such file has": (f'{{"a":"{"x" * read.JSON_SIZE}"}}', "holds too much"),
    "nothing but brackets": (f'{{"a":[{"[" * 35 + "]" * 35 + ","}' * 120_000, "holds too much"),
    "nothing but numbers": (f'{{"a":[{"0," * 4_300_000}0]}}', "holds too much"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_file_takes_long(name: str) -> None:
    """Each took seconds to minutes, or gigabytes."""
    text, problem = BOMBS[name]
    began = time.process_time()
    with pytest.raises(FileError, match=problem) as caught:
        read.parse_json(text.encode(), "runs/x/config.json")
    one_line(caught.value, "runs/x/config.json")
    assert time.process_time() - began < 10


def test_plain_json_is_read(tmp_path: Path) -> None:
    value = {"a": [1, -2.5, None, True, "text ü", {"deep": [[[]]]}], "state": 2**128 - 1}
    (tmp_path / "x.json").write_text(json.dumps(value))
    assert read.json_object(tmp_path / "x.json") == value


def saved(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_ARRAYS = {
    "nothing": b"",
    "short": b"\x01\0\0",
    "header beyond the end": (2**40).to_bytes(8, "little") + b"{}",
    "header of 2**64 - 1": b"\xff" * 8 + b"{}",
    "no header": (0).to_bytes(8, "little"),
    "pickle": b"\x80\x04\x95\x1d\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "deep": saved(b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "list": saved([]),
    "entry is no object": saved({"a": 3}),
    "no shape": saved({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, b"\0" * 8),
    "extra key": saved({"a": entry() | {"more": 1}}, b"\0" * 8),
    "unknown type": saved({"a": entry("BF16", [4])}, b"\0" * 8),
    "object type": saved({"a": entry("O", [1])}, b"\0" * 8),
    "negative side": saved({"a": entry(shape=[-1, -2])}, b"\0" * 8),
    "absurd shape": saved({"a": entry(shape=[2**62, 2**62])}, b"\0" * 8),
    "too many sides": saved({"a": entry(shape=[1] * 40 + [2])}, b"\0" * 8),
    "shape with text": saved({"a": entry(shape=["2"])}, b"\0" * 8),
    "shape with true": saved({"a": entry(shape=[True, 2])}, b"\0" * 8),
    "shape and offsets differ": saved({"a": entry(shape=[3])}, b"\0" * 8),
    "offsets backwards": saved({"a": entry(shape=[0], offsets=[8, 0])}, b"\0" * 8),
    "negative offset": saved({"a": entry(offsets=[-8, 0])}, b"\0" * 8),
    "three offsets": saved({"a": entry(offsets=[0, 8, 8])}, b"\0" * 8),
    "overlap": saved({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12),
    "the same bytes twice": saved({"a": entry(), "b": entry()}, b"\0" * 8),
    "gap": saved({"a": entry(), "b": entry(offsets=[12, 20])}, b"\0" * 20),
    "truncated": saved({"a": entry()}, b"\0" * 7),
    "more bytes than arrays": saved({"a": entry()}, b"\0" * 9),
    "neither true nor false": saved({"a": entry("BOOL", [2], [0, 2])}, b"\1\2"),
}


@pytest.mark.parametrize("data", BAD_ARRAYS.values(), ids=BAD_ARRAYS.keys())
def test_what_is_no_whole_safetensors_file_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught:
        read.parse_arrays(data, "w.safetensors")
    one_line(caught.value, "w.safetensors")
    if "true nor false" not in str(caught.value):  # all else is known before the arrays are read
        (tmp_path / "w").write_bytes(data)
        with pytest.raises(FileError):
            read.header(tmp_path / "w")


def test_arrays_are_those_that_were_saved(tmp_path: Path) -> None:
    data = safetensors.numpy.save(ARRAYS, {"note": "others may add this"})
    found = read.parse_arrays(data, "w")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    (tmp_path / "w").write_bytes(data)
    shapes = {name: array.shape for name, array in ARRAYS.items()}
    assert {name: one.shape for name, one in read.header(tmp_path / "w").items()} == shapes


def test_reading_needs_no_more_than_twice_the_file(tmp_path: Path) -> None:
    size = 8 << 20
    (tmp_path / "w").write_bytes(safetensors.numpy.save({"a": np.ones(size // 4, np.float32)}))
    tracemalloc.start()
    try:
        arrays = read.parse_arrays(read.content(tmp_path / "w"), "w")
        assert tracemalloc.get_traced_memory()[1] < 2 * size
    finally:
        tracemalloc.stop()
    assert arrays["a"].sum() == size // 4


def test_fuzzed_headers_are_read_as_before_or_refused() -> None:
    """Each has a few bytes changed, cut out or put in; what is read must then be what the header says."""
    rng = random.Random(7)
    good = safetensors.numpy.save(ARRAYS)
    head = int.from_bytes(good[:8], "little") + 8
    outcomes = {"read": 0, "refused": 0}
    tracemalloc.start()
    for _ in range(100_000 if LONG else 1_000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(head)
            change = rng.randrange(4)
            if change == 0:
                data[at] = rng.randrange(256)
            elif change == 1:
                data[at] ^= 1 << rng.randrange(8)
            elif change == 2:
                del data[at : at + rng.randint(1, 8)]
            else:
                data[at:at] = bytes(rng.choices(b'0123456789[]{}",:-eNaN\\u', k=rng.randint(1, 6)))
        try:
            assert sum(array.nbytes for array in read.parse_arrays(bytes(data), "w").values()) <= len(data)
            outcomes["read"] += 1
        except FileError as error:
            one_line(error, "w")
            outcomes["refused"] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20, "no header made it allocate what the file does not have"
    assert min(outcomes.values()) > 0, outcomes


@dataclass(frozen=True)
class Inner:
    x: float


@dataclass(frozen=True)
class Outer:
    name: str
    sizes: tuple[int, ...]
    pair: tuple[int, int] | None
    kind: Literal["a", "b"]
    inner: Inner
    keys: tuple[str | int, ...] = ()
    on: bool = False


GOOD = {"name": "n", "sizes": [1, 2], "pair": None, "kind": "b", "inner": {"x": 1}, "keys": ["k", 3], "on": True}


def test_a_record_has_the_types_of_its_fields() -> None:
    assert read.record(Outer, GOOD, "f") == Outer("n", (1, 2), None, "b", Inner(1.0), ("k", 3), True)
    assert read.record(Outer, GOOD | {"pair": [3, 4]}, "f").pair == (3, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name of f should be text, not 3"),
        ({"sizes": "12"}, "sizes of f should be a list, not '12'"),
        ({"sizes": [1, 2.5]}, r"sizes of f \(1\) should be a whole number, not 2.5"),
        ({"sizes": [True]}, r"sizes of f \(0\) should be a whole number, not True"),
        ({"sizes": [2**70]}, "should be a whole number"),
        ({"pair": [1]}, r"pair of f should have 2 values, not \[1\]"),
        ({"kind": "c"}, "kind of f should be one of 'a', 'b', not 'c'"),
        ({"inner": []}, r"inner of f should be an object, not \[\]"),
        ({"inner": {"x": "1"}}, "x of inner of f should be a number, not '1'"),
        ({"inner": {}}, "inner of f has no 'x'"),
        ({"keys": [None]}, r"keys of f \(0\) should be"),
        ({"on": 1}, "on of f should be true or false, not 1"),
        ({"more": 1}, "f has 'more', which is not known here"),
        ({"name": "x" * 999, "kind": "y" * 999}, "kind of f should be one of"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message) as caught:
        read.record(Outer, GOOD | change, "f")
    one_line(caught.value)


@dataclass(frozen=True)
class Size:
    width: int
    height: int = 1


@dataclass(frozen=True, kw_only=True)
class Box:
    name: str
    size: Size = field(metadata=read.PART)
    full: bool


def test_the_values_of_a_part_stand_among_the_others() -> None:
    box = Box(name="a", size=Size(2, 3), full=True)
    assert list(read.flat(box).items()) == [("name", "a"), ("width", 2), ("height", 3), ("full", True)]
    assert list(read.hints_of(Box)) == ["name", "width", "height", "full"]
    assert read.record(Box, read.flat(box), "it") == box
    assert read.record(Box, {"name": "a", "width": 2, "full": True}, "it").size == Size(2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": None}, "width of it should be a whole number, not None"),
        ({"size": {"width": 1}}, "it has 'size', which is not known here"),
        ({"depth": 1}, "it has 'depth', which is not known here"),
    ],
)
def test_a_wrong_value_of_a_part_is_named_like_any_other(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=re.escape(message)):
        read.record(Box, {"name": "a", "width": 2, "full": True, **change}, "it")
    with pytest.raises(FileError, match="it has no 'width'"):
        read.record(Box, {"name": "a", "full": True}, "it")


def test_the_last_lines_are_those_that_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"one\ntwo\nthree\nhalf")
    assert read.tail(file, 100) == [b"one", b"two", b"three"]
    assert read.tail(file, 13) == [b"three"]  # of "two" only a part is within
    assert read.tail(file, 3) == []
    file.write_bytes(b"")
    assert read.tail(file, 10) == []
    with pytest.raises(FileError, match="is missing"):
        read.tail(tmp_path / "none", 10)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="not a regular file"):
        read.tail(tmp_path / "pipe", 10)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (b'{"a": 1}\n{"a": 2}\n', {"a": 2}),
        (b'{"a": 1}\n{"a": 2', {"a": 1}),  # half written
        (b"", {}),
        (b"[1]\n", {}),
        (b"[" * 100_000 + b"\n", {}),
    ],
)
def test_the_newest_row_is_the_last_whole_one(tmp_path: Path, text: bytes, row: dict[str, int]) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(text)
    assert read.newest_row(file) == row
    assert read.newest_row(tmp_path / "nothing") == {}
