"""The end of a run: every part of it is tried, whatever became of the parts before; and what the exit code says of it."""

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
from freewheel.run.process import Interrupted, exit_called

Out = TypeVar("Out")
SPARE = 24  # descriptors that the end of a run needs


class Ending:
    """How a run ends. The first failure is the run's own; those after it are notes on it, and problems in the summary."""

    def __init__(self) -> None:
        self.reason = ""  # summary["ended"]
        self.failure: BaseException | None = None
        self.problems: list[str] = []  # what is not as it should be, a line each
        self._begun = threading.Lock()
        self._spare = list[int]()

    def prepare(self) -> None:
        """Keep descriptors for the end: an environment that has taken all others must not cost the last save."""
        with suppress(OSError):
            self._spare += [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(SPARE)]

    def begin(self) -> bool:
        """Whether the caller is the one to end the run: the training, or a thread that ends it in its place."""
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
        """A run that has used up what it was given without an update is no success."""
        if self.failure is None and vars(budget).get(self.reason) and not done["updates"]:
            spent = f"--{self.reason} were over after {done['env_steps']:,} env steps, before the first update"
            endless = "limit episodes that do not end (--max-episode-steps)"
            less = "ask for fewer rows an update" if done["env_steps"] else endless
            remedy = f"give more to `freewheel resume`, or {less}"
            self.fail(NothingLearnedError(f"nothing was learned: {spent}; {remedy}"), "training")

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


def without_descriptors(error: BaseException, env: str) -> BaseException:
    """The same, or of a process that has no descriptor left a line that names its environment and the limit."""
    if not isinstance(error, OSError) or error.errno != errno.EMFILE:
        return error
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    question = f"does {env} open files that it does not close? Else raise the limit, or use fewer envs"
    return SetupError(f"this process has all the {limit:,} files open that it may (ulimit -n): {question}")
