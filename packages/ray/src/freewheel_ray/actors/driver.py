"""The driver: a separate process that is connected to Ray, and a pipe to it. Ray silently ends every connected process when its
raylet dies. The trainer is not connected, so it can report the loss and save its progress."""

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

ANSWERED = ("call", "ask")  # methods whose answers arrive later
CLOSES = 5.0  # seconds that the driver has to disconnect before it is killed
LOST = (
    "the connection to Ray is lost: the raylet of this machine, one of its agents or the head of the cluster has ended; "
    "resume the run to continue from the last checkpoint"
)


class HandleNumber(NamedTuple):
    """Names an actor or a stored value in a message to the driver, which holds the object."""

    number: int


class RemoteHandle:
    """Refers to an actor or a stored value of the driver. The driver releases the object when the last handle is deleted."""

    def __init__(self, number: int, unused: deque[int]) -> None:
        self._number = number
        self._unused = unused

    def __del__(self) -> None:
        self._unused.append(self._number)

    def __reduce__(self) -> tuple[Any, ...]:
        return HandleNumber, (self._number,)


class DriverCall(NamedTuple):
    """A message that calls one of the driver's methods."""

    method: str  # a method of RayCalls
    number: int  # names the result; -1: the method returns nothing
    arguments: tuple[Any, ...]
    unused: Sequence[int] = ()  # numbers of objects that can be released


class Driver:
    """Runs calls.RayCalls in the driver process. Only one thread may wait and get; every thread may call and put."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers = count()
        self._arrived: dict[Ref, Any] = {}  # answers that nobody has taken yet, in order of arrival
        self._unused = deque[int]()
        self._sending = threading.Lock()
        self._held = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as held:
            self._line, theirs = Pipe()
            held.callback(self._line.close)
            cluster = held.enter_context(ExitStack())  # starts while the driver imports Ray, and ends after the driver
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
        """Return the references that have been answered, in order of arrival, after at most this many seconds."""
        wanted = set(refs)
        if self._arrived.keys().isdisjoint(wanted):
            connection.wait(self._ends, seconds)
        while ready := connection.wait(self._ends, 0):
            if self._line not in ready:
                raise CollectorLostError(LOST)  # the local cluster has ended
            self._arrived.update(self._receive())
        return [ref for ref in self._arrived if ref in wanted]

    def get(self, ref: Ref) -> Any:
        """Return an answer that has arrived; it may be a CallFailure."""
        return self._arrived.pop(ref)

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
    for stream in (1, 2):  # hide the messages that Ray prints when it ends this process
        os.dup2(nothing, stream)
    os.environ.clear()
    os.environ.update(variables)
    with suppress(EOFError, OSError):  # the trainer has ended
        import ray  # noqa: F401 - takes time, which passes while the cluster starts

        server, cluster = _DriverServer(line), line.recv().arguments[0]
        try:
            with cluster:
                server.serve(cluster)
        except FreewheelError as error:
            server.send(error)
        except Exception as error:  # noqa: BLE001 - Ray raises many types of errors
            server.send(SetupError(f"Ray fails: {type(error).__name__}: {text_of(error).strip().splitlines()[0]}"))


class _DriverServer:
    """Runs the calls that arrive through a pipe, and sends each answer when it is known."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._numbers = count(-2, -1)
        self._sending = threading.Lock()
        self._kept: dict[int, Any] = {}
        self._answers: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()

    def send(self, what: Any) -> None:
        with self._sending:
            self._line.send(what)

    def serve(self, cluster: Cluster) -> None:
        calls = RayCalls(cluster)
        self.send(cluster.notes)
        threading.Thread(target=self._send_answers, name="freewheel-answers", daemon=True).start()
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

    def _send_answers(self) -> None:
        with suppress(OSError):
            while True:
                answers = [self._answers.get()]
                while not self._answers.empty():
                    answers.append(self._answers.get())
                self.send([*map(self._numbered, answers)])

    def _numbered(self, answered: tuple[int, Future[Any]]) -> tuple[int, Any]:
        """Return the number and the answer of a call. Rows in the object store are replaced by a number and follow later."""
        number, answer = answered[0], answer_of(answered[1])
        if isinstance(answer, Reply) and answer.stored is not None:
            self._watch(stored := next(self._numbers), answer.stored)
            answer = answer._replace(stored=stored)
        return number, answer
