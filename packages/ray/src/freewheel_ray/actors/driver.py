"""The driver: a process of its own that is connected to Ray, and a line to it. Ray ends every process whose raylet dies, without
a word; a trainer that is not connected itself can say so, and save what it has learned."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from itertools import count
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

from freewheel.errors import CollectorLostError, FreewheelError, SetupError, text_of
from freewheel.transport import forkserver
from freewheel_ray.actors import local_cluster
from freewheel_ray.actors.actor import Reply
from freewheel_ray.actors.calls import NodeSpec, RayCalls, Ref, answer_of
from freewheel_ray.actors.cluster import Cluster

ANSWERED = ("call", "ask")  # methods whose answers come later
CLOSES = 5.0  # seconds for it to disconnect; then it is killed
LOST = (
    "the connection to Ray is lost: the raylet of this machine, one of its agents or the head of the cluster has ended; "
    "resume the run to go on from what is saved"
)


class HandleNumber(NamedTuple):
    """An actor or a stored value, on the way to the driver, which keeps it."""

    number: int


class RemoteHandle:
    """The same here: the driver forgets it when nobody here holds it any more."""

    def __init__(self, number: int, unused: deque[int]) -> None:
        self._number, self._unused = number, unused

    def __del__(self) -> None:
        self._unused.append(self._number)

    def __reduce__(self) -> tuple[Any, ...]:
        return HandleNumber, (self._number,)


class DriverCall(NamedTuple):
    """A call of one of the driver's methods."""

    method: str  # of RayCalls
    number: int  # of what it returns; -1: nothing
    arguments: tuple[Any, ...]
    unused: Sequence[int] = ()  # numbers that may be forgotten


class Driver:
    """Calls of calls.RayCalls. Only one thread waits and gets; any may call and put."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._numbers = cluster, count()
        self._come: dict[Ref, Any] = {}  # answers that nobody has taken, in the order in which they came
        self._unused = deque[int]()
        self._sending, self._held = threading.Lock(), ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as held:
            self._line, theirs = Pipe()
            held.callback(self._line.close)
            cluster = held.enter_context(ExitStack())  # which ends after the driver, and starts while that imports Ray
            with theirs:
                self._start(held, theirs)
            self._ends: list[Connection | int] = [self._line, *self._cluster.start_outside(cluster)]
            self._send("connect", -1, self._cluster)
            if self._line not in connection.wait(self._ends, local_cluster.SERVES):
                raise SetupError(f"Ray does not answer within {local_cluster.SERVES:g} s")
            self._cluster.notes += self._receive()
            self._held = held.pop_all()
        return self

    def _start(self, held: ExitStack, theirs: Connection) -> None:
        lifeline = forkserver.Lifeline()
        held.callback(lifeline.close)
        process = lifeline.process(_drive, theirs, dict(os.environ), name="freewheel-ray-driver")
        forkserver.start(process)
        held.callback(forkserver.end, [process], CLOSES)
        held.callback(self._close)

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def start(self, worker: int) -> RemoteHandle:
        return self._keep("start", worker)

    def attend(self, number: int, place: NodeSpec, *words: str) -> RemoteHandle:
        return self._keep("attend", number, place, *words)

    def put(self, value: Any) -> RemoteHandle:
        return self._keep("put", value)

    def call(self, actor: RemoteHandle, method: str, *arguments: Any) -> Ref:
        return self._send("call", next(self._numbers), actor, method, *arguments)

    def ask(self, actor: RemoteHandle, method: str, number: int) -> Ref:
        return self._send("ask", next(self._numbers), actor, method, number)

    def kill(self, actor: RemoteHandle) -> None:
        self._send("kill", -1, actor)

    def wait(self, refs: Sequence[Ref], seconds: float) -> list[Ref]:
        """Those that have been answered, in that order; at the latest after so many seconds."""
        wanted = set(refs)
        if self._come.keys().isdisjoint(wanted):
            connection.wait(self._ends, seconds)
        while ready := connection.wait(self._ends, 0):
            if self._line not in ready:
                raise CollectorLostError(LOST)  # the cluster that was started for it has ended
            self._come.update(self._receive())
        return [ref for ref in self._come if ref in wanted]

    def get(self, ref: Ref) -> Any:
        """The answer of one that has come, or Failed."""
        return self._come.pop(ref)

    def _keep(self, method: str, *arguments: Any) -> RemoteHandle:
        return RemoteHandle(self._send(method, next(self._numbers), *arguments), self._unused)

    def _send(self, method: str, number: int, *arguments: Any) -> int:
        with self._sending:
            unused = [self._unused.popleft() for _ in range(len(self._unused))]
            try:
                self._line.send(DriverCall(method, number, arguments, unused))
            except OSError as error:
                raise CollectorLostError(LOST) from error
        return number

    def _receive(self) -> Any:
        try:
            found = self._line.recv()
        except (EOFError, OSError) as error:
            raise CollectorLostError(LOST) from error
        if isinstance(found, FreewheelError):
            raise found
        return found

    def _close(self) -> None:
        with suppress(CollectorLostError):
            self._send("close", -1)


def _drive(line: Connection, variables: Mapping[str, str]) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what Ray says when it ends this process
        os.dup2(nothing, stream)
    os.environ.clear()
    os.environ.update(variables)
    with suppress(EOFError, OSError):  # the trainer has ended
        import ray  # noqa: F401 - while the cluster starts

        desk, cluster = _DriverServer(line), line.recv().arguments[0]
        try:
            with cluster:
                desk.serve(cluster)
        except FreewheelError as error:
            desk.say(error)
        except Exception as error:  # noqa: BLE001 - Ray's own, of many kinds
            desk.say(SetupError(f"Ray fails: {type(error).__name__}: {text_of(error).strip().splitlines()[0]}"))


class _DriverServer:
    """Carries out what comes on a line, and sends answers as they come."""

    def __init__(self, line: Connection) -> None:
        self._line, self._numbers, self._sending = line, count(-2, -1), threading.Lock()
        self._kept: dict[int, Any] = {}
        self._answers: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()

    def say(self, what: Any) -> None:
        with self._sending:
            self._line.send(what)

    def serve(self, cluster: Cluster) -> None:
        calls = RayCalls(cluster)
        self.say(cluster.notes)
        threading.Thread(target=self._tell, name="freewheel-answers", daemon=True).start()
        while (message := self._line.recv()).method != "close":
            self._do(calls, message)

    def _do(self, calls: RayCalls, message: DriverCall) -> None:
        known = (self._kept[one.number] if isinstance(one, HandleNumber) else one for one in message.arguments)
        found = getattr(calls, message.method)(*known)
        if message.method in ANSWERED:
            self._watch(message.number, found)
        elif message.number >= 0:
            self._kept[message.number] = found
        for number in message.unused:
            self._kept.pop(number, None)

    def _watch(self, number: int, ref: Any) -> None:
        ref.future().add_done_callback(lambda future: self._answers.put((number, future)))

    def _tell(self) -> None:
        with suppress(OSError):
            while True:
                answers = [self._answers.get()]
                while not self._answers.empty():
                    answers.append(self._answers.get())
                self.say([*map(self._numbered, answers)])

    def _numbered(self, answered: tuple[int, Future[Any]]) -> tuple[int, Any]:
        """With a number in the place of rows that are still in the object store, which come next."""
        number, answer = answered[0], answer_of(answered[1])
        if isinstance(answer, Reply) and answer.stored is not None:
            self._watch(stored := next(self._numbers), answer.stored)
            answer = answer._replace(stored=stored)
        return number, answer
