"""A learner's share of a run. Options describe the whole run, which is divided evenly between the learners."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freewheel.collect.mode import ModeConfig
from freewheel.collect.workers import WorkersConfig, divisor
from freewheel.config.machine import find_devices
from freewheel.config.resolve import Config
from freewheel.errors import UsageError
from freewheel.run.learners.devices import task_beside
from freewheel.run.plan import Plan, Share
from freewheel.transport.learners.rank import RankInfo


def by_torchrun(config: Config, place: RankInfo | None) -> Config:
    """Return the config with the number of learners that torchrun started. UsageError if --learners is given too."""
    machine, given = config.run.machine, config.sources.get("learners", "")
    if place is None:
        return config
    if given in ("flag", "argument"):
        raise UsageError(f"torchrun has already started {place.count} learners: leave out --learners")
    sources = {**config.sources, "learners": "torchrun"}
    run = replace(config.run, machine=replace(machine, learners=place.count))
    return replace(config, run=run, sources=sources)


def evenly(planned: ModeConfig, given: ModeConfig, learners: int) -> ModeConfig:
    """Round numbers that were chosen automatically so that the learners divide them; UsageError for given numbers."""
    if learners == 1:
        return planned
    if planned.episodes_per_update is not None:
        _check("--episodes-per-update", planned.episodes_per_update, learners)
    if not isinstance(planned, WorkersConfig) or not isinstance(given, WorkersConfig):
        _check("--num-envs", planned.lanes, learners)
        return planned
    workers, lanes = planned.worker_count, planned.lanes
    if given.workers != "auto":
        _check("--workers", workers, learners)
    if given.num_envs != "auto":
        _check("--num-envs", lanes, learners)
        workers = learners * divisor(lanes // learners, -(-workers // learners))
    else:
        workers = learners * -(-workers // learners)
    each = -(-lanes // workers) if given.envs_per_worker == "auto" else given.envs_per_worker
    return replace(planned, workers=workers, envs_per_worker=each, num_envs=workers * each)


def _check(flag: str, value: int, learners: int) -> None:
    if value % learners:
        fitting = -(-value // learners) * learners
        raise UsageError(f"{flag} {value} cannot be divided evenly over {learners} learners; use {flag} {fitting}")


def check_together(config: Config) -> None:
    """Raise UsageError for options that several learners do not support."""
    if config.run.machine.learners == 1:
        return
    refused = {
        "--record-schedule": (config.run.output.record_schedule, "records the order of one learner's rows"),
        "--adapt": (getattr(config.collector, "adapt", False), "steers the collector of one learner"),
        f"policy.module {config.policy.module.rpartition(':')[2]}": (
            config.policy.module.startswith("__main__:"),
            "was defined in a script or a notebook, and other learners can only import it from a file (path/to/file.py:Name)",
        ),
        f"--algo {config.algo}": (
            not getattr(config.learner, "trains_together", False),
            "has a learner that does not sum gradients across learners (AlgorithmConfig.trains_together)",
        ),
    }
    for option, (asked, why) in refused.items():
        if asked:
            raise UsageError(f"{option} {why}: leave it out, or leave out --learners")


def share_of(whole: Plan, place: RankInfo) -> Plan:
    """Return the share of learner `place.rank`. All shares cover the plan; no two learners play the same episode."""
    learners, config = place.count, whole.config
    mode: Any = config.collector
    parts: dict[str, int] = {"num_envs": mode.lanes // learners}
    if isinstance(mode, WorkersConfig):
        parts["workers"] = mode.worker_count // learners
    if mode.episodes_per_update is not None:
        parts["episodes_per_update"] = mode.episodes_per_update // learners
    mode = replace(mode, **parts) if all(hasattr(mode, name) for name in parts) else mode
    machine = replace(config.run.machine, threads=max(1, config.run.machine.threads // place.local))
    where = find_devices(machine.device, rank=place.local_rank, learners=place.local, simulated=config.env.on_device)
    run = replace(config.run, machine=machine)
    config = replace(config, collector=mode, env=config.env.to(where.simulator), run=run)
    together = whole.spec.device == whole.device  # else the simulator has chosen another device
    spec = replace(whole.spec, lanes=whole.spec.lanes // learners, model_task=task_beside(whole.spec, where.learner))
    spec = replace(spec, device=where.simulator if together else spec.device)
    share = Share(place.rank, learners, place.local)
    return replace(whole, config=config, spec=spec, device=where.learner, share=share)
