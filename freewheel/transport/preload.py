"""Imported last by the forkserver: imports what workers will need, and freezes all objects, so that workers share their memory.

What an env has started outlives its worker only as a child of the forkserver, which kills it when it ends itself.

A module that raises, ends or takes too long is left out: a worker will meet it again, where it is supervised.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import time
import warnings

import numpy as np
import psutil

from freewheel.policies.spec import HEADS
from freewheel.transport._multiprocessing import before_threads_end
from freewheel.transport.forkserver import PRELOADED, TEMPORARY

HARD = 1.0  # seconds beyond the limit
TRAINER_ENDS = 10.0  # seconds within which a trainer that was killed is gone after its pipes were closed
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl


def _adopt() -> None:
    """Become the parent of processes whose own parent has ended, and kill them at the end, for which nothing that a module has
    left here is waited for: no thread of it, no exit handler; of a trainer that was killed, remove the temporary files. Children
    of this process do not inherit any of that."""
    server, (trainer, _, folder) = os.getpid(), os.environ.pop(TEMPORARY, "").partition(":")

    def kill_all() -> None:
        if os.getpid() == server:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            limit = time.monotonic() + TRAINER_ENDS
            while folder and str(os.getppid()) == trainer and time.monotonic() < limit:
                time.sleep(0.005)  # its pipes close before it is gone
            if folder and str(os.getppid()) != trainer:
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)

    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before_threads_end(kill_all)
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")


def _late(*_: object) -> None:
    raise TimeoutError


def _import(limit: float, *modules: str) -> None:
    """Within `limit` seconds. Where C code hangs, which no signal interrupts, the server ends and another starts without them."""
    before, nowhere = signal.signal(signal.SIGALRM, _late), open(os.devnull, "w")  # noqa: SIM115 - used by a thread of faulthandler
    signal.setitimer(signal.ITIMER_REAL, limit)
    faulthandler.dump_traceback_later(limit + HARD, exit=True, file=nowhere)
    try:
        for module in modules:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(module)
    finally:
        faulthandler.cancel_dump_traceback_later()
        nowhere.close()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    _adopt()
if PRELOADED in os.environ:
    _import(*json.loads(os.environ.pop(PRELOADED)))
HEADS.ours  # noqa: B018 - found once here instead of in every worker
np.ones((4, 4)) @ np.ones((4, 4))  # BLAS makes its buffers at the first product
np.random.Generator(np.random.SFC64(0)).random()
gc.collect()
gc.freeze()
