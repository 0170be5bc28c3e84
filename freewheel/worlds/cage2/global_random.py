"""Python's and numpy's global generators as a stream of one's own, for simulators that draw from nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


class GlobalRandom:
    """Within `with dice` Python's global `random` is this stream; outside, the caller's goes on as if nothing had been."""

    __slots__ = ("_callers", "state")

    def __init__(self, seed: int | None = None) -> None:
        self._callers: Any = None
        self.state: Any = None  # where the stream stands; a value that may be kept and put back
        self.seed(seed)

    def seed(self, seed: int | None) -> None:
        """Begin where `random.seed(seed)` begins."""
        self.state = random.Random(seed).getstate()

    def __enter__(self) -> None:
        self._callers = random.getstate()
        random.setstate(self.state)

    def __exit__(self, *_: object) -> None:
        self.state = random.getstate()
        random.setstate(self._callers)


class MoreDice(GlobalRandom):
    """The same with numpy's global generator, but for the spare normal number that it may hold: that is lost on the way."""

    __slots__ = ("_numpy", "_numpy_callers")

    def seed(self, seed: int | None) -> None:
        super().seed(seed)
        self._numpy = np.random.MT19937(seed)

    def __enter__(self) -> None:
        super().__enter__()
        self._numpy_callers = np.random.mtrand.get_bit_generator()
        np.random.mtrand.set_bit_generator(self._numpy)

    def __exit__(self, *_: object) -> None:
        np.random.mtrand.set_bit_generator(self._numpy_callers)
        super().__exit__()
