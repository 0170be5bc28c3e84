"""All exceptions of this package, as one tree.

    FreewheelError                exit 1
    ├── UsageError                exit 2   a flag, a file or an argument is wrong: nothing was started
    ├── SetupError                exit 1   a valid request that this machine cannot serve: nothing was started
    ├── EnvError                  exit 1   the user's environment failed; holds the lane, the place and its own traceback
    ├── LedgerError               exit 1   rows were lost or counted twice: a bug in Freewheel
    ├── FileError                 exit 1   a file is missing, damaged, or holds something else than it should
    │   └── CheckpointError       exit 1   no valid checkpoint on disk
    ├── DiskError                 exit 1   the last weights or the summary could not be written
    ├── DivergedError             exit 1   the learner's numbers are not finite: it learns nothing
    └── ObservationError          exit 1   what predict() was given does not fit the policy; also a ValueError

The first line of every message says what is wrong and what to do about it.

Exit codes of a run: 0 done; 1 failed; 2 the command is wrong, nothing was started; 3 done, but workers were lost for good;
128 + the number of a signal that ended it in good order (130 SIGINT, 143 SIGTERM, 129 SIGHUP).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

DONE, FAILED, USAGE, DEGRADED, SIGNALLED = 0, 1, 2, 3, 128  # exit codes; the last is added to a signal's number


class FreewheelError(Exception):
    """The base class of all exceptions of this package."""

    exit_code = FAILED


class UsageError(FreewheelError):
    """The command line, a config file or an argument asks for something that does not exist."""

    exit_code = USAGE


class SetupError(FreewheelError):
    """A valid request that this machine, the installed packages or the environment cannot serve."""


class LedgerError(FreewheelError):
    """produced = trained + queued + open + dropped did not hold."""


class FileError(FreewheelError):
    """A file is missing, damaged, or holds something else than it should."""


class CheckpointError(FileError):
    """No valid checkpoint on disk."""


class DiskError(FreewheelError):
    """What a run has to leave behind could not be written."""


class DivergedError(FreewheelError):
    """A learner whose updates are skipped, because a number in them is not finite, or whose weights are not."""


class ObservationError(FreewheelError, ValueError):
    """An observation, a mask or a state does not fit the policy that is to act on it."""


class EnvError(FreewheelError):
    """The user's environment raised, gave an invalid answer, hung or died. `cause` is one of core.CAUSES."""

    def __init__(self, report: str, cause: str = "env_error") -> None:
        super().__init__(report, cause)
        self.report, self.cause = report, cause

    def __str__(self) -> str:
        return self.report


def nearest(name: str, valid: Iterable[str], otherwise: str | None = None, *, cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` for a misspelt name; else the text `otherwise`, or the list of valid names."""
    names = sorted(valid)
    match = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    if match:
        return f"; did you mean '{match[0]}'?"
    return f"; choose from {', '.join(names)}" if otherwise is None else otherwise


def require_positive(**options: float | None) -> None:
    """UsageError about the first of these options that is given and not a positive, finite number."""
    for name, value in options.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value}")
