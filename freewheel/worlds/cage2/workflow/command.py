"""`freewheel workflow search`: what it says to a person."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.table import Table

from freewheel.config import flags
from freewheel.worlds.cage2.workflow import search
from freewheel.worlds.cage2.workflow.logs import workflow
from freewheel.worlds.cage2.workflow.options import SearchOptions, read
from freewheel.worlds.cage2.workflow.search import Outcome, Proposal
from freewheel.worlds.cage2.workflow.task import Task, begin, take_up
from freewheel.worlds.cage2.workflow.train import SIGNALLED, TRIALS, InterruptedSearch

DESCRIPTION = (
    "Search the best workflow: the order of host types (defender, enterprise, op_server, op_host, user) in which a "
    "defender of CAGE 2 fixes what red has taken. Options of `freewheel train` may follow: --num-envs, --ppo.lr, ..."
)


def search_workflows(argv: Sequence[str]) -> int:
    """Search, or show what would be searched; the exit code."""
    if "--help" in argv or "-h" in argv:
        flags.show_help(SearchOptions, "freewheel workflow search [ENV]", DESCRIPTION)
    options, passed, given = read(argv)
    task = take_up(options, given) if options.resume else begin(options, passed)
    console = Console(highlight=False)
    if options.dry_run:
        _say(console, *task.lines())
        return 0
    return _search(task, console)


def _search(task: Task, console: Console) -> int:
    searched, train = task.search, task.trainer()

    def trial(proposal: Proposal) -> Outcome:
        begun = f", from {proposal.init}" if proposal.init else ""
        what = f"trial {proposal.number}: {workflow(proposal.order)}{begun}"
        _say(console, f"{what}, up to {proposal.episodes:,} episodes")
        outcome = train(proposal)
        worth = f"env return {outcome.env_return:.1f}, compliance {_number(outcome.compliance)}"
        _say(console, f"  {worth}; ended by {outcome.ended} after {outcome.episodes:,} episodes")
        return outcome

    task.save()
    task.book.begin_training(len(searched.trials))
    try:
        with _interruptible():
            search.run(searched, trial, task.save)
    except InterruptedSearch as interrupted:
        _say(console, f"interrupted; --run {task.book.folder.name} --resume goes on after the last whole trial")
        return interrupted.exit_code
    _report(task, console)
    return 0


@contextmanager
def _interruptible() -> Iterator[None]:
    """A run ends in order by itself when it is signalled; between two of them this is what does."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise InterruptedSearch(SIGNALLED + number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(task: Task, console: Console) -> None:
    """Every workflow that was tried, and the one to choose."""
    made, best = task.search, task.search.best
    assert best is not None, "a search ends after a trial"
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))  # 80 columns wide
    for column in ("workflow", "env return", "compliance", "episodes", ""):
        table.add_column(column, justify="left" if column in ("workflow", "") else "right", no_wrap=True)
    for last in sorted(made.latest, key=lambda one: -one.outcome.env_return):
        outcome, episodes = last.outcome, sum(one.outcome.episodes for one in made.trials if one.order == last.order)
        note = "chosen" if last is best else "failed" if made.failure(last) else ""
        figures = (f"{outcome.env_return:.1f}", _number(outcome.compliance), f"{episodes:,}")
        table.add_row(workflow(last.order), *figures, note)
    console.print(table)
    _say(
        console,
        f"{workflow(best.order)}: env return {best.outcome.env_return:.1f}, "
        f"compliance {_number(best.outcome.compliance)}; freewheel eval {task.book.folder / TRIALS / best.outcome.run}",
    )
    if made.failure(best):
        _say(console, f"no order has reached compliance {made.rules.threshold:g}: this one came nearest")


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
