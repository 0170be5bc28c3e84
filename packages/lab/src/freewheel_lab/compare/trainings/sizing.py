"""How much work every training of a comparison does: the same in every mode that keeps up, and a part of it in a far slower one.

The whole work is what the slowest mode that keeps up has time for. A mode that is several times slower than the fastest does so
many of the same updates as it has time for, at least so many that episodes end. An update has the rows that the user's settings
give it. Only where not even a few updates would fit, and the user has not said how many rows there are, updates are made smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST_UPDATES = 4  # of the whole work, one of them to warm up
LEAST_OF_PART = 2  # of a part of it: one to warm up, one that is measured
MOST_UPDATES = 500
LEAST_ROWS = 500  # that are learned from, where there is a replay buffer
WARM_UP = 0.1  # of the updates
SHORTEST = 8  # steps of an env in an update that was made smaller
KEEPS_UP = 0.25  # of the fastest mode's steps/s
ENDS, LONGER = (
    1.5,
    3.0,
)  # each env steps through so many mean episodes, where that takes no more than so many times the budget
START = 3.0  # seconds that a process takes to start, as long as none has
UNKNOWN = 500.0  # env steps/s, as long as nothing is known


@dataclass(frozen=True, kw_only=True)
class WorkDemand:
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
    episode_steps: float = 0.0  # mean length of an episode; 0: not known

    @property
    def steady(self) -> float:
        """Steps/s of the slowest mode that keeps up; one whose speed is not known is taken for it."""
        known = [rate for rate in self.rates.values() if rate > 0] or [UNKNOWN]
        return min(known) if self.steps is not None else min(rate for rate in known if rate >= KEEPS_UP * max(known))

    @property
    def seconds(self) -> float:
        """Of a training."""
        return self.budget_s / self.repeats


@dataclass(frozen=True, kw_only=True)
class WorkSize:
    """The whole work, and the parts of it that slow modes do."""

    rows: int
    steps_per_env: int
    warm_up_rows: int
    starts: int = 0  # rows before the first update, which warm up nothing
    updates: int | None  # None: a replay buffer's learner decides
    seconds: Mapping[str, float]  # expected, of one training of each mode, without start-up
    parts: Mapping[str, int] = field(default_factory=dict)  # rows of slow modes
    notes: tuple[str, ...] = ()

    @property
    def slowest_s(self) -> float:
        return max(self.seconds.values())

    def of(self, mode: str) -> tuple[int, int]:
        """Rows of a mode's training, and those of them that warm it up."""
        rows = self.parts.get(mode, self.rows)
        learned, of_all = rows - self.starts, max(1, self.rows - self.starts)
        return rows, self.starts + (self.warm_up_rows - self.starts) * learned // of_all

    def duration(self, repeats: int) -> float:
        """Of the whole comparison, expected."""
        return repeats * sum(seconds + START for seconds in self.seconds.values())


def size(demand: WorkDemand) -> WorkSize:
    """The work that fits."""
    steady, fixed, starts = demand.steady, demand.steps is not None, demand.starts
    rates = {mode: rate or steady for mode, rate in demand.rates.items()}
    steps = _steps_per_env(demand, min(rates.values()))
    update = steps * demand.envs
    whole = _rows(demand, update, steady, LEAST_UPDATES)
    slow = {} if fixed else {mode: rate for mode, rate in rates.items() if rate < steady}
    parts = {mode: min(whole, _rows(demand, update, rate, LEAST_OF_PART)) for mode, rate in slow.items()}
    # Rows before the first update take next to no time.
    seconds = {mode: max(1, parts.get(mode, whole) - starts) / rate for mode, rate in rates.items()}
    where = f"in every mode that makes at least {KEEPS_UP:.0%} of the fastest's steps/s" if parts else "in every mode"
    notes = [f"{whole:,} rows {where}, {starts:,} of them before the first update"]
    updates, warm_up_rows = None, starts + round(WARM_UP * max(0, whole - starts))
    if demand.on_policy:
        updates = whole // update
        warm_up_rows = update * min(max(1, round(WARM_UP * updates)), updates - 1)
        why = "" if fixed else f", as the slowest{' of them' * bool(parts)} makes about {steady:,.0f} steps/s"
        asked = f"--steps {demand.steps:,}: " if fixed else ""
        notes = [f"{asked}{updates} updates of {update:,} rows {where}{why}"]
    if steps < demand.steps_per_env:
        less = f"an update has {update:,} rows instead of {demand.steps_per_env * demand.envs:,}, so that a few of them fit"
        notes.insert(0, f"{less} the budget in every mode; --num-steps-per-env or a larger --budget changes that")
    for mode, rows in parts.items():
        notes.append(
            f"{mode} makes about {rates[mode]:,.0f} steps/s and does {rows / whole:.1%} of that, {rows:,} rows"
        )
    if max(seconds.values()) > 1.5 * demand.seconds and not fixed:
        long = f"the slowest mode takes about {max(seconds.values()):.0f} s a training, more than its budget"
        notes.append(f"{long}: fewer updates could not be measured, or would end no episode")
    return WorkSize(
        rows=whole, steps_per_env=steps, warm_up_rows=warm_up_rows, starts=starts, updates=updates,
        seconds=seconds, parts=parts, notes=tuple(notes),
    )  # fmt: skip


def _steps_per_env(demand: WorkDemand, slowest: float) -> int:
    """Of an update: fewer than asked for where a few updates would not fit."""
    if demand.steps is not None or demand.fixed_steps_per_env or not demand.on_policy:
        return demand.steps_per_env
    fits = demand.seconds * min(demand.steady / LEAST_UPDATES, slowest / LEAST_OF_PART)
    return min(demand.steps_per_env, max(SHORTEST, int(fits / demand.envs)))


def _rows(demand: WorkDemand, update: int, rate: float, least: int) -> int:
    """What a mode of this speed has time for; at least so many updates, and so many rows that episodes end."""
    fits, ended = demand.seconds * rate, math.ceil(ENDS * demand.episode_steps * demand.envs)
    ended = ended if ended <= LONGER * fits else 0
    if not demand.on_policy:
        return demand.steps or demand.starts + max(LEAST_ROWS, int(fits), ended)
    if demand.steps is not None:
        return update * max(2, math.ceil(demand.steps / update))
    return update * max(least, min(MOST_UPDATES, int(fits / update)), math.ceil(ended / update))
