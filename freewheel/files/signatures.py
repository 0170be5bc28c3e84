"""Signatures and checksums: who wrote a file, and whether it has changed since.

Freewheel signs what it writes for this user on this machine with a key that only this user can read.

The key is in $XDG_STATE_HOME/freewheel (~/.local/state/freewheel) and never leaves it. A signature (HMAC-SHA256 of the
values, with sorted keys) is part of the file, so it stays valid when the file is moved or copied, but not when a value
changes. If no key can be stored, each process uses a temporary key, and only that process recognises its signatures.

A checksum of the values needs no key and shows damage wherever the file is read; files of earlier versions have none.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from freewheel.errors import ConsentError, FileError

FIELD = "origin"  # where a file keeps its signature ...
CHECKSUM = "sha256"  # ... and its checksum
SIZE = 32  # bytes of a key

Purpose = Literal["config", "policy", "federation"]  # a signature for one is not valid for another


def signature(purpose: Purpose, data: Mapping[str, Any]) -> str:
    """Return the signature of these values by this user on this machine."""
    return _signature(purpose, data, _key(state_folder()) or _own_key())


def made_here(purpose: Purpose, data: Mapping[str, Any], given: object) -> bool:
    """Return whether this is the signature of exactly these values by this user on this machine."""
    if not isinstance(given, str) or not given.isascii():
        return False
    keys = [key for key in (_key(state_folder(), create=False), _own_key()) if key]
    return any(hmac.compare_digest(given, _signature(purpose, data, key)) for key in keys)


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return these values and their checksum."""
    return {**data, CHECKSUM: _checksum(data)}


def unsealed(data: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return the values of a file without their checksum; raise FileError if the checksum does not match."""
    values = {name: value for name, value in data.items() if name != CHECKSUM}
    if CHECKSUM in data and data[CHECKSUM] != _checksum(values):
        remedy = f"restore it from a copy; if you have changed it yourself, take '{CHECKSUM}' out of it"
        raise FileError(f"{file} has changed since it was written, its checksum differs: {remedy}")
    return values


def _checksum(data: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(data))  # keys that are numbers become text, and are sorted as text
    return hashlib.sha256(json.dumps(as_read, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def refusal(file: str, what: str) -> ConsentError:
    """Return the error for code, or a place on disk, that is named by a file without a valid signature."""
    why = "it was not written by you on this machine, or was changed since"
    remedy = "look at it, then add --trust (trust=True in Python)"
    return ConsentError(f"{file} names code or places on disk, {what}, and {why}: {remedy}")


def state_folder() -> Path | None:
    """Return the folder for this user's lasting state; None: there is no such place."""
    if place := os.environ.get("XDG_STATE_HOME"):
        return Path(place) / "freewheel"
    try:
        return Path.home() / ".local" / "state" / "freewheel"
    except RuntimeError:  # the user has no home folder
        return None


def _signature(purpose: Purpose, data: Mapping[str, Any], key: bytes) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, f"freewheel {purpose}\n{text}".encode(), hashlib.sha256).hexdigest()


@functools.cache
def _own_key() -> bytes:
    return secrets.token_bytes(SIZE)


def _key(folder: Path | None, *, create: bool = True) -> bytes | None:
    """Return the key of this user; make a new one if there is none that only this user can read."""
    if folder is None:
        return None
    try:
        return _read(folder / "key") or (_made(folder) if create else None)
    except (OSError, ValueError):
        return None


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        about = os.fstat(descriptor)
        private = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
        key = os.read(descriptor, SIZE + 1) if private else b""
    finally:
        os.close(descriptor)
    return key if len(key) == SIZE else None


def _made(folder: Path) -> bytes | None:
    """Make a key. Two processes that do so at the same time get the same key; a damaged or public key is replaced."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, part = folder / "key", folder / f".part-{secrets.token_hex(8)}"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SIZE))
        try:
            os.link(part, path)
        except FileExistsError:
            if _read(path) is None:
                os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return _read(path)
