"""The model of a timeline: rows of spans over the seconds of a run, and its compact form for pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, get_args

from freewheel.errors import FileError, printable

FORMAT = 1
Group = Literal["envs", "learner", "gpu", "sync"]
GROUPS: tuple[Group, ...] = get_args(Group)


class Look(NamedTuple):
    """How a kind of span is shown."""

    color: str
    mark: str  # one letter, for output without colours


#: Every kind of span: of core.WORKER_TIME, of core.LEARNER_TIME and of the collector. Waits have warm colours.
KINDS: Mapping[str, Look] = {
    "step": Look("#2e9e5b", "S"),
    "reset": Look("#8fd19e", "R"),
    "infer": Look("#3b82c4", "I"),
    "write": Look("#7aa6c9", "w"),
    "load": Look("#9b7fd1", "l"),
    "observe": Look("#5bb5c9", "o"),
    "update": Look("#3d5a98", "U"),
    "fit": Look("#8e4585", "F"),
    "rollout": Look("#c27bb8", "M"),
    "publish": Look("#9b7fd1", "p"),
    "eval": Look("#b8a13a", "E"),
    "save": Look("#8c6d4f", "C"),
    "take": Look("#5bb5c9", "t"),
    "wait-credit": Look("#f0a35e", "c"),
    "wait-slot": Look("#e0793c", "q"),
    "wait-gate": Look("#d9574a", "g"),
    "wait-data": Look("#f0a35e", "d"),
    "wait-model": Look("#e0793c", "m"),
    "down": Look("#8b1e2d", "X"),
    "other": Look("#c3c8cf", "."),
}
UNKNOWN = Look("#999999", "?")
#: The party that a wait is for, if the span itself does not name it.
WAITS_FOR: Mapping[str, str] = {
    "wait-credit": "learner",
    "wait-slot": "learner",
    "wait-gate": "the slowest worker",
    "wait-data": "the workers",
    "wait-model": "the fit of the model",
}


def look(kind: str) -> Look:
    return KINDS.get(kind, UNKNOWN)


def is_wait(kind: str) -> bool:
    return kind.startswith("wait-")


class Span(NamedTuple):
    """An interval of one party's time, in seconds since the run began."""

    kind: str
    t0_s: float
    t1_s: float
    waits_for: str = ""  # the row that a wait was for, if known

    @property
    def seconds(self) -> float:
        return self.t1_s - self.t0_s


@dataclass(frozen=True)
class Row:
    """One party: a worker, the collector, the learner, a GPU. Its spans are in order and do not overlap."""

    name: str
    group: Group
    spans: Sequence[Span]

    def seconds(self) -> dict[str, float]:
        """Return the seconds by kind."""
        found: dict[str, float] = {}
        for span in self.spans:
            found[span.kind] = found.get(span.kind, 0.0) + span.seconds
        return found

    def window(self, begin_s: float, end_s: float) -> Self:
        """Return the part between these times; spans are cut at them."""
        cut = (span._replace(t0_s=max(span.t0_s, begin_s), t1_s=min(span.t1_s, end_s)) for span in self.spans)
        return replace(self, spans=[span for span in cut if span.t1_s > span.t0_s])


@dataclass(frozen=True)
class Timeline:
    """All rows of a run, or of a part of it."""

    rows: Sequence[Row]
    about: Mapping[str, str] = field(default_factory=dict)  # kind -> a sentence: the activity, or why it waits
    begin_s: float = 0.0
    end_s: float = 0.0  # the shown part ends here

    @property
    def seconds(self) -> float:
        return max(self.end_s - self.begin_s, 0.0)

    def group(self, group: Group) -> Iterator[Row]:
        return (row for row in self.rows if row.group == group)

    def kinds(self) -> list[str]:
        """Return the kinds that occur, in the order of KINDS."""
        found = {span.kind for row in self.rows for span in row.spans}
        return [kind for kind in KINDS if kind in found] + sorted(found - set(KINDS))

    def last(self, seconds: float) -> Self:
        """Return the part with the newest `seconds`."""
        return self.window(max(self.begin_s, self.end_s - seconds), self.end_s)

    def window(self, begin_s: float, end_s: float) -> Self:
        rows = [row.window(begin_s, end_s) for row in self.rows]
        return replace(self, rows=rows, begin_s=begin_s, end_s=end_s)

    def to_json(self) -> dict[str, Any]:
        """Return the compact form. A span is [t0, t1, kind] or, if the row it waits for is known, [t0, t1, kind, row].

        `kinds`, `about`, `waits_for` and `colors` have one entry for each kind; times are seconds since the run began.
        """
        kinds = self.kinds()
        number = {kind: place for place, kind in enumerate(kinds)}
        place = {row.name: place for place, row in enumerate(self.rows)}
        return {
            "format": FORMAT,
            "kinds": kinds,
            "about": [self.about.get(kind, "") for kind in kinds],
            "waits_for": [WAITS_FOR.get(kind, "") for kind in kinds],
            "colors": [look(kind).color for kind in kinds],
            "rows": [
                {"name": row.name, "group": row.group, "spans": [_packed(span, number, place) for span in row.spans]}
                for row in self.rows
            ],
            "begin": _short(self.begin_s),
            "seconds": _short(self.seconds),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], name: str = "the timeline") -> Self:
        """Return the timeline that `to_json` encoded; FileError if the data is not a timeline."""
        try:
            kinds, names = ([printable(str(one)) for one in found]
                            for found in (data["kinds"], [row["name"] for row in data["rows"]]))  # fmt: skip
            rows = [Row(own, _group(row["group"]), [_unpacked(one, kinds, names) for one in row["spans"]])
                    for own, row in zip(names, data["rows"], strict=True)]  # fmt: skip
            about = dict(zip(kinds, map(str, data.get("about", ())), strict=False))
            begin = float(data.get("begin", 0.0))
            return cls(rows, about, begin, begin + float(data["seconds"]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise FileError(f"{name} is not a timeline of freewheel ({type(error).__name__}: {error})") from None


def _packed(span: Span, number: Mapping[str, int], place: Mapping[str, int]) -> list[float]:
    kind, begin, end, party = span
    packed = [_short(begin), _short(end), number[kind]]
    return [*packed, place[party]] if party in place else packed


def _unpacked(packed: Sequence[float], kinds: Sequence[str], names: Sequence[str]) -> Span:
    t0, t1, kind, *party = packed
    return Span(kinds[int(kind)], float(t0), float(t1), names[int(party[0])] if party else "")


def _group(name: object) -> Group:
    found = next((group for group in GROUPS if group == name), None)
    if found is None:
        raise ValueError(f"a row has the group {name!r}")
    return found


def _short(seconds: float) -> float:
    """Round to 10 µs, several times faster than `round`."""
    return int(seconds * 1e5 + 0.5) / 1e5
