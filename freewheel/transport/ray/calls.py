"""Calls of Ray actors: how they are made, waited for and answered, and what an error says about whose fault it was."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from freewheel.transport.ray.actor import RayWorker
from freewheel.transport.ray.cluster import Cluster

CONTROL = "control"  # the concurrency group of calls that are answered while another one is under way
Ref = Hashable  # the answer of a call, or a stored value: a ray.ObjectRef


class Failed(NamedTuple):
    """A call that has no answer, because its worker has ended or failed."""

    reason: str
    report: str = ""
    own_fault: bool = True  # not that of the machine it was on


class Calls(Protocol):
    """What the crew needs of Ray; tests have one without."""

    def start(self, worker: int) -> Any: ...  # a new actor for this worker; it may take long until there is room for it
    def call(self, actor: Any, method: str, *arguments: Any, control: bool = False) -> Ref: ...
    def wait(self, refs: Sequence[Ref], seconds: float) -> Sequence[Ref]: ...  # those that have come
    def get(self, ref: Ref) -> Any: ...  # of one that has come: the answer, or Failed
    def put(self, value: Any) -> Ref: ...
    def kill(self, actor: Any) -> None: ...


class RayCalls:
    """Implements Calls. The cluster is entered."""

    def __init__(self, cluster: Cluster) -> None:
        import ray

        self._ray, self._cluster = ray, cluster
        self._class = ray.remote(concurrency_groups={CONTROL: 1})(RayWorker)

    def start(self, worker: int) -> Any:
        return self._class.options(**self._cluster.actor_options(worker)).remote()

    def call(self, actor: Any, method: str, *arguments: Any, control: bool = False) -> Ref:
        bound = getattr(actor, method)
        ref: Ref = (bound.options(concurrency_group=CONTROL) if control else bound).remote(*arguments)
        return ref

    def wait(self, refs: Sequence[Ref], seconds: float) -> Sequence[Ref]:
        """In the order of completion, and all that have come: one wait for many costs as much as for one."""
        refs = list(refs)
        ready, left = self._ray.wait(refs, num_returns=1, timeout=seconds)
        if ready and left:
            more, _ = self._ray.wait(left, num_returns=len(left), timeout=0)
            ready += more
        return list(ready)

    def get(self, ref: Ref) -> Any:
        from ray import exceptions

        try:
            return self._ray.get(ref)
        except exceptions.RayTaskError as error:
            return Failed("failed", str(error.cause or error).strip())
        except exceptions.RayError as error:
            return failed(error)

    def put(self, value: Any) -> Ref:
        ref: Ref = self._ray.put(value)
        return ref

    def kill(self, actor: Any) -> None:
        self._ray.kill(actor)


def failed(error: Exception) -> Failed:
    """What Ray says about an actor or an object that is gone, in a few words."""
    from ray import exceptions

    text = str(error)
    if getattr(error, "preempted", False) or isinstance(error, exceptions.NodeDiedError) or "node has died" in text:
        return Failed("lost its node", own_fault=False)
    if isinstance(error, exceptions.OutOfMemoryError) or "running low on memory" in text:
        return Failed("was killed by Ray, because its node ran out of memory")
    if isinstance(error, exceptions.RuntimeEnvSetupError | exceptions.ActorUnschedulableError):
        return Failed("cannot be started", text)
    return Failed("cannot be reached" if isinstance(error, exceptions.ActorUnavailableError) else "ended unexpectedly")
