"""All calls that change a run directory, in one place, so that tests can make each of them fail.

Call them as `disk.write(...)`, never by a name imported from here, or the tests cannot reach them. They raise OSError;
the caller decides what a failure means. Folders are readable only by their owner. No call follows a link (reach.py).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from freewheel.files.reach import folder_of, opened, typed

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write(path: Path, data: bytes | memoryview) -> None:
    """Write a new file, which is on the disk when this returns; raise FileExistsError if there is one."""
    with _new(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _new(path: Path) -> BinaryIO:
    return os.fdopen(opened(path, NEW), "wb")


def open_end(path: Path) -> BinaryIO:
    """Open a file without a buffer, to append to and to read; make it if there is none. A file with a second name (a
    hard link) is refused, because nobody knows what else would change with it."""
    descriptor = opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK)
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode) and about.st_nlink <= 1:
        return os.fdopen(descriptor, "a+b", buffering=0)
    os.close(descriptor)
    what = "has a second name, a hard link," if stat.S_ISREG(about.st_mode) else "is not a regular file"
    raise OSError(errno.EMLINK, f"{path} {what} and is not written to; put a copy in its place")


def begin(path: Path) -> BinaryIO:
    """Make a new file in place of whatever is there."""
    remove(path)
    return _new(path)


def append(file: BinaryIO, data: bytes) -> None:
    """Append to an open file, visible to readers. After an error, cut off the written part if the disk allows it."""
    rest, end = memoryview(data), file.seek(0, os.SEEK_END)
    try:
        while rest:
            rest = rest[file.write(rest) :]  # a disk that is nearly full accepts a part
        file.flush()
    except OSError:
        with suppress(OSError):  # even a full disk can make a file shorter
            file.truncate(end)
        raise


def cut(file: BinaryIO, size: int) -> None:
    """Cut an open file to its first `size` bytes."""
    file.truncate(size)


def make_folder(path: Path, mode: int = 0o700) -> None:
    """Make a folder; its parent exists."""
    with folder_of(path) as (folder, name):
        os.mkdir(name, mode, dir_fd=folder)


def rename(old: Path, new: Path) -> None:
    """Move a file or folder; a file at `new` is replaced in one step."""
    with folder_of(old) as (source, name), folder_of(new) as (target, to):
        os.replace(name, to, src_dir_fd=source, dst_dir_fd=target)


def link(old: Path, new: Path) -> None:
    """Give the content of a file a second name."""
    with folder_of(old) as (source, name), folder_of(new) as (target, to):
        os.link(name, to, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)


def copy(old: Path, new: Path) -> None:
    """Copy the content of a file to a new file, which is on the disk when this returns."""
    with os.fdopen(opened(old, os.O_RDONLY), "rb") as source, _new(new) as file:
        shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())


def point(path: Path, target: str) -> None:
    """Make a symbolic link at `path`."""
    with folder_of(path) as (folder, name):
        os.symlink(target, name, dir_fd=folder)


def sync(folder: Path) -> None:
    """Flush the names in this folder to the disk."""
    descriptor = opened(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    with suppress(FileNotFoundError), folder_of(path) as (folder, name):
        if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def show(path: Path, data: bytes) -> None:
    """Replace a file like `replace`, but without waiting for the disk: it may be lost if the machine fails."""
    with folder_of(path) as (folder, name):
        part = f".part-{name}"
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)
        try:
            with os.fdopen(os.open(part, NEW, 0o666, dir_fd=folder), "wb") as file:
                file.write(data)
            os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)


def replace(path: Path, data: bytes) -> None:
    """Replace a file, whose content is at any moment the old one or the new one."""
    part = path.with_name(f".part-{path.name}")
    remove(part)
    try:
        write(part, data)
        rename(part, path)
    finally:
        with suppress(FileNotFoundError), folder_of(part) as (folder, name):
            os.unlink(name, dir_fd=folder)
    sync(path.parent)


def deliver(path: Path, data: bytes) -> None:
    """Write a file that the user has named: a device (/dev/stdout) is written to, everything else is replaced."""
    if path.is_relative_to("/dev"):
        path.write_bytes(data)
    else:
        replace(typed(path.parent) / path.name, data)
