"""All exceptions of this package, as one tree, and the valid ranges of options: a value outside is a UsageError.

    FreewheelError                exit 1
    ├── UsageError                exit 2   a flag, a file or an argument is wrong: nothing was started
    ├── ConsentError              exit 2   a file names code to run without the user's consent: nothing was imported
    ├── SetupError                exit 1   a valid request that this machine cannot serve: nothing was started
    ├── EnvError                  exit 1   the user's environment failed; holds the lane, the place and its traceback
    ├── LedgerError               exit 1   rows were lost or counted twice: a bug in Freewheel
    ├── FileError                 exit 1   a file is missing, damaged, or has unexpected content
    │   └── CheckpointError       exit 1   no valid checkpoint on disk
    ├── CollectorLostError        exit 1   a resource of all workers is gone; learned weights are saved
    ├── MeasureError              exit 1   the training of a measurement failed, or took too long
    ├── DiskError                 exit 1   the last weights or the summary could not be written
    ├── DivergedError             exit 1   the learner's numbers are not finite: it no longer learns
    ├── NothingLearnedError       exit 1   a run reached its limit before its first update
    ├── PeerLostError             exit 1   one of several learners is gone: the others cannot continue
    └── ObservationError          exit 1   an argument of predict() does not fit the policy; also a ValueError

The first line of every message states the problem and its remedy.

Exit codes of a run: 0 done; 1 failed; 2 the command is wrong, nothing was started; 3 done, but workers were lost
permanently; 128 + the number of a signal that ended it cleanly (130 SIGINT, 143 SIGTERM, 129 SIGHUP).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import typing
from collections.abc import Iterable

DONE, FAILED, USAGE, DEGRADED, SIGNALLED = 0, 1, 2, 3, 128  # exit codes; a signal's number is added to the last


#: Control characters, line ends, marks that change the writing direction, and surrogates, which cannot be encoded.
ACTING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
LONGEST = 4_000  # most characters kept of a foreign exception's message


class FreewheelError(Exception):
    """The base class of all exceptions of this package."""

    exit_code = FAILED


class UsageError(FreewheelError):
    """The command line, a config file or an argument asks for something that does not exist."""

    exit_code = USAGE


class ConsentError(FreewheelError):
    """A file that this user has not written names code to run, and the user has not consented."""

    exit_code = 2


class SetupError(FreewheelError):
    """A valid request that this machine, the installed packages or the environment cannot serve."""


class LedgerError(FreewheelError):
    """produced = trained + queued + open + dropped did not hold."""


class FileError(FreewheelError):
    """A file is missing, damaged, or has unexpected content."""


class CheckpointError(FileError):
    """There is no valid checkpoint on disk."""


class MeasureError(FreewheelError):
    """The training of a measurement failed, or took too long."""


class DiskError(FreewheelError):
    """The last weights or the summary of a run could not be written."""


class DivergedError(FreewheelError):
    """The learner's weights are not finite, or its updates are skipped because they contain numbers that are not."""


class NothingLearnedError(FreewheelError):
    """A run reached its limit of time, steps or episodes before its first update."""


class PeerLostError(FreewheelError):
    """One of several learners that train together is gone: an all-reduce of the others can never complete."""


class CollectorLostError(FreewheelError):
    """A resource of all workers is gone. The learner is intact, and everything it has learned can be saved."""


class ObservationError(FreewheelError, ValueError):
    """An observation, a mask or a state does not fit the policy that is to act on it."""


class EnvError(FreewheelError):
    """The user's environment raised, gave an invalid answer, hung or died. `cause` is one of core.CAUSES."""

    def __init__(self, report: str, cause: str = "env_error") -> None:
        super().__init__(report, cause)
        self.report, self.cause = report, cause

    def __str__(self) -> str:
        return self.report


def text_of(error: BaseException) -> str:
    """Return an exception's text, even if its __str__ raises or the text cannot be encoded."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception as other:  # noqa: BLE001 - its __str__ is the user's code
        return f"(no text: __str__ raised {type(other).__name__})"


def printable(text: str, kept: str = "") -> str:
    """Make foreign text safe for a terminal: escape invisible characters that act on it, except those in `kept`."""
    return ACTING.sub(lambda one: one[0] if one[0] in kept else one[0].encode("unicode_escape").decode(), text)


def cut(text: str, most: int = LONGEST) -> str:
    """Shorten a long text to its beginning and end: a message may hold a whole array or file."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [... {len(text) - most:,} characters left out ...] {text[-most // 2 :]}"


def nearest(name: str, valid: Iterable[str], otherwise: str | None = None, *, cutoff: float = 0.6) -> str:
    """Return `; did you mean 'x'?` for a misspelt name, else the text `otherwise` or the list of valid names."""
    names = sorted(map(printable, valid))
    match = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    if match:
        return f"; did you mean '{match[0]}'?"
    return f"; choose from {', '.join(names)}" if otherwise is None else otherwise


@dataclasses.dataclass(frozen=True)
class Range:
    """The valid numbers of an option, declared in its type: `lr: Annotated[float, Range(above=0, most=1e6)] = 3e-4`."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf  # exclusive lower bound

    def misfit(self, value: float) -> str:
        """Describe why this number is invalid; empty if it is valid."""
        if math.isfinite(value) and self.least <= value <= self.most and value > self.above:
            return ""
        shown, least, most = (_number(number) for number in (value, max(self.least, self.above), self.most))
        if (self.least, self.most) == (0, 1):
            return f"must lie in 0..1, not {shown}"
        if value > self.most and math.isfinite(value):
            return f"must be at most {most}, not {shown}"
        if max(self.least, self.above) < 0:
            return f"must lie in {least}..{most}, not {shown}"
        return f"must not be negative, but is {shown}" if self.least == 0 else f"must be positive, not {shown}"


def _number(value: float) -> str:
    whole = isinstance(value, int) or (value.is_integer() and 1e3 <= abs(value) < 1e16)
    return f"{int(value):,}" if whole else f"{value}"


COUNT = Range(least=1, most=10**12)  # for counts of things that need no memory each
POSITIVE = Range(above=0, most=1e12)
SHARE = Range(least=0, most=1)
SEED = Range(least=0, most=2**63 - 1)


def check_ranges(options: typing.Any, prefix: str = "") -> None:
    """Raise UsageError for the first option of a dataclass that is set and outside its declared range."""
    for name, flag, allowed in _ranges(typing.cast(typing.Hashable, type(options))):
        value = getattr(options, name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and (problem := allowed.misfit(number)):
                raise UsageError(f"--{prefix}{flag.replace('_', '-')} {problem}")


@functools.cache
def _ranges(kind: type[typing.Any]) -> tuple[tuple[str, str, Range], ...]:
    """Return the names, option names and ranges of the dataclass fields that have a range."""
    flags = {field.name: field.metadata.get("flag", field.name) for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind, include_extras=True)
    found = ((name, part) for name in flags for part in typing.get_args(hints[name])[1:] if isinstance(part, Range))
    return tuple((name, flags[name], allowed) for name, allowed in found)
