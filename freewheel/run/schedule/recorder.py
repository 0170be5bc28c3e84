"""Records a run: listens to its collector and its executors and writes schedule.jsonl."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from freewheel.core import Chunk, Executor, Learner, MakeExecutor, Snapshot, Tick, Transitions, to_numpy
from freewheel.files import disk
from freewheel.files.lines import Lines
from freewheel.loop import Source
from freewheel.pacing.episode_queue import RECENT
from freewheel.registry import installed_version
from freewheel.run.checkpoints import checkpoint
from freewheel.run.plan import Plan
from freewheel.run.schedule.log import (
    FILE,
    FORMAT,
    Act,
    Author,
    Check,
    Delivery,
    Drop,
    LogLine,
    WorkerStart,
    as_json,
    checksums,
)
from freewheel.timeline.trainer_tracks import WatchedExecutor

WRITE_EVERY = 1.0  # seconds
MOST_WAITING = 600  # blocks of lines that may wait for a failing disk; recording ends if there are more
SHARE = 0.005  # share of the time that fingerprints of the weights may take


def versions() -> dict[str, str]:
    """Return what the bits of a run depend on besides its config."""
    import torch

    packages = {"freewheel": installed_version(), "python": platform.python_version(), "numpy": np.__version__}
    return packages | {"torch": torch.__version__, "machine": f"{platform.machine()} {platform.system()}"}


class ScheduleRecorder:
    """Implements rollout.factory.ProcessRecorder. The learner's thread calls all methods except `started`."""

    def __init__(self) -> None:
        self.file: ScheduleFile | None = None
        self._about: dict[str, Any] = {}
        self._weights: Callable[[], Snapshot] | None = None
        self._starts: dict[Author, WorkerStart] = {}  # of processes that have not acted yet
        self._tickets: Counter[Author] = Counter()
        self._waiting: dict[int, list[tuple[Transitions[Any], int]]] = {}  # by worker: its fragments and their steps
        self._began, self._events = list[WorkerStart](), list[Act | Drop]()
        self._empty, self._oldest = 0, list[int | None]()
        self._polls: Counter[int] = Counter()
        self._got: dict[int, list[int]] = {}  # polls with a result, by executor polled since the last line
        self._turn = self._env_steps = self._version = 0
        self._turning = False  # a turn of the loop is under way
        self._checked, self._next_check = -1, 0.0  # version, time

    def open(self, folder: Path, say: Callable[[str], None], **about: Any) -> None:
        """Begin to write. say: shows the user a message about a failing disk."""
        with suppress(OSError):
            disk.remove(folder / FILE)  # left by a session that had saved nothing: the run has begun again
        self.file, self._about = ScheduleFile(folder / FILE, say), about

    @property
    def problems(self) -> list[str]:
        """Return why the schedule is incomplete."""
        return [self.file.problem] if self.file is not None and self.file.problem else []

    # Events of the workers.

    def started(self, worker: int, incarnation: int, first: Sequence[int], version: int) -> None:
        self._starts[worker, incarnation] = WorkerStart((worker, incarnation), version, tuple(first))

    def acted(
        self, worker: int, incarnation: int, version: int, data: Transitions[Any], tickets: Sequence[int]
    ) -> None:
        steps, author = len(data.valid), (worker, incarnation)
        if not steps:
            return
        self._note_start(author)
        self._events.append(Act(author, version, steps, checksums(data), self._issued(author, tickets)))
        self._waiting.setdefault(worker, []).append((data, steps))

    def skipped(self, worker: int, incarnation: int, version: int, steps: int | None) -> None:
        author = worker, incarnation
        if steps is None:
            self._give_up(f"the queue of worker {worker} has dropped too many fragments at once")
        else:
            self._note_start(author)
            self._events.append(Act(author, version, steps, None, ()))

    def _note_start(self, author: Author) -> None:
        if (start := self._starts.pop(author, None)) is not None:
            self._began.append(start)

    def _issued(self, author: Author, history: Sequence[int]) -> tuple[int, ...]:
        """Return the tickets issued to a process since its last fragment."""
        if not history:
            return ()
        count, *recent = history
        new, self._tickets[author] = count - self._tickets[author], count
        if new > RECENT:
            self._give_up(f"worker {author[0]} was issued {new} episodes at once")
        return tuple(recent[len(recent) - new :])

    def dropped(self, worker: int, data: Transitions[Any], cause: str) -> None:
        waiting = self._waiting.get(worker, [])
        for place, (one, _) in enumerate(waiting):
            if one is data:
                self._events.append(Drop(worker, place, cause))
                del waiting[place]
                return

    # Answers to the learner.

    def listen(self, collector: Source, planned: Plan, learner: Learner) -> Source:
        """Return the same collector, recorded. Call it when the loop begins."""
        self._weights, limits = learner.snapshot, asdict(planned.config.run.limits)
        if self.file is not None:
            self.file.add(json.dumps({"schedule": FORMAT, **versions(), **self._about, "limits": limits}) + "\n")
        self._check()
        return _Recorded(collector, self, serial=planned.worker_config is None)

    def executors(self, make: MakeExecutor) -> MakeExecutor:
        """Return the same executors, recorded."""

        def made(build: Callable[[], Callable[[Any], Any]], what: str) -> Executor:
            number = len(self._polls)
            self._polls[number] = 0
            return _RecordedExecutor(make(build, what), lambda found: self._polled(number, found))

        return made

    def saw_oldest(self, version: int | None) -> None:
        self._turning = True
        self._oldest.append(version)

    def collected(self, chunks: Sequence[Chunk[Any]], *, serial: bool) -> None:
        self._turning = True
        if serial and chunks:
            self._write(LogLine(chunks=tuple((len(chunk.data.valid), checksums(chunk.data)) for chunk in chunks)))
        elif chunks or self._events:
            self._write(LogLine(deliveries=tuple(map(self._delivered, chunks))))
        else:
            self._empty += 1

    def _delivered(self, chunk: Chunk[Any]) -> Delivery:
        worker, steps, parts = chunk.origin.worker, len(chunk.data.valid), 0
        waiting = self._waiting[worker]
        while steps > 0:
            steps -= waiting[parts][1]
            parts += 1
        del waiting[:parts]
        return Delivery(worker, chunk.origin.sequence, parts)

    def _polled(self, executor: int, found: bool) -> None:
        self._polls[executor] += 1
        got = self._got.setdefault(executor, [])
        if found:
            got.append(self._polls[executor])

    def turn(self, tick: Tick) -> None:
        """Record the end of a turn of the loop."""
        self._turn, self._turning = self._turn + 1, False
        self._env_steps, self._version = tick.env_steps, tick.version
        if tick.version != self._checked and perf_counter() >= self._next_check:
            self._check()
        self.keep_up()

    def keep_up(self) -> None:
        """Write waiting lines, at most once per WRITE_EVERY."""
        if self.file is not None:
            self.file.keep_up()

    def _check(self, end: str = "") -> None:
        """Record a fingerprint of the present weights; delay the next one, so that they take only SHARE of the time."""
        if self.file is None or self._weights is None:
            return
        began = perf_counter()
        snapshot = self._weights()
        params = {name: to_numpy(value) for name, value in snapshot.params.items()}
        check = Check(self._turn, snapshot.version, self._env_steps, checkpoint.fingerprint(params))
        self._write(LogLine(check=check, end=end))
        now = perf_counter()
        self._checked, self._next_check = snapshot.version, now + (now - began) / SHARE

    def close(self, ended: str) -> None:
        """End the recording. Weights of an unfinished turn that has or may have changed them are not checked."""
        changed = self._weights is not None and (ended == "failed" or self._weights().version != self._version)
        if self._turning and changed:
            self._write(LogLine(end=ended))
        else:
            self._check(end=ended)
        if self.file is not None:
            self.file.close()

    def _write(self, line: LogLine) -> None:
        """Write this line with everything since the last one."""
        polls = tuple((executor, self._polls[executor], tuple(got)) for executor, got in self._got.items())
        began, events = tuple(self._began), tuple(self._events)
        line = replace(line, empty=self._empty, oldest=tuple(self._oldest), polls=polls, starts=began, events=events)
        self._empty, self._oldest, self._began, self._events, self._got = 0, [], [], [], {}
        if self.file is not None:
            self.file.add(as_json(line))

    def _give_up(self, reason: str) -> None:
        if self.file is not None:
            self.file.give_up(reason)


class ScheduleFile:
    """Writes every second. Lines wait in memory while the disk fails; if that lasts, nothing more is recorded."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._lines, self._say = Lines(path, say, "parts of the schedule"), say
        self._new: list[str] = []
        self._next = 0.0
        self.problem = ""  # why the schedule is incomplete

    def add(self, line: str) -> None:
        if not self.problem:
            self._new.append(line)

    def keep_up(self) -> None:
        if perf_counter() >= self._next and not self.problem:
            self._next = perf_counter() + WRITE_EVERY
            self._flush()

    def _flush(self) -> None:
        if self._new:
            self._lines.add("".join(self._new).encode())
            self._new = []
            self._lines.catch_up()
        if len(self._lines) > MOST_WAITING:
            self.give_up(self._lines.problem)

    def give_up(self, reason: str) -> None:
        """Stop recording."""
        if not self.problem:
            self.problem = f"the schedule ends before the run ({reason}): freewheel replay stops there"
            self._say(self.problem)

    def close(self) -> None:
        self._flush()
        self._lines.close()
        self.problem = self.problem or self._lines.problem


class _Recorded:
    """A collector whose answers are recorded. Implements loop.Source."""

    def __init__(self, collector: Source, recorder: ScheduleRecorder, *, serial: bool) -> None:
        self._collector, self._recorder, self._serial = collector, recorder, serial

    def publish(self, snapshot: Snapshot, done: int) -> None:
        self._collector.publish(snapshot, done)

    def collect(self, wait: bool) -> Sequence[Chunk[Any]]:
        chunks = self._collector.collect(wait)
        self._recorder.collected(chunks, serial=self._serial)
        return chunks

    def oldest(self) -> int | None:
        version = self._collector.oldest()
        self._recorder.saw_oldest(version)
        return version


class _RecordedExecutor(WatchedExecutor):
    def __init__(self, executor: Executor, polled: Callable[[bool], None]) -> None:
        super().__init__(executor)
        self._polled = polled

    def result(self, wait: float = 0.0) -> Any:
        found = self.executor.result(wait)
        self._polled(found is not None)
        return found
