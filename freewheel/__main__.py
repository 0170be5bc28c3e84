"""The command line, as `freewheel` and as `python -m freewheel`."""

from __future__ import annotations

import gc
import os
import signal


def main() -> int:
    """Run a command and return its exit code. A signal is quiet from the first import on, and until the process has ended."""
    before = signal.signal(signal.SIGINT, _leave)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup it is ignored
            signal.signal(number, _leave)
    from freewheel.cli.main import main as run_command

    signal.signal(signal.SIGINT, before)
    code = run_command()
    signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    gc.freeze()  # or Python would look for garbage among all that torch has made, for a second or more
    return code


def _leave(number: int, _: object) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    raise SystemExit(main())
