"""This module implements the command `freewheel tune`, which finds the best mode, workers, envs and
fragments for an environment on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

from freewheel.errors import Range, check_ranges
from freewheel.registry import Command

if TYPE_CHECKING:
    from rich.console import Console

    from freewheel.config.resolve import Config
    from freewheel_lab.tune.result import Tuning

LOOK = 0.3  # seconds over which the load of other programs is measured
WIDTH = 124  # width of an output that is not a terminal


@dataclass(frozen=True)
class TuneOptions:
    """How to search."""

    out: str = "tuned.toml"
    """The file for the chosen options, .toml or .json. Use it with `freewheel train ENV --config
    FILE`."""
    probe_seconds: Annotated[float, Range(least=2, most=60)] = 15.0
    """Maximum duration of the probe in seconds."""
    measure_seconds: Annotated[float, Range(least=0, most=3600)] = 8.0
    """Seconds for which each of the best two settings is run for real, without its start. With 0,
    settings are only predicted."""
    show: Annotated[int, Range(least=1, most=1000)] = 8
    """Number of settings in the table."""
    json: bool = False
    """Print everything as JSON."""
    dry_run: bool = False
    """Print what would be measured, and exit."""
    trust: bool = False
    """Run code that the file of --config names, even if you have not written it."""

    def __post_init__(self) -> None:
        check_ranges(self)


def _options(argv: Sequence[str]) -> type[Any]:
    from freewheel.config import flags, resolve

    doc = (
        "Measure an environment and predict the speed of every mode with different workers, envs and fragments. Run the best two "
        "for real, and write the better one to a file for `freewheel train --config`. All options of `train` are accepted: "
        "options that you give stay fixed, and the others are searched."
    )
    return flags.with_own(resolve.options_type(argv), TuneOptions, doc=doc)


def _run(argv: Sequence[str]) -> int:
    from pathlib import Path

    from freewheel.config import flags

    others, given = flags.split_argv(argv, flags.option_types(TuneOptions))
    own = flags.build(TuneOptions, given)
    config = configure(others, trust=own.trust)
    from freewheel.run.planning import print_line
    from freewheel_lab.tune import file

    path = Path(own.out)
    file.check_place(path)
    if own.dry_run:
        print_line("\n".join(_plan_lines(config, own, path)))
        return 0
    from freewheel_lab.tune.result import Tuning

    tuning = Tuning(config)
    try:
        _tune(tuning, own)
    except KeyboardInterrupt:
        tuning.interrupted = True
    if tuning.chosen is not None:
        file.write(tuning, path)
    _tell(tuning, own)
    return 130 if tuning.interrupted else 0 if tuning.chosen is not None else 1


def configure(argv: Sequence[str], *, trust: bool = False) -> Config:
    """Return the run that a command line describes. It can use any mode unless the command line or
    its file names one."""
    from pathlib import Path

    from freewheel.config import flags, resolve

    _, given = resolve.read_options(argv)
    path = given.flags.get("config", ("",))[0]
    named = "mode" in given.flags or (path and "mode" in flags.read_file(Path(path), typed=True))
    return resolve.from_argv(argv if named else [*argv, "--mode", resolve.AUTO], trust=trust)


def _tune(tuning: Tuning, own: TuneOptions) -> None:
    """Run the steps of the tuning and store their results in `tuning`."""
    import psutil

    from freewheel.run.naming import name_run
    from freewheel_lab.tune.probe import probe, stages
    from freewheel_lab.tune.search import best_two, search
    from freewheel_lab.tune.trial import expected_s, run_trial

    config = tuning.config
    trials = ("the best two, run for real", 2 * (own.measure_seconds + 5))
    with TuningProgress([*stages(config, own.probe_seconds), *([trials] if own.measure_seconds else [])]) as progress:
        tuning.others = psutil.cpu_percent(LOOK) / 100 * (psutil.cpu_count() or 1)
        tuning.probe = probe(config, name_run(config), own.probe_seconds, progress.next)
        progress.next("the settings", 0.0)
        tuning.order, tuning.refused = search(tuning.probe)
        pair = best_two(tuning.order) if own.measure_seconds else []
        seconds = [expected_s(one, own.measure_seconds) for one in pair]
        for index, one in enumerate(pair):
            progress.trial(index, one, seconds)
            tuning.trials.append(run_trial(one, own.measure_seconds, trust=own.trust))


class TuningProgress:
    """Shows on standard error what is being measured and how long all of it will take."""

    def __init__(self, stages: Sequence[tuple[str, float]]) -> None:
        from freewheel.files.terminal import Terminal

        self._stages = list(stages)
        self._console = Terminal(stderr=True)
        self._status = self._console.status("starting ...")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def next(self, what: str, seconds: float) -> None:
        """Show the next step and its approximate duration."""
        names = [name for name, _ in self._stages]
        if what in names:
            del self._stages[: names.index(what)]
        self._say(f"measuring {what}", sum(took for _, took in self._stages))

    def trial(self, index: int, candidate: Any, seconds: Sequence[float]) -> None:
        """Show that one of the best two settings is started."""
        from freewheel_lab.tune.result import setting

        text = f"running {index + 1} of {len(seconds)} for real: {setting(candidate)}"
        self._say(text, sum(seconds[index:]))

    def _say(self, what: str, left: float) -> None:
        from freewheel.sinks.formats import clock

        text = f"{what} ... about {clock(left)} left"
        if self._console.is_terminal:
            self._status.update(text)
        else:
            self._console.print(text, soft_wrap=True)


def _plan_lines(config: Config, own: TuneOptions, path: Any) -> list[str]:
    """Return the lines of the plan."""
    from freewheel.sinks.formats import clock
    from freewheel_lab.tune.probe import stages
    from freewheel_lab.tune.search import fixed_options

    fixed = sorted(fixed_options(config) - {"env"})
    modes = [one.mode for one in config.among] or [config.mode]
    parts = stages(config, own.probe_seconds)
    lines = [f"tune     {config.env.label} with {config.algo}", f"modes    {', '.join(modes)}"]
    lines += [f"fixed    {', '.join(fixed) or 'nothing: mode, workers, envs and fragments are searched'}"]
    lines += [f"probe    {what}, about {seconds:.1f} s" for what, seconds in parts]
    if own.measure_seconds:
        lines.append(f"run      the best two settings for {own.measure_seconds:g} s each, and about 5 s to start")
    total = sum(seconds for _, seconds in parts) + (2 * (own.measure_seconds + 5) if own.measure_seconds else 0)
    return [*lines, f"write    {path}", f"time     about {clock(total)}"]


def _tell(tuning: Tuning, own: TuneOptions) -> None:
    """Print the result to standard output."""
    if own.json:
        import json

        sys.stdout.write(json.dumps(tuning.to_json(), indent=2) + "\n")
        return
    from freewheel.files.terminal import Terminal

    console = Terminal()
    _show(tuning, own, console if console.is_terminal else Terminal(width=WIDTH))


def _show(tuning: Tuning, own: TuneOptions, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from freewheel_lab.tune.probe import described

    console.print(Text(f"{tuning.config.env.name}  {tuning.config.algo}", "bold"))
    if tuning.probe is not None:
        facts = Table.grid(padding=(0, 2), pad_edge=True)
        facts.add_column(style="dim", no_wrap=True)
        for about, text in described(tuning.probe):
            facts.add_row(f"  {about}", Text(text))
        console.print(facts)
    if tuning.order:
        console.print()
        console.print(_table(tuning, own))
    for mode, why in tuning.refused.items():
        console.print(Text(f"  {mode}: {why}", "dim"))
    console.print()
    if tuning.interrupted:
        done = "predictions" if tuning.order else "the probe was not finished, so there are no predictions"
        console.print(Text(f"interrupted: {done}" + (" without all measurements" if tuning.order else ""), "yellow"))
    if tuning.chosen is None:
        if not tuning.interrupted:
            console.print(Text(tuning.sentence, "red"))
        return
    if tuning.warning:
        console.print(Text(tuning.warning, "yellow"), soft_wrap=True)
    for remark in tuning.chosen.plan.remarks:
        console.print(Text(f"note: {remark}", "dim"), soft_wrap=True)
    console.print(Text(tuning.sentence), soft_wrap=True)
    console.print(Text.assemble("  ", (tuning.command, "bold")), soft_wrap=True)


def _table(tuning: Tuning, own: TuneOptions) -> Any:
    from rich.table import Table

    from freewheel.run.advice.predictions import WAITS_FOR
    from freewheel_lab.tune.result import workers_and_envs

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    numbers = ("fragment", "predicted/s", "measured/s", "error", "lag", "memory")
    for name in ("", "mode", "workers x envs", *numbers, "waits for"):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    for one in tuning.shown(own.show):
        trial = tuning.trial_of(one)
        measured = "" if trial is None else "failed" if trial.rate is None else f"{trial.rate:,.0f}"
        error = "" if trial is None or trial.error is None else f"{trial.error:+.0%}"
        table.add_row(
            "->" if one is tuning.chosen else "",
            one.mode,
            workers_and_envs(one).replace(" workers", "").replace(" worker", ""),
            "" if one.fragment is None else str(one.fragment),
            f"{one.forecast.rate:,.0f}",
            measured,
            error,
            f"{one.forecast.lag:.1f}",
            f"{one.memory / 2**20:,.0f} MB",
            WAITS_FOR[one.forecast.limit],
        )
    return table


COMMAND = Command(
    name="tune",
    argument="ENV",
    summary="find the best mode, workers, envs and fragments by measuring; writes a file for train --config",
    options=_options,
    run=_run,
    order=2,
)
