"""The search: every mode with the numbers of workers, envs and steps that make sense here, each with what the model predicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

from freewheel.collect.mode import ENVS, MODES, WorkersConfig, memory_room
from freewheel.collect.serial import SerialConfig
from freewheel.config.resolve import Config
from freewheel.errors import FreewheelError
from freewheel.rollout.probe import usable_cores
from freewheel.run.advice.prospects import by_lag
from freewheel.run.advice.throughput import Forecast
from freewheel.run.plan import Plan
from freewheel.run.process import learner_threads
from freewheel_lab.tune.probe import Probe

#: Of the best predicted rate: of those that reach it, the one with the least lag and the fewest processes.
AS_GOOD = 0.97
SHORTEST = 16  # steps of each env in an update: shorter ones teach less about what follows an action
MOST_WORKERS = 256
MOST_TOGETHER = 256  # envs in one process
FRAGMENTS = (8, 32, 128)
SEARCHED = ("workers", "envs_per_worker", "num_envs", "collection_batch_size", "placement")
CHOSEN = ("flag", "argument", "file", "preset")  # how the sources of options begin that a person has decided


@dataclass(frozen=True)
class TuningCandidate:
    """A setting, and what it would make."""

    plan: Plan
    forecast: Forecast
    memory: int  # bytes of environments and workers

    @property
    def mode(self) -> str:
        return self.plan.config.mode

    @property
    def options(self) -> dict[str, Any]:
        """The options that make this setting, by name; what is so by default is left out."""
        config = self.plan.config.collector
        if isinstance(config, WorkersConfig):
            chosen: dict[str, Any] = {"workers": config.workers, "envs_per_worker": config.envs_per_worker}
            usual = replace(config, collection_batch_size=type(config)().collection_batch_size)  # type: ignore[call-arg, attr-defined]
            if config.fragment_steps(self.plan.batch) != usual.fragment_steps(self.plan.batch):
                chosen["collection_batch_size"] = config.fragment_steps(self.plan.batch)
            return {"mode": self.mode, **chosen}
        placed = {"placement": placement} if (placement := getattr(config, "placement", None)) else {}
        return {"mode": self.mode, "num_envs": config.lanes, **placed}

    @property
    def fragment(self) -> int | None:
        """Steps of each env that a worker hands over at once."""
        config = self.plan.worker_config
        return None if config is None else config.fragment_steps(self.plan.batch)

    @property
    def cost(self) -> tuple[float, ...]:
        """What to have little of, where the rates are as good: lag, fragments of unusual length, processes, and numbers of envs
        far from the usual ones, because what is learned depends on them."""
        processes = self.plan.workers if self.plan.worker_config is not None else 0
        if getattr(self.plan.config.collector, "placement", "") == "processes":
            processes = self.plan.spec.lanes
        odd = "collection_batch_size" in self.options
        lanes = abs(log2(self.plan.spec.lanes / ENVS))
        return (by_lag(self.mode), odd, round(self.forecast.lag, 1), processes, lanes)


def fixed_options(config: Config) -> frozenset[str]:
    """The names of options that a person has decided."""
    return frozenset(name for name, source in config.sources.items() if source.partition(" ")[0] in CHOSEN)


def search(probe: Probe) -> tuple[list[TuningCandidate], dict[str, str]]:
    """Every setting that can be had, the best first; and why modes are left out."""
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
    """The settings of one mode; and why it does not take one of them, if so."""
    found, refused = list[TuningCandidate](), ""
    for setting in _settings(config, probe):
        try:
            prospect = probe.predict(probe.arrange(setting))
        except FreewheelError as error:
            refused = str(error).splitlines()[0]
            continue
        if prospect.plan is not None and prospect.forecast is not None:  # else nothing can be predicted
            found.append(TuningCandidate(prospect.plan, prospect.forecast, prospect.memory))
    return found, refused


def ranked(found: Iterable[TuningCandidate]) -> list[TuningCandidate]:
    """The best first: of those whose rates are as good, the one that costs least; then the others by their rates."""
    left, order = sorted(found, key=lambda one: -one.forecast.rate), list[TuningCandidate]()
    while left:
        good = [one for one in left if one.forecast.rate >= AS_GOOD * left[0].forecast.rate]
        order += sorted(good, key=lambda one: one.cost)
        left = [one for one in left if one.forecast.rate < AS_GOOD * left[0].forecast.rate]
    return order


def best_two(order: Sequence[TuningCandidate]) -> list[TuningCandidate]:
    """The best, and the best of another mode; where there is none, the next with other workers or envs."""
    if len(order) < 2:
        return list(order)
    first = order[0]
    others = [one for one in order if one.mode != first.mode]
    size = first.plan.workers, first.plan.spec.lanes
    same = [one for one in order[1:] if (one.plan.workers, one.plan.spec.lanes) != size]
    return [first, *(others or same or order[1:])[:1]]


def _settings(config: Config, probe: Probe) -> Iterator[Config]:
    """The run in its mode, with every number that makes sense; what a person has decided stays."""
    fixed, collector = fixed_options(config), config.collector
    free = [name for name in SEARCHED if name not in fixed and hasattr(collector, name)]
    found: Iterator[dict[str, Any]] = iter([{}])
    if isinstance(collector, SerialConfig):
        found = _serial(free, config, probe)
    elif isinstance(collector, WorkersConfig) and probe.cost.portable:
        found = _workers(free, config, probe)
    options: Any = collector
    yield from (replace(config, collector=replace(options, **one)) for one in found)


def _most_lanes(config: Config, probe: Probe) -> int:
    """Lanes that leave each enough steps in an update, where their number follows from its rows."""
    if not config.learner.on_policy or config.run.num_steps_per_env != "auto":
        return MOST_TOGETHER
    return max(1, config.learner.rows_per_update(probe.cost.spec) // SHORTEST)


def _serial(free: Sequence[str], config: Config, probe: Probe) -> Iterator[dict[str, Any]]:
    room, cores = min(_most_lanes(config, probe), memory_room(probe.cost), MOST_TOGETHER), usable_cores()
    lanes = _doubling(1, room) if "num_envs" in free else [None]
    places: Sequence[str | None] = [None]
    if "placement" in free:
        places = ["inline", "processes"] if probe.cost.portable and not config.env.batched else ["inline"]
    for count in lanes:
        for place in places:
            many = place == "processes" and probe.cost.computes and (count or 0) > cores
            if many or (place == "processes" and count == 1):
                continue
            given = {"num_envs": count, "placement": place}
            yield {name: value for name, value in given.items() if value is not None}


def _workers(free: Sequence[str], config: Config, probe: Probe) -> Iterator[dict[str, Any]]:
    """Numbers that multiply to what is fixed; an env that computes gets no more workers than there are cores."""
    most, cores = min(_most_lanes(config, probe), memory_room(probe.cost)), usable_cores()
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
    """Whole batches are handed over whole: only where workers run free does the length matter."""
    mode = MODES[config.mode]
    if "collection_batch_size" not in free or not mode.free_running or config.collector.whole_episodes:
        return [None]
    return [None, *FRAGMENTS]


def _doubling(least: int, most: int, *others: int) -> list[int]:
    """1, 2, 4, ... and others, up to a limit."""
    powers = [1 << power for power in range(most.bit_length()) if least <= 1 << power <= most]
    return sorted({*powers, *(one for one in others if least <= one <= most)})
