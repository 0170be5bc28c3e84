"""A discrete-event simulation of --mode ray: a driver with its learner, a network, object stores, nodes and workers.

Time is simulated; the decisions are real: `freewheel.pacing` says who may act, on which version, and what waits for the learner.
What things cost comes from measurements (`Costs`). A fragment's walk, every stage a queue that others wait in too:

    worker steps > answer > driver's Ray threads > pump > (weights: driver's network, once a node and version > read) > worker
    rows: with the answer, or stored > node's network > driver's network > object store > driver's Ray threads > pump > learner

Rows that are stored travel while their worker steps on. An episode that ends is one more call, which begins the next. The pump
and the learner are threads of one Python process: what the pump does delays an update that is under way.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from freewheel.pacing.episode_queue import EpisodeOrder, EpisodeQueue
from freewheel.pacing.lag_bound import LagBound
from freewheel.pacing.pacing import NO_VERSION, Grant, Tally

Limit: TypeAlias = Literal[
    "environments", "processor", "driver", "learner", "object store", "network", "lag bound", "latency"
]
Unit: TypeAlias = Literal["fragments", "episodes"]
FULL = 0.85  # of the time: a stage that is busy so much is what the others wait for
IDEAL = 0.95  # of the ideal: nothing limits but the environments
WARM, WINDOW = 5, 8  # updates before the window, and in it
STAGGER = 1_000  # steps at most over which workers begin
LEAST_FRAGMENTS = 400  # of the window
MOST_FRAGMENTS = 60_000  # a simulation that has seen so many ends, whatever it has reached
ROUNDS, CLOSE = 6, 0.02  # runs until processor shares agree with each other


@dataclass(frozen=True)
class Curve:
    """A cost by size: straight lines through measured points, the last of which goes on."""

    points: tuple[tuple[float, float], ...]

    def __call__(self, size: float) -> float:
        xs, ys = zip(*self.points, strict=True)
        if size <= xs[-1] or len(xs) == 1:
            return float(np.interp(size, xs, ys))
        slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
        return float(ys[-1] + slope * (size - xs[-1]))

    def plus(self, seconds: float) -> Curve:
        """So much more, or less, at every size."""
        return Curve(tuple((size, max(0.0, cost + seconds)) for size, cost in self.points))


@dataclass(frozen=True, kw_only=True)
class CallCosts:
    """Of a call whose result has so many bytes, in seconds."""

    idle: Curve  # that an actor stands still between two calls where nobody else is served
    pump: Curve  # of the driver's pump
    threads: Curve  # processor of the driver's other threads
    raylets: Curve  # processor of Ray's daemons
    actor: Curve  # processor of the actor


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured; in seconds, and bytes."""

    near: CallCosts  # on the driver's machine
    far: CallCosts  # on another
    pending: float = 0.0  # of the pump, for each call that is open, whenever it has taken what was there
    learning: float = 0.0  # longer idle while the learner trains
    standing: float = 0.0  # processor seconds a second of an actor, whatever it does
    submit: float = 0.0  # of the pump, for a call to a worker that had to wait
    put: Curve = Curve(((0.0, 0.0),))  # weights by the driver
    fetch: Curve = Curve(((0.0, 0.0),))  # of a node's first read, beyond what a further one takes
    read: Curve = Curve(((0.0, 0.0),))  # of every read
    inline: int = 64 * 2**10  # so many bytes come with the answer and pass no object store


FREE = CallCosts(**dict.fromkeys(("idle", "pump", "threads", "raylets", "actor"), Curve(((0.0, 0.0),))))


@dataclass(frozen=True, kw_only=True)
class World:
    """An environment with its policy and learner."""

    name: str
    step: float  # seconds
    spread: float  # deviation of a step
    computes: float  # processor seconds of a step, inference included
    row_bytes: float
    weights_bytes: float
    learn: Curve  # learner's seconds of a row, by the rows of an update
    episode: int = 100  # steps


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How it is run."""

    workers: int
    nodes: int = 1  # with workers
    apart: bool | None = None  # whether drivers have machines of their own; None: where there are several nodes
    cores: int = 16  # of a node
    bandwidth: float = 10e9 / 8  # bytes/s of a node's network, each way
    trip: float = 100e-6  # seconds on the network, each way
    unit: Unit = "fragments"
    steps: int = 64  # of each env in an update
    fragment: int = 32  # steps
    lanes: int = 1  # envs of a worker, which it steps in turn
    max_lag: int = 2
    learners: int = 1  # each with a driver and its share of the workers
    gradient_steps: int = (
        320  # of an update: epochs × minibatches, after each of which several learners add up gradients
    )

    @property
    def rows(self) -> int:
        return self.steps * self.workers * self.lanes


@dataclass(frozen=True)
class Outcome:
    """What was reached."""

    rate: float  # env steps/s
    share: float  # of the ideal: every environment steps all the time
    limit: Limit
    busy: dict[str, float] = field(
        default_factory=dict
    )  # share of the time of each stage; 'lag bound', 'latency': of workers'
    bytes_in: float = 0.0  # bytes/s into the driver's machine
    bytes_out: float = 0.0  # of weights out of it


class Queue:
    """Serves one after the other, in the order in which they come. look: seconds of a look at what has come, which finds all that
    came during the last round."""

    def __init__(self, look: float = 0.0) -> None:
        self.free_at = self.busy = 0.0
        self._look, self._round = look, -1.0  # when the newest round begins

    def serve(self, now: float, seconds: float) -> float:
        if now > self._round:
            self._round = max(now, self.free_at)
            seconds += self._look
        self.free_at = max(now, self.free_at) + seconds
        self.busy += seconds
        return self.free_at


@dataclass
class Worker:
    """What the simulation knows of one."""

    node: int
    produced: int = 0
    version: int = NO_VERSION  # of its weights
    ended: bool = True
    asked: float = 0.0  # since when it waits for credit
    acting: int = NO_VERSION
    episodes: int = 0  # that have ended


class Simulation:
    """One driver and its workers. `slower`: how many times as long everything that computes takes on the driver's machine."""

    def __init__(self, setting: Setting, world: World, costs: Costs, *, slower: float = 1.0, seed: int = 0) -> None:
        self.setting, self.world, self.costs, self.slower = setting, world, costs, slower
        self.rng = np.random.default_rng(seed)
        apart = setting.nodes > 1 if setting.apart is None else setting.apart
        self.alone = not apart  # the workers are on the driver's machine
        self.call = costs.near if self.alone else costs.far
        self.pacing = _pacing(setting)
        per_node = -(-setting.workers // setting.nodes)
        self.workers = [Worker(at // per_node) for at in range(setting.workers)]
        self.pump = Queue(look=slower * costs.pending * setting.workers)
        self.threads, self.store, self.into, self.out = (Queue() for _ in range(4))
        self.node_out = [Queue() for _ in range(setting.nodes)]
        self.arrived: dict[tuple[int, int], float] = {}  # when the weights of a version are on a node
        self.processor = 0.0  # seconds used on the driver's machine
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = itertools.count()
        self.version, self.held, self.done, self.fragments = 0, 0, 0, 0
        self.queued: list[int] = []  # versions of fragments on their way to the learner, of each one under way
        self.updating, self.update_from, self.learned = False, 0.0, 0.0
        self.waited = self.stood = self.drawn = (
            0.0  # seconds of all workers: for credit; between calls; drawn for steps
        )
        self.bytes = [0.0, 0.0]  # in, out

    # ------------------------------------------------------------------------------------------------------ the machinery

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (when, next(self.order), what, arguments))

    def through(self, now: float, stages: Sequence[tuple[Queue, float]], then: Callable[[float], None]) -> None:
        """One queue after the other."""
        if not stages:
            then(now)
            return
        (queue, seconds), *rest = stages
        self.at(queue.serve(now, seconds), self.through_next, rest, then)

    def through_next(self, now: float, stages: Sequence[tuple[Queue, float]], then: Callable[[float], None]) -> None:
        self.through(now, stages, then)

    def run(self) -> dict[str, float]:
        """Counters of the window."""
        self.publish(0.0)
        steps = min(self.world.episode, STAGGER) if self.setting.unit == "episodes" else self.setting.fragment
        for worker in range(self.setting.workers):  # actors do not start all at once
            self.at(float(self.rng.random()) * steps * self.setting.lanes * self.world.step, self.ask, worker)
        begun: dict[str, float] | None = None
        now = 0.0
        while self.events and self.fragments < MOST_FRAGMENTS and not (begun and self.enough(begun)):
            now, _, what, arguments = heapq.heappop(self.events)
            what(now, *arguments)
            if begun is None and self.version >= WARM:
                begun = self.read(now)
        end = self.read(now)
        return {key: end[key] - (begun or dict.fromkeys(end, 0.0))[key] for key in end}

    def enough(self, begun: dict[str, float]) -> bool:
        return self.version >= WARM + WINDOW and self.done - begun["rows"] >= LEAST_FRAGMENTS * self.setting.fragment

    def read(self, now: float) -> dict[str, float]:
        found = {"now": now, "rows": self.done, "processor": self.processor, "learner": self.learned}
        found |= {"lag bound": self.waited, "latency": self.stood}
        found |= {"pump": self.pump.busy, "threads": self.threads.busy, "object store": self.store.busy}
        found |= {"in": self.into.busy, "out": self.out.busy, "bytes_in": self.bytes[0], "bytes_out": self.bytes[1]}
        return found | {"node": max(queue.busy for queue in self.node_out)}

    # --------------------------------------------------------------------------------------------------------- a worker

    def ask(self, now: float, number: int) -> None:
        """The pump asks for the next grant of a worker and submits its call."""
        worker = self.workers[number]
        grant, woken = self.pacing.take(number, Tally(worker.produced, 0, ended=worker.ended))
        self.wake(now, woken)
        if grant is None:
            worker.asked, worker.acting = now, NO_VERSION
            return
        if grant.version >= 0:
            worker.acting = grant.version
        size = grant.steps * self.setting.lanes * self.world.row_bytes
        there = now + self._half(size) + (0.0 if self.alone else self.setting.trip)
        if worker.acting > worker.version:
            worker.version = worker.acting
            there = self.weights(there, worker)
        self.stood += there - now
        self.at(there, self.step, number, grant)

    def wake(self, now: float, woken: Sequence[int]) -> None:
        for number in woken:
            self.waited += now - self.workers[number].asked
            self.processor += self.costs.submit
            self.at(self.pump.serve(now, self.slower * self.costs.submit), self.ask, number)

    def weights(self, now: float, worker: Worker) -> float:
        """When a worker has read the newest ones."""
        size, key = self.world.weights_bytes, (worker.node, worker.version)
        if key not in self.arrived:
            sent = now
            if not self.alone:
                sent = self.out.serve(now, size / self.setting.bandwidth) + self.setting.trip
                self.bytes[1] += size
            self.arrived[key] = sent + self.costs.fetch(size)
        return max(now, self.arrived[key]) + self.slower_here(self.costs.read(size))

    def slower_here(self, seconds: float) -> float:
        """Of a worker's processor: slower where it shares a machine that is busy."""
        if self.alone:
            self.processor += seconds
            return self.slower * seconds
        return seconds

    def step(self, now: float, number: int, grant: Grant) -> None:
        world, lanes = self.world, self.setting.lanes
        steps = min(grant.steps, world.episode) if self.setting.unit == "episodes" else grant.steps
        drawn = max(
            0.0,
            steps * lanes * world.step + math.sqrt(steps * lanes) * world.spread * float(self.rng.standard_normal()),
        )
        work = steps * lanes * world.computes
        waits = max(0.0, drawn - work)
        lasts = waits + self.slower_here(work)
        self.at(now + lasts, self.close, number, steps * lanes)

    def close(self, now: float, number: int, rows: int) -> None:
        worker = self.workers[number]
        worker.produced += rows
        worker.ended = self.setting.unit == "episodes"
        size = rows * self.world.row_bytes
        self.bytes[0] += size
        self.queued.append(worker.acting)
        if self.alone:
            self.processor += self.call.actor(size) + self.call.raylets(size)
        version, stored = worker.acting, size > self.costs.inline

        def answered(at: float) -> None:
            if not stored:
                self.receive(at, version, rows)
            self.answered(at, number, rows, now)

        first = 0.0 if stored else size  # bytes that come with the answer
        there = now + self._half(size)
        self.at(there, self.through_next, [*self._net(worker, first), *self._driver(first)], answered)
        if stored:
            stages = [*self._net(worker, size), (self.store, self.slower * self._daemon(size))]
            rest = self._driver(size, beyond=first)
            self.at(there, self.through_next, [*stages, *rest], lambda at: self.receive(at, version, rows))

    def _net(self, worker: Worker, size: float) -> list[tuple[Queue, float]]:
        seconds = size / self.setting.bandwidth
        return [] if self.alone else [(self.node_out[worker.node], seconds), (self.into, seconds)]

    def _driver(self, size: float, beyond: float | None = None) -> list[tuple[Queue, float]]:
        """What the driver does for a call with so many bytes; beyond: without what it did for one of so many."""
        threads, pump = self.call.threads(size), self.call.pump(size)
        if beyond is not None:
            threads, pump = max(0.0, threads - self.call.threads(beyond)), max(0.0, pump - self.call.pump(beyond))
        self.processor += threads + pump
        return [(self.threads, self.slower * threads), (self.pump, self.slower * pump)]

    def receive(self, now: float, version: int, rows: int) -> None:
        """The learner's side has the rows."""
        self.queued.remove(version)
        self.fragments, self.held = self.fragments + 1, self.held + rows
        self.learn(now)

    def answered(self, now: float, number: int, rows: int, closed: float) -> None:
        """A call has ended: the next one; before it the next episode, where one has ended."""
        worker = self.workers[number]
        if self.updating:
            now += self.costs.learning
        ends = worker.produced // self.setting.lanes // self.world.episode
        if isinstance(self.pacing, EpisodeQueue):
            self.pacing.finished += 1
            self.pacing.finished_rows += rows
            self.wake(now, self.pacing.give_back(number, Tally(worker.produced, 0, ended=True)))
        self.stood += now - closed
        if ends == worker.episodes:
            self.ask(now, number)
            self.learn(now)  # nothing old may be left now
            return
        worker.episodes = ends
        small = 2 * self._half(0.0)
        self.stood += small
        self.at(now + small, self.through_next, self._driver(0.0), lambda at: self.ask(at, number))

    def _half(self, size: float) -> float:
        """Of what an actor stands still between two calls beside the stages that are simulated: there, or back."""
        first = 0.0 if size > self.costs.inline else size
        return max(0.0, self.call.idle(size) - self.call.pump(first) - self.call.threads(first)) / 2

    def _daemon(self, size: float) -> float:
        """Seconds of the driver's raylet; where the worker is elsewhere, its own does the other half."""
        return self.call.raylets(size) / (1 if self.alone else 2)

    # ------------------------------------------------------------------------------------------------------ the learner

    def learn(self, now: float) -> None:
        """Begin an update, if there are rows enough and none of them is too old."""
        if self.updating or self.held < self.setting.rows:
            return
        if self.pacing.max_lag is not None:
            open_versions = [version for version in self.pacing.announced() if version != NO_VERSION]
            oldest = min([*open_versions, *self.queued], default=None)
            if oldest is not None and oldest <= self.version - self.pacing.max_lag:
                return
        self.held -= self.setting.rows
        self.updating, self.update_from = True, self.pump.busy
        seconds = self.setting.rows * self.world.learn(self.setting.rows) + self._all_reduce()
        self.processor += seconds
        self.learned += self.slower * seconds
        self.at(now + self.slower * seconds, self.finish)

    def finish(self, now: float) -> None:
        """The update is over, unless the pump has taken time from it."""
        taken = self.pump.busy - self.update_from
        if taken > 1e-6:
            self.update_from = self.pump.busy
            self.learned += taken
            self.at(now + taken, self.finish)
            return
        self.updating = False
        self.done += self.setting.rows
        self.version += 1
        self.publish(now + self.slower * self.costs.put(self.world.weights_bytes))
        self.learn(now)

    def publish(self, now: float) -> None:
        self.wake(now, self.pacing.publish(self.version, self.done))

    def _all_reduce(self) -> float:
        """Seconds of an update in which learners add up gradients: a ring, and its messages."""
        count, setting = self.setting.learners, self.setting
        if count == 1:
            return 0.0
        each = 2 * (count - 1) / count * self.world.weights_bytes / setting.bandwidth + 2 * (count - 1) * setting.trip
        return setting.gradient_steps * each


def _pacing(setting: Setting) -> LagBound | EpisodeQueue:
    shared: dict[str, Any] = {"workers": setting.workers, "batch_rows": setting.rows}
    if setting.unit == "episodes":
        order = EpisodeOrder(0, setting.workers * setting.lanes)
        return EpisodeQueue(order=order, side_by_side=setting.lanes, steps=10_000, **shared)
    shared |= {"ahead": setting.max_lag, "max_lag": setting.max_lag}
    return LagBound(lanes=setting.lanes, steps=setting.fragment, **shared)


def simulate(setting: Setting, world: World, costs: Costs) -> Outcome:
    """Several learners are as many drivers, each with its share of the workers, which are spread over all nodes."""
    workers = max(1, setting.workers // setting.learners)
    one = replace(setting, workers=workers, nodes=min(workers, setting.nodes), apart=setting.nodes > 1)
    slower, found = 1.0, dict[str, float]()
    for _ in range(ROUNDS):  # what computes on a machine that is full takes longer, until the shares agree
        simulation = Simulation(one, world, costs, slower=slower)
        found = simulation.run()
        if simulation.alone:
            found["processor"] += costs.standing * one.workers * found["now"]
        wanted = found["processor"] / found["now"] / one.cores * slower
        if wanted <= 1.0 + CLOSE and slower == 1.0:
            break
        following = max(1.0, wanted)
        if abs(following / slower - 1) < CLOSE:
            break
        slower = following
    return _judged(setting, one, world, found)


def _judged(setting: Setting, one: Setting, world: World, found: dict[str, float]) -> Outcome:
    seconds = found["now"]
    rate = found["rows"] / seconds * setting.workers / one.workers
    share = rate * world.step / setting.workers
    busy = {
        "driver": max(found["pump"], found["threads"]) / seconds,
        "learner": found["learner"] / seconds,
        "object store": found["object store"] / seconds,
        "network": max(found["in"], found["out"], found["node"]) / seconds,
        "processor": found["processor"] / seconds / one.cores,
        "lag bound": found["lag bound"] / seconds / one.workers,
        "latency": found["latency"] / seconds / one.workers,
    }
    bytes_in, bytes_out = (found[key] / seconds * setting.workers / one.workers for key in ("bytes_in", "bytes_out"))
    return Outcome(rate, share, _limit(share, busy), busy, bytes_in, bytes_out)


def _limit(share: float, busy: dict[str, float]) -> Limit:
    """What the others wait for."""
    if share >= IDEAL:
        return "environments"
    stages: list[Limit] = ["driver", "learner", "object store", "network", "processor"]
    fullest = max(stages, key=lambda stage: busy[stage])
    if busy[fullest] >= FULL:
        return fullest
    waits: list[Limit] = ["lag bound", "latency"]
    return max(waits, key=lambda wait: busy[wait])
