"""This module implements the command `freewheel compare`, which measures every mode on one
environment."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from freewheel.errors import DEGRADED, DONE, FAILED, SIGNALLED, Range, SetupError, UsageError, check_ranges
from freewheel.files.reach import typed
from freewheel.registry import Command

if TYPE_CHECKING:
    from freewheel_lab.compare.comparison import ComparisonRequest
    from freewheel_lab.compare.results import Results
    from freewheel_lab.compare.trackers import TrackerOptions

WIDTH = 120  # width of an output that is not a terminal
MOST_WORKERS = 10_000


@dataclass(frozen=True)
class CompareOptions:
    """What to compare, and for how long."""

    modes: str = "all"
    """The modes to compare, separated by commas. `all` stands for every installed mode."""
    budget: Annotated[float, Range(above=0, most=1e6)] = 60.0
    """Seconds of training for each mode, summed over all repeats. Start-up is not counted. The
    slowest mode that keeps up sets the amount of work. A much slower mode does only a part of it.
    --steps sets the same amount of work for every mode."""
    repeats: Annotated[int, Range(least=1, most=100)] = 3
    """Number of measurements of every mode. Modes take turns, and each repeat uses the next seed."""
    scale: str = ""
    """Numbers of workers, such as 1,2,4,8. The modes are also measured with these numbers, and the
    report says how many workers are worth using."""
    timelines: bool = True
    """Also record a short training of every mode. The report then shows when each part works and
    when it waits."""
    out: str = ""
    """A new folder for compare.json, table.md, report.html, plots and the trainings (default:
    compare-ENV-ALGO, with a number if it exists)."""
    report: str = ""
    """Measure nothing. Write table.md, report.html and plots of this folder again from its
    compare.json."""
    json: bool = False
    """Print compare.json instead of tables."""
    dry_run: bool = False
    """Print the plan and how long it would take, and exit."""
    trust: bool = False
    """Run code that the file of --config names, even if you have not written it."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def chosen(self) -> tuple[str, ...]:
        """Return the modes, those with the least lag first."""
        from freewheel.collect.mode import MODES
        from freewheel.config import synonyms
        from freewheel.run.advice.predictions import by_lag

        if self.modes == "all":
            return tuple(sorted(MODES, key=by_lag))
        names = [word.strip() for word in self.modes.split(",") if word.strip()]
        return tuple(sorted({MODES[synonyms.MODES.get(name, name)].name for name in names}, key=by_lag))

    def worker_counts(self) -> tuple[int, ...]:
        """Return the numbers of --scale in ascending order."""
        if not self.scale:
            return ()
        if not re.fullmatch(r"\d{1,5}(,\d{1,5})*", self.scale):
            raise UsageError(f"--scale must be numbers of workers like 1,2,4,8, not {self.scale}")
        counts = sorted(set(map(int, self.scale.split(","))))
        if not 1 <= counts[0] <= counts[-1] <= MOST_WORKERS:
            raise UsageError(f"--scale accepts 1 to {MOST_WORKERS:,} workers, not {self.scale}")
        return tuple(counts)


def _options(argv: Sequence[str]) -> type[Any]:
    from freewheel.config import flags, resolve

    doc = (
        "Train in every mode on your environment with the same settings, seeds and amount of work, and recommend one. "
        "All options of `freewheel train` are accepted. An option that only some modes have applies to those modes."
    )
    return flags.with_own(resolve.options_type(argv), CompareOptions, doc=doc)


def _run(argv: Sequence[str]) -> int:
    """Run the command and return the exit code. 0: done. 1: nothing could be measured. 3: some
    modes failed. 130: interrupted, and the trainings that have ended are reported."""
    from freewheel.config import flags
    from freewheel.files.stdout import lasting_output
    from freewheel_lab.compare import trackers
    from freewheel_lab.compare.comparison import ComparisonRequest
    from freewheel_lab.compare.trainings.cases import GivenOptions

    others, given = flags.split_argv(argv, flags.option_types(CompareOptions))
    own = flags.build(CompareOptions, given)
    if own.report:
        return _show_again(typed(Path(own.report)), own)
    asked, tracked = trackers.split(GivenOptions.read(others, own.trust))
    request = ComparisonRequest(
        given=asked,
        modes=own.chosen(),
        budget_s=own.budget,
        repeats=own.repeats,
        command=shlex.join(["freewheel", "compare", *argv]),
        scale=own.worker_counts(),
        timelines=own.timelines,
    )
    if not request.modes:
        raise UsageError("--modes is empty; leave it out to compare all modes")
    with lasting_output():
        return _compare(request, own, tracked)


def _compare(request: ComparisonRequest, own: CompareOptions, tracked: TrackerOptions) -> int:
    from freewheel.files.stdout import complain
    from freewheel.files.terminal import Terminal
    from freewheel.run.planning import print_line
    from freewheel.run.stopping.stop import Stop
    from freewheel_lab.compare import comparison, trackers
    from freewheel_lab.compare.trainings.measuring import ComparisonProgress

    stop = Stop()
    with stop.listening():
        folder = None if own.dry_run else _folder(own.out, request)
        try:
            with Terminal(stderr=True).waiting() as tell:
                plan = comparison.prepare(request, tell, folder and folder / comparison.RUNS)
        except BaseException:
            if folder is not None and not any(folder.iterdir()):
                folder.rmdir()
            raise
        if folder is None:
            print_line("\n".join(plan.lines()))
            return DONE
        stop.begin()
        with ComparisonProgress(plan.title) as progress:
            progress.say("\n".join(plan.lines()))
            results = comparison.carry_out(plan, folder, stop, progress)
        stop.over = True
        files = comparison.write(results, folder)
        report = trackers.write(results, folder, tracked)
        _show(results, [_listed(files), *report.lines], own)
        for problem in report.problems:
            complain(problem)
    return SIGNALLED + stop.signal if stop.signal is not None else _exit_code(results)


def _listed(files: Sequence[Path]) -> str:
    """Return a line with the files that were written. It gives only the number of pictures."""
    named = [path for path in files if path.suffix not in (".png", ".svg")]
    pictures = f", {len(files) - len(named)} plots" if len(files) > len(named) else ""
    return f"{', '.join(map(str, named))}{pictures}"


def _show(results: Results, lines: Sequence[str], own: CompareOptions) -> None:
    from freewheel.files.terminal import Terminal
    from freewheel_lab.compare import table

    if own.json:
        sys.stdout.write(json.dumps(results.to_json()) + "\n")
        return
    console = Terminal()
    table.show(results, console if console.is_terminal else Terminal(width=WIDTH))
    for line in lines:
        console.print(f"  {line}", soft_wrap=True)


def _show_again(path: Path, own: CompareOptions) -> int:
    """Show an earlier comparison from its compare.json."""
    from freewheel_lab.compare import report, table
    from freewheel_lab.compare.results import Results

    folder = path if path.is_dir() else path.parent
    results = Results.read(path)
    try:
        files = [table.write(results, folder), *report.write(results, folder)]
        _show(results, [_listed(files)], own)
    except OSError as error:
        raise SetupError(f"cannot write to {folder}: {error.strerror}") from None
    return DONE


def _exit_code(results: Results) -> int:
    from freewheel.files.stdout import complain
    from freewheel_lab.compare.summary import unequal

    if not results.rows:
        return FAILED
    if wrong := unequal(results):
        complain(f"the trainings did not do the same work: {wrong[0]}")
        return FAILED
    return DEGRADED if any(case.failed for case in results.modes) else DONE


def usual_folder(env: str, algo: str) -> str:
    """Return the default name of the folder. It contains the environment, as names of runs do."""
    label = re.sub(r"^(?:.*/)?(\w+)\.py(?=:|$)", r"\1", env)
    return re.sub(r"[^\w.-]+", "_", f"compare-{label}-{algo}")


def _folder(out: str, request: ComparisonRequest) -> Path:
    """Create a new folder, or accept an empty one that the user has named."""
    usual = usual_folder(request.given.env or "env", request.given.flags.get("algo", ("ppo",))[0])
    path = typed(Path(out or usual))
    number = 1
    while not out and path.exists():
        number += 1
        path = Path(f"{usual}-{number}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise SetupError(f"--out {path} is not empty; choose another folder")
    except OSError as error:
        raise SetupError(f"cannot create {path}: {error.strerror}; choose another --out") from None
    return path


COMMAND = Command(
    name="compare",
    argument="ENV",
    summary="train in every mode, measure the modes, and recommend one",
    options=_options,
    run=_run,
    order=2,
)
