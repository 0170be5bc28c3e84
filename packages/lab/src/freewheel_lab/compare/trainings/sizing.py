"""This module decides how much work every training of a comparison does. Modes that keep up do the
same work, and a much slower mode does a part of it.

The slowest mode that keeps up has enough time for the whole work. A mode that is several times
slower than the fastest does as many of the same updates as it has time for, and enough of them that
episodes end. The user's settings decide how many rows an update has. Updates become smaller only if
not even a few of them would fit and the user has not set their size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST_UPDATES = 4  # minimum of the whole work; one of them warms up
LEAST_OF_PART = 2  # minimum of a part of it: one warms up, and one is measured
MOST_UPDATES = 500
LEAST_ROWS = 500  # minimum of rows that are learned from, with a replay buffer
WARM_UP = 0.1  # share of the updates
SHORTEST = 8  # minimum of steps of an env in an update that was made smaller
KEEPS_UP = 0.25  # share of the fastest mode's steps/s
ENDS = 1.5  # each env steps through this many mean episodes ...
LONGER = 3.0  # ... unless that takes more than this many times the budget
START = 3.0  # seconds that a process is assumed to need until it starts
UNKNOWN = 500.0  # env steps/s that are assumed if nothing is known


@dataclass(frozen=True, kw_only=True)
class WorkDemand:
    """Holds what the user asked for and what is known in advance."""

    budget_s: float  # for each mode, over all repeats, without start-up
    repeats: int
    envs: int
    steps_per_env: int
    rates: Mapping[str, float]  # expected env steps/s of each mode; 0: not known
    steps: int | None = None  # set if the user has fixed the work
    on_policy: bool = True
    fixed_steps_per_env: bool = False  # whether the user has set the number
    starts: int = 0  # rows before the first update, with a replay buffer
    episode_steps: float = 0.0  # mean length of an episode; 0: not known

    @property
    def steady(self) -> float:
        """Return the steps/s of the slowest mode that keeps up. A mode of unknown speed is assumed
        to be that fast."""
        known = [rate for rate in self.rates.values() if rate > 0] or [UNKNOWN]
        return min(known) if self.steps is not None else min(rate for rate in known if rate >= KEEPS_UP * max(known))

    @property
    def seconds(self) -> float:
        """Return the seconds of one training."""
        return self.budget_s / self.repeats


@dataclass(frozen=True, kw_only=True)
class WorkSize:
    """Holds the whole work, and the parts of it that slow modes do."""

    rows: int
    steps_per_env: int
    warm_up_rows: int
    starts: int = 0  # rows before the first update; they do not warm anything up
    updates: int | None  # None: the learner of a replay buffer decides
    seconds: Mapping[str, float]  # expected seconds of one training of each mode, without start-up
    parts: Mapping[str, int] = field(default_factory=dict)  # rows of each slow mode
    notes: tuple[str, ...] = ()

    @property
    def slowest_s(self) -> float:
        return max(self.seconds.values())

    def of(self, mode: str) -> tuple[int, int]:
        """Return the rows of a mode's training, and the number of them that are warm-up."""
        rows = self.parts.get(mode, self.rows)
        learned = rows - self.starts
        of_all = max(1, self.rows - self.starts)
        return rows, self.starts + (self.warm_up_rows - self.starts) * learned // of_all

    def duration(self, repeats: int) -> float:
        """Return the expected seconds of the whole comparison."""
        return repeats * sum(seconds + START for seconds in self.seconds.values())


def size(demand: WorkDemand) -> WorkSize:
    """Return the work that fits the budget."""
    steady = demand.steady
    fixed = demand.steps is not None
    starts = demand.starts
    rates = {mode: rate or steady for mode, rate in demand.rates.items()}
    steps = _steps_per_env(demand, min(rates.values()))
    update = steps * demand.envs
    whole = _rows(demand, update, steady, LEAST_UPDATES)
    slow = {} if fixed else {mode: rate for mode, rate in rates.items() if rate < steady}
    parts = {mode: min(whole, _rows(demand, update, rate, LEAST_OF_PART)) for mode, rate in slow.items()}
    # Rows before the first update take almost no time.
    seconds = {mode: max(1, parts.get(mode, whole) - starts) / rate for mode, rate in rates.items()}
    where = f"in every mode that makes at least {KEEPS_UP:.0%} of the fastest's steps/s" if parts else "in every mode"
    notes = [f"{whole:,} rows {where}, {starts:,} of them before the first update"]
    updates = None
    warm_up_rows = starts + round(WARM_UP * max(0, whole - starts))
    if demand.on_policy:
        updates = whole // update
        warm_up_rows = update * min(max(1, round(WARM_UP * updates)), updates - 1)
        why = "" if fixed else f", because the slowest{' of them' * bool(parts)} makes about {steady:,.0f} steps/s"
        asked = f"--steps {demand.steps:,}: " if fixed else ""
        notes = [f"{asked}{updates} updates of {update:,} rows {where}{why}"]
    if steps < demand.steps_per_env:
        less = f"an update has {update:,} rows instead of {demand.steps_per_env * demand.envs:,}, so that several updates fit"
        notes.insert(0, f"{less} the budget in every mode; --num-steps-per-env or a larger --budget changes that")
    for mode, rows in parts.items():
        notes.append(
            f"{mode} makes about {rates[mode]:,.0f} steps/s and does {rows / whole:.1%} of that, {rows:,} rows"
        )
    if max(seconds.values()) > 1.5 * demand.seconds and not fixed:
        long = f"the slowest mode takes about {max(seconds.values()):.0f} s per training, which is more than its budget"
        notes.append(f"{long}: with fewer updates nothing could be measured, or no episode would end")
    return WorkSize(
        rows=whole, steps_per_env=steps, warm_up_rows=warm_up_rows, starts=starts, updates=updates,
        seconds=seconds, parts=parts, notes=tuple(notes),
    )  # fmt: skip


def _steps_per_env(demand: WorkDemand, slowest: float) -> int:
    """Return the steps of each env in an update. They are fewer than asked for if several updates
    would not fit."""
    if demand.steps is not None or demand.fixed_steps_per_env or not demand.on_policy:
        return demand.steps_per_env
    fits = demand.seconds * min(demand.steady / LEAST_UPDATES, slowest / LEAST_OF_PART)
    return min(demand.steps_per_env, max(SHORTEST, int(fits / demand.envs)))


def _rows(demand: WorkDemand, update: int, rate: float, least: int) -> int:
    """Return the rows that a mode of this speed has time for. They have at least `least` updates,
    and enough rows that episodes end."""
    fits = demand.seconds * rate
    ended = math.ceil(ENDS * demand.episode_steps * demand.envs)
    ended = ended if ended <= LONGER * fits else 0
    if not demand.on_policy:
        return demand.steps or demand.starts + max(LEAST_ROWS, int(fits), ended)
    if demand.steps is not None:
        return update * max(2, math.ceil(demand.steps / update))
    return update * max(least, min(MOST_UPDATES, int(fits / update)), math.ceil(ended / update))
