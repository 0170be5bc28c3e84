"""This module computes the figures of every mode over all repeats: medians, spreads, speed-up,
efficiency, and returns at equal wall time."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from freewheel_lab.compare.results import IdealSpeed, ModeFigures, ResultRow, Results, Spread

BASE = "sequential"  # the mode that speed-ups are relative to
EPISODES = 100_000
ALIKE = 1.1  # with a replay buffer, no two trainings have exactly the same number of updates


def summarised(results: Results) -> Results:
    """Return the results with the figures of every mode that has rows."""
    parts = results.work.parts
    modes = [case.mode for case in results.modes]
    by_mode = {mode: rows for mode in modes if (rows := [row for row in results.rows if row.mode == mode])}
    own = {case.mode for case in results.modes if case.of is None and case.mode not in parts}
    ends = [statistics.median(row.wall_s for row in rows) for mode, rows in by_mode.items() if mode in own]
    equal = min(ends, default=None)
    texts = [equal_work([row for row in results.rows if row.mode not in parts], replay=results.work.updates is None)]
    part = [f"{mode} {parts[mode] / results.work.rows:.1%} ({parts[mode]:,} rows)" for mode in by_mode if mode in parts]
    if part:
        texts.append(
            f"too slow for the whole work: {', '.join(part)}; compare these modes by speed and by return at equal time"
        )
    figures = tuple(_figures(mode, rows, by_mode.get(BASE, []), results.ideal, equal) for mode, rows in by_mode.items())
    return replace(
        results,
        summary=figures,
        equal_wall_s=equal,
        equal_work="; ".join(filter(None, texts)),
    )


def rates(rows: Sequence[ResultRow]) -> dict[int, float]:
    """Return the steps/s of each repeat."""
    return {row.repeat: row.steps_per_s for row in rows}


def episode_steps(rows: Sequence[ResultRow]) -> float | None:
    """Return the mean length of the episodes that ended in these trainings, or None if none has
    ended. Each training contributes with its own mean."""
    known = [(row.episodes, row.steps_per_s / row.episodes_per_s) for row in rows if row.episodes_per_s]
    return sum(count * length for count, length in known) / sum(count for count, _ in known) if known else None


def gains(rows: Sequence[ResultRow], base: Sequence[ResultRow]) -> list[float]:
    """Return the steps/s divided by those of the base, for every repeat that both have. A machine
    that is slow for a while slows down both."""
    over = rates(rows)
    under = rates(base)
    return [rate / under[repeat] for repeat, rate in over.items() if repeat in under]


def spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def return_at(row: ResultRow, seconds: float) -> float | None:
    """Return the mean return of the newest episodes at this time of the training, or None if none
    had ended."""
    past = bisect_right([point[0] for point in row.curve], seconds)
    return row.curve[past - 1][2] if past else None


def equal_work(rows: Sequence[ResultRow], *, replay: bool = False) -> str:
    """Say whether all trainings did the same work according to their ledgers. With `replay`,
    updates follow rows, and the updates for the last rows may be missing."""
    if not rows:
        return ""
    trained = sorted({row.trained for row in rows})
    updates = sorted({row.updates for row in rows})
    if len(trained) == len(updates) == 1:
        work = f"{trained[0]:,} rows trained and {updates[0]:,} updates"
        return f"equal work by the ledger: {work} in each of {len(rows)} training{'s' * (len(rows) > 1)}"
    if replay and max(trained) <= ALIKE * min(trained) and max(updates) <= ALIKE * min(updates):
        work = f"{_range(trained)} rows stored and {_range(updates)} updates"
        return f"equal work by the ledger, except for the updates of the last rows: {work} in {len(rows)} trainings"
    both = f"{trained[0]:,} to {trained[-1]:,} rows, {updates[0]:,} to {updates[-1]:,} updates"
    return f"not equal: {both} in {len(rows)} trainings"


def _range(counts: Sequence[int]) -> str:
    return f"{counts[0]:,}" if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,}"


def unequal(results: Results) -> list[str]:
    """Return a line for every training whose amount of work is wrong. A replay buffer takes rows as
    they come, so a training may end with the rows of one update more."""
    work = results.work
    wrong = []
    allowed = 0 if work.updates is not None else max(work.rows_per_update, work.rows // 50)
    for row in results.rows:
        rows, updates = work.of(row.mode)
        if not 0 <= row.trained - rows <= allowed or row.updates != (updates or row.updates):
            done = f"{row.trained:,} rows and {row.updates} updates"
            wrong.append(f"{row.path}: {done} instead of {rows:,} and {updates}")
        if row.produced != row.trained + row.queued + row.open + sum(row.dropped.values()):
            wrong.append(f"{row.path}: its ledger does not balance")
    return wrong


def _figures(
    mode: str, rows: Sequence[ResultRow], base: Sequence[ResultRow], ideal: IdealSpeed, equal: float | None
) -> ModeFigures:
    steps = spread(rates(rows).values())
    assert steps is not None, "there are rows"
    length = episode_steps(rows)
    updates = spread(row.updates_per_s for row in rows)
    assert updates is not None
    per_s = None
    if length is not None:  # a training in which no episode ended uses the episode length of the other trainings
        per_s = spread(row.episodes_per_s or row.steps_per_s / length for row in rows)
    return ModeFigures(
        mode=mode,
        repeats=len(rows),
        steps_per_s=steps,
        episodes_per_s=per_s,
        episode_steps=length,
        updates_per_s=updates,
        time_100k_episodes_s=EPISODES / per_s.median if per_s is not None and per_s.median > 0 else None,
        speedup=spread(gains(rows, base)),
        efficiency=None if ideal.steps_per_s is None else steps.median / ideal.steps_per_s,
        startup_s=spread(row.startup_s for row in rows),
        return_final=spread(row.return_final for row in rows),
        return_at=None if equal is None else _median(return_at(row, equal) for row in rows),
        lag_mean=_mean([row.lag_mean for row in rows if row.lag_mean is not None]),
        lag_max=max((row.lag_max for row in rows if row.lag_max is not None), default=None),
        memory_mb=_median(row.memory_mb for row in rows),
        cpu_util=_median(row.cpu_util for row in rows),
        gpu_util=_median(row.gpu_util for row in rows),
        dropped=sum(count for row in rows for cause, count in row.dropped.items() if cause != "shutdown"),
        shares=_shares(rows),
    )


def _shares(rows: Sequence[ResultRow]) -> dict[str, Mapping[str, float]]:
    parties = rows[0].shares
    return {
        party: {kind: statistics.fmean(row.shares[party][kind] for row in rows) for kind in kinds}
        for party, kinds in parties.items()
    }


def _mean(known: Sequence[float]) -> float | None:
    return statistics.fmean(known) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    found = spread(values)
    return None if found is None else found.median
