"""Draws a timeline as text: CPU, GPU, Envs and Sync as blocks over seconds, then one line for each party."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from freewheel.timeline.model import Group, Row, Span, Timeline, is_wait, look

if TYPE_CHECKING:
    from rich.text import Text

LEVELS = " ▁▂▃▄▅▆▇█"
MOST_WORKERS = 12  # lines of workers; if there are more, the first ones are drawn
NARROWEST, WIDEST = 20, 160  # least columns of time, most columns of all
ENVS = ("step", "reset")
IDLE = ("down", "other")
SYNC = ("publish", "load", "take")
#: The groups of rows behind each of the four bars. CPU: work outside environments. Sync: waits, and transfers of data.
ROWS: Mapping[str, tuple[Group, ...]] = {
    "CPU": ("learner",),
    "GPU": ("gpu",),
    "Envs": ("envs",),
    "Sync": ("envs", "learner", "sync"),
}


def show(timeline: Timeline) -> None:
    """Print the timeline to standard output, up to its width."""
    from freewheel.files.terminal import Terminal

    console = Terminal()
    console.print(draw(timeline, min(console.width, WIDEST)), soft_wrap=True, end="")


def draw(timeline: Timeline, width: int = 100) -> Text:
    """Draw the timeline with colours; `str` of the result is plain text, with a letter for every kind."""
    from rich.text import Text

    labels = [*ROWS, *(row.name for row in timeline.rows)]
    margin = max(map(len, labels)) + 2
    columns = max(width - margin - 7, NARROWEST)
    text = Text(no_wrap=True, end="")
    for name in ROWS:
        _bar(text, timeline, name, margin, columns)
    _axis(text, timeline, margin, columns)
    shown, hidden = _shown(timeline.rows)
    for row in shown:
        _line(text, timeline, row, margin, columns)
    if hidden:
        text.append(f"{'':{margin}}and {hidden} more workers\n", style="dim")
    _legend(text, timeline, margin, width)
    for sentence in longest_waits(timeline):
        text.append(f"{sentence}\n")
    return text


def shares(rows: Iterable[Row], begin_s: float, end_s: float, columns: int) -> list[dict[str, float]]:
    """Return the seconds by kind, over these rows, for each of `columns` equal parts of a window."""
    cells: list[dict[str, float]] = [{} for _ in range(columns)]
    each = (end_s - begin_s) / columns
    if each <= 0:
        return cells
    for row in rows:
        for span in row.spans:
            _spread(span, cells, begin_s, each)
    return cells


def _spread(span: Span, cells: Sequence[dict[str, float]], begin_s: float, each: float) -> None:
    first = max(int((span.t0_s - begin_s) / each), 0)
    last = min(int((span.t1_s - begin_s) / each), len(cells) - 1)
    for place in range(first, last + 1):
        begin = begin_s + place * each
        inside = min(span.t1_s, begin + each) - max(span.t0_s, begin)
        if inside > 0:
            cells[place][span.kind] = cells[place].get(span.kind, 0.0) + inside


def busy(bar: str, timeline: Timeline, columns: int) -> tuple[list[float], int]:
    """Return the share of time, 0 to 1, that a bar shows in each column, and the number of its rows."""
    rows = [row for row in timeline.rows if row.group in ROWS[bar]]
    on_gpu = {span.kind for row in timeline.group("gpu") for span in row.spans} if bar == "CPU" else set()
    whole = timeline.seconds / columns
    each = []
    for row in rows:
        cells = shares([row], timeline.begin_s, timeline.end_s, columns)
        parts = (sum(s for kind, s in cell.items() if kind not in on_gpu and _counts(bar, kind)) for cell in cells)
        each.append([min(part / whole, 1.0) if whole else 0.0 for part in parts])
    if bar in ("CPU", "GPU"):  # rows share the device: show the busiest one
        return [max(column) for column in zip(*each, strict=True)], len(rows)
    return [sum(column) / len(rows) for column in zip(*each, strict=True)], len(rows)


def _counts(bar: str, kind: str) -> bool:
    if bar == "Sync":
        return is_wait(kind) or kind in SYNC
    if bar == "Envs":
        return kind in ENVS
    return not is_wait(kind) and kind not in IDLE


def _bar(text: Text, timeline: Timeline, name: str, margin: int, columns: int) -> None:
    levels, rows = busy(name, timeline, columns)
    text.append(f"{name:{margin}}", style="bold")
    if not rows:
        text.append("none in this run\n", style="dim")
        return
    color = {"CPU": "update", "GPU": "fit", "Envs": "step", "Sync": "wait-gate"}[name]
    text.append("".join(LEVELS[round(level * (len(LEVELS) - 1))] for level in levels), style=look(color).color)
    text.append(f" {100 * sum(levels) / len(levels):4.0f} %\n")


def _axis(text: Text, timeline: Timeline, margin: int, columns: int) -> None:
    marks = 4
    line = [" "] * (columns + 7)
    for mark in range(marks + 1):
        label = f"{timeline.begin_s + timeline.seconds * mark / marks:.3g} s"
        at = min(round(columns * mark / marks), columns + 7 - len(label))
        line[at : at + len(label)] = label
    text.append(f"{'':{margin}}{''.join(line).rstrip()}\n", style="dim")


def _shown(rows: Sequence[Row]) -> tuple[list[Row], int]:
    workers = [row for row in rows if row.group == "envs"]
    kept = workers[:MOST_WORKERS]
    return kept + [row for row in rows if row.group != "envs"], len(workers) - len(kept)


def _line(text: Text, timeline: Timeline, row: Row, margin: int, columns: int) -> None:
    """Append one row, with the kind that took the most time in each column."""
    cells = shares([row], timeline.begin_s, timeline.end_s, columns)
    text.append(f"{row.name:{margin}}")
    for cell in cells:
        kind = max(cell, key=lambda one: cell[one], default="")
        text.append(look(kind).mark if kind else " ", style=f"black on {look(kind).color}" if kind else "")
    text.append("\n")


def _legend(text: Text, timeline: Timeline, margin: int, width: int) -> None:
    used = margin
    text.append(f"{'':{margin}}")
    for kind in timeline.kinds():
        entry = f"{look(kind).mark} {kind}  "
        if used + len(entry) > width:
            text.append(f"\n{'':{margin}}")
            used = margin
        text.append(look(kind).mark, style=f"black on {look(kind).color}")
        text.append(entry[1:])
        used += len(entry)
    text.append("\n")


def longest_waits(timeline: Timeline) -> Iterator[str]:
    """Yield one sentence for the workers and one for the learner: their longest wait, for whom and why."""
    whose: tuple[tuple[Group, str], ...] = (("envs", "workers"), ("learner", "the learner"))
    for group, who in whose:
        rows = list(timeline.group(group))[: None if group == "envs" else 1]
        waits = _waits(rows)
        if not waits or not timeline.seconds:
            continue
        (kind, party), seconds = max(waits.items(), key=lambda item: item[1])
        share = 100 * seconds / (timeline.seconds * len(rows))
        if share >= 1:
            whom = f" (mostly {party})" if party else ""
            yield f"{who}: {share:.0f} % {kind}{whom}: {timeline.about.get(kind, '')}".rstrip(": ")


def _waits(rows: Sequence[Row]) -> Mapping[tuple[str, str], float]:
    """Return the seconds by kind of wait, with the party that more than half of the wait was for, if there is one."""
    by_kind: dict[str, dict[str, float]] = {}
    for row in rows:
        for span in row.spans:
            if is_wait(span.kind):
                own = by_kind.setdefault(span.kind, {})
                own[span.waits_for] = own.get(span.waits_for, 0.0) + span.seconds
    found = {}
    for kind, own in by_kind.items():
        party, whole = max(own, key=lambda one: own[one]), sum(own.values())
        found[kind, party if own[party] > whole / 2 else ""] = whole
    return found
