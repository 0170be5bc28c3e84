"""Reads files that others may have written, as data: limits size, depth and numbers, and checks types.

Every error is a FileError of one line that names the file and the field. Only regular files are read, nothing is
allocated before it is known to fit, and nothing that a file names is imported here.

    content       the bytes of a regular file          typed_content the bytes of a file that the user has typed
    lines         the lines of a regular file          regular       a regular file, open
    tail          its last whole lines                 newest_row    the last row of a file of metrics
    json_object   the object in a JSON file            parse_json    the object in bytes that were read (and verified)
    header        entries of a safetensors file        parse_arrays  its arrays, from bytes that were read (and verified)
    record        a dataclass from an object of JSON, every value checked against the type of its field
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import stat
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn, TypeVar

import numpy as np

from freewheel.core import NDArray
from freewheel.errors import FileError
from freewheel.files.memory import free_memory, in_words
from freewheel.files.reach import LinkError, opened

T = TypeVar("T")

JSON_SIZE = 16 << 20  # bytes of a JSON file: a run may have large tables of contexts
VALUE = 4  # the fewest bytes per value of JSON on average: a file of nothing but brackets takes seconds to read
ROW = 1 << 20  # bytes at the end of metrics.jsonl in which the newest row is looked for
#: The metadata of a field that is itself a record, but whose values are among the other values in JSON.
PART: Mapping[str, bool] = types.MappingProxyType({"part": True})
DEPTH = 40  # the most levels of nested objects and arrays
DIGITS = 39  # the most digits of a whole number: 128 bits, as in the states of random generators
HEADER_SIZE = 16 << 20  # bytes of a safetensors header
MOST_ARRAYS = 100_000
#: Types of arrays, as safetensors calls them.
DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
    "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip


def content(path: Path, most: int | None = None) -> bytearray:
    """Return the bytes of a regular file (no link, pipe or device): at most `most`, by default what memory allows."""
    with regular(path) as file:
        size = _size(file, path, most)
        try:
            data = bytearray(size)
            count = file.readinto(data)  # type: ignore[attr-defined] # it is a buffered file
            more = file.read(1)
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror}") from None
        except MemoryError:
            raise FileError(f"{path} has {in_words(size)}, more than fit into memory") from None
    if count != size or more:
        raise FileError(f"{path} changed while it was read; try again")
    return data


def lines(path: Path, longest: int) -> Iterator[bytes]:
    """Yield the lines of a regular file with their ends; a line of more than `longest` bytes comes in pieces."""
    with regular(path) as file:
        while True:
            try:
                line = file.readline(longest)
            except OSError as error:
                raise FileError(f"{path} cannot be read: {error.strerror}") from None
            if not line:
                return
            yield line


def tail(path: Path, most: int) -> list[bytes]:
    """Return the whole lines in the last `most` bytes of a regular file, without their ends."""
    with regular(path) as file:
        try:
            begin = max(0, os.fstat(file.fileno()).st_size - most)
            file.seek(begin)
            found = file.read(most).split(b"\n")
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror}") from None
    return found[1 if begin else 0 : -1]


def newest_row(path: Path) -> dict[str, Any]:
    """Return the last whole row of a file of metrics, which may still grow; empty if there is none."""
    try:
        row = json.loads(tail(path, ROW)[-1])
    except (FileError, IndexError, ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def typed_content(path: Path, most: int) -> bytes:
    """Return the bytes of a file that the user has typed, which may also be a link, a pipe or standard input."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > most:
        raise FileError(f"{path} has more than {most:,} bytes")
    return data


def regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. A link is not followed, and a pipe does not block."""
    try:
        descriptor = opened(path, os.O_RDONLY | os.O_NONBLOCK)
    except LinkError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        code = error.errno if isinstance(error, OSError) else None
        if code == errno.ENOENT:
            raise FileError(f"{path} is missing") from None
        if code == errno.ENXIO:
            raise FileError(f"{path} is not a regular file; it is not read") from None
        raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(f"{path} is not a regular file; it is not read")
    return os.fdopen(descriptor, "rb")


def _size(file: BinaryIO, path: Path, most: int | None) -> int:
    size, free = os.fstat(file.fileno()).st_size, free_memory() if most is None else 0
    if most is not None and size > most:
        raise FileError(f"{path} has {size:,} bytes; such a file has at most {most:,}")
    if most is None and size > free:
        raise FileError(f"{path} has {in_words(size)}, but {in_words(free)} of memory are free")
    return size


def json_object(path: Path, most: int = JSON_SIZE) -> dict[str, Any]:
    """Return the object in a JSON file."""
    return parse_json(content(path, most), str(path), most)


def parse_json(data: bytes | bytearray, name: str, most: int = JSON_SIZE) -> dict[str, Any]:
    """Parse an object of JSON in UTF-8: no key twice, no NaN or infinity, no whole number beyond 128 bits, not nested
    too deeply, and no more values than fit into `most` bytes. `name` is the file, for messages."""
    if len(data) > most or sum(map(data.count, (b"[", b"{", b","))) > most // VALUE:
        raise FileError(f"{name} holds too much: at most {most:,} bytes and {most // VALUE:,} values")
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=functools.partial(_pairs, name),
            parse_constant=functools.partial(_constant, name),
            parse_float=functools.partial(_real, name),
            parse_int=functools.partial(_whole, name),
        )
    except RecursionError:
        raise FileError(f"{name} is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{name} is damaged: it is not text in UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise FileError(f"{name} is damaged: it is not JSON ({error.msg}, line {error.lineno})") from None
    if not isinstance(value, dict):
        raise FileError(f"{name} is damaged: it should hold a JSON object, not {show(value)}")
    _check_depth(value, name)
    return value


def _pairs(name: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        last = {key: at for at, (key, _) in enumerate(pairs)}
        twice = next(key for at, (key, _) in enumerate(pairs) if last[key] != at)
        raise FileError(f"{name} is damaged: it has {show(twice)} twice")
    return found


def _constant(name: str, word: str) -> NoReturn:
    raise FileError(f"{name} is damaged: it has the number {word}, which is not JSON")


def _real(name: str, word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise FileError(f"{name} is damaged: it has the number {show(word)}, which is too large")
    return value


def _whole(name: str, word: str) -> int:
    if len(word) > DIGITS + word.startswith("-"):
        raise FileError(f"{name} is damaged: it has a whole number of {len(word)} digits")
    return int(word)


def _check_depth(value: Any, name: str) -> None:
    """Check the depth, and that all text is valid: half of a surrogate pair cannot be printed or encoded."""
    level: list[Any] = [value]
    for _ in range(DEPTH):
        for text in (item for item in level if isinstance(item, str)):
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise FileError(f"{name} is damaged: {show(text)} is not valid text")
        objects = [item for item in level if isinstance(item, dict)]
        lists = [item for item in level if isinstance(item, list)]
        level = [*itertools.chain.from_iterable(lists), *itertools.chain.from_iterable(one.values() for one in objects)]
        level += itertools.chain.from_iterable(objects)  # their keys
        if not level:
            return
    raise FileError(f"{name} is nested too deeply")


def show(value: object) -> str:
    """Return a value of a file for a message: short, on one line, printable."""
    text = ascii(value) if isinstance(value, str) else " ".join(repr(value).split())
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class ArrayEntry:
    """One array of a safetensors file: its type, its shape, and where its bytes are (from the end of the header)."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


def header(path: Path) -> dict[str, ArrayEntry]:
    """Return the entries of a safetensors file, checked against its size; its arrays are not read."""
    with regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            begin = file.read(8)
            length = _header_length(begin, size, str(path))
            return _entries(file.read(length), size - 8 - length, str(path))
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror}") from None


def parse_arrays(data: bytes | bytearray, name: str) -> dict[str, NDArray]:
    """Return the arrays of a safetensors file as views of its bytes, not copies; views of a bytearray are writable."""
    length = _header_length(data[:8], len(data), name)
    entries = _entries(data[8 : 8 + length], len(data) - 8 - length, name)
    body = memoryview(data)[8 + length :]
    found = dict[str, NDArray]()
    for key, entry in entries.items():
        part = body[entry.start : entry.stop]
        if entry.dtype.kind == "b" and not (np.frombuffer(part, np.uint8) <= 1).all():
            raise FileError(f"{name} is damaged: {show(key)} has values that are neither true nor false")
        found[key] = np.frombuffer(part, entry.dtype).reshape(entry.shape)
    return found


def _header_length(begin: bytes | bytearray, size: int, name: str) -> int:
    if len(begin) < 8:
        raise FileError(f"{name} is damaged: {size} bytes are too few for safetensors")
    length = int.from_bytes(begin, "little")
    if not 2 <= length <= min(HEADER_SIZE, size - 8):
        raise FileError(f"{name} is not a whole safetensors file: its header should have {length:,} bytes")
    return length


def _entries(text: bytes | bytearray, size: int, name: str) -> dict[str, ArrayEntry]:
    """Return the entries of a header in its order; they must fill the file's `size` bytes without a gap."""
    listed = parse_json(text, f"the header of {name}", HEADER_SIZE)
    listed.pop("__metadata__", None)
    if len(listed) > MOST_ARRAYS:
        raise FileError(f"{name} is damaged: it lists {len(listed):,} arrays")
    found = {key: _entry(value, f"{show(key)} in {name}") for key, value in listed.items()}
    end = 0
    for key, entry in sorted(found.items(), key=lambda pair: (pair[1].start, pair[1].stop)):
        if entry.start != end:
            raise FileError(f"{name} is damaged: {show(key)} begins at byte {entry.start:,}, not at {end:,}")
        end = entry.stop
    if end != size:
        raise FileError(f"{name} is damaged: its arrays need {end:,} bytes, and it has {size:,}")
    return found


def _entry(value: Any, where: str) -> ArrayEntry:
    fields = record(_Listed, value, where)
    start, stop = fields.data_offsets
    if fields.dtype not in DTYPES:
        raise FileError(f"{where} has the type {show(fields.dtype)}; choose from {', '.join(DTYPES)}")
    dtype = np.dtype(DTYPES[fields.dtype])
    if len(fields.shape) > 32 or any(side < 0 for side in fields.shape):
        raise FileError(f"{where} has the shape {show(fields.shape)}")
    if not 0 <= start <= stop or stop - start != math.prod(fields.shape) * dtype.itemsize:
        need = f"{show(fields.shape)} of {fields.dtype} are {math.prod(fields.shape) * dtype.itemsize:,} bytes"
        raise FileError(f"{where} has {stop - start:,} bytes, but {need}")
    return ArrayEntry(dtype, fields.shape, start, stop)


@dataclass(frozen=True)
class _Listed:
    """An array as the header of a safetensors file lists it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def flat(record: Any) -> dict[str, Any]:
    """Return the values of a dataclass by the names that they have in JSON, in order."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        found |= vars(value) if field.metadata == PART else {field.name: value}
    return found


def hints_of(kind: Any) -> dict[str, Any]:
    """Return the types of the values that `flat` returns."""
    hints, parts, found = _hints(kind), _parts(kind), dict[str, Any]()
    for field in dataclasses.fields(kind):
        found |= hints_of(parts[field.name]) if field.name in parts else {field.name: hints[field.name]}
    return found


def record(kind: type[T], data: object, where: str) -> T:
    """Build a dataclass from a JSON object: it must have every field without a default, no unknown key, valid types."""
    if not isinstance(data, Mapping):
        raise FileError(f"{where} should be an object, not {show(data)}")
    hints, fields = hints_of(kind), dataclasses.fields(typing.cast(Any, kind))
    parts = _parts(typing.cast(Any, kind))
    names = {field.name for field in fields if field.init and field.name not in parts}
    known = names.union(*map(hints_of, parts.values()))
    if extra := [key for key in data if key not in known]:
        raise FileError(f"{where} has {show(extra[0])}, which is not known here")
    needed = (dataclasses.MISSING, dataclasses.MISSING)
    for field in fields:
        if field.name in names and field.name not in data and (field.default, field.default_factory) == needed:
            raise FileError(f"{where} has no '{field.name}'")
    values = {key: value_of(hints[key], value, f"{key} of {where}") for key, value in data.items() if key in names}
    for name, own in parts.items():
        values[name] = record(own, {key: value for key, value in data.items() if key in hints_of(own)}, where)
    return kind(**values)


_hints = functools.cache(typing.get_type_hints)


@functools.cache
def _parts(kind: Any) -> dict[str, Any]:
    """Return the types of the fields marked PART, by name."""
    return {field.name: _hints(kind)[field.name] for field in dataclasses.fields(kind) if field.metadata == PART}


def value_of(kind: Any, value: object, where: str) -> Any:
    """Convert a value of JSON to this type (a class of plain values, a dataclass, a tuple, a mapping from texts, a
    union or a Literal of them; Any is not checked)."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in inner:
            return None
        others = [one for one in inner if one is not types.NoneType]
        fitting = [one for one in others if _plausible(one, value)]
        return value_of((fitting or others)[0], value, where)
    if origin is tuple:
        return _tuple(inner, value, where)
    if origin in (dict, Mapping):
        return _mapping(inner[1], value, where)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return record(typing.cast(type[Any], kind), value, where)
    if not _plausible(kind, value):
        raise FileError(f"{where} should be {_described(kind)}, not {show(value)}")
    return float(typing.cast(float, value)) if kind is float else value


def _tuple(inner: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise FileError(f"{where} should be a list, not {show(value)}")
    kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
    if len(kinds) != len(value):
        raise FileError(f"{where} should have {len(kinds)} values, not {show(value)}")
    return tuple(value_of(one, item, f"{where} ({i})") for i, (one, item) in enumerate(zip(kinds, value, strict=True)))


def _mapping(inner: Any, value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise FileError(f"{where} should be an object, not {show(value)}")
    return {key: value_of(inner, item, f"{show(key)} in {where}") for key, item in value.items()}


def _plausible(kind: Any, value: object) -> bool:
    if typing.get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(kind))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    if typing.get_origin(kind) is tuple:
        return isinstance(value, list | tuple)
    if typing.get_origin(kind) in (dict, Mapping):
        return isinstance(value, Mapping)
    if dataclasses.is_dataclass(kind):
        return isinstance(value, Mapping)
    return isinstance(value, kind)


def _described(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(show, typing.get_args(kind)))
    known = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return known.get(kind, getattr(kind, "__name__", str(kind)))
