"""Checkpoints that are whole or absent: written to a temporary folder, hashed, renamed; read only if every byte verifies."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from freewheel.core import NDArray
from freewheel.errors import CheckpointError, FileError, UsageError
from freewheel.files.read import content, header, json_object, parse_arrays, parse_json, record, show, value_of

WEIGHTS, POLICY, MANIFEST = "weights.safetensors", "policy.json", "manifest.json"
FORMAT = 1
PART = ".part-"  # begins the name of what is being written or removed; readers look only at names made of digits


@dataclass(frozen=True)
class Checkpoint:
    """A saved checkpoint, every byte of it verified. `warnings` name newer ones that were skipped because they are damaged."""

    step: int
    params: dict[str, NDArray]
    about: dict[str, Any]
    path: Path
    warnings: tuple[str, ...] = ()


def fingerprint(params: Mapping[str, NDArray]) -> str:
    """SHA-256 over names, types, shapes and bytes: equal if and only if the weights are."""
    digest = hashlib.sha256()
    for name, array in sorted(params.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def make_private(folder: Path) -> Path:
    """Create a folder and its missing parents, readable only by their owner (0700)."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync(folder.parent)
    return folder


def save(
    root: Path, step: int, params: Mapping[str, NDArray], about: Mapping[str, Any], *, best: bool = False, keep: int = 2
) -> Path:
    """Write `root/<step>` and point `latest` (and `best`, if it is) at it; one writer at a time.

    If the process is killed at any moment, the disk holds the old checkpoint or the new one. The newest `keep` stay, and those
    that a link points to.
    """
    files = _encoded(params, about)
    folder = make_private(root) / str(step)
    _place(folder, files)
    for link in ("latest", "best") if best else ("latest",):
        _point(root, link, step)
    _prune(root, keep)
    return folder


def write(
    folder: Path,
    params: Mapping[str, NDArray],
    about: Mapping[str, Any],
    others: Mapping[str, bytes] | None = None,
    *,
    mode: int = 0o700,
) -> None:
    """Write or replace one checkpoint, perhaps with files that are not its own."""
    _place(folder, _encoded(params, about, others or {}), mode)


def _encoded(
    params: Mapping[str, NDArray], about: Mapping[str, Any], others: Mapping[str, bytes] = types.MappingProxyType({})
) -> dict[str, bytes]:
    """The files of a checkpoint; the manifest is the last."""
    # In C order: safetensors copies the memory of an array and ignores its strides.
    arrays = {name: np.asarray(array, order="C") for name, array in params.items()}
    files = {WEIGHTS: safetensors.numpy.save(arrays), POLICY: _json(about)}
    listed = {name: _entry(data) for name, data in files.items()}
    return {**files, **others, MANIFEST: _json({"format": FORMAT, "files": listed})}


def _place(folder: Path, files: Mapping[str, bytes], mode: int = 0o700) -> None:
    if not _holds(folder, files):
        _publish(folder, files, mode)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def _entry(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Whether exactly these files are there already, undamaged."""
    try:
        return all(content(folder / name, len(data)) == data for name, data in files.items())
    except FileError:
        return False


def _publish(folder: Path, files: Mapping[str, bytes], mode: int) -> None:
    part, old = (folder.with_name(f"{PART}{folder.name}{suffix}") for suffix in ("", "-old"))
    _remove(part)
    try:
        part.mkdir(mode=mode)
        for name, data in files.items():
            with open(part / name, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        _sync(part)
        if folder.exists():  # damaged, or with other contents: a directory cannot be replaced in one call
            _remove(old)
            os.rename(folder, old)
        os.rename(part, folder)
    finally:
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        _remove(part)
    _sync(folder.parent)
    if old.exists():
        _remove(old)


def _point(root: Path, link: str, step: int) -> None:
    part = root / f"{PART}{link}"
    part.unlink(missing_ok=True)
    os.symlink(str(step), part)
    os.replace(part, root / link)
    _sync(root)


def _prune(root: Path, keep: int) -> None:
    """Remove old checkpoints: each is renamed before it is emptied, so that no reader finds half of one."""
    kept = {_target(root, "latest"), _target(root, "best"), *_steps(root)[:keep]}
    for step in _steps(root):
        if step not in kept:
            os.rename(root / str(step), root / f"{PART}{step}")
    for leftover in root.glob(f"{PART}*"):
        _remove(leftover)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def load(root: Path, which: str = "latest") -> Checkpoint:
    """The checkpoint `which` ("latest", "best" or a step), else the newest that verifies, with warnings to show."""
    if which not in ("latest", "best") and not _is_step(which):
        raise UsageError(f"there is no checkpoint '{which}': ask for latest, best or the number of a step")
    if _is_step(which) and int(which) not in (steps := _steps(root)):
        known = ", ".join(map(str, steps)) or "none"
        raise UsageError(f"there is no checkpoint of step {which} in {root}; there is {known}")
    wanted = int(which) if _is_step(which) else _target(root, which)
    problems = [] if wanted is not None else [f"{root / which} is missing or is not a link to a step"]
    others = [step for step in _steps(root) if step != wanted]
    for step in others if wanted is None else [wanted, *others]:
        try:
            found = read(root / str(step))
        except FileError as error:
            problems.append(str(error))
        else:
            fallback = [f"using step {step} instead of '{which}'"] if problems else []
            return replace(found, warnings=(*problems, *fallback))
    found_nothing = f"no checkpoint under {root} verifies: restore one from a copy, or start a new run"
    raise CheckpointError("\n  ".join([found_nothing, *problems]))


def read(folder: Path) -> Checkpoint:
    """One checkpoint, or a FileError that names the file that is damaged or does not match the manifest."""
    listed = _listed(folder / MANIFEST)
    files = {name: _verified(folder / name, entry) for name, entry in listed.items()}
    params = parse_arrays(files[WEIGHTS], str(folder / WEIGHTS))
    about = parse_json(files[POLICY], str(folder / POLICY))
    # An export has a name of its own.
    step = (
        int(folder.name) if _is_step(folder.name) else value_of(int, about.get("step", 0), f"step of {folder / POLICY}")
    )
    return Checkpoint(step, params, about, folder)


@dataclass(frozen=True)
class _Entry:
    """What the manifest says about a file."""

    size: int
    sha256: str


def _listed(path: Path) -> dict[str, _Entry]:
    """The entries of the manifest: exactly the two files of a checkpoint, and no other name or path."""
    manifest = json_object(path)
    number, files = manifest.get("format"), manifest.get("files")
    if isinstance(number, int) and number > FORMAT:
        raise CheckpointError(f"{path} has the newer format {number}; this Freewheel reads {FORMAT}: update it")
    if number != FORMAT or not isinstance(files, dict):
        raise CheckpointError(f"{path} is not a manifest of format {FORMAT}")
    if files.keys() != {WEIGHTS, POLICY}:
        raise CheckpointError(f"{path} should list {WEIGHTS} and {POLICY}, but it lists {show(sorted(files))}")
    return {name: record(_Entry, entry, f"{show(name)} in {path}") for name, entry in files.items()}


def _verified(path: Path, entry: _Entry) -> bytearray:
    """The content of a file of this size and hash. Nothing is read of one with another size."""
    damaged = f"{path} is damaged: its size or hash is not the manifest's"
    if not path.is_symlink() and path.is_file() and path.stat().st_size != entry.size:
        raise CheckpointError(damaged)
    if path.name.endswith(".safetensors"):
        header(path)  # before all of it is read: its arrays are as large as it is
    data = content(path)
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise CheckpointError(damaged)
    return data


def _is_step(name: str) -> bool:
    return re.fullmatch("0|[1-9][0-9]{0,18}", name) is not None


def _steps(root: Path) -> list[int]:
    """Steps there are directories for, from the newest down."""
    folders = root.iterdir() if root.is_dir() else ()
    return sorted((int(folder.name) for folder in folders if _is_step(folder.name) and folder.is_dir()), reverse=True)


def _target(root: Path, link: str) -> int | None:
    try:
        name = os.readlink(root / link)
    except OSError:
        return None
    return int(name) if _is_step(name) else None
