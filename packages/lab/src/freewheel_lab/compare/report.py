"""This module writes the report of a comparison: report.html, a single file that needs no network,
and the same charts as PNG files.

Both depend on the results alone, so a report can be written again from compare.json at any time.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from freewheel.errors import FileError, SetupError
from freewheel.files import disk
from freewheel.files.stdout import complain
from freewheel.timeline.model import Timeline
from freewheel_lab.compare import charts, sections
from freewheel_lab.compare.results import Results
from freewheel_lab.compare.sections import card, section, tag, text
from freewheel_lab.plots import picture
from freewheel_lab.plots.chart import Chart, SpanChart
from freewheel_lab.plots.numbers import duration
from freewheel_watch.timeline import page as gantt

HERE = Path(__file__).parent
PAGE = "report.html"
PLOTS = "plots"
MOST_SPANS = 40_000  # of all timelines together, so that the page stays below 2 MB


def write(results: Results, folder: Path, say: Callable[[str], None] = complain) -> list[Path]:
    """Write report.html and plots/*.png into this folder. Call `say` if a package for the pictures
    is missing."""
    path = folder / PAGE
    disk.replace(path, html(results).encode())
    try:
        return [path, *_pictures(results, folder / PLOTS)]
    except SetupError as error:
        say(str(error))
        return [path]


def _pictures(results: Results, folder: Path) -> list[Path]:
    picture.require()
    folder.mkdir(exist_ok=True)
    written = []
    found: dict[str, Sequence[Chart | SpanChart]] = {topic.name: topic.charts for topic in charts.topics(results)}
    if scaling := charts.scaling(results):
        found["scaling"] = scaling
    if timelines := [one for case in charts.ranked(results) if (one := charts.tracks(results, case.mode)) is not None]:
        found["timelines"] = timelines
    for name, drawn in found.items():
        path = folder / f"{name}.png"
        picture.write(
            drawn,
            path,
            columns=1 if name == "timelines" else min(len(drawn), 2),
            title=f"{results.env}, {results.algo}",
        )
        written.append(path)
    return written


def html(results: Results) -> str:
    """Return the page."""
    script = gantt.script() + (HERE / "report.js").read_text(encoding="utf-8")
    topics = [sections.topic(one) for one in charts.topics(results)]
    body = [
        sections.interrupted(results),
        sections.verdict(results),
        sections.failures(results),
        section("all-modes", "All modes", sections.sentence(results.equal_work), sections.main_table(results)),
        *topics[:2],
        sections.pairs(results),
        *topics[2:],
        sections.scale(results),
        _timelines(results),
        sections.modes(results),
        sections.details(results),
        sections.raw_rows(results),
    ]
    return Template((HERE / "report.html").read_text(encoding="utf-8")).substitute(
        title=text(f"{results.env}, {results.algo}: freewheel compare"),
        hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=gantt.style() + (HERE / "report.css").read_text(encoding="utf-8"),
        script=script,
        head=sections.heading(results),
        body="\n".join(filter(None, body)),
    )


def _timelines(results: Results) -> str:
    known = {
        case.mode: results.timelines[case.mode] for case in charts.ranked(results) if results.timelines.get(case.mode)
    }
    if not known:
        return ""
    about = (
        "Each row shows what a worker or the learner did; thin bars in warm colours are waits. "
        "Point at a wait to see what it is for. Click into a timeline to zoom with the wheel, and drag to move."
    )
    shown = "".join(_timeline(results, mode, data, MOST_SPANS // len(known)) for mode, data in known.items())
    return section("timelines", "Timelines", about, shown)


def _timeline(results: Results, mode: str, data: Mapping[str, Any], most: int) -> str:
    try:
        whole = Timeline.from_json(data, f"the timeline of {mode}")
    except FileError as error:
        return card(mode, "", tag("p", text(error), class_="about"))
    part = _fitting(whole, most)
    seconds = f"{duration(part.seconds)} of {duration(whole.seconds)}" if part is not whole else duration(whole.seconds)
    packed = json.dumps(part.to_json(), separators=(",", ":")).replace("<", "\\u003c")
    holder = f'<div class="timeline"></div><script type="application/json">{packed}</script>'
    return tag(
        "figure", tag("h3", sections.mode_name(results, mode) + tag("small", text(seconds))) + holder, class_="card"
    )


def _fitting(timeline: Timeline, most: int) -> Timeline:
    """Return the beginning of the timeline that has at most this number of spans."""
    begins = sorted(span.t0_s for row in timeline.rows for span in row.spans)
    return timeline if len(begins) <= most else timeline.window(timeline.begin_s, begins[most])
