"""An environment of which one instance does not return from a step, from when a file `hold` is in the current folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.support.worlds import Counter


class Held(Counter):
    """Until the file is removed; which instance it is decides who is first to make the folder `held`."""

    def __init__(self) -> None:
        super().__init__(length=8)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        hold = Path("hold")
        if hold.exists():
            try:
                Path("held").mkdir()
            except FileExistsError:
                return super().step(action)
            while hold.exists():
                time.sleep(0.01)
        return super().step(action)
