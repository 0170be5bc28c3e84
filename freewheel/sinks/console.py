"""Shows a run on a screen: a live panel on a terminal, one line per interval elsewhere, and a summary at the end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freewheel.files.terminal import Terminal
from freewheel.metrics.meter import Budget
from freewheel.metrics.targets import Indicator, Setup, judge
from freewheel.sinks.classic import ClassicLines
from freewheel.sinks.formats import (
    ASCII_SHADES,
    SHADES,
    causes,
    clock,
    evaluating,
    filled,
    lag_of,
    ledger,
    number,
    percent,
    progress_and_left,
    rate,
    shares_bar,
)
from freewheel.sinks.sink import RunInfo, SinkEntry

WIDTH = 88  # largest width of the panel, in columns
BAR = 60  # largest length of a bar of shares, in cells
LABEL = 11  # columns before the lines of the summary
FREE_RUNNING = ("continuous", "episodes", "ray")  # modes whose classic name begins with Async
#: Labels of the panel's key figures by metric, and the styles of figures that have a target.
FIGURES = {"steps_per_s": "steps/s", "updates_per_s": "updates/s", "queue_util": "queue", "buffer_util": "buffer",
           "gpu_util": "gpu", "cpu_util": "cpu"}  # fmt: skip
STYLES = {"good": "bold green", "bad": "bold red"}
STEADY = 5  # consecutive rows after which the console says why a target is out of reach
ENDINGS = {"steps": "all steps taken", "minutes": "time is up", "episodes": "all episodes played"}


class ConsoleSink:
    """Prints a run. Implements sink.Sink.

    `classic`: lines to print instead of the panel or plain lines; `setup`: decides which targets the run can reach.
    """

    direct = True

    def __init__(
        self,
        title: str,
        budget: Budget,
        out: Console | None = None,
        classic: ClassicLines | None = None,
        setup: Setup | None = None,
    ) -> None:
        self._title, self._budget, self._out, self._classic = title, budget, out or Terminal(), classic
        self._setup, self._beyond = setup, Counter[str]()  # consecutive rows in which a target was out of reach
        self._live: Live | None = None
        self._best: float | None = None

    def write(self, row: Mapping[str, Any]) -> None:
        evaluated = row.get("eval_return")
        if evaluated is not None:
            self._best = evaluated if self._best is None else max(self._best, evaluated)
        if self._classic:
            for line in self._classic.of(row):
                self._print(Text(line))
        elif self._out.is_terminal and not self._out.is_dumb_terminal:
            self._show(row)
        else:
            self._print(Text(_line(self._budget, row)))

    def note(self, text: str) -> None:
        self._print(Text(text))

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        shades = ASCII_SHADES if self._out.options.ascii_only else SHADES
        for line in _summary(self._title, summary, shades, self._out.width if self._out.is_terminal else None):
            self._print(line)

    def _show(self, row: Mapping[str, Any]) -> None:
        if self._live is None:
            # Every row refreshes the panel, so it needs no thread.
            self._live = Live(console=self._out, auto_refresh=False, transient=True)
            self._live.start()
        judged = judge(row, self._setup)
        self._explain(judged)
        body = Group(_progress(self._budget, row), "", _figures(row, self._best, judged), "", *ledger(row))
        title, elapsed = Text(self._title, "bold"), Text(clock(row["wall_s"]), "dim")
        panel = Panel(body, title=title, subtitle=elapsed, padding=(0, 1), width=min(self._out.width, WIDTH))
        self._live.update(panel, refresh=True)

    def _explain(self, judged: Sequence[Indicator]) -> None:
        """Say once why a target is out of reach, after STEADY rows in succession."""
        for one in judged:
            self._beyond[one.name] = self._beyond[one.name] + 1 if one.state == "unreachable" else 0
            if self._beyond[one.name] == STEADY:
                self._print(Text(f"{one.label}: {one.reason}", "dim"))
                self._beyond[one.name] = -sys.maxsize  # never again

    def _print(self, text: Text) -> None:
        # Lines are not wrapped, so that `grep` works; above a panel they must be, or the panel would be cut as well.
        self._out.print(text, soft_wrap=self._live is None)


def _open(run: RunInfo) -> ConsoleSink | None:
    name = ("Async" if run.mode in FREE_RUNNING else "") + run.algorithm.upper()
    episodes = run.budget.episodes
    classic = ClassicLines("" if episodes else name, episodes=episodes) if run.console == "classic" else None
    return None if run.quiet else ConsoleSink(run.title, run.budget, classic=classic, setup=run.setup)


SINK = SinkEntry("console", _open, default=True)


def _line(budget: Budget, row: Mapping[str, Any]) -> str:
    progress, left = progress_and_left(budget, row)
    steps = str(row["env_steps"])
    if budget.steps is not None:
        steps = f"{steps:>{len(str(budget.steps))}}/{budget.steps}"
    parts = [
        f"step {steps}" + ("" if progress is None else f" {percent(progress):>4}"),
        f"{rate(row['steps_per_s']):>5} steps/s",
        f"return {number(row['return_mean']):>7} (last {row['return_episodes']})",
        f"length {number(row['length_mean'], 0):>5}",
        f"updates {row['updates']:>5}",
        f"lag {number(lag_of(row, 'mean')):>3}",
        f"learner {percent(row['learner_busy']):>4} env {percent(row['env_busy']):>4}",
    ]
    if progress is not None and not (progress == 1 and evaluating(row)):
        parts.append(f"eta {clock(left):>5}")
    if playing := evaluating(row):
        parts.append(playing)
    if row.get("eval_return") is not None:
        parts.append(f"eval {number(row['eval_return'])}")
    if row["dropped"]:
        parts.append(f"dropped {sum(row['dropped'].values())} ({causes(row)})")
    return "  ".join(parts)


def _progress(budget: Budget, row: Mapping[str, Any]) -> RenderableType:
    progress, left = progress_and_left(budget, row)
    steps = f"{row['env_steps']:,}" + ("" if budget.steps is None else f" / {budget.steps:,}") + " steps"
    if progress is None:
        return Text(steps, "bold")
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(ratio=1)
    bar = ProgressBar(total=1.0, completed=progress, complete_style="green")
    doing = evaluating(row) or f"eta {clock(left)}"
    line.add_row(bar, Text(percent(progress), "bold"), steps, Text(doing, "cyan"))
    return line


def _figures(row: Mapping[str, Any], best: float | None, judged: Sequence[Indicator]) -> Columns:
    """Lay out the key figures; only a figure with a reachable target is green or red."""
    busy = {kind: percent(row[f"{kind}_busy"]) for kind in ("learner", "env")}
    used = {part: percent(row[f"{part}_util"]) for part in ("queue", "buffer", "cpu", "gpu")}
    groups = (
        {f"{noun}/s": rate(row[f"{noun}_per_s"]) for noun in ("steps", "updates", "episodes")},
        {"return": number(row["return_mean"]), "length": number(row["length_mean"], 0), "best eval": number(best)},
        {"lag": number(lag_of(row, "mean")), "lag max": number(lag_of(row, "max"), 0), "queue": used["queue"]},
        {"learner": busy["learner"], "env": busy["env"], "buffer": used["buffer"]},
        {"cpu": used["cpu"], "gpu": used["gpu"]},
    )
    styles = {FIGURES[one.name]: STYLES.get(one.state, "bold") for one in judged}
    return Columns([_group(figures, styles) for figures in groups], padding=(0, 2))


def _group(figures: Mapping[str, str], styles: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim")
    table.add_column(justify="right", min_width=5)
    for name, value in figures.items():
        table.add_row(name, Text(value, styles.get(name, "bold")))
    return table


def _summary(title: str, summary: Mapping[str, Any], shades: str, width: int | None) -> list[Text]:
    """Return the lines at the end of a run; a dash stands for a value that is unknown because the run failed early.
    `width`: of the terminal, which bars and legends must fit; None: no terminal."""
    ended = summary["ended"]
    colour = {0: "green", 3: "yellow"}.get(summary["exit_code"], "red")
    lines = [Text.assemble((title, "bold"), ": ", (ENDINGS.get(ended, ended), colour))]

    def add(label: str, *parts: Text | str | tuple[str, str]) -> None:
        lines.append(Text.assemble((f"  {label:<9}", "dim"), *parts))

    counts = ", ".join(f"{summary[key]:,} {key.replace('env_', '')}" for key in ("env_steps", "updates", "episodes"))
    nouns, training = ("steps", "updates", "episodes"), summary.get("training_s")  # earlier versions do not have it
    known, so_long = {noun: summary[f"{noun}_per_s"] for noun in nouns}, ""
    if training:
        known = {noun: each and each * summary["wall_s"] / training for noun, each in known.items()}
        so_long = f" in the {training:.1f} s of training"
    add("work", f"{counts} in {clock(summary['wall_s'])}")
    add("speed", ", ".join(f"{rate(each)} {noun}/s" for noun, each in known.items()) + so_long)
    add("return", f"{number(summary['return_mean'])} (the last {summary['return_episodes']} training episodes)")
    if evaluated := _evaluated(summary):
        add("eval", evaluated if shades == SHADES else evaluated.replace("±", "+-"))
    for party, shares in summary["shares"].items():
        room = None if width is None else max(12, width - LABEL)
        bar, legend = shares_bar(shares, shades, min(BAR, room or BAR))
        add(party, bar)
        for line in filled(legend, room):
            add("", line)
    if width is not None:
        add("", Text("what these are: freewheel help shares", "dim", no_wrap=True, overflow="ellipsis"))
    for label, text in zip(("rows", "", ""), ledger(summary), strict=False):
        add(label, text)
    if summary["worker_restarts"]:
        add("restarts", f"{summary['worker_restarts']:,} workers replaced")
    for label, closing in _closing_lines(summary):
        add(label, closing)
    return lines


def _closing_lines(summary: Mapping[str, Any]) -> Iterator[tuple[str, str | tuple[str, str]]]:
    """Yield the run directory, how to resume the run, problems and advice."""
    yield "saved in", summary["path"]
    if summary["ended"].startswith("interrupted") and summary.get("checkpoints", {}).get("saved"):
        yield "resume", f"freewheel resume {summary['path']}"
    for place, problem in enumerate(summary.get("problems", ())):
        yield ("" if place else "problems"), (problem, "yellow")
    if summary.get("advice"):
        yield "advice", (summary["advice"], "cyan")


def _evaluated(summary: Mapping[str, Any]) -> str:
    """Describe the scores of the best and final weights, and their episodes; empty if there were no evaluations."""
    best, final = (
        f"{which} {number(summary[f'{which}_eval'])} ± {number(summary[f'{which}_eval_std'])}"
        if summary[f"{which}_eval"] is not None
        else ""
        for which in ("best", "final")
    )
    count = summary["eval_episodes"]
    if summary["eval_fresh"]:
        at = "" if summary["best_step"] == summary["env_steps"] else f" (step {summary['best_step']:,})"
        return f"{best}{at}, {final} ({count} fresh episodes each)"
    if not best:
        return ""  # a note has given the reason
    known = f"{best} (step {summary['best_step']:,}), {final or 'final not scored'}"
    return f"{known} (the same {count} episodes that selected it: {summary['eval_note'].splitlines()[0]})"
