"""The forkserver's last import: it imports what workers need and freezes all objects, so workers share their memory.

A process of an env that outlives its worker becomes a child of the forkserver, which kills it when it ends itself.

A module that raises, exits or takes too long is skipped: a worker imports it again, under supervision.
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

HARD = 1.0  # seconds after the limit until a hanging import ends the server
TRAINER_ENDS = 10.0  # seconds that a killed trainer may take to end after its pipes have closed
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl


def _adopt() -> None:
    """Become the parent of processes whose parent has ended, and kill them when this process ends. That end does not
    wait for threads and exit handlers that modules have left here. It also removes the temporary files of a killed
    trainer. Children of this process inherit none of this."""
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
    """Import these in `limit` seconds. C code that hangs despite the signal ends the server; the next skips them."""
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
