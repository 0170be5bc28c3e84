"""Records the timeline of a run: all its tracks, the spans that are kept, and the files that are written.

The newest spans are kept unchanged. Whenever there are too many, the older half is merged into coarser ones: a long run
fits into the same memory, with its last minutes in detail, and the total time of each party by kind stays exact.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from freewheel.core import NDArray
from freewheel.errors import FreewheelError
from freewheel.files import disk
from freewheel.timeline.chrome import RECENT, TRACE, encode, read
from freewheel.timeline.merging import cell_for, fitted, gathered
from freewheel.timeline.model import Group, Row, Span, Timeline
from freewheel.timeline.track import NAMES, NUMBERS, PARTY, WIDTH, Ring, Track

MOST = 100_000  # spans that are kept, over all rows: a trace.json of about 8 MB
LEAST = 200  # spans that are kept of a row, even if there are many rows
FINEST = 20_000_000  # ns: the shortest cell in which old spans are merged
WINDOW = 60.0  # seconds in timeline.json
WINDOW_SPANS = 4000  # approximate number of spans in timeline.json: about 100 kB

#: Current activities by row: (kind, begin, end) in ns of CLOCK_MONOTONIC, which are not yet written as spans.
Doing = Mapping[str, Sequence[tuple[str, int, int]]]


class _Kept:
    """The spans of one row."""

    def __init__(self, name: str, group: Group, number: int) -> None:
        self.name, self.group, self.number = name, group, number
        self.spans: NDArray = np.empty((0, WIDTH), np.int64)
        self.ring: Ring | None = None
        self._next, self._cell = 0, FINEST
        self._recent: deque[NDArray] = deque()  # merged spans of the last minute

    def attach(self, ring: Ring | None) -> None:
        self.ring, self._next = ring, 0

    def drain(self, most: int, cell: int) -> None:
        """Take new spans from the ring, and merge older ones if there are too many. `cell`: the length for `recent`."""
        if self.ring is not None:
            new, self._next = self.ring.read(self._next)
            if len(new):
                self.spans = np.concatenate([self.spans, new])
                self._recent.append(gathered(new, cell))
        if len(self.spans) > most:
            half = len(self.spans) - most // 2
            old, self._cell = fitted(self.spans[:half], most // 4, self._cell)
            self.spans = np.concatenate([old, self.spans[half:]])

    def recent(self, begin: int) -> NDArray:
        """Return the merged spans since this time."""
        while self._recent and self._recent[0][-1, 1] <= begin:
            self._recent.popleft()
        return np.concatenate(self._recent) if self._recent else self.spans[:0]


def _going_on(spans: NDArray, doing: Sequence[tuple[str, int, int]], now: int) -> NDArray:
    """Return the spans and, after them, the activities that are not yet written."""
    end = int(spans[-1, 1]) if len(spans) else 0
    for kind, begin, until in doing:
        begin, until = max(begin, end), min(until, now)
        if until > begin:
            spans = np.concatenate([spans, [[begin, until, NUMBERS[kind]]]])
            end = until
    return spans


class SpanRecording:
    """All tracks of a run. Any thread may add rows, drain them and write."""

    def __init__(self, about: Mapping[str, str] | None = None, now: Callable[[], int] = perf_counter_ns) -> None:
        """about: the meaning of each kind, for viewers of the timeline."""
        self._about, self._now = dict(about or {}), now
        self._begin = now()
        self._rows: dict[str, _Kept] = {}
        self._sources: list[Callable[[], Doing]] = []
        self._tracks: list[Track] = []  # of parties in this process
        self._lock = threading.RLock()
        self.latest = -1  # the number of the party whose rows the learner got last, and which its wait was for
        self._folder: Path | None = None

    def begin(self, folder: Path, earlier_s: float = 0.0) -> None:
        """Begin the run now. `earlier_s`: the length of the sessions before this one, whose recording is kept."""
        self._begin, self._folder = self._now() - round(earlier_s * 1e9), folder
        if earlier_s and (folder / TRACE).is_file():
            with suppress(FreewheelError):  # a damaged file is ignored: the recording begins here
                self._restore(read(folder / TRACE).window(0.0, earlier_s))

    def _restore(self, earlier: Timeline) -> None:
        for row in earlier.rows:
            self.number(row.name, row.group)
        for row in earlier.rows:
            numbers = [
                (*(self._begin + round(time * 1e9) for time in (span.t0_s, span.t1_s)), self._code(span))
                for span in row.spans
                if span.kind in NUMBERS
            ]
            self._rows[row.name].spans = np.array(numbers, np.int64).reshape(-1, WIDTH)

    def _code(self, span: Span) -> int:
        party = self._rows[span.waits_for].number + 1 if span.waits_for in self._rows else 0
        return NUMBERS[span.kind] | party << PARTY

    def number(self, name: str, group: Group) -> int:
        """Return the number of the row of this name; create the row if there is none."""
        with self._lock:
            if name not in self._rows:
                self._rows[name] = _Kept(name, group, len(self._rows))
            return self._rows[name].number

    def attach(self, rings: Mapping[str, Ring], group: Group, doing: Callable[[], Doing] | None = None) -> None:
        """Read the spans of parties from these rings, until `detach`."""
        with self._lock:
            for name, ring in rings.items():
                self.number(name, group)
                self._rows[name].attach(ring)
            self._sources += [] if doing is None else [doing]

    def track(self, name: str, group: Group) -> Track:
        """Create a track for a party of this process."""
        ring = Ring.private()
        self.attach({name: ring}, group)
        self._tracks.append(made := Track(ring))
        return made

    def detach(self, rings: Iterable[str], doing: Callable[[], Doing] | None = None) -> None:
        """Keep the content of these rings, whose memory is about to be freed."""
        with self._lock:
            self.drain()
            now, last = self._now(), {} if doing is None else doing()
            for row in map(self._rows.__getitem__, rings):
                row.spans = _going_on(row.spans, last.get(row.name, ()), now)
                row.attach(None)
            self._sources = [source for source in self._sources if source != doing]

    def drain(self) -> None:
        with self._lock:
            rows = max(len(self._rows), 1)
            most, cell = max(MOST // rows, LEAST), cell_for(round(WINDOW * 1e9), max(WINDOW_SPANS // rows, LEAST // 5))
            for row in self._rows.values():
                row.drain(most, cell)

    def timeline(self) -> Timeline:
        """Return the timeline of the whole run so far."""
        with self._lock:
            self.drain()
            return self._made(self._begin, lambda row: row.spans)

    def recent(self) -> Timeline:
        """Return the last minute, merged to about WINDOW_SPANS spans."""
        with self._lock:
            self.drain()
            begin = max(self._begin, self._now() - round(WINDOW * 1e9))
            return self._made(begin, lambda row: row.recent(begin))

    def _made(self, begin: int, spans_of: Callable[[_Kept], NDArray]) -> Timeline:
        now, names = self._now(), list(self._rows)
        doing = {name: spans for source in self._sources for name, spans in source().items()}
        rows = []
        for row in self._rows.values():
            spans = _going_on(spans_of(row), doing.get(row.name, ()), now)
            spans = spans[np.searchsorted(spans[:, 1], begin, "right") :]
            if len(spans):
                rows.append(Row(row.name, row.group, self._named(spans, begin, now, names)))
        return Timeline(rows, self._about, (begin - self._begin) / 1e9, (now - self._begin) / 1e9)

    def _named(self, spans: NDArray, begin: int, end: int, names: Sequence[str]) -> list[Span]:
        seconds = (spans[:, :2].clip(begin, end) - self._begin) / 1e9
        codes = spans[:, 2]
        kinds, parties = (codes & (1 << PARTY) - 1).tolist(), (codes >> PARTY).tolist()
        return [
            Span(NAMES[kind], t0, t1, names[party - 1] if party else "")
            for (t0, t1), kind, party in zip(seconds.tolist(), kinds, parties, strict=True)
        ]

    def write_recent(self) -> None:
        """Write timeline.json, the last minute, for viewers of the run. OSError if it cannot be written."""
        if self._folder is not None:
            recent = self.recent().to_json()
            disk.show(self._folder / RECENT, json.dumps(recent, separators=(",", ":")).encode())

    def finished(self) -> Timeline:
        """Return the whole timeline; no party may write any more."""
        for track in self._tracks:
            track.flush()
        return self.timeline()

    def write(self, whole: Timeline) -> None:
        """Write trace.json and timeline.json at the end of the run. OSError if they cannot be written."""
        if self._folder is not None:
            disk.replace(self._folder / TRACE, encode(whole))
            self.write_recent()
