"""The compiled part of the house (_kernel.c), which may be missing: everything in it is also there in Python.

    FastCategorical   policies/single.py    a choice among K actions
    RowWriter     rollout/page.py       rows of one lane
    finite   envs/tolerant.py      whether numbers are

A worker with one slow env does these at every step. A process that has slept finds its caches cold, and then it matters less
how much is computed than how much code and memory is touched: with 100 such workers on 2 cores, choosing an action and writing
it down costs 50 µs of a step in numpy and 15 µs here.
"""

from __future__ import annotations

import importlib
from typing import TypeVar

Part = TypeVar("Part")


def compiled(name: str, otherwise: Part) -> Part:
    """The compiled part of this name, or what does the same in Python."""
    try:
        module = importlib.import_module("freewheel.rollout._kernel")
    except ImportError:
        return otherwise
    part: Part = getattr(module, name)
    return part
