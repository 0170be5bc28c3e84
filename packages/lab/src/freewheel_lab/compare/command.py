"""The command `freewheel compare`: every mode on one environment, measured side by side."""

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

WIDTH = 120  # where the output is not a terminal
MOST_WORKERS = 10_000


@dataclass(frozen=True)
class CompareOptions:
    """What to compare, and how long."""

    modes: str = "all"
    """The modes to compare, with commas between them; all: every mode that is installed."""
    budget: Annotated[float, Range(above=0, most=1e6)] = 60.0
    """Seconds of training for each mode, over all repeats; start-up comes on top. The work is as much as the slowest mode that
    keeps up has time for; a far slower one does a part of it. --steps fixes the work, the same in every mode."""
    repeats: Annotated[int, Range(least=1, most=100)] = 3
    """How often every mode is measured, in turn with the others, each time with the next seed."""
    scale: str = ""
    """Numbers of workers (1,2,4,8): also measure the modes with so many, and say up to where more of them pay."""
    timelines: bool = True
    """Also record a short training of every mode, for the report to show who works and who waits when."""
    out: str = ""
    """A new folder for compare.json, table.md, report.html, plots and the trainings (default: compare-ENV-ALGO, numbered)."""
    report: str = ""
    """Measure nothing: make table.md, report.html and plots of this folder again, from its compare.json."""
    json: bool = False
    """Print compare.json instead of tables."""
    dry_run: bool = False
    """Print what would be done and how long it would take, and exit."""
    trust: bool = False
    """Run code that the file of --config names, though you have not written it."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def chosen(self) -> tuple[str, ...]:
        """The modes, those with the least lag first."""
        from freewheel.collect.mode import MODES
        from freewheel.config import words
        from freewheel.run.advice.prospects import by_lag

        if self.modes == "all":
            return tuple(sorted(MODES, key=by_lag))
        names = [word.strip() for word in self.modes.split(",") if word.strip()]
        return tuple(sorted({MODES[words.MODES.get(name, name)].name for name in names}, key=by_lag))

    def worker_counts(self) -> tuple[int, ...]:
        """Of --scale, ascending."""
        if not self.scale:
            return ()
        if not re.fullmatch(r"\d{1,5}(,\d{1,5})*", self.scale):
            raise UsageError(f"--scale must be numbers of workers like 1,2,4,8, not {self.scale}")
        counts = sorted(set(map(int, self.scale.split(","))))
        if not 1 <= counts[0] <= counts[-1] <= MOST_WORKERS:
            raise UsageError(f"--scale takes 1 to {MOST_WORKERS:,} workers, not {self.scale}")
        return tuple(counts)


def _options(argv: Sequence[str]) -> type[Any]:
    from freewheel.config import flags, resolve

    doc = (
        "Train in every mode on your environment, with the same settings, seeds and amount of work, and say which to use. "
        "Takes the options of `freewheel train`; an option that only some modes have is given to those."
    )
    return flags.with_own(resolve.options_type(argv), CompareOptions, doc=doc)


def _run(argv: Sequence[str]) -> int:
    """0: done; 1: nothing could be measured; 3: some modes failed; 130: interrupted, what was measured is reported."""
    from freewheel.config import flags
    from freewheel.files.output import lasting_output
    from freewheel_lab.compare import trackers
    from freewheel_lab.compare.comparison import ComparisonRequest
    from freewheel_lab.compare.trainings.cases import GivenOptions

    others, given = flags.split_argv(argv, flags.option_types(CompareOptions))
    own = flags.build(CompareOptions, given)
    if own.report:
        return _again(typed(Path(own.report)), own)
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
        raise UsageError("--modes names no mode; leave it out to compare all of them")
    with lasting_output():
        return _compare(request, own, tracked)


def _compare(request: ComparisonRequest, own: CompareOptions, tracked: TrackerOptions) -> int:
    from freewheel.files.output import complain
    from freewheel.files.terminal import Terminal
    from freewheel.run.plan import print_line
    from freewheel.run.process import Stop
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
        files, told = comparison.write(results, folder), trackers.write(results, folder, tracked)
        _show(results, [_listed(files), *told.lines], own)
        for problem in told.problems:
            complain(problem)
    return SIGNALLED + stop.signal if stop.signal is not None else _exit_code(results)


def _listed(files: Sequence[Path]) -> str:
    """What was written; pictures are only counted."""
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


def _again(path: Path, own: CompareOptions) -> int:
    """What is shown of an earlier comparison, made from its compare.json."""
    from freewheel_lab.compare import report, table
    from freewheel_lab.compare.results import Results

    folder = path if path.is_dir() else path.parent
    results = Results.read(path)
    try:
        files = [table.write(results, folder), *report.write(results, folder)]
        _show(results, [_listed(files)], own)
    except OSError as error:
        raise SetupError(f"cannot write in {folder}: {error.strerror}") from None
    return DONE


def _exit_code(results: Results) -> int:
    from freewheel.files.output import complain
    from freewheel_lab.compare.summary import unequal

    if not results.rows:
        return FAILED
    if wrong := unequal(results):
        complain(f"the trainings did not do the same work: {wrong[0]}")
        return FAILED
    return DEGRADED if any(case.failed for case in results.modes) else DONE


def usual_folder(env: str, algo: str) -> str:
    """Named after the environment; a file without its folders, as in the names of runs."""
    label = re.sub(r"^(?:.*/)?(\w+)\.py(?=:|$)", r"\1", env)
    return re.sub(r"[^\w.-]+", "_", f"compare-{label}-{algo}")


def _folder(out: str, request: ComparisonRequest) -> Path:
    """A new folder, or an empty one that was named."""
    usual = usual_folder(request.given.env or "env", request.given.flags.get("algo", ("ppo",))[0])
    path, number = typed(Path(out or usual)), 1
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
    summary="train in every mode, measure them side by side, and say which one to use",
    options=_options,
    run=_run,
    order=2,
)
