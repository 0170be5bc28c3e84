"""The end of a run: every part of it is tried, whatever became of the parts before; and what the exit code says of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from freewheel.errors import DEGRADED, DONE, FAILED, SIGNALLED, EnvError, FreewheelError
from freewheel.run.process import Interrupted

Out = TypeVar("Out")


class Ending:
    """How a run ends. The first failure is the run's own; those after it are notes on it, and problems in the summary."""

    def __init__(self) -> None:
        self.reason = ""  # summary["ended"]
        self.failure: BaseException | None = None
        self.problems: list[str] = []  # what is not as it should be, a line each
        self._begun = threading.Lock()

    def begin(self) -> bool:
        """Whether the caller is the one to end the run: the training, or a thread that ends it in its place."""
        return self._begun.acquire(blocking=False)

    def fail(self, error: BaseException, what: str) -> None:
        if self.failure is None:
            self.failure, self.reason = error, "failed"
            return
        if error is not self.failure:
            self.failure.add_note(f"{what[0].upper()}{what[1:]} failed after that: {error!r}")
            self.problems.append(f"{what} failed: {_first_line(error)}")

    def attempt(self, what: str, part: Callable[[], Out], otherwise: Out) -> Out:
        """One part of the end; if it fails, what to go on with."""
        try:
            return part()
        except Interrupted:
            self.reason = "interrupted"
        except BaseException as error:  # noqa: BLE001 - raised when everything has been tried
            self.fail(error, what)
        return otherwise

    @contextmanager
    def leaving(self, resource: AbstractContextManager[Out], what: str) -> Iterator[Out]:
        """`with resource`, but what fails on the way out hides no failure, and nothing that was achieved: an environment that
        cannot be closed has done its work."""
        entered = resource.__enter__()
        try:
            yield entered
        except BaseException as error:
            self._leave(resource, what, error)
            raise
        self._leave(resource, what, None)

    def _leave(self, resource: AbstractContextManager[Any], what: str, inside: BaseException | None) -> None:
        try:
            resource.__exit__(*((None, None, None) if inside is None else (type(inside), inside, inside.__traceback__)))
        except Exception as error:
            if inside is None and isinstance(error, FreewheelError) and not isinstance(error, EnvError):
                raise
            self.problems.append(f"{what} failed: {_first_line(error)}")
            if inside is not None:
                inside.add_note(f"{what[0].upper()}{what[1:]} failed after that: {error!r}")

    def exit_code(self, stopped_by: signal.Signals | None, *, degraded: bool) -> int:
        """By what matters most: a failure, a signal, workers that were lost for good."""
        if self.failure is not None:
            return exit_code_of(self.failure)
        if stopped_by is not None:
            return SIGNALLED + stopped_by
        return DEGRADED if degraded else DONE


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, FreewheelError):
        return error.exit_code
    return SIGNALLED + signal.SIGINT if isinstance(error, KeyboardInterrupt) else FAILED


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
