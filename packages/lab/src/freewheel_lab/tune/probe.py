"""The probe: what an environment, its policy, its learner and the wire cost on this machine, within a budget of seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

from freewheel.collect.mode import count, memory_room
from freewheel.config.resolve import Config
from freewheel.errors import FreewheelError, UsageError
from freewheel.learn.spec import Services
from freewheel.rollout.probe import EnvCost, usable_cores
from freewheel.run.advice.policy_times import PolicyClock
from freewheel.run.advice.prospects import Prospect, in_mode, predicted, step_times
from freewheel.run.advice.throughput import NO_WIRE, PolicyTimes, StepTimes, WireTimes, along
from freewheel.run.learners.devices import placed
from freewheel.run.naming import RunName
from freewheel.run.plan import Plan, arrange, survey_env
from freewheel.run.process import learner_threads
from freewheel.transport.executors import SerialExecutor
from freewheel_lab.tune.worker_benchmark import WorkerBenchmark, benchmark_workers

SURVEY, LEARNER = 0.25, 0.1  # of the budget, at most
SURVEY_S = 2.5  # seconds of steps, at most
LONGEST, STARTING = 3.0, 0.7  # seconds of a rehearsal, and of its start
FEWEST_ROWS = 40  # of a rehearsal, or it is not worth its time
SHORT_ROWS = 500  # of one with short fragments: what they cost is the difference of two small times
MOST_S = 60.0  # seconds of the rehearsals, however slowly workers start
LANES, BATCHED_LANES = (1, 4, 16), (1, 8, 64)  # of a worker, where many lanes cost little more than one
LONG, USUAL, SHORT = 32, 16, 4  # steps of a fragment
LEARNING = "the learner"
SLEEPERS = 16  # workers, where the env waits: they do not feel each other, and uneven steps need many of them

Report = Callable[[str, float], None]  # what is done next, and about how many seconds it takes


@dataclass(frozen=True)
class Probe:
    """Everything that was measured."""

    config: Config
    cost: EnvCost
    name: RunName
    device: str
    env: StepTimes
    wire: WireTimes = NO_WIRE
    #: (lanes of a worker, seconds of one step of all of them beside the env), rising; empty: what the policy alone takes
    acting: tuple[tuple[int, float], ...] = ()
    benchmarks: tuple[WorkerBenchmark, ...] = ()
    clock: PolicyClock = field(default_factory=PolicyClock, compare=False)

    def arrange(self, config: Config) -> Plan:
        """The plan of a setting; FreewheelError if this environment or machine does not take it."""
        return arrange(replace(config, env=self.config.env), self.cost, self.name, self.device)

    def predict(self, planned: Plan) -> Prospect:
        """What a plan would make; the learner is measured where it is not known yet."""
        return predicted(planned, self.env, self.policy, self.wire)

    def policy(self, planned: Plan) -> PolicyTimes | None:
        """What acting and learning take in a plan."""
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
    """What a probe does, and about how many seconds each part takes; known before anything is measured."""
    shapes = _shapes(config)
    each = _benchmark_s(budget, len(shapes))
    parts = [(f"steps and resets of {config.env.label}", min(SURVEY_S, SURVEY * budget) + 1.0)]
    parts += [(str(one), each + STARTING) for one in shapes]
    return [*parts, (LEARNING, LEARNER * budget)]


class _BenchmarkShape(NamedTuple):
    """Of a rehearsal."""

    lanes: int  # of a worker
    fragment: int
    workers: int = 1

    def __str__(self) -> str:
        who = "a worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{who} with {count(self.lanes, 'env')}, {self.fragment} steps at once"


def _shapes(config: Config, cost: EnvCost | None = None) -> list[_BenchmarkShape]:
    """Rehearsal by rehearsal; before the cost is known, as for an env that computes."""
    if cost is not None and not cost.computes and not config.env.batched:
        workers = min(SLEEPERS, memory_room(cost))
        return [_BenchmarkShape(1, USUAL, workers), _BenchmarkShape(1, SHORT, workers)]
    lanes = BATCHED_LANES if config.env.batched else LANES
    return [*(_BenchmarkShape(one, LONG) for one in lanes), _BenchmarkShape(1, SHORT)]


def _benchmark_s(budget: float, shapes: int) -> float:
    left = budget * (1 - SURVEY - LEARNER) - shapes * STARTING
    return max(0.2, min(LONGEST, left / shapes))


def probe(config: Config, name: RunName, budget: float, report: Report) -> Probe:
    """Measure; an environment that hangs, dies or raises is named by the error."""
    if config.env.on_device:
        what = f"{config.env.label} steps all its lanes at once on a device, so workers and envs per worker mean nothing there"
        remedy = "try --num-envs and --collection-batch-size with freewheel train, or freewheel compare"
        raise UsageError(f"{what}: {remedy}")
    if config.learner.executor != "serial":
        what = f"{config.algo} fits a model beside its learner, which the probe does not measure"
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
        found.predict(found.arrange(config))  # measures the learner
    return found


def _with_benchmarks(found: Probe, budget: float, report: Report) -> Probe:
    """The same with what workers showed, where their steps are short enough."""
    made, began = list[WorkerBenchmark](), perf_counter()
    shapes = _shapes(found.config, found.cost)
    seconds = _benchmark_s(budget, len(shapes))
    base = worker_config(found.config)
    if base is None:
        return found
    with learner_threads(found.config.run.machine.threads):
        snapshot = _snapshot(found.arrange(base))
        for one in shapes:
            at_once = one.workers * (one.lanes if found.config.env.batched else 1)  # rows of one step's time
            few = SHORT_ROWS if one.fragment == SHORT else FEWEST_ROWS
            left = MOST_S - (perf_counter() - began) - SURVEY_S
            if found.cost.own * few > seconds * at_once or left < seconds:
                continue
            report(str(one), seconds + STARTING)
            showed = benchmark_workers(found.arrange(_with(base, one)), snapshot, seconds, left)
            made += [] if showed is None else [showed]
    return _derived(found, made)


def worker_config(config: Config) -> Config | None:
    """The run in mode continuous, with its default options; None if it has other options than that mode takes."""
    own = next((one for one in (*config.among, config) if one.mode == "continuous"), None)
    if own is not None:
        return own
    try:
        return in_mode(config, "continuous")
    except FreewheelError:
        return None


def _with(base: Config, shape: _BenchmarkShape) -> Config:
    """So many workers and envs; updates large enough for such fragments."""
    collector: Any = base.collector
    sizes = {"workers": shape.workers, "envs_per_worker": shape.lanes, "num_envs": "auto"}
    collector = replace(collector, **sizes, collection_batch_size=shape.fragment)
    run = replace(base.run, num_steps_per_env="auto", limits=replace(base.run.limits, steps=None, minutes=1.0))
    return replace(base, collector=collector, run=run)


def _snapshot(planned: Plan) -> Any:
    services = Services(executors=SerialExecutor)
    return planned.config.learner.build(replace(planned.learner_spec, services=services)).snapshot()


def _derived(found: Probe, made: Sequence[WorkerBenchmark]) -> Probe:
    """The times of the model from those of the rehearsals."""
    longs = [one for one in made if one.fragment > SHORT]
    short = next((one for one in made if one.fragment == SHORT), None)
    alone = next((one for one in longs if one.lanes == 1), None)
    if alone is None:
        return replace(found, benchmarks=tuple(made))
    wire = WireTimes(taken_row=alone.taken) if short is None else _wire(alone, short, longs)
    acting = tuple((one.lanes, one.lanes * _without_env(one, wire)) for one in longs)
    together = tuple((one.lanes, one.lanes * one.env / alone.env) for one in longs) if alone.env > 0 else ()
    env = found.env
    if env.row > 0 and alone.rows >= found.cost.steps:  # it has seen more
        env = env.scaled(alone.env / env.row)
    cpu = env.cpu if found.cost.children else min(env.row, max(0.0, alone.cpu - alone.act - alone.send))
    env = replace(env, cpu=cpu, together=together if len(together) > 1 else env.together)
    return replace(found, env=env, wire=wire, acting=acting, benchmarks=tuple(made))


def _without_env(one: WorkerBenchmark, wire: WireTimes) -> float:
    """Seconds of a row beside the env and the closing of fragments."""
    return max(0.0, one.act + one.send - wire.fragment / one.fragment_rows)


def _wire(long: WorkerBenchmark, short: WorkerBenchmark, others: Sequence[WorkerBenchmark]) -> WireTimes:
    """What a fragment costs, from fragments of two lengths: a row is the same in both. What taking a row costs shows where most
    were taken at once."""
    more = 1 / short.fragment_rows - 1 / long.fragment_rows
    sent, taken = max(0.0, short.send - long.send) / more, max(0.0, short.taken - long.taken) / more
    row = min(max(0.0, one.taken - taken / one.fragment_rows) for one in others)
    return WireTimes(fragment=sent, taken_fragment=taken, taken_row=row)


def described(found: Probe) -> Iterator[tuple[str, str]]:
    """What was measured, for people."""
    env, cost, wire = found.env, found.cost, found.wire
    busy = f"{1e3 * env.cpu:.3g} ms of processor time: the env {'computes' if cost.computes else 'waits'}"
    yield "step", f"{1e3 * env.row:.3g} ms with its part of a reset, {busy}"
    if cost.lengths:
        yield "episode", f"{sum(cost.lengths) / len(cost.lengths):.0f} steps, a reset {1e3 * cost.reset:.3g} ms"
    if env.together:
        most, times = env.together[-1]
        yield "together", f"{most} envs in one worker take {times:.3g} times as long as one"
    for lanes, seconds in (found.acting[0], found.acting[-1]) if found.acting else ():
        row = f"{1e6 * seconds / lanes:.3g} µs a row with {count(lanes, 'env')} at once"
        yield "acting", f"{row}, writing it included"
    if wire != NO_WIRE:
        sent = f"a fragment costs {1e6 * wire.fragment:.3g} µs to send"
        yield "wire", f"{sent} and {1e6 * wire.taken_fragment:.3g} µs to take"
