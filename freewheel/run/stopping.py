"""Stopping: a signal ends a run in good order, with every row counted; a second signal ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from freewheel.core import Env

In = ParamSpec("In")
Out = TypeVar("Out")


class Interrupted(BaseException):
    """A signal asked the run to end."""


class Stop:
    """The signal that asked the run to end. It interrupts calls of environments, where every row is counted, and nothing else."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.over = False  # the summary is being written, which must not be interrupted
        self._in_env = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: the first signal ends the run in good order, the second at once."""
        first, self.signal = self.signal is None, self.signal or signal.Signals(number)
        if not self.over and (self._in_env or not first):
            raise Interrupted

    def check(self) -> None:
        if self.signal is not None:
            raise Interrupted

    def guard(self, call: Callable[In, Out]) -> Callable[In, Out]:
        def guarded(*args: In.args, **kwargs: In.kwargs) -> Out:
            self._in_env = True
            try:
                self.check()
                return call(*args, **kwargs)
            finally:
                self._in_env = False

        return guarded

    @contextmanager
    def listening(self) -> Iterator[None]:
        try:
            before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # only the main thread may handle signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Interruptible:
    """An Env whose calls a signal may interrupt."""

    def __init__(self, env: Env[Any], stop: Stop) -> None:
        self.reset, self.step, self.autoreset = stop.guard(env.reset), stop.guard(env.step), stop.guard(env.autoreset)
        self.set_context, self.render, self.close = env.set_context, env.render, env.close
        self.spec = env.spec
