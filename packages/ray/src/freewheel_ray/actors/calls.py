"""Calls of Ray actors: this module makes them, takes their answers, and translates Ray's errors."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from freewheel.errors import SetupError
from freewheel_ray.actors.actor import RayWorker
from freewheel_ray.actors.cluster import Cluster

MOST_QUESTIONS = 100_000  # that can wait at the relay at the same time
Ref = Hashable  # refers to the answer of a call or to a stored value, like ray.ObjectRef


class CallFailure(NamedTuple):
    """Takes the place of an answer if the worker has ended or failed."""

    reason: str
    report: str = ""
    own_fault: bool = True  # False: the machine of the worker was lost


@dataclass(frozen=True)
class NodeSpec:
    """The node and the resources that a process asks for."""

    node: str = ""  # the name or address of a host; empty: any node with room
    cpus: float = 1.0
    gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)  # custom resources of the cluster


class QuestionRelay:
    """An actor that passes questions to workers during a call. A second thread of each worker waits here for them.

    Ray's concurrency groups could do the same. With them, however, the main thread of every worker wakes a hundred times a
    second, which costs a third of a core for fifty workers.
    """

    def __init__(self) -> None:
        self._questions: dict[str, asyncio.Queue[tuple[int, str, int]]] = defaultdict(asyncio.Queue)
        self._answers: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._numbers = count()

    async def ask(self, worker: str, method: str, argument: int) -> Any:
        """Return the worker's answer, or None if the worker has ended."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = worker, answer
        self._questions[worker].put_nowait((number, method, argument))
        return await answer

    async def question(self, worker: str) -> tuple[int, str, int]:
        """Return the next question to this worker."""
        return await self._questions[worker].get()

    async def answer(self, number: int, value: Any) -> None:
        _, answer = self._answers.pop(number, (None, None))
        if answer is not None:
            answer.set_result(value)

    async def forget(self, worker: str) -> None:
        """Note that a worker has ended, and answer its open questions with None."""
        self._questions.pop(worker, None)
        for number in [number for number, (asked, _) in self._answers.items() if asked == worker]:
            await self.answer(number, None)


class NamedActor(NamedTuple):
    """An actor, with its name at the relay if it is a worker."""

    handle: Any
    name: str


class RayCalls:
    """The calls to Ray that the driver makes. The cluster must be connected."""

    def __init__(self, cluster: Cluster) -> None:
        import ray

        self._ray = ray
        self._cluster = cluster
        self._names = count()
        self._class = ray.remote(RayWorker)
        self._board: Any = None  # until there are workers

    def start(self, worker: int) -> NamedActor:
        """Create an actor for this worker. It may take a long time until the cluster has room for it."""
        self._board = self._board or self._relay()
        name = f"{worker}.{next(self._names)}"
        return NamedActor(self._class.options(**self._cluster.actor_options(worker)).remote(self._board, name), name)

    def _relay(self) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": MOST_QUESTIONS, "max_restarts": -1, "scheduling_strategy": here}
        return self._ray.remote(QuestionRelay).options(**options).remote()

    def attend(self, number: int, place: NodeSpec, *words: str) -> NamedActor:
        """Create an actor of class node_processes.NodeProcess."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from freewheel_ray.actors.node_processes import NodeProcess

        options = self._cluster.actor_options(number) | {"num_cpus": place.cpus, "num_gpus": place.gpus}
        if place.resources:
            options["resources"] = place.resources
        if place.node:
            alive = [node for node in self._cluster.nodes() if node.alive]
            chosen = [node for node in alive if place.node in (node.host, node.id)]
            if not chosen:
                there = ", ".join(sorted({node.host for node in alive}))
                raise SetupError(f"the cluster has no node '{place.node}'; its nodes are {there}")
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(chosen[0].id, soft=False)
        return NamedActor(self._ray.remote(max_concurrency=2)(NodeProcess).options(**options).remote(*words), "")

    def call(self, actor: NamedActor, method: str, *arguments: Any) -> Any:
        return getattr(actor.handle, method).remote(*arguments)

    def ask(self, actor: NamedActor, method: str, number: int) -> Any:
        return self._board.ask.remote(actor.name, method, number)

    def put(self, value: Any) -> Any:
        return self._ray.put(value)

    def kill(self, actor: NamedActor) -> None:
        self._ray.kill(actor.handle)
        if self._board is not None:
            self._board.forget.remote(actor.name)


def answer_of(future: Future[Any]) -> Any:
    """Return the answer of a call, or a CallFailure."""
    from ray import exceptions

    try:
        return future.result()
    except exceptions.RayTaskError as error:
        return CallFailure("failed", str(error.cause or error).strip())
    except exceptions.RayError as error:
        return failed(error)


def failed(error: Exception) -> CallFailure:
    """Describe Ray's error about a lost actor or object in a few words."""
    from ray import exceptions

    text = str(error)
    if getattr(error, "preempted", False) or isinstance(error, exceptions.NodeDiedError) or "node has died" in text:
        return CallFailure("lost its node", own_fault=False)
    if isinstance(error, exceptions.OutOfMemoryError) or "running low on memory" in text:
        return CallFailure("was killed by Ray, because its node ran out of memory")
    if isinstance(error, exceptions.RuntimeEnvSetupError | exceptions.ActorUnschedulableError):
        return CallFailure("cannot be started", text)
    return CallFailure(
        "cannot be reached" if isinstance(error, exceptions.ActorUnavailableError) else "ended unexpectedly"
    )
