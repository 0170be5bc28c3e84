"""This module implements `freewheel watch --tui`, which shows a run in the terminal. It reads only
the run directory."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from freewheel.errors import ACTING, FileError, SetupError, printable
from freewheel.files.terminal import Terminal
from freewheel.metrics import targets
from freewheel.metrics.targets import Indicator, Setup, judge
from freewheel.metrics.workers import STATES
from freewheel.run.live.following import Follower
from freewheel.run.live.status import Worker, called
from freewheel.sinks import formats
from freewheel_watch import braille
from freewheel_watch.curve import number, numbers
from freewheel_watch.feed import budget_of
from freewheel_watch.listing import list_runs

EVERY = 0.25  # seconds between two updates
CHOOSE = 2.0  # seconds between two searches for a newer run
STALE = 5.0  # seconds without a status after which an active trainer does not answer
LONG = 2.0  # seconds in a call of an environment that move a worker to the top
RECENT = 10.0  # seconds after the death of a worker in which it is at the top
COLOURS = {"good": "green", "bad": "red", "unreachable": "yellow", "unknown": "dim"}
RUN_COLOURS = {"running": "green", "ended": "cyan", "failed": "red", "gone": "red", "interrupted": "yellow"}
CYAN = dict.fromkeys(("construct", "pending"), "cyan")
WORKER_COLOURS = {"down": "bold red", "lost": "bold red", "step": "green", "reset": "green", **CYAN}
CURVE = 12  # lines of the curve if there is room
COLUMNS = ("env_steps", "return_mean", "eval_return")


class CurvePoint(NamedTuple):
    """Holds what is kept of a row of metrics."""

    steps: float | None
    returned: float | None
    evaluated: float | None


class FollowedRun:
    """Holds what the directory of one run has provided so far."""

    def __init__(self, path: Path) -> None:
        self.follower = Follower(path)
        self.points: list[CurvePoint] = []
        self.row: Mapping[str, Any] = {}
        self.setup: Setup | None = None

    def look(self) -> None:
        """Read everything that is new."""
        while True:
            news = self.follower.poll()
            if news.kept < len(self.points):
                del self.points[news.kept :]
                self.row = {}
            self.points += [CurvePoint(*numbers(row, COLUMNS)) for row in news.rows]
            self.row = news.rows[-1] if news.rows else self.row
            if "config" in news.changed or self.setup is None:
                self.setup = targets.read(self.follower.path)
            if not news.more:
                return


class TerminalView:
    """Chooses the run on the screen: the run of this name, or the newest active run of the
    directory, or else its newest run."""

    def __init__(self, directory: Path, run: str | None = None) -> None:
        self._directory = directory
        self._name = run
        self.watched: FollowedRun | None = None if run is None else FollowedRun(directory / run)
        self._chosen = -CHOOSE

    def look(self) -> None:
        if self._name is None and time.monotonic() - self._chosen > CHOOSE:
            self._chosen = time.monotonic()
            self._choose()
        if self.watched is not None:
            self.watched.look()

    def _choose(self) -> None:
        """Choose a run. The present one stays until it has ended and another one is active."""
        current = self.watched
        if current is not None and current.follower.state == "running":
            return
        try:
            found = list_runs(self._directory)
        except FileError:  # the directory does not exist yet
            found = []
        running = [entry for entry in found if entry.state == "running"]
        newest = (running or ([] if current is not None else found))[:1]
        if newest and (current is None or current.follower.path != newest[0].path):
            self.watched = FollowedRun(newest[0].path)

    def lines(self, width: int, height: int, *, ascii_only: bool = False) -> list[Text]:
        """Return at most `height` lines of at most `width` columns."""
        if self.watched is None:
            return [Text(f"no run in {self._directory} yet; it appears here when a training begins", "dim"), _keys()]
        page = _page(self.watched, width, height, ascii_only)[:height]
        return [Text(printable(line.plain), no_wrap=True) if ACTING.search(line.plain) else line for line in page]


def run_tui(directory: Path, run: str | None = None) -> int:
    """Show a run until q or Ctrl-C. Trainings are not affected."""
    out = Terminal()
    if not (out.is_terminal and sys.stdin.isatty()):
        raise SetupError("the terminal view needs a terminal; `freewheel runs` lists runs anywhere")
    view = TerminalView(directory, run)
    with suppress(KeyboardInterrupt), _keyboard(), Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            view.look()
            live.update(_fitted(view, out), refresh=True)
            if _pressed(EVERY) in ("q", "Q"):
                break
    return 0


def _fitted(view: TerminalView, out: Console) -> RenderableType:
    size = out.size
    return Group(*view.lines(size.width, size.height - 1, ascii_only=out.options.ascii_only))


@contextmanager
def _keyboard() -> Iterator[None]:
    """Read keys one by one without echo, and restore the terminal at the end."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(seconds: float) -> str:
    """Return the key that is pressed within this time, or an empty text. The end of the input
    counts as q."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q" if ready else ""


def _page(watched: FollowedRun, width: int, height: int, ascii_only: bool) -> list[Text]:
    """Return the page from top to bottom. On a small terminal the curve shrinks first, then the
    table of workers, and then bars are left out."""
    row = watched.row
    status = watched.follower.status
    judged = judge(row, watched.setup) if row else ()
    top = [*_header(watched), *_progress(watched, width), Text(), *_tiles(judged, width)]
    top += [*_reasons(judged)[: max(0, height - 30) // 4], Text()]
    middle = [*_figures(watched), *_shares(row, width, ascii_only, legend=height >= 32), *_ledger(row)]
    workers = status.workers if status is not None and watched.follower.state == "running" else ()
    least = min(len(workers), 4) + bool(workers) + 2 * bool(workers)
    room = height - len(top) - len(middle) - least - 2
    if room < 4 and height >= 12:
        middle = middle[:1]
        room = height - len(top) - 1 - least - 2
    curve = _curve(watched, width, min(CURVE, max(room, 0)), ascii_only)
    rest = height - len(top) - len(middle) - len(curve) - 1
    return [*top, *curve, *middle, *_workers(workers, rest)]


def _keys() -> Text:
    return Text("q ends this view; trainings continue", "dim")


def _header(watched: FollowedRun) -> list[Text]:
    follower = watched.follower
    row = watched.row
    config = follower.config or {}
    status = follower.status
    state = follower.state
    what = "  ".join(str(config[name]) for name in ("env", "algo", "mode") if config.get(name))
    seed = f"  seed {config['seed']}" if config.get("seed") is not None else ""
    wall = number(row.get("wall_s")) if state != "running" or status is None else status.wall_s
    line = Text.assemble(
        (follower.path.name, "bold"), "  ", what, (seed, "dim"), "   ", (state, RUN_COLOURS.get(state, "")),
        (f"  {formats.clock(wall)}" if wall is not None else "", ""), ("   q ends this view", "dim"),
    )  # fmt: skip
    line.no_wrap = True
    if state == "running" and status is not None and status.age > STALE:
        asked = f"the trainer has not answered for {formats.clock(status.age)}: freewheel doctor --why-stuck {follower.path}"
        return [line, Text(asked, "bold red")]
    if (summary := follower.summary) is not None and summary.get("error"):
        return [line, Text(" ".join(str(summary["error"]).split()), "red", no_wrap=True, overflow="ellipsis")]
    return [line, *(Text(problem, "red", no_wrap=True) for problem in list(follower.problems.values())[:1])]


def _progress(watched: FollowedRun, width: int) -> list[Text]:
    row = watched.row
    budget = budget_of(watched.follower.config or {})
    if not {"wall_s", "env_steps", "episodes"} <= row.keys():
        return [Text("starting: no row of metrics yet", "dim")]
    progress, left = formats.progress_and_left(budget, row)
    steps = f"{row['env_steps']:,}" + (f" / {budget.steps:,}" if budget.steps is not None else "") + " steps"
    if progress is None:
        return [Text(steps, "bold")]
    doing = formats.evaluating(row) or (f"eta {formats.clock(left)}" if watched.follower.state == "running" else "")
    text = f"  {formats.percent(progress)}  {steps}  {doing}"
    bar = max(10, width - len(text) - 1)
    full = round(progress * bar)
    return [Text.assemble(("━" * full, "green"), ("━" * (bar - full), "grey30"), (text, "bold"), no_wrap=True)]


def _tiles(judged: Sequence[Indicator], width: int) -> list[Text]:
    """Return each key figure above its target in green or red. Yellow means that this set-up cannot
    reach it, and the reason follows below."""
    if not judged:
        return []
    each = max(12, width // len(judged))
    lines = [Text(no_wrap=True) for _ in range(3)]
    for one in judged:
        colour = COLOURS[one.state]
        cells = ((one.label, "dim"), (_value(one, one.value), f"bold {colour}"), (_target(one), "dim"))
        for line, (text, style) in zip(lines, cells, strict=True):
            line.append("▌", colour)
            line.append(f"{text:<{each - 1}}"[: each - 1], style)
    return lines


def _value(one: Indicator, value: float | None) -> str:
    return formats.percent(value) if one.is_share or value is None else f"{formats.rate(value)}/s"


def _target(one: Indicator) -> str:
    if one.low is not None and one.high is not None:
        return f"{100 * one.low:.0f}-{100 * one.high:.0f} %"
    return f">= {_value(one, one.low)}" if one.low is not None else "no target"


def _reasons(judged: Sequence[Indicator]) -> list[Text]:
    """Return the reasons why figures are off target, red ones first."""
    wrong = sorted((one for one in judged if one.state in ("bad", "unreachable")), key=lambda one: one.state)
    return [
        Text.assemble((f"{one.label}: ", COLOURS[one.state]), (one.reason, "dim"), no_wrap=True, overflow="ellipsis")
        for one in wrong
    ]


def _curve(watched: FollowedRun, width: int, height: int, ascii_only: bool) -> list[Text]:
    if height < 4:
        return []
    line = [(point.steps or 0.0, point.returned) for point in watched.points if point.returned is not None]
    scores = [(point.steps or 0.0, point.evaluated) for point in watched.points if point.evaluated is not None]
    marks = [new for at, new in enumerate(scores) if not at or scores[at - 1][1] != new[1]]
    title = Text.assemble(("return of training episodes", braille.LINE), "   ", ("o evaluations", braille.MARK))
    return [title, *braille.draw(line, marks, width, height - 2, ascii_only=ascii_only), Text()]


def _figures(watched: FollowedRun) -> list[Text]:
    row = watched.row
    status = watched.follower.status
    best = max((point.evaluated for point in watched.points if point.evaluated is not None), default=None)
    parts = [
        ("return", formats.number(number(row.get("return_mean")))),
        ("best eval", formats.number(best)),
        ("length", formats.number(number(row.get("length_mean")), 0)),
        ("episodes/s", formats.rate(number(row.get("episodes_per_s")))),
        ("updates", f"{row.get('updates', 0):,}"),
        ("lag", formats.number(number(row.get("lag_mean")))),
    ]
    if status is not None and watched.follower.state == "running":
        parts.append(("learner", f"{status.learner.doing} for {formats.duration(status.learner.since_s)}"))
    line = Text(no_wrap=True, overflow="ellipsis")
    for name, value in parts:
        line.append(f"{name} ", "dim")
        line.append(f"{value}   ", "bold")
    return [line]


def _shares(row: Mapping[str, Any], width: int, ascii_only: bool, *, legend: bool) -> list[Text]:
    """Return bars that show where the time of the last interval went."""
    lines = []
    for party in ("worker", "learner"):
        prefix = f"time/{party}_"
        spent = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix) and value}
        shares = {name.replace("_", "-"): value for name, value in spent.items()}
        if not shares:
            continue
        shades = formats.ASCII_SHADES if ascii_only else formats.SHADES
        bar, parts = formats.shares_bar(shares, shades, max(10, min(60, width - 10)))
        lines.append(Text.assemble((f"{party:<8} ", "dim"), bar, no_wrap=True))
        if legend:
            lines += [Text.assemble(" " * 9, line, no_wrap=True) for line in formats.filled(parts, width - 10)[:1]]
    return lines


def _ledger(row: Mapping[str, Any]) -> list[Text]:
    if not {"produced", "trained", "queued", "open", "dropped"} <= row.keys():
        return []
    return [Text.assemble(("rows     ", "dim"), line, no_wrap=True) for line in formats.ledger(row)]


def _workers(workers: Sequence[Worker], height: int) -> list[Text]:
    """Return the table of workers, with the important ones first. The counts include workers that
    do not fit."""
    if not workers or height < 3:
        return []
    counts = Counter(worker.state for worker in workers)
    summary = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    head = Text.assemble(("workers  ", "dim"), f"{len(workers)}: {summary}", no_wrap=True)
    names = Text(f"{'':9}{'no':>4}  {'state':<12}{'for':>8}  {'steps/s':>8}  {'restarts':>8}  {'pid':>8}  doing", "dim")
    shown = sorted(workers, key=_interest)[: height - 2]
    return [head, names, *(_worker(worker) for worker in shown)]


def _interest(worker: Worker) -> tuple[float, ...]:
    """Return the sort key of a worker. Smaller keys come first."""
    if worker.state in ("lost", "down"):
        return (0 if worker.state == "lost" else 1, worker.worker)
    if worker.state in ("construct", "reset", "step") and worker.since_s > LONG:
        return (2, -worker.since_s)
    return (3 if worker.died_s is not None and worker.died_s < RECENT else 4, worker.worker)


def _worker(worker: Worker) -> Text:
    long = worker.state in ("construct", "reset", "step") and worker.since_s > LONG
    colour = "bold yellow" if long else WORKER_COLOURS.get(worker.state, "dim")
    what = worker.waits_for or ("" if worker.lane is None else f"lane {worker.lane}, {called(worker)}")
    figures = f"{formats.duration(worker.since_s):>8}  {formats.rate(worker.steps_per_s):>8}  {worker.restarts:>8}"
    line = Text(f"{'':9}{worker.worker:>4}  ", no_wrap=True, overflow="ellipsis")
    line.append(f"{worker.state:<12}", colour)
    line.append(f"{figures}  {worker.pid or '-':>8}  ")
    line.append(what, "dim")
    return line
