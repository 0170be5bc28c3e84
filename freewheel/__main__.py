"""The entry point of `freewheel` and `python -m freewheel`."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable

# `python -m` puts the current folder first on the search path. Remove it unless this package comes from there.
if (
    __name__ == "__main__"
    and __spec__
    and not sys.flags.safe_path
    and not __file__.startswith(f"{sys.path[0]}/freewheel/")
):
    del sys.path[0]

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Run a command and return its exit code. Signals end the process quietly, even during imports and exit."""
    atexit.register(_handle, signal.SIG_IGN)  # runs last, when Python would let a signal kill the process
    before = signal.getsignal(signal.SIGINT)
    _handle(lambda number, _: os._exit(128 + number))
    from freewheel.cli.main import main as run_command
    from freewheel.transport.command import leave_soon

    signal.signal(signal.SIGINT, before)
    code = 1
    try:
        code = run_command()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
        raise
    finally:
        leave_soon(code)
    _handle(lambda *_: os._exit(code))
    gc.freeze()  # otherwise a last garbage collection over torch's objects takes a second or more
    return code


def _handle(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    """Use this handler for the signals that end a command; under nohup, SIGHUP stays ignored."""
    for number in SIGNALS:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


if __name__ == "__main__":
    raise SystemExit(main())
