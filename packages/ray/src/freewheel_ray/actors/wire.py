"""Connect the pool to Ray actors. A call carries a grant and a reference to the weights, and its reply carries rows."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

from freewheel.core import NDArray, Snapshot, to_numpy
from freewheel.pacing.pacing import Pacing
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.transport.shm.channel import Shape
from freewheel.transport.shm.memory import most_contexts
from freewheel.transport.wire import Fragment, WorkerRows
from freewheel.transport.workers.heartbeats import Heartbeats
from freewheel.transport.workers.wire import Size, SupervisedWire
from freewheel_ray.actors.actor import INLINE, ActorSetup
from freewheel_ray.actors.cluster import Cluster
from freewheel_ray.actors.code_shipping import packed
from freewheel_ray.actors.driver import Driver
from freewheel_ray.actors.queue import FragmentQueue
from freewheel_ray.actors.supervisor import ActorSupervisor

FIRST = 60.0  # seconds to wait for the first actor before the training continues without it
LOOK = 0.1  # seconds between two checks


class RayWire(SupervisedWire):
    """The connection to supervised actors. The pacing's cells are in this process, where a thread takes the grants for actors."""

    inline = INLINE

    def __init__(self, factory: RunnerFactory, spec: CollectSpec, pacing: Pacing, size: Size, cluster: Cluster) -> None:
        super().__init__(factory, spec, pacing, size)
        self._cluster = cluster
        self._nice = spec.workers.nice
        self._driver = Driver(cluster)
        self._while_waiting = spec.while_waiting
        self._weights = (spec.weights, most_contexts(spec.context))
        self._pacing = copy.copy(pacing)
        self._pacing.cells = {}
        env = replace(spec.env, lanes=self.lanes)
        context, tickets = spec.context.shape[1], pacing.ticket_columns
        self._shape = Shape(env, 1, 1, size.steps, context, self.state_size, tickets)
        self._factory = packed(factory, "the environment", spec.workers.modules)
        with ExitStack() as undo:
            self.queue = FragmentQueue(size.workers, env)
            undo.callback(self.queue.close)
            heartbeats = Heartbeats(size.workers, self.lanes, spec.env.name)
            undo.callback(heartbeats.close)
            self._resources = undo.pop_all()
        limits, room = spec.workers.timeouts, size.slots
        self.supervisor = ActorSupervisor(
            size.workers, heartbeats, limits, self.queue, pacing, self._job, room, self.mean_step
        )
        self.permits = self.supervisor.permits
        self._watch_over(self.supervisor, self.supervisor.times)

    def __enter__(self) -> Self:
        began = time.monotonic()
        with ExitStack() as undo:
            undo.push(self)
            self._resources.enter_context(self._driver)
            self._resources.callback(self._close_accounts)
            self._resources.callback(self.supervisor.stop)
            self.supervisor.start(self._driver, self._factory)
            while not self.supervisor.there.wait(LOOK) and time.monotonic() < began + FIRST:
                self._check()
                self._while_waiting()
            self.started_s = time.monotonic() - began
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def post(self, snapshot: Snapshot) -> None:
        """Store the weights once for all actors; each node fetches them once."""
        super().post(snapshot)
        params = {name: to_numpy(snapshot.params[name]) for name in self._weights[0]}
        self.supervisor.weights = (
            snapshot.version,
            self._driver.put(Snapshot(snapshot.version, params, snapshot.context)),
        )

    def take(self) -> Iterator[Fragment]:
        taken = self.queue.take()
        if taken and self._final is None:
            self.supervisor.wake({fragment.worker for fragment in taken})
        return iter(taken)

    def take_open(self, worker: int) -> Fragment | None:
        return self.supervisor.take_part(worker)

    def wait(self, seconds: float) -> bool:
        closed = self.queue.wakeup.wait(seconds)
        if not closed:
            self._check()
        return closed

    def queued_versions(self) -> list[int]:
        return self.queue.versions()

    def account(self, worker: int) -> WorkerRows:
        return self.queue.account(worker)

    def waiting(self) -> int:
        return self.queue.waiting()

    def step_ages(self) -> NDArray:
        return self.supervisor.step_ages()

    def messages(self) -> list[str]:
        notes = self._cluster.notes
        self._cluster.notes = []
        return [*notes, *super().messages()]

    def summary(self) -> Mapping[str, Any]:
        return {**super().summary(), "fragments_lost": self.supervisor.fragments_lost}

    def _settle_all(self) -> None:
        """Do nothing, because the supervisor has settled every worker."""

    def _job(self, worker: int, incarnation: int, ticket: int) -> ActorSetup:
        self._record_start(worker, incarnation)
        memory, first = self.heartbeats.memory, worker * self.lanes
        died = int(memory["died"][worker])
        return ActorSetup(
            worker=worker,
            incarnation=incarnation,
            lanes=range(first, first + self.lanes),
            shape=self._shape,
            pacing=self._pacing,
            weights=self._weights,
            context=self._newest[1],
            steps=int(memory["steps"][worker]),
            out_of_space=int(memory["out_of_space"][worker]),
            begun=memory["begun"][worker].tolist(),
            down_ns=time.monotonic_ns() - died if died else 0,
            ticket=ticket,
            nice=self._nice,
            inline=self.inline,
            resume=self._resume.pop(worker, None),
        )
