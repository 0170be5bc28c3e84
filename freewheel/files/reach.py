"""Opens files from folder to folder, with each folder held open, and never through a link.

So nothing in a run directory leads out of it, even if it is replaced at that very moment. Links in a path that the user
has typed are resolved first, once, by `typed`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from freewheel.errors import FileError

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LINK = errno.ELOOP, errno.ENOTDIR  # the errors of opening a link, to a file or to a folder


class LinkError(FileError, OSError):
    """A file is a link, or is reached through one. It is also an OSError, for callers that treat all failed writes alike."""

    def __init__(self, link: Path) -> None:
        super().__init__(errno.ELOOP, f"{link} is a link and is not followed; replace it with a real file or folder")

    def __str__(self) -> str:
        return str(self.strerror)


def typed(path: Path) -> Path:
    """Resolve the links in a path that the user has typed; what lies below that path may be from somebody else."""
    real = os.path.realpath(path)
    return path if real == os.path.abspath(path) else Path(real)


@contextmanager
def folder_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the open folder of a file, and the file's name there; raise LinkError if a folder on the way is a link."""
    *folders, name = path.relative_to(path.anchor).parts or (".",)
    here, folder = Path(path.anchor), os.open(path.anchor or ".", FOLDER)
    try:
        for part in folders:
            here = here / part
            try:
                below = os.open(part, FOLDER, dir_fd=folder)
            except NotADirectoryError:
                if _is_link(folder, part):
                    raise LinkError(here) from None
                raise
            os.close(folder)
            folder = below
        yield folder, name
    finally:
        os.close(folder)


def check_folder(path: Path) -> None:
    """Raise LinkError if a folder, which need not be there, is a link or is reached through one."""
    with suppress(FileNotFoundError, NotADirectoryError), folder_of(path / "file"):
        pass


def opened(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file and return its descriptor; raise LinkError if it is a link."""
    with folder_of(path) as (folder, name):
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
        except OSError as error:
            raise LinkError(path) if error.errno in LINK and _is_link(folder, name) else error from None


def _is_link(folder: int, name: str) -> bool:
    return stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode)
