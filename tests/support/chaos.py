"""Training with faults: a loop in this process that checks every chunk, and helpers that kill, stop and observe workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest
from _pytest.mark import ParameterSet

from freewheel.config.resolve import Config, from_options
from freewheel.core import Chunk, EnvSpec, NDArray, Origin, RowCounts, Snapshot, Tick, Transitions
from freewheel.envs.gym import GymConfig
from freewheel.learn.ppo.learner import PPO
from freewheel.learn.ppo.rollout_buffer import RolloutBatch, RolloutBuffer
from freewheel.ledger import balance
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.run.naming import RunName
from freewheel.run.plan import Plan
from freewheel.seeding import tree
from freewheel.transport.pool import WorkerPool
from freewheel.transport.workers.heartbeats import WAIT
from freewheel.transport.workers.wire import SupervisedWire
from freewheel.transport.workers.worker_slots import GOOD_STEPS, WorkerSlot, WorkerSlots
from tests.support.costs import cost
from tests.support.faulty_worlds import HIGH, LENGTH, LOW
from tests.support.places import LONG
from tests.support.pools import wire_of
from tests.support.trainers import LIMIT, SEED, wait_until

MODES = ("batch", "continuous", "episodes")
SMALL = {"seed": SEED, "num_steps_per_env": 16, "evals": 0, "policy": {"hidden": [8]}, "ppo": {"epochs": 1}}


def world(name: str) -> str:
    return f"tests.support.faulty_worlds:{name}"


def every(*variants: tuple[Any, ...]) -> list[ParameterSet]:
    """(mode, *variant) for every mode and every variant at least once, or in the long form for all pairs of them. One test of
    each variant is in tier unit."""
    count = max(len(MODES), len(variants))
    pairs = [(MODES[number % len(MODES)], variants[number % len(variants)]) for number in range(count)]
    if LONG:
        pairs = [(mode, variant) for variant in variants for mode in MODES]
    return [
        pytest.param(mode, *variant, marks=[pytest.mark.system] * (number >= len(variants)))
        for number, (mode, variant) in enumerate(pairs)
    ]


def modes(first: str) -> list[ParameterSet]:
    """All of them; only the first is in tier unit."""
    return [pytest.param(mode, marks=[pytest.mark.system] * (mode != first)) for mode in MODES]


def certified(data: Transitions) -> NDArray:
    """[N] a number for every valid row, from its seed and step; fails if a row is not one of a Certified env."""
    valid = data.valid
    obs, after, action, reward = (part[valid] for part in (data.obs, data.next_obs, data.action, data.reward))
    assert np.isfinite(data.obs).all()
    assert np.isfinite(data.next_obs).all()
    assert np.isfinite(data.reward).all()
    assert np.isfinite(data.log_prob[valid]).all()
    seed = (obs[:, 0] * LOW).astype(np.int64) + (obs[:, 1] * HIGH).astype(np.int64) * LOW
    step = (obs[:, 2] * LENGTH).astype(np.int64)
    np.testing.assert_array_equal(after[:, :2], obs[:, :2])
    np.testing.assert_array_equal(after[:, 2] * LENGTH, step + 1)
    np.testing.assert_array_equal(reward, (seed + step) % 5 + action)
    np.testing.assert_array_equal(data.truncated[valid], step + 1 == 6 + seed % 20)
    assert not data.terminated[valid].any()
    return np.asarray(seed * LENGTH + step)


class RecordingBuffer(RolloutBuffer):
    """Records every row that is trained on, and its lag."""

    def __init__(self, learner: PPO) -> None:
        super().__init__()
        self._learner = learner
        self.lags: Counter[int] = Counter()
        self.trained: list[NDArray] = []

    def take(self, rows: int) -> RolloutBatch:
        batch = super().take(rows)
        self.trained.append(certified(batch.data))
        assert len(self.trained[-1]) == rows
        self.lags.update((self._learner.version - batch.version[batch.data.valid]).tolist())
        return batch


@dataclass(frozen=True)
class Delivery:
    at: float  # time.monotonic()
    origin: Origin
    version: int
    rows: int


@dataclass
class Audit:
    """Checks that chunks are delivered in order, complete and once."""

    deliveries: list[Delivery] = field(default_factory=list)
    gaps: int = 0  # in the sequence of an incarnation
    _last: dict[int, Origin] = field(default_factory=dict)
    _rows: list[tuple[NDArray, NDArray]] = field(default_factory=list)  # (lane, certificate)

    def take(self, chunk: Chunk) -> None:
        origin, before = chunk.origin, self._last.get(chunk.origin.worker)
        same = before is not None and before.incarnation == origin.incarnation
        if before is not None:
            assert origin.incarnation >= before.incarnation, f"{origin} came after {before}"
        expected = before.sequence + 1 if same and before is not None else 0
        assert origin.sequence >= expected, f"{origin} came after {before}"
        self.gaps += origin.sequence - expected
        self._last[origin.worker] = origin
        self.deliveries.append(Delivery(time.monotonic(), origin, chunk.version, chunk.rows))
        assert chunk.rows == np.count_nonzero(chunk.data.valid)
        check_continuity(chunk)
        lanes = np.arange(chunk.data.valid.shape[1]) + origin.lane0
        if chunk.episodes and len(chunk.episodes) == 1 and len(lanes) == 1:
            lanes = np.array([chunk.episodes[0].lane])
        self._rows.append((np.broadcast_to(lanes, chunk.data.valid.shape)[chunk.data.valid], certified(chunk.data)))

    def finish(self, witness: RecordingBuffer) -> None:
        """No row was delivered twice, and none was trained on more often than it was delivered."""
        lanes, rows = (np.concatenate([part[i] for part in self._rows]) for i in range(2))
        for (lane, row), count in Counter(zip(lanes.tolist(), rows.tolist(), strict=True)).items():
            if count > 1:  # unless two episodes of a lane happen to have the same seed
                seed = row // LENGTH
                assert count <= sum(tree(SEED, "env", lane, k) == seed for k in range(100_000)), f"lane {lane}, {seed}"
        delivered = Counter(rows.tolist())
        assert Counter(row for part in witness.trained for row in part.tolist()) <= delivered

    def incarnations(self, since: float = 0.0) -> dict[int, int]:
        """The newest incarnation of each worker that has delivered since then."""
        return {one.origin.worker: one.origin.incarnation for one in self.deliveries if one.at >= since and one.rows}


def check_continuity(chunk: Chunk) -> None:
    """Within a chunk, a row begins where the previous one ended, or with an episode."""
    data = chunk.data
    ended = data.terminated | data.truncated
    for t, following in pairwise(range(len(data.valid))):
        both = data.valid[t] & data.valid[following]
        goes_on = both & ~ended[t]
        np.testing.assert_array_equal(data.obs[following][goes_on], data.next_obs[t][goes_on])
        assert (data.obs[following][both & ended[t], 2] == 0).all()


@dataclass
class Limit:
    at: float = float("inf")  # time.monotonic()

    def set(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def check(self) -> None:
        assert time.monotonic() < self.at, "the time limit is over"


class Trial:
    """A training whose row counts are balanced at every tick and whose rows are checked."""

    def __init__(self, collector: WorkerPool, learner: PPO, max_lag: int | None, limit: Limit) -> None:
        self.collector, self.learner, self.max_lag = collector, learner, max_lag
        self._limit = limit
        self.witness = learner._buffer = RecordingBuffer(learner)
        self.audit, self.meter = Audit(), Meter(workers=collector.wire.authors)
        self.messages: list[str] = []
        self.longest_wait = 0.0
        self._ticks: Iterator[Tick] | None = None
        self._next_messages = 0.0

    def publish(self) -> None:
        self.collector.publish(self.learner.snapshot(), self.learner.rows().done)

    def tick(self) -> Tick:
        self._ticks = self._ticks or loop(self.collector, self.learner, self.meter, max_lag=self.max_lag)
        began = time.monotonic()
        tick = next(self._ticks)
        self.longest_wait = max(self.longest_wait, time.monotonic() - began)
        self.meter.take(tick)
        for chunk in tick.chunks:
            self.audit.take(chunk)
        self.balance()
        if began >= self._next_messages:
            self.messages += self.collector.messages()
            self._next_messages = began + 0.1
        return tick

    def run(self, until: Callable[[], bool], limit: float = LIMIT) -> None:
        self._limit.set(limit)
        while not until():
            self._limit.check()
            self.tick()

    def run_for(self, seconds: float) -> int:
        """Train for this many seconds; returns the number of delivered rows."""
        end, before = time.monotonic() + seconds, self.delivered
        self.run(lambda: time.monotonic() >= end, limit=seconds + LIMIT)
        return self.delivered - before

    def learn(self, updates: int, limit: float = LIMIT) -> None:
        target = self.learner.version + updates
        self.run(lambda: self.learner.version >= target, limit)

    def balance(self) -> RowCounts:
        return balance(self.collector.rows(), self.learner.rows())

    @property
    def dropped(self) -> dict[str, int]:
        return dict(self.balance().dropped)

    @property
    def delivered(self) -> int:
        return sum(one.rows for one in self.audit.deliveries)

    @property
    def supervisor(self) -> WorkerSlots[Any]:
        assert isinstance(self.collector.wire, SupervisedWire)
        return self.collector.wire.worker_slots

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(slot.process.pid) for slot in self.supervisor.slots if slot.process is not None]

    @property
    def shown(self) -> str:
        return "\n".join(self.messages)

    def wait_for_workers(self) -> None:
        """Train until all workers have taken enough good steps that one more failure is not their last."""
        self.run(lambda: all(good_steps(self.supervisor, slot) >= GOOD_STEPS for slot in self.supervisor.slots))


def good_steps(supervisor: WorkerSlots[Any], slot: WorkerSlot[Any]) -> int:
    return int(supervisor.heartbeats.memory["steps"][slot.worker]) - slot.steps


@contextmanager
def trial(env: str, mode: str, **options: Any) -> Iterator[Trial]:
    """A Trial on this environment; checks all counts and rows at the end."""
    planned = _planned(from_options(env, {**SMALL, "mode": mode, **options}))
    learner = planned.config.learner.build(planned.learner_spec)
    assert isinstance(learner, PPO)
    limit = Limit()
    spec = planned.collect_spec(learner.snapshot(), limit.check)
    with planned.config.collector.build(planned.runner_factory, spec) as collector:
        assert isinstance(collector, WorkerPool)
        on = Trial(collector, learner, planned.max_lag, limit)
        yield on
    on.messages += collector.messages()
    rows = on.balance()
    assert rows.produced == rows.trained + rows.queued + rows.open + sum(rows.dropped.values())
    if on.audit.deliveries:
        on.audit.finish(on.witness)


def _planned(config: Config) -> Plan:
    """The result of plan() without a survey: all environments of faulty_worlds have the same spec."""
    collector = config.collector.planned(cost())
    spec = replace(_env_spec(), name=config.env.id, lanes=collector.lanes)
    return Plan(
        replace(config, collector=collector), spec, config.policy.resolve(spec), RunName(Path("never"), "made"), "cpu"
    )


@cache
def _env_spec() -> EnvSpec:
    with closing(GymConfig(world("Certified")).make(range(1))) as env:
        return env.spec


def idle(on: Trial) -> bool:
    """Whether all workers wait for the learner."""
    heartbeats = wire_of(on.collector).heartbeats
    before = heartbeats.memory["steps"].copy()
    time.sleep(0.05)
    return bool((heartbeats.memory["steps"] == before).all() and (heartbeats.memory["phase"] == WAIT).all())


def finite(snapshot: Snapshot) -> bool:
    return all(bool(np.isfinite(np.asarray(value)).all()) for value in snapshot.params.values())


@dataclass(frozen=True)
class Kill:
    worker: int
    incarnation: int
    at: float  # time.monotonic()


class Killer:
    """Kills workers, on average `rate` per second, at times and in an order given by the seed."""

    def __init__(self, supervisor: WorkerSlots[Any], rate: float, seed: int = SEED) -> None:
        self._supervisor, self._rate = supervisor, rate
        self._rng = np.random.default_rng(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer")
        self.kills: list[Kill] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._rng.exponential(1 / self._rate)):
            slot = self._supervisor.slots[self._rng.integers(len(self._supervisor.slots))]
            if not self._is_last_chance(slot):
                kill(slot, self.kills)

    def _is_last_chance(self, slot: WorkerSlot[Any]) -> bool:
        """Whether one more failure would give the worker up."""
        return slot.failures >= 2 and good_steps(self._supervisor, slot) < GOOD_STEPS


def kill(slot: WorkerSlot[Any], kills: list[Kill]) -> bool:
    """Kill the current incarnation, unless it was killed already."""
    process, incarnation = slot.process, slot.incarnation
    if (
        process is None
        or slot.pending
        or any((slot.worker, incarnation) == (one.worker, one.incarnation) for one in kills)
    ):
        return False
    with suppress(ValueError, ProcessLookupError):  # it has just ended
        assert process.pid is not None, "a worker that was never started"
        at = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        kills.append(Kill(slot.worker, incarnation, at))
        return True
    return False


def tokens(folder: Path, count: int) -> str:
    """Permission for a number of faults, for Faulty(folder=...)."""
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"token-{number}").touch()
    return str(folder)


@dataclass(frozen=True)
class UsedToken:
    """Where and when a Faulty env failed."""

    worker: int
    at: float
    pid: int


def used_tokens(folder: Path) -> list[UsedToken]:
    notes = (note.read_text().split() for note in sorted(folder.glob("used-*")))
    return [UsedToken(int(worker), float(at), int(pid)) for worker, at, pid in notes]


def hang_a_worker_of_each(faults: Path, count: int) -> None:
    tokens(faults, count)
    wait_until(lambda: len(used_tokens(faults)) == count)
