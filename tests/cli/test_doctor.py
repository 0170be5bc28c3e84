"""The doctor sees what is there, and says what to do about what is not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from freewheel.cli import doctor
from tests.support.places import ROOT


def findings() -> dict[str, tuple[bool, str]]:
    return {what: (well, how) for well, what, how in doctor.findings()}


def test_every_package_is_told_with_its_version() -> None:
    found = findings()
    assert found["python"] == (True, f"{platform.python_version()} on {platform.system()} {platform.release()}")
    for name in doctor.REQUIRED:
        assert found[name] == (True, importlib.metadata.version(name))


def test_the_required_are_those_of_the_project() -> None:
    """typing-extensions comes with torch and is not worth a line."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block
    assert {*re.findall(r'"([\w-]+)', block[1])} - {"typing-extensions"} == {*doctor.REQUIRED}


def test_the_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = namedtuple("memory", "available total")  # noqa: PYI024
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(3 * 2**30, 16 * 2**30))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    found = findings()
    assert found["cores"][1].startswith("3 usable of 8")
    assert found["memory"] == (True, "3.0 GB free of 16.0 GB")
    assert found["gpu"][0]


def test_too_little_memory_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = namedtuple("memory", "available total")  # noqa: PYI024
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(2**29, 16 * 2**30))
    assert findings()["memory"] == (False, "512 MB free of 16.0 GB")


def test_what_is_missing_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == "tyro":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = findings()
    assert found["tyro"] == (False, "missing: pip install tyro")
    assert found["gpu"] == (True, "unknown (torch is missing)")
    for name, purpose in doctor.OPTIONAL.items():
        assert found[name] == (True, f"not installed; for {purpose}")


@pytest.mark.parametrize(
    ("text", "told"), [("max 100000\n", ""), ("150000 100000\n", ", limited to 1.5 by the container")]
)
def test_a_containers_limit_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, told: str) -> None:
    limit = tmp_path / "cpu.max"
    limit.write_text(text)
    monkeypatch.setattr(doctor, "CPU_LIMIT", limit)
    assert findings()["cores"][1].endswith(f"of {os.cpu_count()}{told}")
