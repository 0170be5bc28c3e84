"""The barrier of lockstep: processes that step one environment each and wait for each other.

The parent wakes all processes and waits until each has answered. Rows are in shared memory. A pipe in each direction
carries one byte for a step, and values for rare events: seeds, contexts, failures. Each process records the call of its
environment in its heartbeat, so the time limits hold for each call, and an error names the call. No process is
replaced: if one dies or hangs, all end.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from time import monotonic
from typing import Any

from freewheel.errors import EnvError, SetupError
from freewheel.rollout.call_state import ALL, LANE, LANES, SEEDS, STEP
from freewheel.rollout.call_state import cells as here
from freewheel.rollout.factory import Timeouts
from freewheel.transport import forkserver
from freewheel.transport.clock import LOOK, Limit, clock
from freewheel.transport.workers import heartbeats as phase
from freewheel.transport.workers.heartbeats import Heartbeats

GRACE = 3.0  # seconds for environments to close if nothing has failed
SHORT_GRACE = 0.3  # seconds after a failure; then SIGTERM, the same time again, then SIGKILL
TELLS = 0.5  # seconds for a process to end after its pipe has closed
WAKE, VALUE = b"\0", b"\1"


class WakePipe:
    """One end of two pipes: a byte wakes the process at the other end, and a value may follow the byte."""

    def __init__(self, receiver: Connection, sender: Connection) -> None:
        self._receiver, self._sender = receiver, sender
        self._from, self._to = receiver.fileno(), sender.fileno()
        poller = select.poll()  # Connection.poll makes a selector for every call
        poller.register(self._from, select.POLLIN)
        self._poll = poller.poll

    def wake(self) -> None:
        os.write(self._to, WAKE)

    def send(self, value: Any) -> None:
        os.write(self._to, VALUE)
        self._sender.send(value)

    def wait(self, seconds: float) -> object:
        """Return a true value if there is something to receive, or if the other end is gone."""
        return self._poll(seconds * 1000)

    def receive(self) -> Any:
        """Wait for a wake-up. Return its value, or None; EOFError if the other end is gone."""
        byte = os.read(self._from, 1)
        if not byte:
            raise EOFError
        return None if byte == WAKE else self._receiver.recv()

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return WakePipe, (self._receiver, self._sender)


def line() -> tuple[WakePipe, WakePipe]:
    """Return both ends."""
    (ours, to), (theirs, back) = Pipe(duplex=False), Pipe(duplex=False)
    return WakePipe(ours, back), WakePipe(theirs, to)


class Barrier:
    """Processes that must answer in time; otherwise all are ended, and an error names the lane. `close` leaves none."""

    def __init__(self, who: Sequence[str], timeouts: Timeouts, where: Callable[[int], str]) -> None:
        """`who`: the name of each lane. `where`: describes what a lane does, for errors."""
        self._who, self._where = who, where
        self._limits = (timeouts.construct, timeouts.reset, timeouts.step, timeouts.step)  # by phase
        self._asked = 0.0  # when the processes were last woken
        self._waiting, self._first = False, phase.CONSTRUCT  # for their answers; see _answers
        self.processes: list[ForkServerProcess] = []
        self._lines: list[WakePipe] = []
        self._held = ExitStack()
        self._held.enter_context(clock)
        self._lifeline = forkserver.Lifeline()
        self._held.callback(self._lifeline.close)
        self.heartbeats = Heartbeats(len(who), 1)
        self._held.callback(self.heartbeats.close)

    def start(self, work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run work(line, heartbeats, number, *arguments) in each. Return the first value of each, sent when ready."""
        try:
            forkserver.prepare()
            for number, own in enumerate(arguments):
                ours, theirs = line()
                self._lines.append(ours)
                self.heartbeats.enter(number, phase.CONSTRUCT)
                name = f"freewheel-env-{number}"
                process = self._lifeline.process(work, theirs, self.heartbeats, number, *own, name=name)
                try:
                    forkserver.start(process)
                finally:
                    theirs.close()
                self.processes.append(process)
        except BaseException as error:
            self.close(broken=True)
            if isinstance(error, OSError):
                what = f"cannot start {len(arguments)} processes ({error}): use fewer environments"
                raise SetupError(what) from error
            raise
        return self._answers(lambda _: None, phase.CONSTRUCT)

    def wake(self) -> list[Any]:
        """Wake each process and return the answers; None: an answer without a value."""
        return self._answers(WakePipe.wake)

    def ask(self, values: Sequence[Any]) -> list[Any]:
        """Send each process its value and return the answers."""
        waiting = iter(values)
        return self._answers(lambda line: line.send(next(waiting)))

    def _answers(self, begin: Callable[[WakePipe], None], first: int = phase.STEP) -> list[Any]:
        """`first`: the phase of a process that has not begun anything since it was asked."""
        here[LANE], self._first = ALL, first
        self._asked, self._waiting = monotonic(), True
        answers = list[Any]()
        try:
            for line in self._lines:
                with suppress(BrokenPipeError):  # the wait for its answer will fail
                    begin(line)
            for number, line in enumerate(self._lines):
                if not line.wait(LOOK):
                    self._await(number)
                answers.append(line.receive())
        except (EOFError, ConnectionError):
            raise self._lost(len(answers)) from None
        self._waiting = False
        return answers

    def _await(self, number: int) -> None:
        """Wait for a slow process. Record its lane and its call, so that the watchdog can name them."""
        while True:
            late = self._late(number)
            if late:
                raise self._ended(late, f"did not answer within {self._call(late[0])[1]:g} s")
            self._show(number)
            if self._lines[number].wait(LOOK):
                return

    def _late(self, first: int) -> list[int]:
        """Return the processes from `first` on that have not answered and exceed the time limit of their call."""
        calls = {number: self._call(number) for number in range(first, len(self._lines))}
        late = [number for number, (since, limit) in calls.items() if clock.age(since) > limit]
        return [number for number in late if not self._lines[number].wait(0.0)]

    def _call(self, number: int) -> tuple[float, float]:
        """Return when the present call of this process began, and its time limit. An older record is of an earlier call."""
        memory = self.heartbeats.memory.numbers
        since = memory["since"][number] * 1e-9
        return max(since, self._asked), self._limits[memory["phase"][number] if since >= self._asked else self._first]

    def _show(self, number: int) -> None:
        memory = self.heartbeats.memory.numbers
        if memory["begun"][number] and number < LANES:
            here[SEEDS + number] = memory["seed"][number]
            here[STEP], here[LANE] = self.heartbeats.step(number), number

    def _lost(self, number: int) -> EnvError:
        """Return the error for a closed pipe to this process. Others may have died as well."""
        sentinels = [process.sentinel for process in self.processes]
        connection.wait([sentinels[number]], TELLS)
        ready = connection.wait(sentinels, 0.0)
        dead = [lane for lane, sentinel in enumerate(sentinels) if sentinel in ready] or [number]
        return self._ended(dead, f"died (exit code {self.processes[dead[0]].exitcode})")

    def _ended(self, lanes: Sequence[int], what: str) -> EnvError:
        """End all processes because of these lanes, and return the error."""
        others = f" and {len(lanes) - 1} more" if len(lanes) > 1 else ""
        where = self._where(lanes[0])
        self.close(broken=True)
        return EnvError(f"{self._who[lanes[0]]}{others} {what} ({where})", "worker_death")

    def close(self, *, broken: bool = False) -> list[Any]:
        """End all processes. Return their answers to "close", or nothing if the barrier is broken."""
        answers: list[Any] = []
        broken = broken or self._waiting
        for line in self._lines:
            with suppress(OSError):
                line.send(("close",))
        grace = Limit(SHORT_GRACE if broken else GRACE)
        for line in [] if broken else self._lines:
            with suppress(EOFError, OSError):
                if grace.wait(line.wait):
                    answers.append(line.receive())
        forkserver.end(self.processes, grace.left, SHORT_GRACE)
        for line in self._lines:
            line.close()
        self._held.close()
        self.processes, self._lines, self._waiting = [], [], False
        self._where = str  # the caller's object can be freed
        return answers
