"""The search tries every mode with sensible numbers of workers, envs and steps, and predicts each
setting with the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

from freewheel.collect.lockstep import LockstepConfig
from freewheel.collect.mode import ENVS, MODES
from freewheel.collect.serial import SerialConfig
from freewheel.collect.workers import WorkersConfig, memory_room
from freewheel.config.resolve import Config
from freewheel.errors import FreewheelError
from freewheel.rollout.probe import usable_cores
from freewheel.run.advice.predictions import by_lag
from freewheel.run.advice.throughput import Forecast
from freewheel.run.plan import Plan
from freewheel.run.process import learner_threads
from freewheel_lab.tune.probe import Probe

#: Share of the best predicted rate. Of the settings that reach it, the one with the least lag and the fewest processes is best.
AS_GOOD = 0.97
SHORTEST = 16  # minimum steps of each env in an update; shorter ones teach less about the consequences of an action
MOST_WORKERS = 256
MOST_TOGETHER = 256  # envs in one process
FRAGMENTS = (8, 32, 128)
SEARCHED = ("workers", "envs_per_worker", "num_envs", "collection_batch_size", "placement")
CHOSEN = ("flag", "argument", "file", "preset")  # prefixes of the sources of options that the user has set


@dataclass(frozen=True)
class TuningCandidate:
    """Holds a setting and its forecast."""

    plan: Plan
    forecast: Forecast
    memory: int  # bytes of environments and workers

    @property
    def mode(self) -> str:
        return self.plan.config.mode

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that make this setting. Options with default values are omitted."""
        config = self.plan.config.collector
        if isinstance(config, WorkersConfig):
            chosen: dict[str, Any] = {"workers": config.workers, "envs_per_worker": config.envs_per_worker}
            usual = replace(config, collection_batch_size=type(config)().collection_batch_size)  # type: ignore[call-arg, attr-defined]
            if config.fragment_steps(self.plan.batch) != usual.fragment_steps(self.plan.batch):
                chosen["collection_batch_size"] = config.fragment_steps(self.plan.batch)
            return {"mode": self.mode, **chosen}
        placed = {"placement": config.placement} if isinstance(config, LockstepConfig) else {}
        return {"mode": self.mode, "num_envs": config.lanes, **placed}

    @property
    def fragment(self) -> int | None:
        """Return the steps of each env that a worker hands over at once."""
        config = self.plan.worker_config
        return None if config is None else config.fragment_steps(self.plan.batch)

    @property
    def cost(self) -> tuple[float, ...]:
        """Return the cost by which settings of equal rate are ordered. It counts lag, unusual
        fragments, processes, and the distance from the usual number of envs, because learning
        depends on it."""
        odd = "collection_batch_size" in self.options
        lanes = abs(log2(self.plan.spec.lanes / ENVS))
        return (by_lag(self.mode), odd, round(self.forecast.lag, 1), self.plan.env_processes, lanes)


def fixed_options(config: Config) -> frozenset[str]:
    """Return the names of options that the user has set."""
    return frozenset(name for name, source in config.sources.items() if source.partition(" ")[0] in CHOSEN)


def search(probe: Probe) -> tuple[list[TuningCandidate], dict[str, str]]:
    """Return all possible settings, the best first, and the reasons why modes are excluded."""
    found: list[TuningCandidate] = []
    refused: dict[str, str] = {}
    with learner_threads(probe.config.run.machine.threads):
        for config in probe.config.among or (probe.config,):
            of_mode, why = _of_mode(config, probe)
            found += of_mode
            if why and not of_mode:
                refused[config.mode] = why
    return ranked(found), refused


def _of_mode(config: Config, probe: Probe) -> tuple[list[TuningCandidate], str]:
    """Return the settings of one mode, and the last reason why a setting was refused."""
    found = list[TuningCandidate]()
    refused = ""
    for setting in _settings(config, probe):
        try:
            prediction = probe.predict(probe.arrange(setting))
        except FreewheelError as error:
            refused = str(error).splitlines()[0]
            continue
        if prediction.plan is not None and prediction.forecast is not None:  # otherwise there is no prediction
            found.append(TuningCandidate(prediction.plan, prediction.forecast, prediction.memory))
    return found, refused


def ranked(found: Iterable[TuningCandidate]) -> list[TuningCandidate]:
    """Sort settings. Those with about the best rate come first, ordered by cost. The others follow
    by their rates."""
    left = sorted(found, key=lambda one: -one.forecast.rate)
    order = list[TuningCandidate]()
    while left:
        good = [one for one in left if one.forecast.rate >= AS_GOOD * left[0].forecast.rate]
        order += sorted(good, key=lambda one: one.cost)
        left = [one for one in left if one.forecast.rate < AS_GOOD * left[0].forecast.rate]
    return order


def best_two(order: Sequence[TuningCandidate]) -> list[TuningCandidate]:
    """Return the best setting and the best one of another mode. If there is no other mode, the
    second has other workers or envs."""
    if len(order) < 2:
        return list(order)
    first = order[0]
    others = [one for one in order if one.mode != first.mode]
    size = first.plan.workers, first.plan.spec.lanes
    same = [one for one in order[1:] if (one.plan.workers, one.plan.spec.lanes) != size]
    return [first, *(others or same or order[1:])[:1]]


def _settings(config: Config, probe: Probe) -> Iterator[Config]:
    """Yield the run in its mode with every sensible number. Options that the user has set do not
    change."""
    fixed = fixed_options(config)
    collector = config.collector
    free = [name for name in SEARCHED if name not in fixed and hasattr(collector, name)]
    found: Iterator[dict[str, Any]] = iter([{}])
    if isinstance(collector, SerialConfig):
        found = _serial(free, config, probe)
    elif isinstance(collector, WorkersConfig) and probe.cost.portable:
        found = _workers(free, config, probe)
    options: Any = collector
    yield from (replace(config, collector=replace(options, **one)) for one in found)


def _most_lanes(config: Config, probe: Probe) -> int:
    """Return how many lanes leave each one enough steps in an update, if the number of lanes
    decides its steps."""
    if not config.learner.on_policy or config.run.num_steps_per_env != "auto":
        return MOST_TOGETHER
    return max(1, config.learner.rows_per_update(probe.cost.spec) // SHORTEST)


def _serial(free: Sequence[str], config: Config, probe: Probe) -> Iterator[dict[str, Any]]:
    room = min(_most_lanes(config, probe), memory_room(probe.cost), MOST_TOGETHER)
    cores = usable_cores()
    lanes = _doubling(1, room) if "num_envs" in free else [None]
    placements: Sequence[str | None] = [None]
    if "placement" in free:
        placements = ["inline", "processes"] if probe.cost.portable and not config.env.batched else ["inline"]
    for count in lanes:
        for placement in placements:
            many = placement == "processes" and probe.cost.computes and (count or 0) > cores
            if many or (placement == "processes" and count == 1):
                continue
            given = {"num_envs": count, "placement": placement}
            yield {name: value for name, value in given.items() if value is not None}


def _workers(free: Sequence[str], config: Config, probe: Probe) -> Iterator[dict[str, Any]]:
    """Yield numbers whose product is what the user has fixed. An env that computes gets no more
    workers than there are cores."""
    most = min(_most_lanes(config, probe), memory_room(probe.cost))
    cores = usable_cores()
    collector: Any = config.collector
    total = None if "num_envs" in free else int(collector.num_envs)
    limit = min(cores if probe.cost.computes else MOST_WORKERS, most)
    counts: Sequence[int] = (
        _doubling(1, limit, cores, max(1, cores - 1)) if "workers" in free else [int(collector.workers)]
    )
    alone = config.collector.whole_episodes and not config.env.batched  # a worker plays one episode at a time
    for workers in counts:
        each: Sequence[int] = _doubling(1, 1 if alone else max(1, min(most // workers, MOST_TOGETHER)))
        if "envs_per_worker" not in free:
            each = [int(collector.envs_per_worker)]
        elif total is not None:
            each = [total // workers] if total % workers == 0 else []
        for together in each:
            if total is not None and workers * together != total:
                continue
            sizes = {"workers": workers, "envs_per_worker": together, "num_envs": "auto"}
            for fragment in _fragments(free, config):
                yield sizes | ({} if fragment is None else {"collection_batch_size": fragment})


def _fragments(free: Sequence[str], config: Config) -> Sequence[int | None]:
    """Return the lengths of fragments to try. Only workers that run freely have a choice, because
    whole batches are handed over at once."""
    mode = MODES[config.mode]
    if "collection_batch_size" not in free or not mode.free_running or config.collector.whole_episodes:
        return [None]
    return [None, *FRAGMENTS]


def _doubling(least: int, most: int, *others: int) -> list[int]:
    """Return 1, 2, 4, ... and the other numbers, up to a limit."""
    powers = [1 << power for power in range(most.bit_length()) if least <= 1 << power <= most]
    return sorted({*powers, *(one for one in others if least <= one <= most)})
