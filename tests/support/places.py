"""Where things are in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "freewheel"
SUPPORT = Path(__file__).resolve().parent
