"""Writes and reads trace.json: a timeline as Chrome trace events, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from freewheel.errors import FileError, printable
from freewheel.files import read as files
from freewheel.timeline.model import FORMAT, GROUPS, Group, Row, Span, Timeline

TRACE = "trace.json"  # the whole run, written at its end
RECENT = "timeline.json"  # the last minute, written during the run: Timeline.to_json
TITLES: Mapping[Group, str] = {"envs": "Envs", "learner": "Learner", "gpu": "GPU", "sync": "Sync"}
MOST_BYTES = 64 << 20


def read(path: Path) -> Timeline:
    """Read the timeline in a run directory, a trace.json or a timeline.json; FileError if there is none."""
    if path.is_dir():
        found = next((path / name for name in (TRACE, RECENT) if (path / name).is_file()), None)
        if found is None:
            raise FileError(f"{path} has no timeline: train with --trace to record one")
        path = found
    data = files.json_object(path, MOST_BYTES)
    return _from_events(data, str(path)) if "traceEvents" in data else Timeline.from_json(data, str(path))


def encode(timeline: Timeline) -> bytes:
    """Return the content of trace.json, with one event per line so that people can read it too."""
    about = {"format": FORMAT, "writer": "freewheel", "about": dict(timeline.about)}
    window = {"begin_s": timeline.begin_s, "end_s": timeline.end_s}
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about | window})[:-1]
    lines = ",\n".join(_events(timeline))
    return f'{head}, "traceEvents": [\n{lines}\n]}}\n'.encode()


def _events(timeline: Timeline) -> Iterator[str]:
    names = {kind: json.dumps(kind) for kind in timeline.kinds()}
    for place, group in enumerate(GROUPS, 1):
        rows = list(timeline.group(group))
        if not rows:
            continue
        yield _name("process_name", place, 0, name=TITLES[group])
        yield _name("process_sort_index", place, 0, sort_index=place)
        for number, row in enumerate(rows, 1):
            yield _name("thread_name", place, number, name=row.name)
            yield _name("thread_sort_index", place, number, sort_index=number)
            where = f'"cat":"{group}","ph":"X","pid":{place},"tid":{number}'
            for kind, begin, end, party in row.spans:
                waits = f',"args":{{"waits_for":{json.dumps(party)}}}' if party else ""
                at = round(begin * 1e6, 3)
                yield f'{{"name":{names[kind]},{where},"ts":{at},"dur":{round(end * 1e6 - at, 3)}{waits}}}'


def _name(what: str, process: int, thread: int, **values: Any) -> str:
    return json.dumps({"name": what, "ph": "M", "pid": process, "tid": thread, "args": values}, separators=(",", ":"))


def _from_events(data: Mapping[str, Any], name: str) -> Timeline:
    try:
        about, names = data.get("otherData", {}), {}
        spans: dict[tuple[int, int], list[Span]] = {}
        for event in data["traceEvents"]:
            row = event["pid"], event["tid"]
            if event["ph"] == "M" and event["name"] == "thread_name":
                names[row] = printable(str(event["args"]["name"]))
                spans.setdefault(row, [])
            elif event["ph"] == "X":
                begin, party = float(event["ts"]), printable(str(event.get("args", {}).get("waits_for", "")))
                span = Span(printable(str(event["name"])), begin / 1e6, (begin + float(event["dur"])) / 1e6, party)
                spans.setdefault(row, []).append(span)
        rows = [Row(names[row], GROUPS[row[0] - 1], own) for row, own in spans.items()]
        end = max((own[-1].t1_s for own in spans.values() if own), default=0.0)
        window = float(about.get("begin_s", 0.0)), float(about.get("end_s", end))
        return Timeline(rows, {str(kind): str(text) for kind, text in about.get("about", {}).items()}, *window)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{name} is not a trace of freewheel ({type(error).__name__}: {error})") from None
