"""Who wrote a file, and whether it is as it was written.

What this user's Freewheel has written on this machine is signed with a key that only this user can read.

The key is in $XDG_STATE_HOME/freewheel (~/.local/state/freewheel) and never leaves it. A signature (HMAC-SHA256 of the values in
the file, in one order) is kept in the file itself, so it stays valid when the file is moved or copied, and not when a value is
changed. Where no key can be kept, a key of this process is used, and what it signs is known to this process only.

A checksum of the values, which needs no key, shows damage wherever the file is read; files of earlier versions have none.
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

Purpose = Literal["config", "policy", "federation"]  # a signature for one is none for another


def signature(purpose: Purpose, data: Mapping[str, Any]) -> str:
    """Of these values, by this user on this machine."""
    return _signature(purpose, data, _key(state_folder()) or _own_key())


def made_here(purpose: Purpose, data: Mapping[str, Any], given: object) -> bool:
    """Whether this is the signature of exactly these values by this user on this machine."""
    if not isinstance(given, str) or not given.isascii():
        return False
    keys = [key for key in (_key(state_folder(), create=False), _own_key()) if key]
    return any(hmac.compare_digest(given, _signature(purpose, data, key)) for key in keys)


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """These values and their checksum."""
    return {**data, CHECKSUM: _checksum(data)}


def unsealed(data: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The values of a file without their checksum; FileError if they are not those that were written."""
    values = {name: value for name, value in data.items() if name != CHECKSUM}
    if CHECKSUM in data and data[CHECKSUM] != _checksum(values):
        remedy = f"restore it from a copy; if you have changed it yourself, take '{CHECKSUM}' out of it"
        raise FileError(f"{file} is not as it was written, its checksum is another: {remedy}")
    return values


def _checksum(data: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(data))  # keys that are numbers become text, and are sorted as such
    return hashlib.sha256(json.dumps(as_read, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def refusal(file: str, what: str) -> ConsentError:
    """The error for code, or a place on disk, that is named by a file which nobody here has signed."""
    why = "it was not written by you on this machine, or was changed since"
    remedy = "look at it, then add --trust (trust=True in Python)"
    return ConsentError(f"{file} names code or places of its own, {what}, and {why}: {remedy}")


def state_folder() -> Path | None:
    """Where this user's programs keep what lasts; None: there is no such place."""
    if place := os.environ.get("XDG_STATE_HOME"):
        return Path(place) / "freewheel"
    try:
        return Path.home() / ".local" / "state" / "freewheel"
    except RuntimeError:  # nobody's home
        return None


def _signature(purpose: Purpose, data: Mapping[str, Any], key: bytes) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, f"freewheel {purpose}\n{text}".encode(), hashlib.sha256).hexdigest()


@functools.cache
def _own_key() -> bytes:
    return secrets.token_bytes(SIZE)


def _key(folder: Path | None, *, create: bool = True) -> bytes | None:
    """The key of this user; a new one where there is none that only this user can read."""
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
    """Of two processes that make one at the same time, both get the same; a damaged or public one is replaced."""
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
