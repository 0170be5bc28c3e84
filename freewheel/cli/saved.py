"""What the commands that open a finished run have in common: their options, and finding the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from freewheel.errors import UsageError, require_positive

if TYPE_CHECKING:
    from rich.console import Console

    from freewheel.core import Actor
    from freewheel.run.saved import SavedRun


@dataclass(frozen=True)
class RunOptions:
    """Which run, and which episodes."""

    run: str = ""
    """The run: a name under --runs-dir or a path. Also the first or last word."""
    runs_dir: str = "runs"
    """The directory that contains all runs."""
    which: str = "best"
    """Which weights: best, latest, or the number of a step."""
    episodes: int | None = None
    """Episodes to play (default: 20 for eval, 1 for play)."""
    seed: int | None = None
    """Seed of the episodes (default: the seed of the evaluations during training)."""

    def __post_init__(self) -> None:
        require_positive(episodes=self.episodes)


T = TypeVar("T", bound=RunOptions)


def parse(options: type[T], argv: Sequence[str], command: str) -> T:
    """The options of a command whose first or last word is a run."""
    from freewheel.config import flags

    positional, given = flags.read_argv(argv, flags.option_types(options))
    if len(positional) > 1:
        raise UsageError(f"give one run, not {' '.join(positional)}")
    if positional:
        given["run"] = (positional[0],)
    if not given.get("run", ("",))[0]:
        raise UsageError(f"which run? freewheel {command} NAME, a directory under runs/")
    return flags.build(options, given)


def open_policy(options: RunOptions, console: Console) -> tuple[SavedRun, Actor]:
    """The run and its policy; checkpoints that could not be used are reported."""
    from freewheel.run.saved import open_run

    run = open_run(options.run, options.runs_dir)
    actor, warnings = run.actor(options.which)
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    return run, actor
