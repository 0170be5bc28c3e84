"""The watchdog: acts for the main thread of a run while that thread is stuck.

It enforces the time-outs of environments in this process, and ends a run that does not end soon after a signal. It
saves what can be saved, writes the summary, and names a hanging environment with its seed, step and stack.

A Python thread checks every TICK. It cannot run while C code holds the interpreter lock; then a native thread
(_watch.c, if it was compiled) ends the process.
"""

from __future__ import annotations

import _thread
import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import NoReturn, Self

from freewheel.errors import FAILED, SIGNALLED, printable
from freewheel.files import disk
from freewheel.files.stdout import WHITE
from freewheel.rollout.call_state import (
    ALL,
    BEAT,
    CODE,
    ENDING,
    LANE,
    LIMITS,
    PHASE,
    SIGNAL,
    SIGNALS,
    SINCE,
    STEP,
    cells,
)  # fmt: skip
from freewheel.rollout.factory import Timeouts
from freewheel.rollout.kernel import compiled
from freewheel.run.stopping.exits import ExitCalled, lane_of
from freewheel.run.stopping.stop import END_SIGNALS, ClosingError, Endable, Stop, TimeUp
from freewheel.transport.clock import clock
from freewheel.transport.workers.call_tracker import CLOSE_LIMIT

TICK = 0.1  # seconds between two checks
PREPARE = 1.0  # seconds between two summaries for the native thread
GRACE = 3.0  # seconds after a signal until a hanging environment ends the run and an update is interrupted
LAST = 4.4  # seconds after a signal for the run to end, ...
SAVING = 15.0  # ... unless a save is in progress
SECOND = 0.3  # seconds after a second signal for the run to end
OVERTIME = 5.0  # the same after the run's time limit, for environments, hooks and updates; in seconds
EMERGENCY, HURRIED = 20.0, 0.3  # seconds to save and write the summary, and to write it only
PHASES = ("construct", "reset", "step")  # in the order of whereabouts.py, and part of option names (--step-timeout)

_watch, _prepare, _unwatch = compiled("watch", None), compiled("prepare", None), compiled("unwatch", None)


class Watchdog:
    """Supervises a run within a `with` block."""

    def __init__(self, stop: Stop, name: str, limits: Timeouts) -> None:
        self._stop, self._name, self._limits = stop, name, limits
        self._pid, self._runs_in = os.getpid(), threading.get_ident()
        self._held = ExitStack()
        self._over = False
        self._exit = os._exit
        self._asked: list[float] = []  # when signals came, by time.monotonic()
        self._cut = False  # the update was interrupted because it took too long
        self._own = 0  # expected signals that the watchdog itself sent
        self._call: tuple[int, ...] = ()  # the current call of an environment, ...
        self._seen = self._prepared = 0.0  # ... when it was first seen, and when a summary was last prepared
        self._earlier = 0  # the inode of an earlier session's summary; 0: none

    def __enter__(self) -> Self:
        cells[SINCE] = cells[SIGNAL] = cells[SIGNALS] = cells[ENDING] = cells[STEP] = 0
        cells[LANE] = ALL
        for phase, what in enumerate(PHASES):
            cells[LIMITS + phase] = int(1000 * getattr(self._limits, what))
        self._held.enter_context(clock)
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
            self._held.callback(faulthandler.disable)
        self._socket, theirs = socket.socketpair()
        self._held.enter_context(self._socket)
        self._held.enter_context(theirs)
        theirs.setblocking(False)
        self._socket.setblocking(False)
        self._wake = theirs
        if threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            self._held.callback(signal.set_wakeup_fd, before)
        os._exit = self._exit_called
        self._held.callback(setattr, os, "_exit", self._exit)
        if _watch is not None and not Watchdog._watched:
            _watch(cells, self._socket.fileno(), json.dumps(self._name)[1:-1])
            Watchdog._watched = self._compiled = True
        self._stop.prepare = self._attend
        self._thread = threading.Thread(target=self._watch, name="freewheel-watchdog", daemon=True)
        self._thread.start()
        return self

    _watched = False  # the native thread is in use; a process has only one
    _compiled = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over = True
        with suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._compiled and _unwatch is not None:
            _unwatch()
            Watchdog._watched = False
        self._held.close()

    def _exit_called(self, status: int) -> NoReturn:
        """Replaces os._exit while a run is watched: no environment or hook may end the run without a message."""
        if os.getpid() == self._pid and threading.get_ident() == self._runs_in:
            raise ExitCalled(status)
        self._exit(status)

    # ------------------------------------------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while not self._over:
            poller.poll(TICK * 1000)
            self._take_signals()
            cells[BEAT] += 1
            self._look()
            self._prepare()

    def _take_signals(self) -> None:
        with suppress(BlockingIOError):
            for number in self._socket.recv(64):
                if number in END_SIGNALS and self._own:
                    self._own -= 1
                elif number in END_SIGNALS:
                    cells[SIGNAL] = cells[SIGNAL] or number
                    cells[SIGNALS] += 1
                    self._asked.append(monotonic())

    def _look(self) -> None:
        stop, phase = self._stop, cells[PHASE]
        call = () if stop.over or not cells[SINCE] else (cells[SINCE], cells[LANE], cells[STEP])
        if call != self._call:
            self._call, self._seen = call, monotonic()
        stuck, limit = clock.age(self._seen) if call else 0.0, cells[LIMITS + phase] / 1000
        if limit and stuck > limit:
            self._end(self._where(f"within {limit:g} s", stack=True), FAILED, EMERGENCY)
        self._look_at_close()
        if not self._asked:
            self._look_at_the_time(call)
            return
        name, code, asked = signal.Signals(cells[SIGNAL]).name, SIGNALLED + cells[SIGNAL], clock.age(self._asked[0])
        if len(self._asked) > 1 and clock.age(self._asked[1]) > SECOND:
            self._end(f"ended at once by a second signal ({name})", code, HURRIED)
        elif call and min(stuck, asked) > GRACE:
            self._end(self._where(f"within {GRACE:g} s after {name}"), code, EMERGENCY)
        elif asked > LAST and not (stop.run is not None and stop.run.saving and asked < SAVING):
            self._end(f"the run did not end within {LAST:g} s after {name}", code, HURRIED)
        elif asked > GRACE and not call and not stop.over and not self._cut:
            self._cut, self._own = True, 1
            _thread.interrupt_main(signal.Signals(cells[SIGNAL]))

    def _look_at_the_time(self, call: tuple[int, ...]) -> None:
        """End a hook, environment call or update that still runs long after the run's time limit."""
        stop, when = self._stop, f"within {OVERTIME:g} s after the end of --minutes"
        late = stop.time_up < monotonic() and clock.age(stop.time_up) > OVERTIME
        if stop.hook and (late or stop.hook_s > stop.hook_limit):
            when = when if late else f"within {stop.hook_limit:g} s, and the training is over"
            self._end(f"the hook {stop.hook} did not return {when}{self._here()}", FAILED, EMERGENCY)
        if not late or stop.over or (stop.run is not None and stop.run.saving):
            return
        if call:
            self._end(self._where(when), FAILED, EMERGENCY)
        if not self._cut and stop.cuts:
            self._cut = True
            self._raise(TimeUp())

    def _look_at_close(self) -> None:
        """Give up on an environment of this process that hangs in close(): its work is done."""
        stuck = clock.age(self._stop.closing) if self._stop.closing else 0.0
        if stuck > 2 * CLOSE_LIMIT and self._stop.late is not None:
            self._end(f"{self._name} did not return from close()", FAILED, EMERGENCY)
        if stuck > CLOSE_LIMIT and self._stop.late is None:
            self._raise(ClosingError(f"{self._name} did not return from close() within {CLOSE_LIMIT:g} s"))

    def _raise(self, error: BaseException) -> None:
        """Raise an error in the thread of the run, even while it sleeps, if that thread handles signals."""
        if signal.getsignal(signal.SIGINT) == self._stop.ask:
            self._own, self._stop.late = 1, error
            signal.pthread_kill(self._runs_in, signal.SIGINT)

    def _here(self) -> str:
        """Describe the source line that the run is executing."""
        frame = sys._current_frames().get(self._runs_in)
        return "" if frame is None else f" (it is at {frame.f_code.co_filename}:{frame.f_lineno})"

    def _where(self, when: str, *, stack: bool = False) -> str:
        """Describe which environment does not return, and from which call."""
        frame = sys._current_frames().get(self._runs_in)
        lane = lane_of(frame)
        who, where = (self._name, "in a call") if lane is None else (lane.who, lane.where)
        where = "in its constructor" if cells[PHASE] == 0 else where
        told = f"{who} did not return {when} ({where})"
        if not stack or frame is None:
            return told
        lines = traceback.extract_stack(frame)
        ours = [index for index, line in enumerate(lines) if f"{os.sep}freewheel{os.sep}envs{os.sep}" in line.filename]
        theirs = "".join(traceback.format_list(lines[max(ours, default=-1) + 1 :])).rstrip()
        return f"{told}; --{PHASES[cells[PHASE]]}-timeout allows more. It was here:\n{theirs}"

    def _end(self, reason: str, code: int, patience: float) -> NoReturn:
        """Save what can be saved, write the summary and end the process."""
        cells[CODE], cells[ENDING] = code, int(1000 * patience) + 1
        if not self._compiled:
            faulthandler.dump_traceback_later(patience, exit=True)
        run = self._stop.run
        with suppress(BaseException):
            os.write(2, f"freewheel: {printable(reason, WHITE)}\n".encode())
        if run is not None:
            told = False
            with suppress(BaseException):
                told = run.emergency_end(reason, code, save=patience == EMERGENCY)
            with suppress(BaseException):
                if not told:
                    self._write_summary(run, reason, code)
        with suppress(BaseException):
            self._stop.leftovers.kill()
        with suppress(BaseException):
            sys.stdout.flush()
        self._exit(code)

    def _write_summary(self, run: Endable, reason: str, code: int) -> None:
        """Write the summary of a run that was ending by itself but has not written it."""
        path, known = run.last_known()
        if _file(path) != self._earlier:
            return
        failed = code == FAILED
        ended = "failed" if failed else f"interrupted ({signal.Signals(code - SIGNALLED).name})"
        summary = {
            **known,
            "ended": ended,
            "exit_code": code,
            "error": reason if failed else None,
            "problems": [reason],
        }
        disk.replace(path, json.dumps(summary, indent=2).encode())

    def _attend(self) -> None:
        """Note that a run has begun."""
        if self._stop.run is not None:
            self._earlier = _file(self._stop.run.last_known()[0])
        self._prepare()

    def _prepare(self) -> None:
        """Prepare a summary for the native thread, in case the interpreter lock is never released again."""
        run = self._stop.run
        if not self._compiled or _prepare is None or run is None or self._stop.over:
            return
        if monotonic() - self._prepared < PREPARE:
            return
        self._prepared = monotonic()
        with suppress(Exception):  # the run changes its state in the meantime
            path, summary = run.last_known()
            rest = json.dumps(
                {key: value for key, value in summary.items() if key not in ("exit_code", "ended", "error")}
            )
            _prepare(str(path), f"{path}.partial", rest[1:] + "\n")


def _file(path: Path) -> int:
    """Return the inode of a file; 0 if there is none. Every summary is a new file."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0
