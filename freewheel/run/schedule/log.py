"""schedule.jsonl: the order in which workers acted and the learner got their rows, one JSON object a line.

    {"schedule": 1, ...}                the first line: which format, and what recorded it
    {"f": [...], "d": [...], ...}       what one call of Collector.collect found and handed over, unless it was nothing
    {"w": SHA-256, "t": TURN, ...}      the weights after so many turns of the loop
    {"end": WHY, "t": TURN, ...}        the last line, unless the run was killed

The learner is one thread that asks and gets answers: from the collector (`collect`, `oldest`) and from executors (`result`). All
else in a run follows from its config, its seed and these answers, so they are what is written; questions whose answer was
"nothing" are counted. A line holds what was answered since the line before it.
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
WHOLE = 1 << 16  # bytes of observations that are checked whole; of more, the first and the last row

Author = tuple[int, int]  # worker, incarnation


class Checksums(NamedTuple):
    """Of the rows of a fragment."""

    answers: int  # what the environment returned
    choices: int  # what the policy did


def checksums(data: Transitions[NDArray]) -> Checksums:
    """Two numbers that agree if the rows do."""
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
    """A worker process begins."""

    author: Author
    version: int  # the newest that was posted then
    first: tuple[int, ...]  # the numbers of its lanes' first episodes


@dataclass(frozen=True, slots=True)
class Act:
    """A fragment: so many steps of a worker's lanes under one version."""

    author: Author
    version: int
    steps: int
    sums: Checksums | None  # None: a full queue dropped it, and nobody has seen its rows
    tickets: tuple[int, ...]  # issued to it since its last fragment


@dataclass(frozen=True, slots=True)
class Drop:
    """The worker's fragment at this place among those that wait was dropped."""

    worker: int
    place: int
    cause: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """The first `parts` of a worker's waiting fragments became a chunk."""

    worker: int
    sequence: int
    parts: int


@dataclass(frozen=True, slots=True)
class Check:
    """The weights after a turn of the loop."""

    turn: int
    version: int
    env_steps: int
    sha256: str


@dataclass(frozen=True, slots=True)
class LogLine:
    """Answers, in order."""

    empty: int = 0  # calls of `collect` that found nothing, before this one
    oldest: tuple[int | None, ...] = ()
    #: Executor, its polls so far, which of the last had a result.
    polls: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    starts: tuple[WorkerStart, ...] = ()
    events: tuple[Act | Drop, ...] = ()
    deliveries: tuple[Delivery, ...] | None = None  # None: this line is about no call of `collect`
    chunks: tuple[tuple[int, Checksums], ...] = ()  # steps and checksums, where the learner's own process acts
    check: Check | None = None
    end: str = ""  # why the run ended


def as_json(line: LogLine) -> str:
    """One line of the file."""
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
    """Raises ValueError, TypeError, KeyError, IndexError or RecursionError if it is no line of ours."""
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
    """At least so many integers that are not negative."""
    fitting = isinstance(values, list) and len(values) >= least
    if not fitting or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{least} or more natural numbers expected, not {values!r:.80}")
    return tuple(values)


def _start(values: list[int]) -> WorkerStart:
    worker, incarnation, *first = _naturals([*values[:2], *values[3:]], 3)
    if type(values[2]) is not int:
        raise ValueError("a version is a number")
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
    """The first line: the format, what the bits of a run depend on beside its config, and the number of its hooks."""

    schedule: int
    freewheel: str
    python: str
    numpy: str
    torch: str
    machine: str
    limits: LimitOptions  # of the run when it was recorded: it may have been given more since
    hooks: int = 0


@dataclass
class Outline:
    """What a schedule holds, found by reading it once."""

    loads: Counter[int] = field(default_factory=Counter)  # how often each version is given to a worker
    acts: Counter[Author] = field(default_factory=Counter)  # fragments of each process
    last: Check | None = None
    end: str = ""  # why the run ended; empty: it was killed, or recording ended
    lines: int = 0
    cut: str = ""  # why the rest of the file cannot be used


class Schedule:
    """A recorded schedule. Lines after one that is damaged are not used."""

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
                outline.cut = "its last line is not whole"
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
        """ValueError about numbers that no run of this config can have."""
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
    """What a schedule says about itself."""
    text = next(read.lines(path, LONGEST_LINE), b"")
    about = read.parse_json(text, f"the first line of {path}")
    if about.get("schedule") != FORMAT:
        raise FileError(f"{path} has the format {read.show(about.get('schedule'))}; this Freewheel reads {FORMAT}")
    return read.record(About, about, f"the first line of {path}")
