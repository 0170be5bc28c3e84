"""User code that tries to end the process of a run: the errors that say who did it, and where."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import FrameType

from freewheel.envs.lane import Lane
from freewheel.errors import EnvError, SetupError
from freewheel.rollout.call_state import CONSTRUCT, PHASE, cells

PACKAGE = str(Path(__file__).parents[2])  # the folder of Freewheel's code


class ExitCalled(SystemExit):
    """User code in this process called os._exit."""

    def __str__(self) -> str:
        return f"os._exit({self.code})"


def lane_of(frame: FrameType | None) -> Lane | None:
    """Return the lane whose env is being called in this frame or in one of its callers."""
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, Lane):
            return own
        frame = frame.f_back
    return None


def exit_called(error: SystemExit) -> SetupError:
    """Return the error for user code outside an environment that called exit: code 0 would falsely report success."""
    did = str(error) if isinstance(error, ExitCalled) else f"sys.exit({error.code!r})"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(PACKAGE)]
    # A package may have wrapped sys.exit.
    own = [one for one in frames if "site-packages" not in one.filename] or frames
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else "code of yours"
    return SetupError(
        f"{place} called {did}, which would have ended the run without a message: a hook ends a run with run.stop()"
    )


def left(error: SystemExit | KeyboardInterrupt) -> EnvError:
    """Return the error for an environment that tried to end this process."""
    tb, lane = error.__traceback__, None
    while tb is not None and lane is None:
        lane, tb = lane_of(tb.tb_frame), tb.tb_next
    who, where = ("the environment", "in a call") if lane is None else (lane.who, lane.where)
    where = "in its constructor" if cells[PHASE] == CONSTRUCT else where
    did = "raised KeyboardInterrupt"
    if isinstance(error, SystemExit):
        did = f"called {error if isinstance(error, ExitCalled) else f'sys.exit({error.code!r})'}"
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_globals.get("__name__", "").startswith("freewheel."):
        tb = tb.tb_next
    trace = "".join(traceback.format_exception(type(error), error, tb)).rstrip()
    return EnvError(f"{who} {did}, which would have ended the run ({where})\n{trace}")
