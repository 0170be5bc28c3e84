"""The command `freewheel eval`, and the code for options and runs that it shares with other commands about runs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

from freewheel.errors import SEED, Range, UsageError, check_ranges
from freewheel.files import disk
from freewheel.registry import Command

if TYPE_CHECKING:
    from rich.console import Console

    from freewheel.core import Actor
    from freewheel.envs.family import EvalProtocol
    from freewheel.run.evaluation.episodes import Score
    from freewheel.run.saved import SavedRun

EPISODES = 20


@dataclass(frozen=True)
class WeightsOptions:
    """The run to open, and which of its weights."""

    run: str = ""
    """The run: a name under --runs-dir, a path, RUN@STEP or the path of a checkpoint; also the first or last word."""
    runs_dir: str = "runs"
    """The directory that contains all runs."""
    which: str = ""
    """The weights: best, latest, or the number of a step (default: best, or the weights that RUN names)."""
    trust: bool = False
    """Run code that the run names (its environment, its network), even if you did not make the run on this machine."""


@dataclass(frozen=True)
class RunOptions(WeightsOptions):
    """The run to open, and the episodes to play."""

    env: str = ""
    """An environment to use instead of the run's, e.g. one that a script or a notebook defined (./file.py:Toy)."""
    episodes: Annotated[int | None, Range(least=1, most=10**6)] = None
    """Episodes to play (default: 20 for eval, 1 for play)."""
    seed: Annotated[int | None, SEED] = None
    """Seed of the episodes (default: a fresh seed, which no evaluation of the run has used)."""

    def __post_init__(self) -> None:
        check_ranges(self)


class AboutRun(Protocol):
    """Options of a command that takes a run."""

    @property
    def run(self) -> str: ...


T = TypeVar("T", bound=AboutRun)


def parse(options: type[T], argv: Sequence[str], command: str, answers: Mapping[str, str] | None = None) -> T:
    """Parse the options of a command that takes one run; `answers`: see flags.check_names."""
    found = parse_runs(options, argv, command, answers)
    if len(found) > 1:
        raise UsageError(f"give one run, not {' '.join(one.run for one in found)}")
    return found[0]


def parse_runs(
    options: type[T], argv: Sequence[str], command: str, answers: Mapping[str, str] | None = None
) -> list[T]:
    """Parse the options of a command that takes runs; return them once for each run."""
    from freewheel.config import flags, synonyms

    positional, given = flags.read_argv(argv, flags.option_types(options), answers=answers or synonyms.ABOUT_RUNS)
    runs = positional or [name for name in given.get("run", ()) if name]
    if not runs:
        raise UsageError(f"which run? freewheel {command} NAME, a directory under runs/")
    return [flags.build(options, {**given, "run": (name,)}) for name in runs]


def open_policy(options: RunOptions, console: Console) -> tuple[SavedRun, Actor]:
    """Open a run and load its policy; print a warning for each checkpoint that could not be used."""
    from freewheel.run.saved import open_run

    run = open_run(options.run, options.runs_dir, options.env or None, which=options.which, trust=options.trust)
    actor, warnings = run.actor()
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    return run, actor


@dataclass(frozen=True)
class EvalCommandOptions(RunOptions):
    """Score the greedy policy of one or several runs."""

    json: bool = False
    """Print the scores as JSON, a list with one object per run, and nothing else."""


def _protocols() -> Mapping[str, EvalProtocol]:
    from freewheel.envs.family import WORLDS

    return {one.name: one for family in WORLDS.values() for one in family.evaluation.protocols}


def _options() -> type[Any]:
    """Return the command's options, with a switch for every evaluation protocol of the world families."""
    from freewheel.config import flags

    protocols = _protocols().values()
    texts = {one.name: f"Use {one.help} ({one.episodes} episodes, seed {one.seed} by default)." for one in protocols}
    switches = [(name, Annotated[bool, flags.named(description=text)], False) for name, text in texts.items()]
    options = dataclasses.make_dataclass("EvalOptions", switches, bases=(EvalCommandOptions,), frozen=True)
    options.__doc__ = EvalCommandOptions.__doc__
    return options


def _run(argv: Sequence[str]) -> int:
    from freewheel.files.terminal import Terminal

    asked = parse_runs(_options(), argv, "eval")
    console = Terminal(stderr=asked[0].json)  # keeps warnings and the output of environments out of the JSON
    with redirect_stdout(sys.stderr) if asked[0].json else nullcontext():
        results = [_evaluate(options, console, alone=len(asked) == 1) for options in asked]
    if asked[0].json:
        sys.stdout.write(json.dumps(results, indent=2, allow_nan=False) + "\n")
    elif len(asked) > 1 and "mean" in results[0]:
        _print_table(results, console)
    return 0


def _evaluate(options: EvalCommandOptions, console: Console, *, alone: bool) -> dict[str, Any]:
    """Evaluate one run and return its result; print it unless it becomes part of a table or of JSON."""
    run, actor = open_policy(options, console)
    about = {"run": run.path.name, "path": str(run.path), "env": run.config.env.name, "which": run.which}
    chosen = [protocol for name, protocol in _protocols().items() if getattr(options, name)]
    if chosen:
        return {**about, **_run_protocol(chosen[0], options, run, actor, console)}
    if alone and not options.json:
        _score(options, run, actor, console)
        return about
    score = _play(options, run, actor, console)
    figures = {"mean": score.mean, "std": score.spread, "min": min(score.returns), "max": max(score.returns)}
    counts = {"episodes": len(score.returns), "cut": score.cut, "failed": score.failed}
    length = {"length": sum(score.lengths) / len(score.lengths)}
    return {**about, **figures, **counts, **length, "returns": list(score.returns), "lengths": list(score.lengths)}


def _play(options: EvalCommandOptions, run: SavedRun, actor: Actor, console: Console) -> Score:
    score = run.score(actor, options.episodes or EPISODES, options.seed)
    if score.warning:
        console.print(f"warning: {score.warning}", style="yellow", soft_wrap=True)
    return score


def _print_table(results: Sequence[Mapping[str, Any]], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    for name in ("mean", "±", "min", "max", "length", "episodes"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in results:
        figures = [f"{one[name]:.1f}" for name in ("mean", "std", "min", "max")]
        table.add_row(one["run"], *figures, f"{one['length']:.0f}", str(one["episodes"]))
    console.print(table)


def _score(options: EvalCommandOptions, run: SavedRun, actor: Actor, console: Console) -> None:
    """Print the score of greedy episodes in one line, and the world family's comparison if it has one."""
    from freewheel.envs.family import family_of

    score, name = _play(options, run, actor, console), run.config.env.label
    extremes = f"min {min(score.returns):.1f}, max {max(score.returns):.1f}"
    length = f"length {sum(score.lengths) / len(score.lengths):.0f}"
    mean = f"mean {score.mean:.1f} ± {score.spread:.1f} over {len(score.returns)} greedy episodes"
    console.print(f"{name}: {mean} ({extremes}, {length})", soft_wrap=True)
    if (compare := family_of(run.config.env.name).evaluation.compare) is not None:
        compare(run, score.mean, console)


def _run_protocol(
    protocol: EvalProtocol, options: EvalCommandOptions, run: SavedRun, actor: Actor, console: Console
) -> dict[str, Any]:
    """Run a protocol, print its table, and write its result to a file named after it; return the result."""
    seed = protocol.seed if options.seed is None else options.seed
    data, table = protocol.run(run, actor, options.episodes or protocol.episodes, seed)
    path = run.path / f"{protocol.name}.json"
    disk.replace(path, (json.dumps({"run": run.path.name, "which": run.which, **data}, indent=2) + "\n").encode())
    if not options.json:
        console.print(table)
        console.print(f"  {path}", soft_wrap=True)
    return dict(data)


COMMAND = Command(
    name="eval",
    argument="RUN ...",
    summary="score the greedy policy of runs",
    options=lambda _: _options(),
    run=_run,
    order=1,
)
