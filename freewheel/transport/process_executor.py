"""ProcessExecutor: a helper process that answers questions one after the other while everyone else goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from freewheel.errors import EnvError, FreewheelError
from freewheel.rollout.child import settle
from freewheel.transport import forkserver

Question = TypeVar("Question")
Answer = TypeVar("Answer")

NICE = 10  # it takes what processor time the others leave
GRACE = 1.0  # seconds to end by itself


class ProcessExecutor(Generic[Question, Answer]):
    """`build` makes what answers, over there, when the first question comes; a process that dies is replaced for the next."""

    def __init__(self, build: Callable[[], Callable[[Question], Answer]], what: str, nice: int = NICE) -> None:
        self._build, self._what, self._nice = cloudpickle.dumps(build), what, nice
        self._leash = forkserver.Leash()
        self._process: ForkServerProcess | None = None
        self._pipe: Any = None
        self._waiting: deque[Question] = deque()
        self._asked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()
        self._leash.close()

    def ask(self, question: Question) -> None:
        self._waiting.append(question)
        self._send()

    @property
    def busy(self) -> bool:
        return self._asked or bool(self._waiting)

    def answer(self, wait: float = 0.0) -> Answer | FreewheelError | None:
        """The answer to the oldest question, or why there is none; None: not yet."""
        if not self._asked or not self._pipe.poll(wait):
            return None
        self._asked = False
        try:
            result: Answer | FreewheelError = cloudpickle.loads(self._pipe.recv_bytes())
        except EOFError:
            result = EnvError(f"{self._what} ended its process ({self._end()})")
        self._send()
        return result

    def _send(self) -> None:
        if self._asked or not self._waiting:
            return
        if self._process is None:
            self._start()
        with suppress(BrokenPipeError):  # it is dead: the answer will be the end of the pipe
            self._pipe.send_bytes(cloudpickle.dumps(self._waiting.popleft()))
        self._asked = True

    def _start(self) -> None:
        forkserver.prepare()
        self._pipe, theirs = multiprocessing.get_context("forkserver").Pipe()
        process = self._leash.process(_serve, self._build, theirs, self._nice, name="freewheel-aside")
        forkserver.start(process)
        self._process = process
        theirs.close()

    def _end(self) -> str:
        """Nothing is left; how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "never started"
        self._pipe.close()
        process.join(0.0 if self._asked else GRACE)
        process.kill()
        process.join()
        how = "it took too long" if process.exitcode == -signal.SIGALRM else f"exit code {process.exitcode}"
        process.close()
        return how


def _serve(blob: bytes, pipe: Any, nice: int) -> None:
    os.nice(nice)
    answer: Callable[[Any], Any] | None = None
    with suppress(EOFError):
        while True:
            question = cloudpickle.loads(pipe.recv_bytes())
            try:
                if answer is None:
                    answer = cloudpickle.loads(blob)()
                    settle()
                result: Any = answer(question)
            except FreewheelError as error:
                result = error
            pipe.send_bytes(cloudpickle.dumps(result))
