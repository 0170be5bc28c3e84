"""Where things are in the repository, and whether the long forms of tests run."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "freewheel"
SUPPORT = Path(__file__).resolve().parent
LONG = bool(os.environ.get("FREEWHEEL_LONG"))  # longer tests: `make soak`
