"""This module builds the sections of the report. Each function turns the results into HTML. Text
from users is escaped here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, NamedTuple

from freewheel_lab.compare import charts
from freewheel_lab.compare.results import CaseInfo, ModeFigures, ResultRow, Results, Spread, WorkAmount
from freewheel_lab.plots import svg
from freewheel_lab.plots.chart import Chart
from freewheel_lab.plots.numbers import UNKNOWN, Show, duration, megabytes, number, percent, times

#: Fields of a row that the table of raw rows omits; compare.json has them.
LONG = ("curve", "shares")


def tag(name: str, content: str, **attributes: str) -> str:
    """Return an element. Its content is HTML, and its attributes are text. A trailing _ of an
    attribute's name is dropped."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items() if value
    )
    return f"<{name}{given}>{content}</{name}>"


def text(value: object) -> str:
    return escape(str(value))


def sentence(words: str) -> str:
    """Return the text with an initial capital. A number and its unit stay on one line."""
    return re.sub(r"(?<=\d) (?=%|[a-zµ]{1,3}\b)", "\N{NO-BREAK SPACE}", words[:1].upper() + words[1:])


def moment(created: str) -> str:
    """Return when a comparison was made, as in 2026-11-16 17:06 UTC."""
    try:
        return datetime.fromisoformat(created).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return created


def card(title: str, about: str, content: str, kind: str = "") -> str:
    head = tag("h3", text(title)) + (tag("p", text(about), class_="about") if about else "")
    return tag("figure", head + content, class_=f"card {kind}".strip())


def drawn(chart: Chart, about: str = "") -> str:
    return card(chart.title, about, svg.draw(chart))


def items(lines: Iterable[str]) -> str:
    return tag("ul", "".join(tag("li", text(line)) for line in lines), class_="plain")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table. Heads are text, and cells are HTML. A small screen shows every row as a list
    labelled with the heads."""
    top = tag("thead", tag("tr", "".join(tag("th", text(name), scope="col") for name in head)))
    lines = (
        tag("tr", "".join(tag("td", cell, data_label=name) for name, cell in zip(head, row, strict=True)))
        for row in rows
    )
    return tag("div", tag("table", top + tag("tbody", "".join(lines)), class_=kind), class_="wide")


def mode_name(results: Results, mode: str) -> str:
    """Return the name of a mode with its colour in the charts."""
    swatch = f'<i class="swatch {svg.colour(charts.colour(results, mode))}"></i>'
    return tag("span", swatch + text(mode), class_="mode")


def heading(results: Results) -> str:
    work = results.work
    amount = f"{work.rows:,} environment steps" + (f", {work.updates:,} updates" if work.updates is not None else "")
    repeats = f"{results.repeats} repeat{'s' * (results.repeats != 1)}"
    where = "every mode that keeps up" if work.parts else "every mode"
    parts = [f"{amount} in {where}", repeats, *_machine(results.hardware), moment(results.created)]
    facts = "".join(tag("li", text(part)) for part in parts if part)
    return (
        tag("p", "freewheel compare", class_="kicker")
        + tag("h1", f"{_breakable(results.env)} <small>{text(results.algo)}</small>")
        + tag("ul", facts, class_="meta")
    )


def _breakable(name: str) -> str:
    """Return a name with line breaks allowed after each point, colon, slash or dash."""
    return "<wbr>".join(map(text, re.split(r"(?<=[.:/_-])", name)))


def _machine(hardware: Mapping[str, Any]) -> list[str]:
    """Return a short description of the machine from what is known about it."""
    cores = hardware.get("cores")
    names = [str(hardware[key]) for key in ("cpu", "processor", "gpu") if hardware.get(key)]
    return [*dict.fromkeys(names), *([f"{cores} cores"] if cores else [])]


def interrupted(results: Results) -> str:
    if results.ended == "complete":
        return ""
    most = results.repeats * sum(case.of is None and not case.refused for case in results.modes)
    of_all = f" of at least {most}" if len(results.rows) < most else ""
    done = f"{len(results.rows)}{of_all} trainings"
    notice = f"This comparison was interrupted. It has {done}, and this report covers only these."
    return tag("p", text(notice), class_="notice warn", role="status")


def verdict(results: Results) -> str:
    found = results.recommendation
    if found is None:
        return tag(
            "section", tag("p", "No recommendation: no mode has been measured.", class_="sentence"), class_="hero"
        )
    figures = results.figures(found.mode)
    margin = "no other mode" if found.margin is None else percent(found.margin)
    tiles = [("recommended", text(found.mode), ""), ("env steps/s", number(found.steps_per_s), "steps_per_s")]
    if figures is not None:
        episodes = figures.episodes_per_s
        speedup = figures.speedup
        tiles += [
            ("episodes/s", number(episodes.median if episodes else None), "episodes_per_s"),
            ("100,000 episodes", duration(figures.time_100k_episodes_s), "time_100k_episodes_s"),
            ("over sequential", times(speedup.median if speedup else None), "speedup"),
        ]
    tiles.append(("lead over the next", "within noise" if found.within_noise else text(margin), ""))
    shown = "".join(
        tag("div", tag("dt", label) + tag("dd", value, data_tile=key))
        for label, value, key in tiles
        if value != UNKNOWN
    )
    typed = tag("pre", tag("code", text(found.command)), class_="command") if found.command else ""
    return tag(
        "section",
        tag("p", text(sentence(found.sentence)), class_="sentence") + tag("dl", shown, class_="tiles") + typed,
        class_="hero",
        aria_label="Recommendation",
    )


def failures(results: Results) -> str:
    found = [
        tag("div", tag("strong", f"{text(case.mode)} failed. ") + text(case.failed), class_="notice bad")
        for case in results.modes
        if case.failed
    ]
    return "".join(found)


class TableColumn(NamedTuple):
    """A figure of the main table."""

    key: str
    head: str
    about: str
    show: Show

    def cell(self, figures: ModeFigures) -> tuple[str, str]:
        """Return the text of the cell and the spread below it."""
        value = getattr(figures, self.key)
        if isinstance(value, Spread) and self.key != "return_final":
            return self.show(value.median), _range(value, self.show)
        return self.show(value.median if isinstance(value, Spread) else value), _beside(self.key, figures)


COLUMNS = (
    TableColumn("episodes_per_s", "episodes/s", "Episodes that end per second", number),
    TableColumn("steps_per_s", "steps/s", "Environment steps per second that the learner uses", number),
    TableColumn("time_100k_episodes_s", "100k episodes", "Time for 100,000 episodes at this speed", duration),
    TableColumn("speedup", "speed-up", "Steps/s divided by those of sequential, in each repeat", times),
    TableColumn("efficiency", "efficiency", "Steps/s divided by those of environments that never wait", percent),
    TableColumn(
        "return_final",
        "return",
        "Mean of the newest training episodes at the end; small: when the fastest mode had ended",
        number,
    ),
    TableColumn("lag_max", "lag", "Greatest number of updates between acting and learning, and its mean", number),
    TableColumn("memory_mb", "memory", "Trainer and workers together", megabytes),
    TableColumn("cpu_util", "CPU", "Share of all cores", percent),
    TableColumn("dropped", "drops", "Rows that were dropped, in all repeats", number),
    TableColumn("startup_s", "start-up", "Until the first step of an environment; the speeds exclude it", duration),
)


def _range(value: Spread, show: Show) -> str:
    if value.low == value.high or show(value.low) == show(value.high):
        return ""
    return f"{show(value.low)} – {show(value.high)}"


def _beside(key: str, figures: ModeFigures) -> str:
    if key == "lag_max" and figures.lag_mean is not None and figures.lag_max:
        return f"mean {number(figures.lag_mean)}"
    if key == "return_final" and figures.return_at is not None:
        return f"{number(figures.return_at)} at equal time"
    if key == "cpu_util" and figures.gpu_util is not None:
        return f"GPU {percent(figures.gpu_util)}"
    return ""


def main_table(results: Results) -> str:
    heads = "".join(tag("th", text(one.head), scope="col", title=one.about) for one in COLUMNS)
    top = tag("thead", tag("tr", tag("th", "mode", scope="col") + heads))
    lines = "".join(_mode_row(results, case) for case in charts.ranked(results))
    caption = "Median over the repeats; small: minimum and maximum. The fastest mode comes first."
    return (
        tag("div", tag("table", top + tag("tbody", lines), class_="main"), class_="wide")
        + tag("p", text(caption), class_="about")
    )  # fmt: skip


def _mode_row(results: Results, case: CaseInfo) -> str:
    figures = results.figures(case.mode)
    best = results.recommendation
    chosen = best is not None and best.mode == case.mode
    badge = '<span class="badge">recommended</span>' if chosen else ""
    size = f"{case.workers} worker{'s' * (case.workers != 1)}, {case.envs} env{'s' * (case.envs != 1)}"
    size = "" if case.refused else tag("small", text(size))
    first = tag("th", mode_name(results, case.mode) + size + badge, scope="row", title=case.title)
    kind = " ".join(word for word, on in (("chosen", chosen), ("variant", case.of is not None)) if on)
    if figures is None:
        reason = "failed: see above" if case.failed else text(case.refused or "not measured")
        return tag("tr", first + tag("td", reason, colspan=str(len(COLUMNS)), class_="none"), class_=kind)
    cells = []
    for column in COLUMNS:
        shown, below = column.cell(figures)
        small = tag("small", text(below)) if below else ""
        cells.append(tag("td", text(shown) + small, data_label=column.head, data_key=column.key))
    return tag("tr", first + "".join(cells), class_=kind, data_mode=case.mode)


def topic(one: charts.ChartGroup) -> str:
    wide = "pairs" if one.name in ("learning", "time") else "cards"
    shown = "".join(drawn(chart, getattr(chart, "about", "")) for chart in one.charts)
    return section(one.name, one.title, one.about, tag("div", shown, class_=wide))


def section(name: str, title: str, about: str, content: str) -> str:
    head = tag("h2", text(title)) + (tag("p", text(about), class_="about") if about else "")
    return tag("section", head + content, id=name)


def pairs(results: Results) -> str:
    if not results.pairs:
        return ""
    rows = []
    for pair in results.pairs:
        gain = tag("strong", times(pair.gain.median)) if pair.gain else "not measured"
        below = tag("small", _range(pair.gain, times)) if pair.gain else ""
        ways = f"{mode_name(results, pair.before)} → {mode_name(results, pair.after)}" if pair.gain else UNKNOWN
        rows.append([text(pair.what), ways, gain + below, text(sentence(pair.sentence))])
    head = ("what", "from → to", "steps/s", "meaning")
    about = "Each part of the difference is measured separately."
    return section("pairs", "Synchronous against asynchronous", about, table(head, rows, "words"))


def scale(results: Results) -> str:
    shown = charts.scaling(results)
    if results.scale is None or not shown:
        return ""
    scaling = results.scale
    points = [*scaling.points, *scaling.extrapolated]
    rows = [
        [mode_name(results, one.mode), f"{one.workers:,}",
         text(one.failed) if one.failed else number(one.measured.median if one.measured else None),
         number(one.predicted), "" if one.error is None else f"{100 * one.error:+.0f} %",
         number(one.a_core_each), text(one.limit)]
        for one in sorted(points, key=lambda one: (one.mode, one.workers))
    ]  # fmt: skip
    numbers = table(
        ("mode", "workers", "measured steps/s", "by the law", "error", "with a core for each", "waits for"), rows
    )
    words = (
        items(scaling.verdict)
        + tag("p", f"{tag('strong', 'The law.')} {text(scaling.law)}")
        + tag("p", tag("strong", "Assumptions of the extrapolation"))
        + items(scaling.assumptions)
    )
    content = tag(
        "div", "".join(map(drawn, shown)) + card("Up to where more workers pay", "", words, "words"), class_="pairs"
    )
    fold = tag("details", tag("summary", "All points") + numbers)
    return section("scale", "More workers", "", content + fold)


def modes(results: Results) -> str:
    rows = []
    for case in charts.ranked(results):
        options = ", ".join(f"{name} {value}" for name, value in case.options.items()) or UNKNOWN
        needs = ", ".join(case.dependencies) or "no more than this process"
        command = tag("code", text(case.command)) if case.command else UNKNOWN
        rows.append([mode_name(results, case.mode), text(case.title), text(needs), text(options), command])
    head = ("mode", "what it does", "needs", "its options", "equivalent command")
    return section("modes", "The modes and what they need", "", table(head, rows, "words"))


def details(results: Results) -> str:
    work = results.work
    ideal = results.ideal
    facts: dict[str, Any] = {
        "command": results.command,
        "made": f"{moment(results.created)}, in {duration(results.wall_s)}",
        "budget": f"{duration(results.budget_s)}, {results.repeats} repeats, seeds {', '.join(map(str, work.seeds))}",
        "work": f"{work.rows:,} rows, {work.rows_per_update:,} per update; {work.envs} envs",
        "excluded": _left_out(work),
        "equal work": results.equal_work,
        "ideal": f"{number(ideal.steps_per_s)} steps/s: {ideal.formula}",
        **{str(key): value for key, value in results.hardware.items()},
    }
    rows = [[text(name), text(_plain(value))] for name, value in facts.items() if value not in ("", None)]
    notes = items(work.notes) if work.notes else ""
    return section("details", "How it was measured", "", notes + table(("", ""), rows, "facts"))


def _left_out(work: WorkAmount) -> str:
    """Return what rates exclude."""
    first = f"the first {work.warm_up} update{'s' * (work.warm_up != 1)} (warm-up) of every rate"
    if work.updates is None:
        first = "the rows before the first update, and the first updates after them (warm-up) of every rate"
    where = " in modes that do the whole work, and proportionally less in the others" if work.parts else ""
    return f"{first}{where}, and start-up"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def raw_rows(results: Results) -> str:
    if not results.rows:
        return ""
    names = [name for name in ("repeat", "mode", *vars(results.rows[0])) if name not in LONG]
    names = list(dict.fromkeys(names))
    body = "".join(
        tag("tr", "".join(tag("td", text(_raw(row, name)), data_key=name) for name in names), data_row=str(at))
        for at, row in enumerate(results.rows)
    )
    top = tag("thead", tag("tr", "".join(tag("th", name, scope="col") for name in names)))
    inside = tag("div", tag("table", top + tag("tbody", body), class_="raw"), class_="scroll")
    title = f"All {len(results.rows)} trainings as measured (compare.json also has the learning curves)"
    return tag("details", tag("summary", text(title)) + inside, id="rows")


def _raw(row: ResultRow, name: str) -> str:
    value = getattr(row, name)
    if isinstance(value, float):
        return f"{value:.6g}"
    return UNKNOWN if value is None else _plain(value) or "none"
