"""The walk of a new user: the limits that it holds, and what `make wheel` needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.walk import Walk, blocks, size_of, verdicts
from tests.support.places import ROOT


@pytest.mark.parametrize(("size", "seconds", "found"), [(1.1e9, 170.0, 0), (1.3e9, 170.0, 1), (1.3e9, 190.0, 2)])
def test_what_is_beyond_a_limit_is_said(size: float, seconds: float, found: int) -> None:
    assert len(verdicts(int(size), seconds)) == found


def test_a_line_is_run_as_typed_and_changes_the_variables_of_the_next(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    walk.run("export GREETING='two words' && cd /", tmp_path)
    assert walk.run('echo "$GREETING in $PWD"', tmp_path) == f"two words in {tmp_path}\n"
    with pytest.raises(SystemExit, match="exit code 1"):
        walk.run("false && true", tmp_path)


def test_the_first_block_installs_the_core_and_every_package() -> None:
    assert "pip install . ./packages/*" in blocks()[0][1].splitlines()


def test_a_file_with_two_names_has_one_size(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x" * 1000)
    before = size_of(tmp_path)
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    assert size_of(tmp_path) == before == 1000


def test_a_wheel_needs_no_environment_of_a_developer() -> None:
    plan = subprocess.run(
        ["make", "-n", "wheel", "walk"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert "pip wheel" in plan.stdout
    assert "venv" not in plan.stdout
