"""The command line, as `freewheel` and as `python -m freewheel`."""

from __future__ import annotations

import os
import signal


def main() -> int:
    """Run a command and return its exit code. An interrupt is quiet from the first import on."""
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from freewheel.cli.main import main as run_command

    signal.signal(signal.SIGINT, before)
    return run_command()


if __name__ == "__main__":
    raise SystemExit(main())
