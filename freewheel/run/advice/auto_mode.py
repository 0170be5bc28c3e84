"""`--mode auto`: chooses the fastest mode for an environment here, by the survey at the start of every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from freewheel.collect.mode import MODES
from freewheel.collect.workers import WorkersConfig
from freewheel.config.resolve import AUTO, Config
from freewheel.errors import FreewheelError, UsageError
from freewheel.rollout.probe import EnvCost
from freewheel.run.advice.policy_times import PolicyClock
from freewheel.run.advice.predictions import WAITS_FOR, ModeRate, best_of, by_lag, predict, step_times
from freewheel.run.naming import RunName, name_run
from freewheel.run.plan import Plan, nothing
from freewheel.run.planning import Report, arrange, plan, silent
from freewheel.run.process import learner_threads


def plan_run(
    config: Config, report: Report = silent, meanwhile: Callable[[], object] = nothing, run: Path | None = None
) -> Plan:
    """Return the plan of a run in its mode, or with --mode auto in the mode that is chosen here. See `plan`."""
    if not config.among:
        return plan(config, report, meanwhile, run)
    # An env that cannot be sent to other processes can only be measured for a mode without worker processes.
    here = [one for one in config.among if not isinstance(one.collector, WorkersConfig)]
    fitting = [one for one in config.among if MODES[one.mode].simulators] if config.env.on_device else here
    return plan((fitting or config.among)[0], report, meanwhile, arranged=partial(_chosen, config.among))


def _chosen(among: Sequence[Config], config: Config, cost: EnvCost, name: RunName, device: str) -> Plan:
    """Return the plan in the best of these modes, with a remark that gives the reason."""
    plans, refused = list[Plan](), list[str]()
    for one in among:
        try:
            there = replace(one, env=config.env, notes=config.notes)
            if isinstance(one.collector, WorkersConfig) and not cost.portable:
                raise UsageError(f"{config.env.label} cannot be sent to other processes")
            plans.append(arrange(there, cost, name, device))
        except FreewheelError as error:
            refused.append(str(error))
    if not plans:
        raise UsageError(f"--mode auto: no mode supports this run: {refused[0]}")
    found = [ModeRate(one.config.mode, one) for one in plans]
    if not config.env.on_device:
        env, clock = step_times(config, cost), PolicyClock()
        with learner_threads(config.run.machine.threads):
            found = [predict(one, env, clock) for one in plans]
    best = best_of(sorted(found, key=lambda one: by_lag(one.mode)))
    # If speeds cannot be predict, prefer free-running workers with a bound on the lag.
    free = (one for one in plans if MODES[one.config.mode].free_running and one.config.collector.max_lag is not None)
    chosen = next(free, plans[0]) if best is None or best.plan is None else best.plan
    remark = _why(chosen, best, found)
    sources = {**chosen.config.sources, "mode": AUTO}
    chosen = replace(chosen, config=replace(chosen.config, sources=sources), remarks=(remark, *chosen.remarks))
    return replace(chosen, name=name_run(chosen.config))


def _why(chosen: Plan, best: ModeRate | None, found: Sequence[ModeRate]) -> str:
    """Explain the choice in one line."""
    mode = chosen.config.mode
    if best is None or best.forecast is None:
        why = "speeds are not predicted for this environment or algorithm"
        return f"--mode auto is {mode}" + (f": {why}" if len(found) > 1 else ", the only mode that supports this run")
    others = sorted((one for one in found if one.mode != mode), key=lambda one: -one.rate)
    rates = ", ".join(f"{one.mode} {one.rate:,.0f}" for one in others if one.forecast)
    waits = f"waits for {WAITS_FOR[best.forecast.limit]}"
    lag = f", lag {best.forecast.lag:.1f}" if best.forecast.lag else ", no lag"
    return f"--mode auto is {mode}: about {best.rate:,.0f} env steps/s{lag}, {waits}" + (f" ({rates})" if rates else "")
