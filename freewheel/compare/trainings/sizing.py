"""How much work every training of a comparison does: the same in every mode, so much that the slowest mode fits its budget.

An update has the rows that the user's settings give it. Only where not even a few updates would fit, and the user has not said
how many rows there are, updates are made smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

LEAST_UPDATES = 4  # of a training, one of them to warm up
MOST_UPDATES = 500
LEAST_ROWS = 500  # that are learned from, where there is a replay buffer
WARM_UP = 0.1  # of the updates
SHORTEST = 8  # steps of an env in an update that was made smaller
WELL = 3.0  # seconds that a mode is measured for in each repeat, if that is to be had by more trainings
MOST_AGAIN = 6  # trainings of a mode in one repeat
START = 3.0  # seconds that a process takes to start, as long as none has
UNKNOWN = 500.0  # env steps/s, as long as nothing is known


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What is asked for, and what is known in advance."""

    budget_s: float  # of a mode, over all repeats, without start-up
    repeats: int
    envs: int
    steps_per_env: int
    rates: Mapping[str, float]  # env steps/s of each mode, expected; 0: not known
    steps: int | None = None  # the user has fixed the work
    on_policy: bool = True
    fixed_steps_per_env: bool = False  # the user has said how many
    starts: int = 0  # rows before the first update, where there is a replay buffer

    @property
    def slowest(self) -> float:
        return min((rate for rate in self.rates.values() if rate > 0), default=UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The work of a training."""

    rows: int
    steps_per_env: int
    warm_up_rows: int
    updates: int | None  # None: a replay buffer's learner decides
    warm_up: int
    again: Mapping[str, int]  # trainings of each mode in one repeat
    seconds: Mapping[str, float]  # expected, of one training of each mode, without start-up
    notes: tuple[str, ...] = ()

    @property
    def slowest_s(self) -> float:
        return max(self.seconds.values())

    def duration(self, repeats: int, starts: Mapping[str, float] | None = None) -> float:
        """Of the whole comparison, expected."""
        return repeats * sum(
            self.again[mode] * (seconds + (starts or {}).get(mode, START)) for mode, seconds in self.seconds.items()
        )


def size(demand: Demand) -> Size:
    """The work that fits."""
    chosen = _off_policy(demand) if not demand.on_policy else _on_policy(demand)
    rates = {mode: rate or demand.slowest for mode, rate in demand.rates.items()}
    learned_from = max(1, chosen.rows - demand.starts)  # before that, rows take next to no time
    seconds = {mode: learned_from / rate for mode, rate in rates.items()}
    again = dict.fromkeys(seconds, 1)
    if demand.steps is None:
        again = {mode: _again(took, demand.budget_s / demand.repeats) for mode, took in seconds.items()}
    notes = list(chosen.notes)
    if more := {mode: count for mode, count in again.items() if count > 1}:
        listed = ", ".join(f"{mode} {count}" for mode, count in more.items())
        notes.append(f"trainings in each repeat, so that fast modes are measured for longer: {listed}")
    if max(seconds.values()) > 1.5 * demand.budget_s / demand.repeats and demand.steps is None:
        notes.append(
            f"the slowest mode takes about {max(seconds.values()):.0f} s a training, more than its budget: "
            "fewer updates could not be measured"
        )
    return replace(chosen, again=again, seconds=seconds, notes=tuple(notes))


def _again(seconds: float, share: float) -> int:
    """As many trainings as are measured well together, without taking longer than the slowest mode may."""
    wanted = math.ceil(WELL / seconds)
    return max(1, min(wanted, MOST_AGAIN, int(share / (seconds + START)) or 1))


def _on_policy(demand: Demand) -> Size:
    fits, notes, steps = demand.budget_s / demand.repeats * demand.slowest, [], demand.steps_per_env
    rows = steps * demand.envs
    if demand.steps is not None:
        updates = max(2, math.ceil(demand.steps / rows))
        notes.append(f"--steps {demand.steps:,}: {updates} updates of {rows:,} rows in every mode")
    else:
        if fits < LEAST_UPDATES * rows and not demand.fixed_steps_per_env:
            steps = max(SHORTEST, min(steps, int(fits / LEAST_UPDATES / demand.envs)))
            if steps < demand.steps_per_env:
                notes.append(
                    f"an update has {steps * demand.envs:,} rows instead of {rows:,}, so that {LEAST_UPDATES} of them fit "
                    "the budget in the slowest mode; --num-steps-per-env or a larger --budget changes that"
                )
        rows = steps * demand.envs
        updates = max(LEAST_UPDATES, min(MOST_UPDATES, int(fits / rows)))
        notes.append(
            f"{updates} updates of {rows:,} rows in every mode, as the slowest makes about {demand.slowest:,.0f} steps/s"
        )
    warm_up = min(max(1, round(WARM_UP * updates)), updates - 1)
    return Size(
        rows=updates * rows, steps_per_env=steps, warm_up_rows=warm_up * rows, updates=updates, warm_up=warm_up,
        again={}, seconds={}, notes=tuple(notes),
    )  # fmt: skip


def _off_policy(demand: Demand) -> Size:
    fits = int(demand.budget_s / demand.repeats * demand.slowest)
    rows = demand.steps or demand.starts + max(LEAST_ROWS, fits)
    warm_up = demand.starts + round(WARM_UP * max(0, rows - demand.starts))
    note = f"{rows:,} rows in every mode, {demand.starts:,} of them before the first update"
    return Size(
        rows=rows, steps_per_env=demand.steps_per_env, warm_up_rows=warm_up, updates=None, warm_up=0,
        again={}, seconds={}, notes=(note,),
    )  # fmt: skip
