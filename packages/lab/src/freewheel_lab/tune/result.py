"""This module holds the results of a tuning: the settings with their predictions, the settings that
were run for real, and the recommendation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from freewheel.collect.mode import count
from freewheel.config.resolve import Config
from freewheel.run.advice.predictions import WAITS_FOR
from freewheel_lab.tune.probe import Probe
from freewheel_lab.tune.search import TuningCandidate, fixed_options
from freewheel_lab.tune.trial import TuningTrial

BETTER = 1.03  # a setting replaces the best prediction if it was measured to be this many times as fast ...
WORTH_LAG = 1.1  # ... or this many times if it has more lag: short trainings are inexact, and older actions teach less
BUSY = 0.25  # cores that other programs must keep busy for a warning


@dataclass
class Tuning:
    """Holds what is known so far. It grows during the tuning."""

    config: Config  # as the user gave it
    probe: Probe | None = None
    order: Sequence[TuningCandidate] = ()  # the best prediction first
    refused: Mapping[str, str] = field(default_factory=dict)  # modes that do not accept this run, with the reasons
    trials: list[TuningTrial] = field(default_factory=list)
    interrupted: bool = False
    others: float = 0.0  # cores that other programs kept busy at the start
    file: str = ""  # file with the chosen setting
    command: str = ""  # command that trains with it

    @property
    def chosen(self) -> TuningCandidate | None:
        """Return the setting that was measured to be better. If nothing was measured, return the
        best prediction."""
        measured = [trial for trial in self.trials if trial.rate is not None]
        if not measured:
            failed = [trial.candidate for trial in self.trials if trial.failed]
            return next((one for one in self.order if one not in failed), None)
        best = measured[0]
        for trial in measured[1:]:
            assert trial.rate is not None
            assert best.rate is not None
            more_lag = trial.candidate.forecast.lag > best.candidate.forecast.lag
            best = trial if trial.rate > (WORTH_LAG if more_lag else BETTER) * best.rate else best
        return best.candidate

    @property
    def warning(self) -> str:
        """Return a warning about what disturbed the measurements, or an empty text."""
        if self.others < BUSY:
            return ""
        busy = f"other programs kept {self.others:.1f} cores busy at the start"
        return f"{busy}: predictions assume that this machine does nothing else, so measurements are lower"

    def trial_of(self, candidate: TuningCandidate) -> TuningTrial | None:
        """Return the real run of a setting, if there was one."""
        return next((trial for trial in self.trials if trial.candidate is candidate), None)

    def shown(self, most: int) -> list[TuningCandidate]:
        """Return the settings for the table: those that were run, the best of each mode, and then
        the best of the others."""
        first = {one.mode: one for one in reversed(self.order)}
        picked = [trial.candidate for trial in self.trials] + [one for one in self.order if first[one.mode] is one]
        picked += self.order
        unique = {id(one): one for one in picked}
        return sorted(list(unique.values())[:most], key=lambda one: list(self.order).index(one))

    @property
    def sentence(self) -> str:
        """Return the recommendation as a sentence."""
        chosen = self.chosen
        if chosen is None:
            return "nothing can be recommended, because no setting was predicted"
        trial = self.trial_of(chosen)
        waits = f"it waits for {WAITS_FOR[chosen.forecast.limit]}"
        rate = f"{chosen.forecast.rate:,.0f} env steps/s are predicted"
        if trial is not None and trial.rate is not None and trial.error is not None:
            off = f"(predicted {chosen.forecast.rate:,.0f}, {trial.error:+.0%})"
            rate = f"{trial.rate:,.0f} env steps/s, measured {off}"
        text = f"use {setting(chosen)}: {rate}, lag {chosen.forecast.lag:.1f}, {waits}"
        return "; ".join([text, *self._about_the_other(chosen)])

    def _about_the_other(self, chosen: TuningCandidate) -> list[str]:
        """Return texts about the other setting that was run, and about measurements that contradict
        the prediction."""
        texts = []
        for trial in self.trials:
            if trial.candidate is chosen:
                continue
            if trial.rate is None:
                texts.append(f"{setting(trial.candidate)} could not be measured ({trial.failed})")
            elif trial is self.trials[0]:
                texts.append(f"{setting(trial.candidate)} was predicted to be best but made only {trial.rate:,.0f}")
            else:
                texts.append(f"{setting(trial.candidate)} made {trial.rate:,.0f}")
        return texts

    def to_json(self) -> dict[str, Any]:
        chosen = self.chosen
        return {
            "env": self.config.env.name,
            "algo": self.config.algo,
            "fixed": sorted(fixed_options(self.config)),
            "probe": None if self.probe is None else self.probe.to_json(),
            "candidates": [candidate_json(one) for one in self.order],
            "refused": dict(self.refused),
            "trials": [trial.to_json() for trial in self.trials],
            "chosen": None if chosen is None else candidate_json(chosen),
            "recommendation": self.sentence,
            "file": self.file or None,
            "command": self.command or None,
            "others_cores": self.others,
            "ended": "interrupted" if self.interrupted else "complete",
        }


def setting(one: TuningCandidate) -> str:
    """Return a setting as text, such as --mode continuous with 4 workers x 2."""
    return f"--mode {one.mode} with {workers_and_envs(one)}" + (
        f" in fragments of {one.fragment}" if has_unusual_fragments(one) else ""
    )


def has_unusual_fragments(one: TuningCandidate) -> bool:
    """Return whether its fragments have an unusual length."""
    return "collection_batch_size" in one.options


def workers_and_envs(one: TuningCandidate) -> str:
    """Return its workers and envs as text."""
    envs = one.plan.spec.lanes
    if one.plan.worker_config is None:
        return count(envs, "env") + (" in processes" if one.plan.env_processes else "")
    return f"{count(one.plan.workers, 'worker')} x {envs // one.plan.workers}"


def candidate_json(one: TuningCandidate) -> dict[str, Any]:
    return {
        "options": one.options,
        "workers": one.plan.workers if one.plan.worker_config is not None else 0,
        "envs": one.plan.spec.lanes,
        "fragment": one.fragment,
        "rows_per_update": one.plan.batch.rows,
        "steps_per_s": one.forecast.rate,
        "lag": one.forecast.lag,
        "learner_busy": one.forecast.busy,
        "waits_for": WAITS_FOR[one.forecast.limit],
        "memory": one.memory,
    }
