"""Calls that change a run directory, on a disk that takes a part of what it is given."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from freewheel.files import disk


@pytest.fixture
def full() -> Iterator[None]:
    """No file may be longer than 100 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full")
def test_what_a_full_disk_has_taken_a_part_of_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with disk.open_end(path) as file:
        disk.append(file, b"whole\n")
        with pytest.raises(OSError, match="File too large"):
            disk.append(file, b"x" * 200 + b"\n")
        assert path.read_bytes() == b"whole\n"
        disk.append(file, b"again\n")
    disk.show(tmp_path / "status.json", b"{}")
    with pytest.raises(OSError, match="File too large"):
        disk.show(tmp_path / "status.json", b" " * 200)
    assert (tmp_path / "status.json").read_bytes() == b"{}"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["lines", "status.json"]
    assert path.read_bytes() == b"whole\nagain\n"
