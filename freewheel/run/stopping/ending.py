"""The end of a run: every part is attempted even if an earlier one failed. The outcome determines the exit code."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from freewheel.errors import (
    DEGRADED,
    DONE,
    FAILED,
    SIGNALLED,
    EnvError,
    FreewheelError,
    NothingLearnedError,
    SetupError,
)
from freewheel.metrics.meter import Budget
from freewheel.run.stopping.exits import exit_called
from freewheel.run.stopping.stop import Interrupted

Out = TypeVar("Out")
SPARE = 24  # file descriptors reserved for the end of a run


class Ending:
    """How a run ends. It fails with the first failure; later ones become notes on it, and problems in the summary."""

    def __init__(self) -> None:
        self.reason = ""  # summary["ended"]
        self.failure: BaseException | None = None
        self.problems: list[str] = []  # one line for each thing that went wrong
        self._begun = threading.Lock()
        self._spare = list[int]()

    def prepare(self) -> None:
        """Reserve descriptors, so that the last save works even if an environment has used up all the others."""
        with suppress(OSError):
            self._spare += [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(SPARE)]

    def begin(self) -> bool:
        """Return True to the first caller, who has to end the run: the training, or a thread that replaces it."""
        first = self._begun.acquire(blocking=False)
        while first and self._spare:
            os.close(self._spare.pop())
        return first

    def fail(self, error: BaseException, what: str) -> None:
        if isinstance(error, SystemExit):
            error = exit_called(error)
        if self.failure is None:
            self.failure, self.reason = error, "failed"
            return
        if error is not self.failure:
            self.failure.add_note(f"{what[0].upper()}{what[1:]} failed after that: {error!r}")
            self.problems.append(f"{what} failed: {_first_line(error)}")

    def judge(self, budget: Budget, done: Mapping[str, int]) -> None:
        """Fail a run that used up its budget before the first update."""
        if self.failure is None and vars(budget).get(self.reason) and not done["updates"]:
            spent = f"--{self.reason} ran out after {done['env_steps']:,} env steps, before the first update"
            endless = "limit the length of episodes (--max-episode-steps)"
            less = "use fewer rows per update" if done["env_steps"] else endless
            remedy = f"raise the limit with `freewheel resume`, or {less}"
            self.fail(NothingLearnedError(f"nothing was learned: {spent}; {remedy}"), "training")

    def attempt(self, what: str, part: Callable[[], Out], otherwise: Out) -> Out:
        """Run one part of the end; return `otherwise` if it fails."""
        try:
            return part()
        except Interrupted:
            self.reason = "interrupted"
        except BaseException as error:  # noqa: BLE001 - raised when every part has been attempted
            self.fail(error, what)
        return otherwise

    @contextmanager
    def leaving(self, resource: AbstractContextManager[Out], what: str) -> Iterator[Out]:
        """Like `with resource`, but an error on exit never hides an earlier failure, and fails a successful run only if
        it is a FreewheelError but no EnvError: an environment that cannot be closed has already done its work."""
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
        """Return the exit code, by priority: a failure, a signal, workers that were lost permanently."""
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


def without_descriptors(error: BaseException, env: str) -> BaseException:
    """Return the error itself; if the process ran out of descriptors, one that names the environment and the limit."""
    if not isinstance(error, OSError) or error.errno != errno.EMFILE:
        return error
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    question = f"does {env} open files that it does not close? Otherwise raise the limit, or use fewer envs"
    return SetupError(f"this process has reached its limit of {limit:,} open files (ulimit -n): {question}")
