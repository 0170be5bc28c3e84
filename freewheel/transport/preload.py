"""Imported last by the forkserver: imports what workers will need, and freezes all objects, so that workers share their memory.

A module that raises, ends or takes too long is left out: a worker will meet it again, where it is supervised.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal

import numpy as np

from freewheel.policies.spec import HEADS
from freewheel.transport.forkserver import PRELOADED


def _late(*_: object) -> None:
    raise TimeoutError


def _import(limit: float, *modules: str) -> None:
    before = signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        for module in modules:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(module)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if PRELOADED in os.environ:
    _import(*json.loads(os.environ.pop(PRELOADED)))
HEADS.ours  # noqa: B018 - found once here instead of in every worker
np.ones((4, 4)) @ np.ones((4, 4))  # BLAS makes its buffers at the first product
np.random.Generator(np.random.SFC64(0)).random()
gc.collect()
gc.freeze()
