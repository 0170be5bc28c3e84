"""Every call that changes a run directory, in one place: tests let each of them fail, one after the other.

Call them as `disk.write(...)`, never under a name of your own, or the tests cannot reach them. They raise OSError; who calls
decides what a failure costs. Folders are readable only by their owner.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO


def write(path: Path, data: bytes | memoryview) -> None:
    """A new file, on the disk when this returns; FileExistsError if there is one."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def open_end(path: Path) -> BinaryIO:
    """A file to append to and to read, made if there is none; it has no buffer of its own."""
    return path.open("a+b", buffering=0)


def append(file: BinaryIO, data: bytes) -> None:
    """To the end of an open file, for readers to see; a failure may leave a part of it there."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]  # a disk that is nearly full takes a part
    file.flush()


def cut(file: BinaryIO, size: int) -> None:
    """An open file, back to its first so many bytes."""
    file.truncate(size)


def make_folder(path: Path, mode: int = 0o700) -> None:
    """A new folder; its parent exists."""
    path.mkdir(mode=mode)


def rename(old: Path, new: Path) -> None:
    """Move a file or folder; a file at `new` is replaced in one step."""
    os.replace(old, new)


def link(old: Path, new: Path) -> None:
    """A second name for the content of a file."""
    os.link(old, new)


def copy(old: Path, new: Path) -> None:
    """The content of a file as a new file, on the disk when this returns."""
    with old.open("rb") as source, new.open("xb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())


def point(path: Path, target: str) -> None:
    """A symbolic link at `path`."""
    os.symlink(target, path)


def sync(folder: Path) -> None:
    """The names in this folder, onto the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """A file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def show(path: Path, data: bytes) -> None:
    """The same as `replace` for those who read it now: it may be lost with the machine, and nobody waits for the disk."""
    part = path.with_name(f".part-{path.name}")
    part.write_bytes(data)
    os.replace(part, path)


def replace(path: Path, data: bytes) -> None:
    """A file whose content is, at any moment, the old one or the new one."""
    part = path.with_name(f".part-{path.name}")
    remove(part)
    try:
        write(part, data)
        rename(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync(path.parent)
