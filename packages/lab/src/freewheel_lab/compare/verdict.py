"""This module draws the conclusions of a comparison: which mode to use and why, and how much each
part of asynchronous collection is worth."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from freewheel.metrics.names import WORKING
from freewheel_lab.compare.results import CaseInfo, ModeFigures, ModePair, Recommendation, ResultRow, Results, Spread
from freewheel_lab.compare.summary import BASE, gains, spread

UNKNOWN_NOISE = 0.05  # spread that is assumed if there is only one repeat
SHORT_STEP = 100e-6  # seconds; for a shorter step, sending its row to another process is what takes time
UNEVEN = 1.5  # the slowest of all envs is mentioned if it takes this many times the mean
SHARE = 0.2  # shares of time above this are mentioned


def judged(results: Results) -> Results:
    """Return the results with a recommendation and the pairs."""
    return replace(results, recommendation=recommendation(results), pairs=tuple(pairs(results)))


@dataclass(frozen=True)
class SpeedMargin:
    """Says how much faster one mode is than another."""

    share: float  # 0.12: 12 % more steps/s, median over repeats
    noise: float  # half of the range over repeats

    @property
    def within_noise(self) -> bool:
        return abs(self.share) <= self.noise


def margin(results: Results, mode: str, other: str) -> SpeedMargin:
    """Compare two modes repeat by repeat, because both were measured within the same minutes."""
    found = gains(_rows(results, mode), _rows(results, other))
    if not found:  # they have no repeat in common
        both = [one.steps_per_s.median for one in (results.figures(mode), results.figures(other)) if one is not None]
        return SpeedMargin(both[0] / both[1] - 1, UNKNOWN_NOISE)
    noise = (max(found) - min(found)) / 2 if len(found) > 1 else UNKNOWN_NOISE
    return SpeedMargin(statistics.median(found) - 1, noise)


def recommendation(results: Results) -> Recommendation | None:
    """Recommend the mode with the least lag among those that are as fast as the fastest, within
    noise."""
    own = {case.mode for case in results.modes if case.of is None}
    ranked = sorted((one for one in results.summary if one.mode in own), key=lambda one: -one.steps_per_s.median)
    if not ranked:
        return None
    fastest = ranked[0]
    equal = [one for one in ranked if one is fastest or margin(results, fastest.mode, one.mode).within_noise]
    order = [case.mode for case in results.modes]  # of two modes with the same lag, the first one is taken
    chosen = min(equal, key=lambda one: (one.lag_max or 0.0, order.index(one.mode)))
    others = [one for one in ranked if one is not chosen]
    ahead = margin(results, chosen.mode, others[0].mode) if others else None
    return Recommendation(
        mode=chosen.mode,
        sentence=_sentence(results, chosen, equal, ranked, ahead),
        margin=None if ahead is None else ahead.share,
        within_noise=len(equal) > 1,
        command=results.case(chosen.mode).command,
        steps_per_s=chosen.steps_per_s.median,
    )


def _sentence(
    results: Results,
    chosen: ModeFigures,
    equal: Sequence[ModeFigures],
    ranked: Sequence[ModeFigures],
    ahead: SpeedMargin | None,
) -> str:
    facts = []
    if chosen.speedup is not None and chosen.mode != BASE:
        facts.append(f"{chosen.speedup.median:.2g}x {BASE}")
    elif chosen.mode != BASE:
        facts.append(f"{chosen.steps_per_s.median:,.0f} steps/s")
    if len(equal) > 1:
        names = [one.mode for one in equal if one is not chosen]
        why = "with less lag" if _least_lag(chosen, equal) else "with no more lag"
        noise = max(margin(results, chosen.mode, name).noise for name in names)
        facts.append(f"within noise of {_listed(names)} (±{100 * noise:.0f} %), {why}")
    elif ahead is not None:
        other = next(one.mode for one in ranked if one is not chosen)
        spread = f"±{100 * ahead.noise:.0f} %" if chosen.repeats > 1 else "one repeat, so the spread is not known"
        facts.append(f"{100 * ahead.share:.0f} % above {other} ({spread})")
    reason = "; and ".join(list(reasons(results, chosen))[:2])
    text = ", ".join(facts) or f"{chosen.steps_per_s.median:,.0f} steps/s, the only mode that was measured"
    return f"{chosen.mode}: {text}" + (f", because {reason}" if reason else "")


def _least_lag(chosen: ModeFigures, equal: Sequence[ModeFigures]) -> bool:
    return all((one.lag_max or 0.0) > (chosen.lag_max or 0.0) for one in equal if one is not chosen)


def reasons(results: Results, chosen: ModeFigures) -> Iterator[str]:
    """Yield reasons why this mode is fast here, the most important ones first. They follow from the
    measurements."""
    case = results.case(chosen.mode)
    ideal = results.ideal
    learner = _learning(chosen)
    if case.synchronous and not case.dependencies:
        if ideal.row_s is not None and ideal.row_s < SHORT_STEP:
            yield f"a step takes {1e6 * ideal.row_s:.0f} µs, which is less than sending its row to another process"
        if learner >= 0.5:
            yield f"the learner is busy {learner:.0%} of the time, and another way of collecting does not make it faster"
        return
    uneven = ideal.slowest_s / ideal.row_s if ideal.slowest_s and ideal.row_s else 1.0
    if uneven >= UNEVEN and not case.synchronous:
        yield f"the slowest of {ideal.envs} steps takes {uneven:.1f} times the mean and no env waits for it"
    elif ideal.row_s and ideal.cpu_s is not None and ideal.cpu_s < ideal.row_s / 2:
        yield f"an env waits {1 - ideal.cpu_s / ideal.row_s:.0%} of its time, and {ideal.envs} envs wait at the same time"
    elif ideal.cores > 1:
        yield f"envs step on {min(ideal.cores, max(case.workers, case.envs))} cores at once"
    before = _fastest(results, synchronous=True)
    if not case.synchronous and before is not None and _learning(before) >= SHARE:
        yield f"envs continue to step during updates, which take {_learning(before):.0%} of the time of {before.mode}"


def _learning(one: ModeFigures) -> float:
    return sum(share for kind, share in one.shares.get("learner", {}).items() if kind in WORKING)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def pairs(results: Results) -> Iterator[ModePair]:
    """Yield the comparison of synchronous and asynchronous modes. The gain of overlap and the gain
    of CUDA graphs follow separately."""
    sync = _fastest(results, synchronous=True)
    free = _fastest(results, synchronous=False)
    on_gpu = any(case.of is not None for case in results.modes)
    if sync is not None and free is not None:
        gain = spread(gains(_rows(results, free.mode), _rows(results, sync.mode)))
        yield ModePair(
            what="sync against async",
            before=sync.mode,
            after=free.mode,
            gain=gain,
            sentence=f"{free.mode} makes {_times(gain)} as many steps/s as {sync.mode}, the fastest synchronous mode",
        )
        if not on_gpu:
            yield _overlap(sync, free, gain, results.case(sync.mode))
    yield from _graphs(results) if on_gpu else _no_graphs(results)


def _overlap(sync: ModeFigures, free: ModeFigures, gain: Spread | None, case: CaseInfo) -> ModePair:
    """Return an upper bound for the gain if acting and learning, which take turns in the
    synchronous mode, run at the same time."""
    learner = _learning(sync)
    most = 1 / max(learner, 1 - learner)
    text = f"in {sync.mode} the learner works {learner:.0%} of the time while no env steps"
    text += f": both at once are at most {most:.2f}x as fast"
    if gain is not None and gain.median > most:
        what = "no env waits for another" if case.dependencies else "envs step at the same time instead of taking turns"
        text += f"; the other {gain.median / most:.2f}x of {free.mode} has another reason: {what}"
    return ModePair(what="overlap", before=sync.mode, after=free.mode, gain=Spread(most, 1.0, most), sentence=text)


def _no_graphs(results: Results) -> Iterator[ModePair]:
    text = "CUDA graphs do not apply: the learner computes on the CPU"
    if results.hardware.get("device", "cpu") != "cpu":
        text = "the gain of CUDA graphs was not measured: it needs a synchronous and an asynchronous mode, and --compile graphs"
    for case in results.modes[:1]:
        yield ModePair(what="CUDA graphs", before=case.mode, after=case.mode, gain=None, sentence=text)


def _graphs(results: Results) -> Iterator[ModePair]:
    """Yield the gains from a synchronous and an asynchronous mode, each measured with and without
    graphs."""
    off = {case.of: case for case in results.modes if case.of is not None}
    ways = {results.case(of).synchronous: (of, case.mode) for of, case in off.items() if of is not None}
    if True in ways and False in ways:
        _, sync = ways[True]
        _, free = ways[False]
        gain = spread(gains(_rows(results, free), _rows(results, sync)))
        text = f"overlap alone, without CUDA graphs: {free} makes {_times(gain)} as many steps/s as {sync}"
        yield ModePair(what="overlap", before=sync, after=free, gain=gain, sentence=text)
    for with_graphs, without in ways.values():
        gain = spread(gains(_rows(results, with_graphs), _rows(results, without)))
        text = f"CUDA graphs alone: {with_graphs} makes {_times(gain)} as many steps/s with them as without"
        yield ModePair(what="CUDA graphs", before=without, after=with_graphs, gain=gain, sentence=text)


def _fastest(results: Results, *, synchronous: bool) -> ModeFigures | None:
    modes = {case.mode for case in results.modes if case.synchronous == synchronous and case.of is None}
    found = [one for one in results.summary if one.mode in modes]
    return max(found, key=lambda one: one.steps_per_s.median, default=None)


def _times(gain: Spread | None) -> str:
    if gain is None:
        return "an unknown number of times"
    return f"{gain.median:.2f}x ({gain.low:.2f} .. {gain.high:.2f})"


def _rows(results: Results, mode: str) -> list[ResultRow]:
    return [row for row in results.rows if row.mode == mode]


def variants(cases: Sequence[CaseInfo]) -> tuple[str, str] | None:
    """Return the synchronous and the asynchronous mode that show the gains of overlap and graphs.
    None means that one of them is missing."""
    sync = [case.mode for case in cases if case.synchronous and not case.failed]
    free = [case.mode for case in cases if not case.synchronous and not case.failed]
    if not sync or not free:
        return None
    return ("lockstep" if "lockstep" in sync else sync[0]), ("continuous" if "continuous" in free else free[0])
