"""The probe measures the cost of an environment, its policy, its learner and the transport of rows
on this machine, within a budget of seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

from freewheel.collect.mode import count
from freewheel.collect.workers import memory_room
from freewheel.config.resolve import Config
from freewheel.errors import FreewheelError, UsageError
from freewheel.learn.spec import Services, make_learner
from freewheel.rollout.probe import EnvCost, usable_cores
from freewheel.run.advice.policy_times import PolicyClock
from freewheel.run.advice.predictions import ModeRate, in_mode, predict, step_times
from freewheel.run.advice.throughput import NO_WIRE, PolicyTimes, StepTimes, WireTimes, along
from freewheel.run.learners.devices import placed
from freewheel.run.naming import RunName
from freewheel.run.plan import Plan
from freewheel.run.planning import arrange, survey_env
from freewheel.run.process import learner_threads
from freewheel.transport.executors import SerialExecutor
from freewheel_lab.tune.worker_benchmark import WorkerBenchmark, benchmark_workers

SURVEY = 0.25  # maximum share of the budget for the environment
LEARNER = 0.1  # maximum share of the budget for the learner
SURVEY_S = 2.5  # maximum seconds of steps
LONGEST = 3.0  # maximum seconds of a benchmark
STARTING = 0.7  # seconds of its start
FEWEST_ROWS = 40  # minimum rows of a benchmark that is worth its time
SHORT_ROWS = 500  # minimum rows with short fragments, whose cost is the difference of two small times
MOST_S = 60.0  # maximum seconds of all benchmarks, even if workers start slowly
LANES = (1, 4, 16)  # lanes per worker
BATCHED_LANES = (1, 8, 64)  # the same if many lanes cost little more than one
LONG = 32  # steps of a fragment
USUAL = 16
SHORT = 4
LEARNING = "the learner"
SLEEPERS = 16  # workers, if the env waits: they do not slow each other down, and uneven steps need many samples

Report = Callable[[str, float], None]  # called with the next step and its approximate seconds


@dataclass(frozen=True)
class Probe:
    """Holds everything that was measured."""

    config: Config
    cost: EnvCost
    name: RunName
    device: str
    env: StepTimes
    wire: WireTimes = NO_WIRE
    #: (lanes of a worker, seconds of one step of all of them without the env), rising; empty: only the policy's time is known
    acting: tuple[tuple[int, float], ...] = ()
    benchmarks: tuple[WorkerBenchmark, ...] = ()
    clock: PolicyClock = field(default_factory=PolicyClock, compare=False)

    def arrange(self, config: Config) -> Plan:
        """Return the plan of a setting. Raise FreewheelError if this environment or machine does
        not accept it."""
        return arrange(replace(config, env=self.config.env), self.cost, self.name, self.device)

    def predict(self, planned: Plan) -> ModeRate:
        """Return the forecast of a plan. A learner that is not known yet is measured."""
        return predict(planned, self.env, self.policy, self.wire)

    def policy(self, planned: Plan) -> PolicyTimes | None:
        """Return the times of acting and learning in a plan."""
        found = self.clock(planned)
        if found is None or not self.acting:
            return found
        together = max(1, planned.spec.lanes // planned.workers)
        return replace(found, act=along(self.acting, together) / together)

    def to_json(self) -> dict[str, Any]:
        return {
            "step_s": self.env.row,
            "cpu_s": self.env.cpu,
            "reset_s": self.cost.reset,
            "episode_steps": sum(self.cost.lengths) / len(self.cost.lengths) if self.cost.lengths else None,
            "computes": self.cost.computes,
            "memory": self.cost.memory,
            "cores": usable_cores(),
            "together": self.env.together,
            "acting": self.acting,
            "wire": vars(self.wire),
            "rehearsals": [vars(one) for one in self.benchmarks],
        }


def stages(config: Config, budget: float) -> list[tuple[str, float]]:
    """Return the steps of a probe with their approximate seconds. They are known before anything is
    measured."""
    shapes = _shapes(config)
    each = _benchmark_s(budget, len(shapes))
    parts = [(f"steps and resets of {config.env.label}", min(SURVEY_S, SURVEY * budget) + 1.0)]
    parts += [(str(one), each + STARTING) for one in shapes]
    return [*parts, (LEARNING, LEARNER * budget)]


class _BenchmarkShape(NamedTuple):
    """Describes the size of a benchmark."""

    lanes: int  # lanes of each worker
    fragment: int
    workers: int = 1

    def __str__(self) -> str:
        who = "a worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{who} with {count(self.lanes, 'env')}, {self.fragment} steps at once"


def _shapes(config: Config, cost: EnvCost | None = None) -> list[_BenchmarkShape]:
    """Return the sizes of the benchmarks. Without the cost, the env is assumed to compute."""
    if cost is not None and not cost.computes and not config.env.batched:
        workers = min(SLEEPERS, memory_room(cost))
        return [_BenchmarkShape(1, USUAL, workers), _BenchmarkShape(1, SHORT, workers)]
    lanes = BATCHED_LANES if config.env.batched else LANES
    return [*(_BenchmarkShape(one, LONG) for one in lanes), _BenchmarkShape(1, SHORT)]


def _benchmark_s(budget: float, shapes: int) -> float:
    left = budget * (1 - SURVEY - LEARNER) - shapes * STARTING
    return max(0.2, min(LONGEST, left / shapes))


def probe(config: Config, name: RunName, budget: float, report: Report) -> Probe:
    """Measure the environment, its workers and its learner. Raise an error that names an
    environment that hangs, dies or raises."""
    if config.env.on_device:
        what = f"{config.env.label} steps all its lanes at once on a device, so there are no workers to search"
        remedy = "try --num-envs and --collection-batch-size with freewheel train, or freewheel compare"
        raise UsageError(f"{what}: {remedy}")
    if config.learner.executor != "serial":
        what = f"{config.algo} fits a model in parallel with its learner, which the probe does not measure"
        raise UsageError(f"{what}: use freewheel compare")
    config, device = placed(config)
    parts = stages(config, budget)
    report(*parts[0])
    cost = survey_env(config, budget=min(SURVEY_S, SURVEY * budget))
    cost = replace(cost, batched=config.env.batched)
    found = Probe(config, cost, name, device, step_times(config, cost))
    if cost.portable:
        found = _with_benchmarks(found, budget, report)
    report(*parts[-1])
    with learner_threads(config.run.machine.threads):
        found.predict(found.arrange(config))  # this measures the learner
    return found


def _with_benchmarks(found: Probe, budget: float, report: Report) -> Probe:
    """Return the probe with the results of worker benchmarks, for steps that are short enough."""
    made = list[WorkerBenchmark]()
    began = perf_counter()
    shapes = _shapes(found.config, found.cost)
    seconds = _benchmark_s(budget, len(shapes))
    base = worker_config(found.config)
    if base is None:
        return found
    with learner_threads(found.config.run.machine.threads):
        snapshot = _snapshot(found.arrange(base))
        for one in shapes:
            at_once = one.workers * (one.lanes if found.config.env.batched else 1)  # rows in the time of a step
            few = SHORT_ROWS if one.fragment == SHORT else FEWEST_ROWS
            left = MOST_S - (perf_counter() - began) - SURVEY_S
            if found.cost.own * few > seconds * at_once or left < seconds:
                continue
            report(str(one), seconds + STARTING)
            showed = benchmark_workers(found.arrange(_with(base, one)), snapshot, seconds, left)
            made += [] if showed is None else [showed]
    return _derived(found, made)


def worker_config(config: Config) -> Config | None:
    """Return the run in mode continuous with its default options, or None if that mode does not
    accept its options."""
    own = next((one for one in (*config.among, config) if one.mode == "continuous"), None)
    if own is not None:
        return own
    try:
        return in_mode(config, "continuous")
    except FreewheelError:
        return None


def _with(base: Config, shape: _BenchmarkShape) -> Config:
    """Return the config with this number of workers and envs. Its updates are large enough for such
    fragments."""
    collector: Any = base.collector
    sizes = {"workers": shape.workers, "envs_per_worker": shape.lanes, "num_envs": "auto"}
    collector = replace(collector, **sizes, collection_batch_size=shape.fragment)
    run = replace(base.run, num_steps_per_env="auto", limits=replace(base.run.limits, steps=None, minutes=1.0))
    return replace(base, collector=collector, run=run)


def _snapshot(planned: Plan) -> Any:
    services = Services(executors=SerialExecutor)
    return make_learner(planned.config.learner, replace(planned.learner_spec, services=services)).snapshot()


def _derived(found: Probe, made: Sequence[WorkerBenchmark]) -> Probe:
    """Derive the times of the model from the benchmarks."""
    longs = [one for one in made if one.fragment > SHORT]
    short = next((one for one in made if one.fragment == SHORT), None)
    alone = next((one for one in longs if one.lanes == 1), None)
    if alone is None:
        return replace(found, benchmarks=tuple(made))
    wire = WireTimes(taken_row=alone.taken) if short is None else _wire(alone, short, longs)
    acting = tuple((one.lanes, one.lanes * _without_env(one, wire)) for one in longs)
    together = tuple((one.lanes, one.lanes * one.env / alone.env) for one in longs) if alone.env > 0 else ()
    env = found.env
    if env.row > 0 and alone.rows >= found.cost.steps:  # the benchmark saw more steps than the survey
        env = env.scaled(alone.env / env.row)
    cpu = env.cpu if found.cost.children else min(env.row, max(0.0, alone.cpu - alone.act - alone.send))
    env = replace(env, cpu=cpu, together=together if len(together) > 1 else env.together)
    return replace(found, env=env, wire=wire, acting=acting, benchmarks=tuple(made))


def _without_env(one: WorkerBenchmark, wire: WireTimes) -> float:
    """Return the seconds per row without the env and without the closing of fragments."""
    return max(0.0, one.act + one.send - wire.fragment / one.fragment_rows)


def _wire(long: WorkerBenchmark, short: WorkerBenchmark, others: Sequence[WorkerBenchmark]) -> WireTimes:
    """Return the cost of a fragment from benchmarks with two lengths, in which a row costs the
    same. The cost of taking a row comes from the benchmark that takes most rows at once."""
    more = 1 / short.fragment_rows - 1 / long.fragment_rows
    sent = max(0.0, short.send - long.send) / more
    taken = max(0.0, short.taken - long.taken) / more
    row = min(max(0.0, one.taken - taken / one.fragment_rows) for one in others)
    return WireTimes(fragment=sent, taken_fragment=taken, taken_row=row)


def described(found: Probe) -> Iterator[tuple[str, str]]:
    """Yield the measurements as text."""
    env = found.env
    cost = found.cost
    wire = found.wire
    busy = f"{1e3 * env.cpu:.3g} ms of processor time: the env {'computes' if cost.computes else 'waits'}"
    yield "step", f"{1e3 * env.row:.3g} ms with its share of a reset, {busy}"
    if cost.lengths:
        yield "episode", f"{sum(cost.lengths) / len(cost.lengths):.0f} steps, a reset {1e3 * cost.reset:.3g} ms"
    if env.together:
        most, times = env.together[-1]
        yield "together", f"{most} envs in one worker take {times:.3g} times as long as one"
    for lanes, seconds in (found.acting[0], found.acting[-1]) if found.acting else ():
        row = f"{1e6 * seconds / lanes:.3g} µs per row with {count(lanes, 'env')} at once"
        yield "acting", f"{row}, including writing it"
    if wire != NO_WIRE:
        sent = f"a fragment costs {1e6 * wire.fragment:.3g} µs to send"
        yield "wire", f"{sent} and {1e6 * wire.taken_fragment:.3g} µs to take"
