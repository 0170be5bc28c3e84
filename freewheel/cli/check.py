"""The command `freewheel check`: tries an environment out and recommends how to train on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freewheel.files.memory import in_words
from freewheel.registry import Command

if TYPE_CHECKING:
    from rich.console import Console

    from freewheel.core import EnvSpec
    from freewheel.rollout.probe import EnvCost
    from freewheel.run.advice.env_check import Checkup
    from freewheel.run.advice.predictions import ModeRate

MARKS = {"ok": ("ok", "green"), "note": ("!", "yellow"), "problem": ("!!", "red")}
WIDTH = 80  # columns of an output that is not a terminal


@dataclass(frozen=True)
class CheckOptions:
    """Options of the command itself."""

    json: bool = False
    """Print everything as JSON."""
    trust: bool = False
    """Run code that the --config file names, even if you did not write the file."""


def _options(argv: Sequence[str]) -> type[Any]:
    from freewheel.config import flags, resolve

    doc = "Try an environment out and say how to train on it. Takes the options of `freewheel train`."
    return flags.with_own(resolve.options_type(argv), CheckOptions, doc=doc)


def _run(argv: Sequence[str]) -> int:
    """Return 0, or 1 if training would fail."""
    from freewheel.config import flags, resolve
    from freewheel.files.terminal import Terminal

    others, own = flags.split_argv(argv, flags.option_types(CheckOptions))
    show = flags.build(CheckOptions, own)
    config = resolve.from_argv(others, trust=show.trust)
    from freewheel.run.advice.env_check import checkup

    with Terminal(stderr=True).waiting() as tell:
        found = checkup(config, tell)
    if show.json:
        import json

        sys.stdout.write(json.dumps(found.to_json(), indent=2) + "\n")
    else:
        console = Terminal()
        _show(found, console if console.is_terminal else Terminal(width=WIDTH))
    return 0 if found.fine else 1


def _show(found: Checkup, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(found.config.env.name, "bold"))
    facts = Table.grid(padding=(0, 2), pad_edge=True)
    facts.add_column(style="dim", no_wrap=True)
    for about, text in [*_spaces(found.spec), *_costs(found.cost)]:
        facts.add_row(f"  {about}", Text(text))
    console.print(facts)
    console.print()
    findings = Table.grid(padding=(0, 2))
    findings.add_column(no_wrap=True)
    for finding in found.findings:
        mark, colour = MARKS[finding.level]
        remedy = (f"\n{finding.remedy}" if finding.remedy else "", "cyan")
        findings.add_row(Text(f"  {mark:<2}", colour), finding.about, Text.assemble(finding.text, remedy))
    console.print(findings)
    if found.modes:
        console.print()
        console.print(_modes(found))
    console.print()
    for line in _advice(found):
        console.print(line, soft_wrap=True)


def _spaces(spec: EnvSpec | None) -> list[tuple[str, str]]:
    if spec is None:
        return []
    parts = ", ".join(f"{part.name} {part.stop - part.start}" for part in spec.slices if part.name != "obs")
    names = f": {parts}" if parts else ""
    size = spec.action.size
    action = f"{size} to choose from" if spec.action.kind == "discrete" else f"{size} column{'s' * (size > 1)}"
    masked = ", with a mask" if spec.slice("action_mask") else ""
    return [("observation", f"{spec.obs_size} columns of {spec.obs_dtype}{names}"), ("action", action + masked)]


def _costs(cost: EnvCost | None) -> list[tuple[str, str]]:
    if cost is None:
        return []
    step = f"{_time(cost.wall)} on average; half below {_time(cost.median)}, 95 in 100 below {_time(cost.slow)}"
    working = (
        f"{min(cost.duty, 1.0):.0%} of it is processor time"
        if cost.duty <= 1
        else f"it keeps {cost.duty:.1f} cores busy"
    )
    lengths = f"; episodes of {_range(cost.lengths)} steps" if cost.lengths else ""
    children = f", including {cost.children} child processes" if cost.children else ""
    return [
        ("step", f"{step}; the longest of {cost.steps} took {_time(cost.longest)}; {working}"),
        ("reset", f"{_time(cost.reset)}{lengths}"),
        ("memory", f"{in_words(cost.memory)} for one env{children}; made in {_time(cost.construct)}"),
    ]


def _modes(found: Checkup) -> Any:
    from rich.table import Table

    from freewheel.run.advice.predictions import WAITS_FOR

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "mode", "workers x envs", "env steps/s", "waits for", "memory"):
        table.add_column(name, justify="right" if name in ("env steps/s", "memory") else "left")
    for one in found.modes:
        chosen = "->" if one is (found.better or found.usual) else ""
        if one.plan is None:
            table.add_row(chosen, one.mode, "-", "-", "cannot train this run", "-")
            continue
        rate, limit = (f"{one.rate:,.0f}", WAITS_FOR[one.forecast.limit]) if one.forecast else ("-", "-")
        table.add_row(chosen, one.mode, _lanes(one), rate, limit, in_words(one.memory))
    return table


def _lanes(one: ModeRate) -> str:
    assert one.plan is not None, "it has a plan"
    lanes = one.plan.spec.lanes
    if one.plan.worker_config is not None:
        return f"{one.plan.workers} x {lanes // one.plan.workers}"
    return f"{lanes} in processes" if one.plan.env_processes else f"{lanes} in turn"


def _advice(found: Checkup) -> list[Any]:
    from rich.text import Text

    from freewheel.run.advice.predictions import times, typed

    if not found.fine:
        return [Text("training would fail: see !! above", "red")]
    better, usual = found.better, found.usual
    line = Text.assemble("  ", (typed(found.config, "" if better is None else better.mode), "bold"))
    if better is None or usual is None:
        known = usual is not None and usual.rate
        return [Text("no mode is clearly faster than this one:" if known else "ready to train"), line]
    gain = times(better.rate / usual.rate)
    return [Text(f"--mode {better.mode} would make about {gain} as many env steps/s; try:"), line]


def _range(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low}" if low == high else f"{low} to {high}"


def _time(seconds: float) -> str:
    """Format a time with three digits: 4.52 ms, 120 µs, 1.5 s."""
    unit, name = next((unit for unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= 0.9995 * unit[0]), (1e-6, "µs"))
    return f"{seconds / unit:.3g} {name}"


COMMAND = Command(
    name="check",
    argument="ENV",
    summary="try an environment out: its contract, what it costs, which mode is fastest",
    options=_options,
    run=_run,
    order=1,
)
