"""Who wrote a file is known by a key that only its user can read: by no field of the file, and without one it is nobody."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from freewheel.errors import FileError
from freewheel.files import signatures
from tests.support.runs import python

DATA = {"env": "mine:World", "steps": 100, "lr": 3e-4, "hidden": [64, 64], "none": None}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "freewheel"


def in_another_process(code: str) -> str:
    return python("-c", f"from freewheel.files import signatures; DATA = {DATA!r}; {code}").stdout.strip()


def test_what_was_signed_is_known_in_every_process_and_only_unchanged(state: Path) -> None:
    signature = signatures.signature("config", DATA)
    assert signatures.made_here("config", DATA, signature)
    assert in_another_process(f"print(signatures.made_here('config', DATA, {signature!r}))") == "True"
    assert signatures.made_here("config", dict(reversed(DATA.items())), signature), "the order of keys does not count"
    for change in ({"env": "os:system"}, {"steps": 101}, {"steps": "100"}, {"more": 1}):
        assert not signatures.made_here("config", DATA | change, signature)
    assert not signatures.made_here("policy", DATA, signature), "a signature for one purpose is none for another"
    for other in (None, "", "x", 3, ["x"], signature[:-1], signature.upper(), "é"):
        assert not signatures.made_here("config", DATA, other)


def test_the_key_is_private(state: Path) -> None:
    signatures.signature("config", DATA)
    assert (state / "key").stat().st_mode & 0o777 == 0o600
    assert state.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in state.iterdir()] == ["key"]


@pytest.mark.parametrize("damage", ["public", "short", "link", "pipe"])
def test_a_key_that_others_may_know_counts_no_more(state: Path, damage: str) -> None:
    signature = in_another_process("print(signatures.signature('config', DATA))")
    key = state / "key"
    if damage == "public":
        key.chmod(0o644)
    elif damage == "short":
        key.write_bytes(b"x")
    else:
        key.rename(state / "elsewhere")
        os.mkfifo(key, 0o600) if damage == "pipe" else key.symlink_to("elsewhere")
    assert not signatures.made_here("config", DATA, signature)
    if damage in ("public", "short"):
        assert signatures.made_here("config", DATA, signatures.signature("config", DATA)), "a new key replaces it"
        assert key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("home", ["/proc/no/such/place", "/dev/null/state"])
def test_without_a_place_for_a_key_a_process_knows_only_its_own(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", home)
    signature = signatures.signature("config", DATA)
    assert signatures.made_here("config", DATA, signature)
    assert in_another_process(f"print(signatures.made_here('config', DATA, {signature!r}))") == "False"


def test_two_that_make_a_key_at_the_same_time_get_the_same(state: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: signatures.signature("config", DATA), range(32)))
    assert len(found) == 1
    assert [path.name for path in state.iterdir()] == ["key"]


@pytest.mark.parametrize("values", [{"a": 1, "b": [0.1, None, "ä"]}, {"counts": {10: 1, 9: 2}}, {}])
def test_a_checksum_survives_a_walk_through_a_file_and_shows_any_change(values: dict[str, Any]) -> None:
    read = json.loads(json.dumps(signatures.sealed(values), indent=3))
    assert signatures.unsealed(read, "f.json") == json.loads(json.dumps(values))
    assert signatures.unsealed({"a": 2}, "f.json") == {"a": 2}, "earlier versions had none"
    for other in ({**read, "a": 2}, {**read, "sha256": None}, {**read, "more": 1}):
        with pytest.raises(FileError, match=r"^f\.json has changed since it was written, .* take 'sha256' out of it$"):
            signatures.unsealed(other, "f.json")
