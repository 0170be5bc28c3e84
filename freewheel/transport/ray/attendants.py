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
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple, Self

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from freewheel.errors import SetupError
from freewheel.transport import command
from freewheel.transport.ray.cluster import Cluster

LOOK = 0.5  # seconds between two looks whether the process has ended
GRACE = 20.0  # seconds for a process that is asked to end


class Answer(NamedTuple):
    """What has come from a process, or why nothing will."""

    name: str
    data: bytes  # empty: it has ended
    problem: str = ""


@dataclass(frozen=True)
class Place:
    """Where a process is to run, and what it is to be given of its node."""

    node: str = ""  # the name or address of a host; empty: wherever there is room
    cpus: float = 1.0
    gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)  # of the cluster's own names


class Attendant:
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


class Attendants:
    """The driver's end of all of them. A process has at most one question at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._actor = cluster, ray.remote(max_concurrency=2)(Attendant)
        self._actors: dict[str, Any] = {}
        self._asked: dict[Any, str] = {}  # reference -> name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for name in list(self._actors):
            self.drop(name)

    def start(self, name: str, module: str, output: str, place: Place) -> None:
        """In the driver's working directory, where its node has that."""
        options = self._cluster.actor_options(len(self._actors)) | {"num_cpus": place.cpus, "num_gpus": place.gpus}
        if place.resources:
            options["resources"] = place.resources
        if place.node:
            nodes = [node for node in self._cluster.nodes() if node.alive and place.node in (node.host, node.id)]
            if not nodes:
                there = ", ".join(sorted({node.host for node in self._cluster.nodes() if node.alive}))
                raise SetupError(f"there is no node '{place.node}' in the cluster for {name}; there is {there}")
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(nodes[0].id, soft=False)
        self.drop(name)
        self._actors[name] = self._actor.options(**options).remote(module, os.getcwd(), output)

    def ask(self, names: Sequence[str], data: bytes) -> None:
        """The same question for all of these; it is stored once."""
        stored = ray.put(data)
        for name in names:
            self._asked[self._actors[name].ask.remote(stored)] = name

    def answers(self, seconds: float) -> list[Answer]:
        """What has come, at the latest after so many seconds."""
        if not self._asked:
            return []
        ready, _ = ray.wait(list(self._asked), num_returns=1, timeout=seconds)
        more, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0) if ready else ([], [])
        return [self._taken(reference) for reference in more]

    def _taken(self, reference: Any) -> Answer:
        name = self._asked.pop(reference)
        try:
            return Answer(name, *ray.get(reference))
        except RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return Answer(name, b"", f"its node or its actor is gone ({type(error).__name__}: {lines[0][:200]})")

    def end(self, data: bytes) -> dict[str, str]:
        """Let all end in good order, and wait until they have, for a while. Those that are not asked anything are told this;
        others are interrupted. Returns what is wrong with those that have not ended well."""
        until, stored, busy = monotonic() + 2 * GRACE, ray.put(data), dict(self._asked)
        interrupted = set(busy.values())
        told = {actor.tell.remote(stored): name for name, actor in self._actors.items() if name not in interrupted}
        for name in interrupted:
            self._actors[name].interrupt.remote()
        answered, late = _wait(busy, until)
        names = [busy[reference] for reference in late]
        for answer in map(self._taken, answered):
            if answer.data:  # it was under way: that is no end
                told[self._actors[answer.name].tell.remote(stored)] = answer.name
        done, late = _wait(told, until)
        names += [told[reference] for reference in late]
        found = dict.fromkeys(names, f"it did not end within {2 * GRACE:.0f} s")
        for reference in (one for one in done if told[one] not in interrupted):
            try:
                found[told[reference]] = ray.get(reference)
            except RayError as error:
                found[told[reference]] = type(error).__name__
        return {name: problem for name, problem in found.items() if problem}

    def drop(self, name: str) -> None:
        """Let it go, whatever it does: its process is asked to end by the kernel."""
        self._asked = {reference: other for reference, other in self._asked.items() if other != name}
        if (actor := self._actors.pop(name, None)) is not None:
            with suppress(RayError, ValueError):
                ray.kill(actor)


def _wait(references: Collection[Any], until: float) -> tuple[list[Any], list[Any]]:
    """Those that have come by then, by time.monotonic(), and those that have not."""
    if not references:
        return [], []
    done, late = ray.wait(list(references), num_returns=len(references), timeout=max(0.0, until - monotonic()))
    return done, late
