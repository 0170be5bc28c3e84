"""schedule.jsonl: the order in which workers acted and the learner got their rows, one JSON object per line.

    {"schedule": 1, ...}                the first line: the format and what recorded it
    {"f": [...], "d": [...], ...}       what one call of Collector.collect found and delivered, unless it was nothing
    {"w": SHA-256, "t": TURN, ...}      the weights after TURN turns of the loop
    {"end": WHY, "t": TURN, ...}        the last line, unless the run was killed

The learner is one thread that gets answers from the collector (`collect`, `oldest`) and from executors (`result`).
Everything else in a run follows from its config, its seed and these answers, so only the answers are written. Questions
with the answer "nothing" are counted. A line holds the answers since the previous line.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from freewheel.config.resolve import LimitOptions
from freewheel.core import CAUSES, NDArray, Transitions
from freewheel.errors import FileError
from freewheel.files import read

FILE = "schedule.jsonl"
FORMAT = 1
LONGEST_LINE = 1 << 24  # bytes
WHOLE = 1 << 16  # bytes of observations, up to which all rows are checked; beyond, only the first and the last row

Author = tuple[int, int]  # worker, incarnation


class Checksums(NamedTuple):
    """The checksums of the rows of a fragment."""

    answers: int  # what the environment returned
    choices: int  # what the policy did


def checksums(data: Transitions[NDArray]) -> Checksums:
    """Return the checksums of rows, which are equal if the rows are."""
    seen, after = (data.obs, data.next_obs) if data.obs.nbytes <= WHOLE else (data.obs[0], data.next_obs[-1])
    answers = _checksum(data.reward, data.terminated, data.truncated, data.valid, seen, after)
    return Checksums(answers, _checksum(data.action, data.log_prob))


def _checksum(*columns: NDArray) -> int:
    value = 0
    for column in columns:
        value = zlib.crc32(np.ascontiguousarray(column).data, value)
    return value


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The start of a worker process."""

    author: Author
    version: int  # the newest version published at that time; -1: none
    first: tuple[int, ...]  # the numbers of its lanes' first episodes


@dataclass(frozen=True, slots=True)
class Act:
    """A fragment: `steps` steps of a worker's lanes under one version."""

    author: Author
    version: int
    steps: int
    sums: Checksums | None  # None: a full queue dropped it before its rows were read
    tickets: tuple[int, ...]  # issued to the process since its last fragment


@dataclass(frozen=True, slots=True)
class Drop:
    """The drop of a worker's fragment; `place`: its index among the waiting ones."""

    worker: int
    place: int
    cause: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """A chunk made of the first `parts` of a worker's waiting fragments."""

    worker: int
    sequence: int
    parts: int


@dataclass(frozen=True, slots=True)
class Check:
    """The fingerprint of the weights after a turn of the loop."""

    turn: int
    version: int
    env_steps: int
    sha256: str


@dataclass(frozen=True, slots=True)
class LogLine:
    """The answers of one line, in order."""

    empty: int = 0  # calls of `collect` that found nothing, before this one
    oldest: tuple[int | None, ...] = ()
    #: (executor, its polls so far, the numbers of new polls that had a result)
    polls: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    starts: tuple[WorkerStart, ...] = ()
    events: tuple[Act | Drop, ...] = ()
    deliveries: tuple[Delivery, ...] | None = None  # None: the line has no call of `collect`
    chunks: tuple[tuple[int, Checksums], ...] = ()  # steps and checksums, if the learner's process acts
    check: Check | None = None
    end: str = ""  # why the run ended


def as_json(line: LogLine) -> str:
    """Return the line as JSON text."""
    parts: dict[str, Any] = {}
    if line.empty:
        parts["e"] = line.empty
    if line.oldest:
        parts["o"] = line.oldest
    if line.polls:
        parts["p"] = [[executor, count, *got] for executor, count, got in line.polls]
    if line.starts:
        parts["n"] = [[*start.author, start.version, *start.first] for start in line.starts]
    if line.events:
        parts["f"] = [_event_as_list(event) for event in line.events]
    if line.deliveries is not None:
        parts["d"] = [[one.worker, one.sequence, one.parts] for one in line.deliveries]
    if line.chunks:
        parts["c"] = [[steps, *sums] for steps, sums in line.chunks]
    if line.check is not None:
        check = line.check
        parts |= {"w": check.sha256, "t": check.turn, "v": check.version, "s": check.env_steps}
    if line.end:
        parts["end"] = line.end
    return json.dumps(parts, separators=(",", ":")) + "\n"


def _event_as_list(event: Act | Drop) -> list[int]:
    if isinstance(event, Drop):
        return [event.worker, event.place, CAUSES.index(event.cause)]
    return [*event.author, event.version, event.steps, *(event.sums or ()), *event.tickets]


def _from_json(text: bytes) -> LogLine:
    """Raises ValueError, TypeError, KeyError, IndexError or RecursionError for an invalid line."""
    parts = json.loads(text)
    check = None
    if "w" in parts:
        turn, version, env_steps = _naturals([parts["t"], parts["v"], parts["s"]], 3)
        check = Check(turn, version, env_steps, str(parts["w"]))
    return LogLine(
        empty=_naturals([parts.get("e", 0)], 1)[0],
        oldest=tuple(None if value is None else _naturals([value], 1)[0] for value in parts.get("o", ())),
        polls=tuple((one[0], one[1], one[2:]) for one in _rows(parts.get("p", ()), 2)),
        starts=tuple(_start(one) for one in parts.get("n", ())),
        events=tuple(_event(_naturals(one, 3)) for one in parts.get("f", ())),
        deliveries=tuple(Delivery(*one[:3]) for one in _rows(parts["d"], 3)) if "d" in parts else None,
        chunks=tuple((one[0], Checksums(one[1], one[2])) for one in _rows(parts.get("c", ()), 3)),
        check=check,
        end=str(parts.get("end", "")),
    )


def _rows(lists: Any, least: int) -> Iterator[tuple[int, ...]]:
    return (_naturals(one, least) for one in lists)


def _naturals(values: Sequence[Any], least: int) -> tuple[int, ...]:
    """Return the values if they are at least `least` integers ≥ 0; ValueError: they are not."""
    fitting = isinstance(values, list) and len(values) >= least
    if not fitting or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{least} or more natural numbers expected, not {values!r:.80}")
    return tuple(values)


def _start(values: list[int]) -> WorkerStart:
    worker, incarnation, *first = _naturals([*values[:2], *values[3:]], 3)
    if type(values[2]) is not int:
        raise ValueError("a version must be an integer")
    return WorkerStart((worker, incarnation), values[2], tuple(first))


def _event(values: tuple[int, ...]) -> Act | Drop:
    if len(values) == 3:
        return Drop(values[0], values[1], CAUSES[values[2]])
    if len(values) == 4:
        return Act(values[:2], values[2], values[3], None, ())
    worker, incarnation, version, steps, answers, choices, *tickets = values
    return Act((worker, incarnation), version, steps, Checksums(answers, choices), tuple(tickets))


@dataclass(frozen=True)
class About:
    """The first line: the format, what the bits of a run depend on besides its config, and the number of its hooks."""

    schedule: int
    freewheel: str
    python: str
    numpy: str
    torch: str
    machine: str
    limits: LimitOptions  # of the recorded session; later sessions may have others
    hooks: int = 0


@dataclass
class Outline:
    """A summary of a schedule, made by reading it once."""

    loads: Counter[int] = field(default_factory=Counter)  # how often each version is loaded by a worker
    acts: Counter[Author] = field(default_factory=Counter)  # fragments of each process
    last: Check | None = None
    end: str = ""  # why the run ended; empty: it was killed, or recording ended
    lines: int = 0
    cut: str = ""  # why the rest of the file cannot be used


class Schedule:
    """A recorded schedule. It ends before the first damaged line."""

    def __init__(self, path: Path, *, workers: int, most_steps: int) -> None:
        self._path, self._workers, self._most_steps = path, workers, most_steps
        self.about = describe(path)
        self.outline = Outline()
        loaded: dict[Author, int] = {}
        for line in self._read(self.outline):
            self._outline(line, loaded)

    def __iter__(self) -> Iterator[LogLine]:
        return self._read(Outline())

    def _read(self, outline: Outline) -> Iterator[LogLine]:
        for text in itertools.islice(read.lines(self._path, LONGEST_LINE), 1, None):
            if not text.endswith(b"\n"):
                outline.cut = "its last line is incomplete"
                return
            try:
                line = _from_json(text)
                self._check(line)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
                outline.cut = f"line {outline.lines + 2} is damaged ({error})"
                return
            outline.lines += 1
            yield line

    def _check(self, line: LogLine) -> None:
        """Raise ValueError for numbers that no run of this config can have."""
        workers = [one.author[0] for one in line.starts]
        for event in line.events:
            workers.append(event.worker if isinstance(event, Drop) else event.author[0])
            if isinstance(event, Act) and not 0 < event.steps <= self._most_steps:
                raise ValueError(f"a fragment of {event.steps} steps")
        workers += [one.worker for one in line.deliveries or ()]
        if workers and max(workers) >= self._workers:
            raise ValueError(f"worker {max(workers)} of {self._workers}")

    def _outline(self, line: LogLine, loaded: dict[Author, int]) -> None:
        for event in line.events:
            if isinstance(event, Act):
                self.outline.acts[event.author] += 1
                if loaded.get(event.author) != event.version:
                    loaded[event.author] = event.version
                    self.outline.loads[event.version] += 1
        self.outline.last = line.check or self.outline.last
        self.outline.end = line.end


def describe(path: Path) -> About:
    """Read the first line of a schedule."""
    text = next(read.lines(path, LONGEST_LINE), b"")
    about = read.parse_json(text, f"the first line of {path}")
    if about.get("schedule") != FORMAT:
        raise FileError(f"{path} has the format {read.show(about.get('schedule'))}; this Freewheel reads {FORMAT}")
    return read.record(About, about, f"the first line of {path}")
