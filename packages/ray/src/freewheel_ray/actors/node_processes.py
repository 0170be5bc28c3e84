"""Processes on the nodes of a Ray cluster, each looked after by an actor: bytes go to them and bytes come back, nothing else.

The actor starts `python -m MODULE` on its node and passes on what it is given. When the actor ends, however that happens, the
kernel asks the process to end (transport/command.py); when the driver ends, Ray ends the actors.
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

LOOK = 0.5  # seconds between two looks whether the process has ended
GRACE = 20.0  # seconds for a process that is asked to end


class ProcessReply(NamedTuple):
    """What has come from a process, or why nothing will."""

    name: str
    data: bytes  # empty: it has ended
    problem: str = ""


class NodeProcess:
    """The actor. `ask` and `tell` are called one after the other, `interrupt` at any time."""

    def __init__(self, module: str, folder: str, output: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        path = Path(output)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = "1"  # Ray sets them to the CPUs of the actor; a learner chooses for itself
        self._process, self._line = command.start_with_line(module, path)

    def interrupt(self) -> None:
        """Ask the process to end now and in good order; whoever waits for its answer is told so."""
        self._process.terminate()

    def ask(self, data: bytes) -> tuple[bytes, str]:
        """Pass this on, wait for the answer. Empty, and why: the process has ended."""
        try:
            self._line.send_bytes(data)
            while not self._line.poll(LOOK):
                pass
            return self._line.recv_bytes(), ""
        except (EOFError, OSError):
            return b"", self._ended() or "its training has ended by itself"

    def tell(self, data: bytes) -> str:
        """Pass this on as the last thing, and wait for the process to end."""
        with suppress(OSError):
            self._line.send_bytes(data)
        return self._ended()

    def _ended(self) -> str:
        """Wait until it has ended, and let it end if it takes too long; how it did."""
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
    """The coordinator's end of all of them. A process has at most one question at a time."""

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
        """In this process's working directory, where its node has that."""
        self.drop(name)
        self._actors[name] = self._driver.attend(len(self._actors), place, module, os.getcwd(), output)

    def ask(self, names: Sequence[str], data: bytes) -> None:
        """The same question for all of these; it is stored once."""
        stored = self._driver.put(data)
        for name in names:
            self._asked[self._driver.call(self._actors[name], "ask", stored)] = name

    def answers(self, seconds: float) -> list[ProcessReply]:
        """What has come, at the latest after so many seconds."""
        return [self._taken(reference) for reference in self._driver.wait(list(self._asked), seconds)]

    def _taken(self, reference: Ref) -> ProcessReply:
        name, found = self._asked.pop(reference), self._driver.get(reference)
        if isinstance(found, CallFailure):
            return ProcessReply(name, b"", f"its node or its actor is gone ({found.reason})")
        return ProcessReply(name, *found)

    def end(self, data: bytes) -> dict[str, str]:
        """Let all end in good order, and wait until they have, for a while. Those that are not asked anything are told this;
        others are interrupted. Returns what is wrong with those that have not ended well."""
        until, stored, busy = monotonic() + 2 * GRACE, self._driver.put(data), dict(self._asked)
        interrupted = set(busy.values())
        told = {self._tell(name, stored): name for name in self._actors if name not in interrupted}
        for name in interrupted:
            self._driver.call(self._actors[name], "interrupt")
        answered, late = self._wait(busy, until)
        names = [busy[reference] for reference in late]
        for answer in map(self._taken, answered):
            if answer.data:  # it was under way: that is no end
                told[self._tell(answer.name, stored)] = answer.name
        done, late = self._wait(told, until)
        names += [told[reference] for reference in late]
        found = dict.fromkeys(names, f"it did not end within {2 * GRACE:.0f} s")
        for reference in (one for one in done if told[one] not in interrupted):
            answer = self._driver.get(reference)
            found[told[reference]] = answer.reason if isinstance(answer, CallFailure) else answer
        return {name: problem for name, problem in found.items() if problem}

    def _tell(self, name: str, stored: RemoteHandle) -> Ref:
        return self._driver.call(self._actors[name], "tell", stored)

    def _wait(self, references: Collection[Ref], until: float) -> tuple[list[Ref], list[Ref]]:
        """Those that have come by then, by time.monotonic(), and those that have not."""
        done, late = list[Ref](), list(references)
        while late and (seconds := until - monotonic()) > 0:
            done += self._driver.wait(late, seconds)
            late = [one for one in late if one not in done]
        return done, late

    def drop(self, name: str) -> None:
        """Let it go, whatever it does: its process is asked to end by the kernel."""
        self._asked = {reference: other for reference, other in self._asked.items() if other != name}
        if (actor := self._actors.pop(name, None)) is not None:
            self._driver.kill(actor)
