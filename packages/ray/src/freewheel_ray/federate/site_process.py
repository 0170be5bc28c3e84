"""The process of a site: one training, connected to the coordinator. `python -m freewheel_ray.federate.site_process PID FD`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep

from freewheel.errors import CheckpointError, FileError, FreewheelError, SetupError, UsageError
from freewheel.files.lock import FileLock
from freewheel.files.output import complain
from freewheel.transport import command

ENDS = 30.0  # seconds for the process before to end


def main(argv: Sequence[str]) -> int:
    """Train, until the coordinator ends it or is gone."""
    parent, descriptor = argv
    command.end_with(int(parent))
    with command.line_to_parent(descriptor) as line:
        try:
            return _train(line)
        except FreewheelError as error:
            complain(str(error))
            _tell(line, error)
            return error.exit_code
        except Exception as error:  # noqa: BLE001 - of a hook or an environment: its text stays here
            traceback.print_exc()
            _tell(line, error)
            return 1


def _train(line: Connection) -> int:
    """A new training, or the one of this site that was lost or interrupted: it has its optimiser and its rows."""
    from freewheel.config import resolve
    from freewheel.files.read import record
    from freewheel.run.checkpoints.resume import ResumeSettings, resume
    from freewheel.run.naming import CONFIG
    from freewheel.run.trainer import run
    from freewheel_ray.federate.message import unpack
    from freewheel_ray.federate.site_hook import SiteHook, SiteSetup

    try:
        order = record(
            SiteSetup, dict(unpack(line.recv_bytes(), "the coordinator", "order").values), "the order of a site"
        )
    except EOFError:
        raise SetupError("the coordinator is gone") from None
    config, exchange = resolve.from_argv(order.words, trust=order.trust), SiteHook(line, order)
    output = config.run.output
    before = Path(output.runs_dir) / output.name
    if (before / CONFIG).is_file():
        _wait_for(before)
        with suppress(CheckpointError):  # it has saved nothing to go on from, or that is damaged
            settings = ResumeSettings(runs_dir=output.runs_dir, trust=order.trust)
            return resume(before, settings, quiet=True, hooks=[exchange]).exit_code
        config = replace(config, sources={**config.sources, "run": "federation"})  # then it gets a number
    return run(config, quiet=True, hooks=[exchange]).exit_code


def _wait_for(before: Path) -> None:
    """Until the process that this one replaces has ended; it may be saving what it has."""
    from freewheel.run.naming import LOCK

    until = monotonic() + ENDS
    while FileLock.holder(before / LOCK) is not None and monotonic() < until:
        sleep(0.1)


def _tell(line: Connection, error: Exception) -> None:
    """Why a training could not start. Of one that has started only the kind of error: its text may hold what the site keeps."""
    from freewheel_ray.federate.message import SiteMessage

    clear = isinstance(error, UsageError | SetupError | FileError)
    kind = f"{type(error).__name__}; what it says is in the site's own files"
    problem = str(error).partition("\n")[0] if clear else kind
    with suppress(OSError):
        line.send_bytes(SiteMessage("failed", {"problem": problem}).pack())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
