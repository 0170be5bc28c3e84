"""The process of a site, `python -m freewheel_ray.federate.site_process PID FD`: one training connected to the coordinator."""

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
from freewheel.files.stdout import complain
from freewheel.transport import command

ENDS = 30.0  # seconds that the previous process of the site has to end


def main(argv: Sequence[str]) -> int:
    """Train until the coordinator ends the training or is gone."""
    parent, descriptor = argv
    command.end_with(int(parent))
    with command.line_to_parent(descriptor) as line:
        try:
            return _train(line)
        except FreewheelError as error:
            complain(str(error))
            _report(line, error)
            return error.exit_code
        except Exception as error:  # noqa: BLE001 - a hook or an environment may raise anything; its text stays here
            traceback.print_exc()
            _report(line, error)
            return 1


def _train(line: Connection) -> int:
    """Start a new training, or resume the one of this site that was lost or interrupted, with its optimiser and its rows."""
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
        with suppress(CheckpointError):  # there is no usable checkpoint, so the site starts again
            settings = ResumeSettings(runs_dir=output.runs_dir, trust=order.trust)
            return resume(before, settings, quiet=True, hooks=[exchange]).exit_code
        config = replace(config, sources={**config.sources, "run": "federation"})  # a new run gets a numbered name
    return run(config, quiet=True, hooks=[exchange]).exit_code


def _wait_for(before: Path) -> None:
    """Wait until the process that this one replaces has ended; it may still be saving a checkpoint."""
    from freewheel.run.naming import LOCK

    until = monotonic() + ENDS
    while FileLock.holder(before / LOCK) is not None and monotonic() < until:
        sleep(0.1)


def _report(line: Connection, error: Exception) -> None:
    """Report why a training could not start. After the start only the type of an error is sent; its text may hold site data."""
    from freewheel_ray.federate.message import SiteMessage

    clear = isinstance(error, UsageError | SetupError | FileError)
    kind = f"{type(error).__name__}; its text is in the files of the site"
    problem = str(error).partition("\n")[0] if clear else kind
    with suppress(OSError):
        line.send_bytes(SiteMessage("failed", {"problem": problem}).pack())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
