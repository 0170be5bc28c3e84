"""Nothing is read, written or removed through a link, and what the user has typed may contain links."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from freewheel.errors import FileError
from freewheel.files import disk, read
from freewheel.files.lock import FileLock
from freewheel.files.reach import LinkError, check_folder, typed

CALLS: dict[str, Callable[[Path], object]] = {
    "write": lambda path: disk.write(path, b"new"),
    "open_end": lambda path: disk.open_end(path).close(),
    "make_folder": disk.make_folder,
    "rename": lambda path: disk.rename(path, path.with_name("other")),
    "rename to": lambda path: disk.rename(Path(f"{path}".partition("/run/")[0]) / "source", path),
    "link": lambda path: disk.link(path, path.with_name("other")),
    "copy": lambda path: disk.copy(path, path.with_name("other")),
    "point": lambda path: disk.point(path, "file"),
    "sync": disk.sync,
    "remove": disk.remove,
    "show": lambda path: disk.show(path, b"new"),
    "replace": lambda path: disk.replace(path, b"new"),
    "begin": lambda path: disk.begin(path).close(),
    "read": read.content,
    "lock": FileLock,
    "check": check_folder,
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a file, and a run that has links to both."""
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    run.mkdir()
    (outside / "file").write_text("old")
    (tmp_path / "source").write_text("new")
    (run / "folder").symlink_to(outside)
    (run / "file").symlink_to(outside / "file")
    return outside


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["folder/file", "folder/new", "folder/sub/file"])
def test_no_call_goes_through_a_folder_that_is_a_link(call: str, name: str, tmp_path: Path, outside: Path) -> None:
    with pytest.raises(LinkError, match="run/folder is a link and is not followed"):
        CALLS[call](tmp_path / "run" / name)
    assert names(outside) == ["file"]
    assert (outside / "file").read_text() == "old"


@pytest.mark.parametrize("call", CALLS)
def test_a_file_that_is_a_link_is_refused_or_replaced(call: str, tmp_path: Path, outside: Path) -> None:
    path = tmp_path / "run" / "file"
    if call in ("show", "replace", "begin", "remove", "rename", "rename to", "link"):
        CALLS[call](path)  # of the link itself
    else:
        with pytest.raises((LinkError, FileExistsError)):
            CALLS[call](path)
    assert (outside / "file").read_text() == "old"


def test_a_file_with_a_second_name_is_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    os.link(tmp_path / "a", tmp_path / "b")
    with pytest.raises(OSError, match="b has a second name, a hard link, and is not written to"):
        disk.open_end(tmp_path / "b")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is not a regular file"):
        disk.open_end(tmp_path / "pipe")


def test_a_part_that_was_laid_out_before_is_not_written_through(tmp_path: Path, outside: Path) -> None:
    for write in (disk.show, disk.replace):
        (tmp_path / "run" / ".part-status.json").symlink_to(outside / "file")
        write(tmp_path / "run" / "status.json", b"{}")
        assert (tmp_path / "run" / "status.json").read_bytes() == b"{}"
    assert (outside / "file").read_text() == "old"


def test_removing_a_folder_removes_nothing_that_it_links_to(tmp_path: Path, outside: Path) -> None:
    disk.remove(tmp_path / "run")
    disk.remove(tmp_path / "run")
    assert names(tmp_path) == ["file", "outside", "source"]


def test_what_is_typed_may_contain_links(tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = typed(tmp_path / "run" / "folder")
    assert place == outside
    assert typed(tmp_path / "outside" / "new") == tmp_path / "outside" / "new"
    disk.replace(place / "new", b"new")
    monkeypatch.chdir(tmp_path)
    assert typed(Path("outside/..")) == Path("outside/..")
    assert read.content(Path("outside/new")) == read.content(Path("run/../outside/new")) == b"new"
    disk.deliver(Path("run/folder/page"), b"page")
    assert (outside / "page").read_bytes() == b"page"
    disk.deliver(Path("run/file"), b"page")
    assert (outside / "file").read_text() == "old"


def test_an_error_about_a_link_is_a_failure_of_the_disk_and_of_the_file(tmp_path: Path) -> None:
    error = LinkError(tmp_path)
    assert isinstance(error, OSError)
    assert isinstance(error, FileError)
    assert str(error) == error.strerror
