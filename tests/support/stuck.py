"""An environment that gets stuck, ends its process or leaves one behind, when and how it is told; never while it is measured."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tests.support.worlds import Counter

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Stuck(Counter):
    """Once, in the `at`-th call of this kind by the instance number `only` of this process, counted from 0, or a later one."""

    made = 0

    def __init__(
        self,
        how: str = "sleeps",
        call: Literal["construct", "reset", "step", "close"] = "step",
        only: int = 0,
        at: int = 11,
    ) -> None:
        super().__init__(length=8)
        self.how, self.kind, self.at, self.calls = how, call, at, 0
        self.mine = Stuck.made >= only and multiprocessing.parent_process() is None
        Stuck.made += 1
        if call == "construct" and self.mine:
            self.act()

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        answer = super().reset(**options)
        self.count_call("reset")
        return answer

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count_call("step")
        return super().step(action)

    def close(self) -> None:
        self.count_call("close")

    def count_call(self, kind: str) -> None:
        if self.mine and kind == self.kind:
            self.calls += 1
            if self.calls == self.at:
                self.act()

    def act(self) -> None:
        Path("stuck").touch()
        ACTS[self.how]()


def sleep(*, stubborn: bool = False) -> None:
    while True:
        try:
            time.sleep(600)
        except BaseException:
            if not stubborn:
                raise


def lock_twice(library: ctypes.CDLL) -> None:
    """A wait that no signal interrupts."""
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def interrupt() -> None:
    raise KeyboardInterrupt


def start() -> None:
    started = subprocess.Popen(SLEEP, start_new_session=True)
    Path("started").write_text(str(started.pid))


ACTS: dict[str, Callable[[], object]] = {
    "sleeps": sleep,
    "stubborn": partial(sleep, stubborn=True),
    "in C": partial(lock_twice, ctypes.CDLL(None)),
    "in C with the lock": partial(lock_twice, ctypes.PyDLL(None)),
    "os._exit": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(0),
    "raises": interrupt,
    "segv": lambda: ctypes.string_at(0),
    "chdir": lambda: os.chdir("/"),
    "starts": start,
}


class Parent(Counter):
    """Starts two processes, one of them in a session of its own, and never ends them."""

    def __init__(self) -> None:
        super().__init__(length=8)
        Path("started").mkdir(exist_ok=True)
        for alone in (False, True):
            started = subprocess.Popen(SLEEP, start_new_session=alone)
            Path("started", str(started.pid)).touch()
