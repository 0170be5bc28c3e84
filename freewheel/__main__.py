"""The command line, as `freewheel` and as `python -m freewheel`."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable

# `python -m` searches the current folder first, whatever lies there. Only where this package is in it, that has to stay so.
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
    """Run a command and return its exit code. Signals are quiet from the first import on, and until the process has ended."""
    atexit.register(_handle, signal.SIG_IGN)  # called last; Python would let a signal kill the process then
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
    gc.freeze()  # or Python would look for garbage among all that torch has made, for a second or more
    return code


def _handle(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    """Use this handler for what ends a command; under nohup, SIGHUP stays ignored."""
    for number in SIGNALS:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


if __name__ == "__main__":
    raise SystemExit(main())
