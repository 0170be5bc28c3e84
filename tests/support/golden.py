"""Screens as text files beside their tests, compared as a whole. FREEWHEEL_GOLDEN=1 writes them anew; then read what differs."""

from __future__ import annotations

import os
from pathlib import Path


def assert_golden(test: str, name: str, shown: str) -> None:
    """`shown` is what golden/NAME.txt has, beside the file of this test (`__file__`)."""
    path = Path(test).parent / "golden" / f"{name}.txt"
    if os.environ.get("FREEWHEEL_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")
