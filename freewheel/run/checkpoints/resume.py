"""Resumes a run in its directory, from its newest checkpoint, with its options and perhaps with higher limits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from freewheel.config.resolve import Config, LimitOptions
from freewheel.errors import CheckpointError, FileError
from freewheel.files import signatures
from freewheel.files.read import json_object
from freewheel.metrics.meter import Budget
from freewheel.run.checkpoints import checkpoint
from freewheel.run.checkpoints.run_progress import Earlier
from freewheel.run.learners.versions import check_number, never_saved, newest_of_all
from freewheel.run.naming import CHECKPOINTS, CONFIG, METRICS, SUMMARY, Result
from freewheel.run.planning import print_line
from freewheel.run.saved import SavedRun, lock_run, open_run
from freewheel.run.trainer import followed, run
from freewheel.sinks.sink import Sink
from freewheel.transport.learners.rank import RankInfo, of_torchrun


@dataclass(frozen=True, kw_only=True)
class ResumeSettings:
    """The settings with which a run is resumed."""

    limits: LimitOptions = field(default_factory=LimitOptions)  # for all sessions together; None: unchanged
    which: str = ""  # a checkpoint; empty: the newest that can be resumed
    runs_dir: str = "runs"
    env: str | Callable[..., Any] | None = None  # needed if it cannot be found by its name
    trust: bool = False  # code that the run names may be imported, whoever has written it


def resume(
    name: str | os.PathLike[str] | Result,
    settings: ResumeSettings,
    *,
    quiet: bool = False,
    hooks: Sequence[object] = (),
    sinks: Sequence[Sink] = (),
) -> Result:
    """Resume a run. If it has nothing left to do, report that and return its last result."""
    place = of_torchrun()
    if place is not None and place.rank:
        return followed(place)
    consent: dict[str, Any] = {"trust": settings.trust, "use": "train"}
    found = open_run(name, settings.runs_dir, settings.env, which=settings.which, usual="latest", **consent)
    with lock_run(found.path):
        if settings.which in ("", "latest") and found.which == "latest" and _never_began(found):
            config = _with_limits(_with_sources(found), settings.limits)
            if not quiet:
                print_line(
                    f"{found.path.name} was ended before it had saved anything: it begins again, with its config"
                )
            return run(config, quiet=quiet, hooks=hooks, sinks=sinks, again=found.path)
        found = _of_all(found, settings.which, place)
        config, earlier, said = read_earlier(found, settings)
        if said is not None:
            reason, summary = said
            if not quiet:
                print_line(f"{found.path.name} has nothing left to do: {reason}")
            return Result(found.path, summary)
        return run(config, quiet=quiet, hooks=hooks, sinks=sinks, earlier=earlier)


def read_earlier(
    found: SavedRun, settings: ResumeSettings
) -> tuple[Config, Earlier, tuple[str, Mapping[str, Any]] | None]:
    """Return the config, the state to resume from, and (reason, summary) if nothing is left to do. Writes nothing."""
    earlier = _earlier(found)
    config = _with_limits(_with_sources(found), settings.limits)
    try:
        said = _nothing_left(config.run.budget, found.config.run.budget, earlier)
        written = int(earlier.progress["metrics_bytes"])
    except (KeyError, TypeError, ValueError) as error:
        where = earlier.saved.path / checkpoint.PROGRESS
        raise CheckpointError(
            f"{where} does not say how far the run had come ({type(error).__name__}: {error})"
        ) from None
    metrics = found.path / METRICS
    if (metrics.stat().st_size if metrics.is_file() else 0) < written:
        short = f"{metrics} is shorter than when the run was saved: rows of it are lost"
        earlier = replace(earlier, saved=replace(earlier.saved, warnings=(*earlier.saved.warnings, short)))
    return config, earlier, said


def _never_began(found: SavedRun) -> bool:
    """Return whether a run has no checkpoint because it was killed or failed before its first save."""
    learners = found.config.run.machine.learners
    return never_saved(found.path, learners) and _summary(found.path / SUMMARY).get("exit_code", 1) != 0


def _of_all(found: SavedRun, which: str, place: RankInfo | None) -> SavedRun:
    """Return the run with a checkpoint that all its learners have. SetupError: wrong number of learners."""
    learners = found.config.run.machine.learners
    check_number(found.path, learners, place)
    if learners == 1:
        return found
    return replace(found, which=newest_of_all(found.path, learners, which))


def _earlier(found: SavedRun) -> Earlier:
    root = found.path / CHECKPOINTS
    if checkpoint.names(root) and not any(checkpoint.is_full(root / str(name)) for name in checkpoint.names(root)):
        remedy = f"freewheel train --init {found.path} starts a new run from its weights"
        raise CheckpointError(f"{found.path} has weights only, nothing to resume from: {remedy}")
    return Earlier(found.path, *checkpoint.load_state(root, found.which))


def _with_sources(found: SavedRun) -> Config:
    """Return the config with the sources of its values when the run began; only the run's location may have changed."""
    sources = json_object(found.path / CONFIG).get("sources")
    kept = {str(name): str(source) for name, source in sources.items()} if isinstance(sources, dict) else {}
    return replace(found.config, sources=kept)


def _with_limits(config: Config, limits: LimitOptions) -> Config:
    """Return the config with the given limits in place of the previous ones."""
    given = {name: value for name, value in vars(limits).items() if value is not None}
    if not given:
        return config
    known = LimitOptions(**dataclasses.asdict(config.run.budget))
    sources = {**config.sources, **dict.fromkeys(given, "resume")}
    return replace(config, run=replace(config.run, limits=replace(known, **given)), sources=sources)


def _nothing_left(budget: Budget, before: Budget, earlier: Earlier) -> tuple[str, Mapping[str, Any]] | None:
    """Return why a run that has ended has nothing left to do, and its summary; None: it can continue."""
    progress = earlier.progress
    spent = {
        "steps": progress["done"],
        "minutes": progress["meter"]["wall_s"] / 60,
        "episodes": progress["meter"]["done"]["episodes"],
    }
    limits = {name: value for name, value in vars(budget).items() if value is not None}
    over = [name for name, limit in limits.items() if spent[name] >= limit]
    if progress["ended"] == "minutes" and budget.minutes == before.minutes:  # the rest was for the evaluation
        over.append("minutes")
    summary = _summary(earlier.path / SUMMARY)
    unscored = str(summary.get("ended")).startswith("interrupted") and summary.get("final_eval") is None
    if not over or unscored or "exit_code" not in summary or summary.get("env_steps") != progress["env_steps"]:
        return None  # its closing evaluation is not complete
    name = over[0]
    done = f"{spent[name]:,.1f}" if name == "minutes" else f"{spent[name]:,}"
    return f"{done} of {limits[name]:,} {name} are done; give more with --{name}", summary


def _summary(path: Path) -> Mapping[str, Any]:
    """Return the summary of the run; empty if there is none."""
    if not os.path.lexists(path):
        return {}
    try:
        return signatures.unsealed(json_object(path), str(path))
    except FileError as error:
        raise FileError(f"{error}; or remove it, and resume will write it again") from None
