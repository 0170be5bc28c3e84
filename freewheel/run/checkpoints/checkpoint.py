"""A checkpoint is a folder that is complete or absent: written aside, renamed, and read only if every byte verifies.

weights.safetensors        the policy's weights            policy.json      its network, its spaces, its version
learner.safetensors *      the learner's state             progress.json *  counters, schedules, position in logs
collector.safetensors *    the progress of lanes and workers
best.safetensors *         the weights that evaluations have chosen so far
<buffer>-<n>.safetensors * the rows of the learner's buffers, in segments
manifest.json              the size and SHA-256 of every file; written last          (* only in full checkpoints)
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import safetensors.numpy

from freewheel.core import Learner, NDArray, to_numpy
from freewheel.errors import CheckpointError, DivergedError, FileError, UsageError
from freewheel.files import disk
from freewheel.files.memory import in_words
from freewheel.files.reach import check_folder
from freewheel.files.read import (
    HEADER_SIZE,
    JSON_SIZE,
    content,
    header,
    json_object,
    parse_arrays,
    parse_json,
    record,
    show,
    value_of,
)
from freewheel.policies.spec import PolicySpec, full_layout
from freewheel.run.checkpoints.order import SaveOrder

WEIGHTS, POLICY, MANIFEST = "weights.safetensors", "policy.json", "manifest.json"
LEARNER, COLLECTOR, PROGRESS = "learner.safetensors", "collector.safetensors", "progress.json"
BEST = "best.safetensors"
STATE = frozenset((LEARNER, COLLECTOR, PROGRESS))  # in every full checkpoint
SEGMENT = re.compile(r"([a-z][a-z0-9_]{0,30})-(0|[1-9][0-9]{0,17})\.safetensors")
NO_BEST = "no evaluation has chosen the best weights yet"
FORMAT = 2  # format 1 had weights only
UNKNOWN = 1 << 20  # bytes of weights that are accepted whatever the network needs
WRITERS, MANY = 8, 16  # threads that write a checkpoint while the caller waits, if it has at least MANY files
LOOK = 0.1  # seconds between two polls of these threads
PART = ".part-"  # prefix of folders and links that are being written or removed; readers ignore them


@dataclass(frozen=True)
class ManifestEntry:
    """The manifest's entry for a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Linked:
    """A file of another checkpoint of the run, whose content never changes."""

    path: Path
    entry: ManifestEntry


Content: TypeAlias = bytes | Linked | Callable[[], bytes]  # a function is called when the file is written


@dataclass(frozen=True, order=True)
class Name:
    """A checkpoint by its environment steps, and by the number of its save if the step was saved before: STEP-7."""

    step: int
    number: int = 1

    @classmethod
    def parse(cls, text: str) -> Name | None:
        found = re.fullmatch("(0|[1-9][0-9]{0,18})(?:-([2-9]|[1-9][0-9]{1,17}))?", text)
        return None if found is None else cls(int(found[1]), int(found[2] or 1))

    def __str__(self) -> str:
        return str(self.step) if self.number == 1 else f"{self.step}-{self.number}"


@dataclass(frozen=True)
class Checkpoint:
    """The verified weights of a checkpoint. `warnings` name newer checkpoints that were skipped because of damage."""

    step: int
    params: dict[str, NDArray]
    about: dict[str, Any]
    path: Path
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class SavedState:
    """The state from which a run is resumed: the rest of a full checkpoint, every byte verified."""

    learner: dict[str, NDArray]
    collector: dict[str, NDArray]
    progress: dict[str, Any]
    best: dict[str, NDArray]  # empty: none was chosen yet
    segments: Mapping[str, list[Linked]]  # of each buffer, in order


def fingerprint(params: Mapping[str, NDArray]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes: equal if and only if the weights are."""
    digest = hashlib.sha256()
    for name, array in sorted(params.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def fingerprint_of(learner: Learner) -> str:
    """Return the fingerprint of the weights that the learner would publish now."""
    return fingerprint({name: to_numpy(value) for name, value in learner.snapshot().params.items()})


def require_finite(step: int, params: Mapping[str, NDArray]) -> None:
    """Raise DivergedError if a weight is not finite."""
    if broken := next((name for name, value in params.items() if not np.isfinite(value).all()), ""):
        raise DivergedError(f"the weights '{broken}' of step {step} are not finite and are not saved")


def make_private(folder: Path) -> Path:
    """Create a folder and its missing parents, readable only by their owner (0700)."""
    if not folder.is_dir():
        make_private(folder.parent)
        try:
            disk.make_folder(folder)
        except FileExistsError:
            if not folder.is_dir():
                raise
        disk.sync(folder.parent)
    return folder


def encode_arrays(arrays: Mapping[str, NDArray]) -> bytes:
    # In C order: safetensors copies the memory of an array and ignores its strides.
    return safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def encode_json(value: Mapping[str, Any]) -> bytes:
    """ValueError if JSON cannot express the value."""
    return json.dumps(value, indent=1, allow_nan=False).encode()


def entry_of(data: bytes) -> ManifestEntry:
    return ManifestEntry(len(data), hashlib.sha256(data).hexdigest())


def write(
    folder: Path,
    files: Mapping[str, Content],
    others: Mapping[str, bytes] = types.MappingProxyType({}),
    *,
    order: SaveOrder = SaveOrder(),  # noqa: B008
    mode: int = 0o700,
    waiting: Callable[[], None] | None = None,
) -> Mapping[str, ManifestEntry]:
    """Write or replace one checkpoint; return the files in its manifest. others: files that the manifest does not list.

    If the process is killed at any time, the old folder or the new one exists, or (only during a replacement) neither.
    waiting: called repeatedly; the caller has nothing else to do, so several threads may write files.
    """
    part, old = (folder.with_name(f"{PART}{folder.name}{suffix}") for suffix in ("", "-old"))
    disk.remove(part)
    try:
        disk.make_folder(part, mode)
        listed = _put_all(part, files, waiting)
        for name, data in others.items():
            disk.write(part / name, data)
        files_listed = {name: asdict(entry) for name, entry in listed.items()}
        disk.write(part / MANIFEST, encode_json({"format": FORMAT, **order.to_json(), "files": files_listed}))
        disk.sync(part)
        if folder.exists():  # a directory cannot be replaced in one call
            disk.remove(old)
            disk.rename(folder, old)
        disk.rename(part, folder)
    finally:
        with suppress(OSError):  # the first error is the one to report
            if old.exists() and not folder.exists():
                disk.rename(old, folder)
            disk.remove(part)
    disk.sync(folder.parent)
    if old.exists():
        disk.remove(old)
    return listed


def _put_all(part: Path, files: Mapping[str, Content], waiting: Callable[[], None] | None) -> dict[str, ManifestEntry]:
    if waiting is None or len(files) < MANY:
        return {name: _put(part / name, given) for name, given in files.items()}
    pool = ThreadPoolExecutor(min(WRITERS, os.cpu_count() or 1), "freewheel-write")
    try:
        calls = {name: pool.submit(_put, part / name, given) for name, given in files.items()}
        while any(not call.done() for call in calls.values()):
            if any(call.exception() for call in wait(calls.values(), LOOK, FIRST_EXCEPTION).done):
                break
            waiting()
    finally:
        pool.shutdown(cancel_futures=True)
    return {name: call.result() for name, call in calls.items()}


def _put(path: Path, given: Content) -> ManifestEntry:
    if not isinstance(given, Linked):
        data = given if isinstance(given, bytes) else given()
        disk.write(path, data)
        return entry_of(data)
    try:
        disk.link(given.path, path)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        disk.copy(given.path, path)
    return given.entry


def load(root: Path, which: str = "latest") -> Checkpoint:
    """Load the weights of `which` ("latest", "best" or a step), else of the newest that verifies, with warnings to
    show. A run would be resumed from "latest"."""
    known = names(root)
    newest = next((name for name in known if which == "latest" and is_full(root / str(name))), None)
    for found, problems in _candidates(root, which, known, newest):
        try:
            saved = read(root / str(found))
        except FileError as error:
            problems.append(str(error))
        else:
            return replace(saved, warnings=_warnings(problems, found, which))
    raise AssertionError("_candidates raises at its end")


def load_state(root: Path, which: str = "latest") -> tuple[Checkpoint, SavedState]:
    """Load the full checkpoint `which`, else the newest that verifies. That may be newer than the target of `latest`,
    if the run was killed between a save and its link."""
    known, latest = names(root), target(root, "latest")
    full = [name for name in known if is_full(root / str(name))]
    gone = [] if latest is None or latest in known else [f"{root / str(latest)} is missing"]
    if not full:
        raise CheckpointError(f"there is nothing to resume from in {root}: no checkpoint has the learner's state")
    for found, problems in _candidates(root, which, full, full[0] if which == "latest" else None):
        try:
            folder = root / str(found)
            saved, state = read(folder), read_state(folder)
        except FileError as error:
            problems.append(str(error))
        else:
            noticed = [*gone, *problems] if which == "latest" else problems
            return replace(saved, warnings=_warnings(noticed, found, which)), state
    raise AssertionError("_candidates raises at its end")


def _candidates(
    root: Path, which: str, known: list[Name], newest: Name | None = None
) -> Iterator[tuple[Name, list[str]]]:
    """Yield the checkpoints to try, with a list to which the caller adds problems; finally raise CheckpointError.

    newest: the first to try if `which` is not a step, whatever the links say."""
    asked = None
    if which not in ("latest", "best") and (asked := named(which, known)) is None:
        if Name.parse(which) is None:
            raise UsageError(f"there is no checkpoint '{which}': ask for latest, best or the number of a step")
        there = ", ".join(map(str, known)) or "none"
        raise UsageError(f"there is no checkpoint of step {which} in {root}; available: {there}")
    wanted = asked or newest or target(root, which)
    problems = [] if wanted is not None else [_no_link(root, which)]
    if wanted is not None and wanted not in known:
        problems, wanted = [f"{root / str(wanted)} is missing"], None
    for name in known if wanted is None else [wanted, *(name for name in known if name != wanted)]:
        yield name, problems
    found_nothing = f"no checkpoint under {root} verifies: restore one from a copy, or start a new run"
    raise CheckpointError("\n  ".join([found_nothing, *problems]))


def _no_link(root: Path, which: str) -> str:
    if which == "best" and not (root / which).is_symlink():
        return NO_BEST
    return f"{root / which} is missing or is not a link to a step"


def _warnings(problems: list[str], found: Name, which: str) -> tuple[str, ...]:
    if problems == [NO_BEST]:
        return (f"{NO_BEST}: using step {found} instead of '{which}'",)
    return (*problems, f"using step {found} instead of '{which}'") if problems else ()


def read(folder: Path) -> Checkpoint:
    """Read the weights of one checkpoint. FileError: names a file that is damaged or does not match the manifest."""
    listed = _listed(folder / MANIFEST)
    about = _object(folder / POLICY, listed)
    _check_size(folder / WEIGHTS, listed[WEIGHTS].size, about)
    params = _arrays(folder / WEIGHTS, listed)
    name = Name.parse(folder.name)  # an export may have any name
    step = value_of(int, about.get("step", 0), f"step of {folder / POLICY}") if name is None else name.step
    return Checkpoint(step, params, about, folder)


def read_state(folder: Path) -> SavedState:
    """Read the state of one full checkpoint. FileError: names a file that is damaged or does not match the manifest."""
    listed = _listed(folder / MANIFEST)
    if not listed.keys() >= STATE:
        raise CheckpointError(f"{folder} has weights only: a run cannot be resumed from it")
    segments: dict[str, dict[int, Linked]] = {}
    for name, entry in listed.items():
        if found := SEGMENT.fullmatch(name):
            _verified(folder / name, entry)
            segments.setdefault(found[1], {})[int(found[2])] = Linked(folder / name, entry)
    return SavedState(
        learner=_arrays(folder / LEARNER, listed),
        collector=_arrays(folder / COLLECTOR, listed),
        progress=_object(folder / PROGRESS, listed),
        best=_arrays(folder / BEST, listed) if BEST in listed else {},
        segments={buffer: [parts[number] for number in sorted(parts)] for buffer, parts in segments.items()},
    )


def holds(folder: Path, files: Mapping[str, Content]) -> bool:
    """Return whether the checkpoint has these files, given as bytes. FileError: one of them is damaged."""
    listed = _listed(folder / MANIFEST)
    return all(data == bytes(_verified(folder / name, listed[name])) for name, data in files.items())


def read_arrays(file: Linked) -> dict[str, NDArray]:
    """Return the arrays of a file that the manifest lists."""
    return _arrays(file.path, {file.path.name: file.entry})


def _listed(path: Path) -> Mapping[str, ManifestEntry]:
    """Return the entries of the manifest. CheckpointError: it lists a name that no checkpoint file has."""
    manifest = json_object(path)
    number, files = manifest.get("format"), manifest.get("files")
    if type(number) is int and number > FORMAT:
        raise CheckpointError(f"{path.parent} was written by a newer Freewheel (format {number}): upgrade this one")
    if type(number) is not int or number < 1 or not isinstance(files, dict):
        raise CheckpointError(f"{path} is not a manifest of format {FORMAT}")
    others = files.keys() - {WEIGHTS, POLICY}
    if not files.keys() >= {WEIGHTS, POLICY} or (number == 1 and others):
        raise CheckpointError(f"{path} should list {WEIGHTS} and {POLICY}, but it lists {show(sorted(files))}")
    if strange := sorted(name for name in others - STATE - {BEST} if not SEGMENT.fullmatch(name)):
        raise CheckpointError(f"{path} should list the files of a checkpoint, and not {show(strange[0])}")
    return {name: record(ManifestEntry, entry, f"{show(name)} in {path}") for name, entry in files.items()}


def _check_size(path: Path, size: int, about: Mapping[str, Any]) -> None:
    """Raise CheckpointError if there are more weights than the network needs, before any is read. The size of a user's
    module is not known. Without a valid network the limit is UNKNOWN; code that needs the network reports the error."""
    try:
        spec = PolicySpec.from_json(about.get("policy"))
        needed = sum(4 * math.prod(shape) for shape in full_layout(spec).values())
    except FileError:
        needed = 0
    else:
        if spec.module:
            return
    if size > max(needed, UNKNOWN) + HEADER_SIZE:
        network = f"the network of its {POLICY} needs {in_words(needed)}" if needed else f"its {POLICY} has no network"
        raise CheckpointError(f"{path} has {in_words(size)} by its manifest, but {network}")


def _arrays(path: Path, listed: Mapping[str, ManifestEntry]) -> dict[str, NDArray]:
    return parse_arrays(_verified(path, listed[path.name]), str(path))


def _object(path: Path, listed: Mapping[str, ManifestEntry]) -> dict[str, Any]:
    if listed[path.name].size > JSON_SIZE:
        raise CheckpointError(f"{path} has {listed[path.name].size:,} bytes by its manifest; at most {JSON_SIZE:,}")
    return parse_json(_verified(path, listed[path.name]), str(path))


def _verified(path: Path, entry: ManifestEntry) -> bytearray:
    """Return the content of a file of this size and hash. A file of another size is not read."""
    damaged = f"{path} is damaged: its size or hash is not the manifest's"
    if not path.is_symlink() and path.is_file() and path.stat().st_size != entry.size:
        raise CheckpointError(damaged)
    if path.name.endswith(".safetensors"):
        header(path)  # first check that the arrays fill the file, before all of it is read
    data = content(path)
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise CheckpointError(damaged)
    return data


def names(root: Path) -> list[Name]:
    """Return the checkpoints that have a folder; the last save comes first."""
    known = orders(root)
    return sorted(known, key=lambda name: (known[name].number, name), reverse=True)


def orders(root: Path) -> dict[Name, SaveOrder]:
    """Return the order of saves. Damaged and older manifests lack it. Then the target of `latest` counts as the last
    save, unless no manifest has an order and there is a later step. The others come before all that have an order."""
    check_folder(root)
    try:
        folders = list(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        if error.errno == errno.EMFILE:  # this process has too many open files; the folder may be readable
            raise
        raise CheckpointError(f"{root} cannot be read: {error.strerror}") from None
    known = [name for folder in folders if (name := Name.parse(folder.name)) and folder.is_dir()]
    found, latest = {name: SaveOrder.read(root / str(name) / MANIFEST) for name in known}, target(root, "latest")
    last = max((order.number for order in found.values()), default=0)
    if latest in found and not found[latest].number and (last or latest.step == max(known).step):
        found[latest] = SaveOrder(last + 1)
    return found


def is_full(folder: Path) -> bool:
    """Return whether the folder has the learner's state, or a part of it."""
    return any((folder / name).is_file() for name in STATE)


def target(root: Path, link: str) -> Name | None:
    """Return the checkpoint that `latest` or `best` points to."""
    try:
        return Name.parse(os.readlink(root / link))
    except OSError:
        return None


def named(which: str, known: list[Name]) -> Name | None:
    """Return the checkpoint of this name, else the last save of this step."""
    asked = Name.parse(which)
    same = [name for name in known if asked is not None and asked.number == 1 and name.step == asked.step]
    return asked if asked in known else next(iter(same), None)
