"""Processes on the nodes of a Ray cluster. An actor supervises each process and exchanges bytes with it.

The actor starts `python -m MODULE` on its node and forwards all bytes. When the actor ends for any reason, the kernel asks the
process to end (see transport/command.py). When the driver ends, Ray ends the actors.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Self

from freewheel.errors import CollectorLostError
from freewheel.transport import command
from freewheel_ray.actors.calls import CallFailure, NodeSpec, Ref
from freewheel_ray.actors.driver import Driver, RemoteHandle

LOOK = 0.5  # seconds between two checks whether the process has ended
GRACE = 20.0  # seconds that a process has to end after it was asked to


class ProcessReply(NamedTuple):
    """The answer of a process, or the reason why it cannot answer."""

    name: str
    data: bytes  # empty: the process has ended
    problem: str = ""


class NodeProcess:
    """The actor of one process. `ask` and `end` must not overlap; `interrupt` may be called at any time."""

    def __init__(self, module: str, folder: str, output: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        path = Path(output)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = "1"  # Ray sets these to the CPUs of the actor, but a learner chooses its own number
        self._process, self._line = command.start_with_line(module, path)

    def interrupt(self) -> None:
        """Ask the process to stop cleanly now. A caller that waits for its answer learns that it has ended."""
        self._process.terminate()

    def ask(self, data: bytes) -> tuple[bytes, str]:
        """Forward this and wait for the answer. If the process has ended, return no bytes and the reason."""
        try:
            self._line.send_bytes(data)
            while not self._line.poll(LOOK):
                pass
            return self._line.recv_bytes(), ""
        except (EOFError, OSError):
            return b"", self._ended() or "its training has ended without being asked to"

    def end(self, data: bytes) -> str:
        """Forward the last message, wait for the process to end, and return its problem."""
        with suppress(OSError):
            self._line.send_bytes(data)
        return self._ended()

    def _ended(self) -> str:
        """Wait until the process has ended and return how. A process that takes too long is terminated, then killed."""
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            if number:
                self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
                break
        code = self._process.wait()
        self._line.close()
        if code < 0:
            return f"its training was killed by {signal.Signals(-code).name}"
        return f"its training has ended with exit code {code}" if code else ""


class NodeProcesses:
    """All processes, as the coordinator sees them. Each process handles at most one question at a time."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._actors: dict[str, RemoteHandle] = {}
        self._asked: dict[Ref, str] = {}  # reference -> name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(CollectorLostError):
            for name in list(self._actors):
                self.drop(name)

    def start(self, name: str, module: str, output: str, place: NodeSpec) -> None:
        """Start a process in the current working directory if its node has that directory."""
        self.drop(name)
        self._actors[name] = self._driver.attend(len(self._actors), place, module, os.getcwd(), output)

    def ask(self, names: Sequence[str], data: bytes) -> None:
        """Ask several processes the same question, which is stored only once."""
        stored = self._driver.put(data)
        for name in names:
            self._asked[self._driver.call(self._actors[name], "ask", stored)] = name

    def answers(self, seconds: float) -> list[ProcessReply]:
        """Return the answers that have arrived, after at most this many seconds."""
        return [self._taken(reference) for reference in self._driver.wait(list(self._asked), seconds)]

    def _taken(self, reference: Ref) -> ProcessReply:
        name, found = self._asked.pop(reference), self._driver.get(reference)
        if isinstance(found, CallFailure):
            return ProcessReply(name, b"", f"its node or its actor is gone ({found.reason})")
        return ProcessReply(name, *found)

    def end(self, data: bytes) -> dict[str, str]:
        """Stop all processes cleanly and wait a limited time for them. Idle processes receive `data`, and busy ones are
        interrupted. Returns the problems of the processes that did not end well."""
        until = monotonic() + 2 * GRACE
        stored = self._driver.put(data)
        busy = dict(self._asked)
        interrupted = set(busy.values())
        ending = {self._end(name, stored): name for name in self._actors if name not in interrupted}
        for name in interrupted:
            self._driver.call(self._actors[name], "interrupt")
        answered, late = self._wait(busy, until)
        names = [busy[reference] for reference in late]
        for answer in map(self._taken, answered):
            if answer.data:  # this answer was already on its way; the process has not ended
                ending[self._end(answer.name, stored)] = answer.name
        done, late = self._wait(ending, until)
        names += [ending[reference] for reference in late]
        found = dict.fromkeys(names, f"it did not end within {2 * GRACE:.0f} s")
        for reference in (one for one in done if ending[one] not in interrupted):
            answer = self._driver.get(reference)
            found[ending[reference]] = answer.reason if isinstance(answer, CallFailure) else answer
        return {name: problem for name, problem in found.items() if problem}

    def _end(self, name: str, stored: RemoteHandle) -> Ref:
        return self._driver.call(self._actors[name], "end", stored)

    def _wait(self, references: Collection[Ref], until: float) -> tuple[list[Ref], list[Ref]]:
        """Return the references that were answered before this time of time.monotonic(), and the others."""
        done, late = list[Ref](), list(references)
        while late and (seconds := until - monotonic()) > 0:
            done += self._driver.wait(late, seconds)
            late = [one for one in late if one not in done]
        return done, late

    def drop(self, name: str) -> None:
        """Kill the actor of a process; the kernel then asks the process to end."""
        self._asked = {reference: other for reference, other in self._asked.items() if other != name}
        if (actor := self._actors.pop(name, None)) is not None:
            self._driver.kill(actor)
