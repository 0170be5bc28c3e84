"""`python -m freewheel` is the command line."""

from __future__ import annotations

from freewheel.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
