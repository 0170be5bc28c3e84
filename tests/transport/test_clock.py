"""The clock of time-outs: it stands still while this process is stopped, and does not depend on the time of day."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

import freewheel
from freewheel.transport import clock as module
from freewheel.transport._multiprocessing import server_pid
from freewheel.transport.clock import GAP, RETURN, Clock, Limit, Pause
from freewheel.transport.workers.heartbeats import STEP, Heartbeats, Stragglers
from tests.support import children
from tests.support.places import ROOT
from tests.transport.conftest import Pipe, Start

STOPPED = 0.8  # seconds
#: Waits under a limit, is stopped meanwhile, and then holds the interpreter for a while: once asleep, once busy.
SLEEPER = """
import ctypes, time
from freewheel.transport.clock import Limit, clock
with clock:
    began, limit = time.monotonic(), Limit(0.4)
    print("ready", flush=True)
    limit.wait(time.sleep)
    print(time.monotonic() - began, [pause.seconds for pause in clock.pauses])
    clock.pauses.clear()
    ctypes.PyDLL(None).usleep(1_500_000)
    time.sleep(0.2)
    print([pause.seconds for pause in clock.pauses])
"""


@pytest.mark.system
def test_a_limit_does_not_count_the_time_in_which_the_process_was_stopped() -> None:
    """A busy machine may add pauses of its own, which do not count either."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", SLEEPER], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED)
        process.send_signal(signal.SIGCONT)
        took, pauses = (ast.literal_eval(part) for part in process.stdout.readline().split(" ", 1))
        assert max(pauses) > STOPPED - 0.1
        assert took > sum(pauses) + 0.4 - 0.01
        held = ast.literal_eval(process.stdout.readline())
        assert max(held, default=0.0) < 1.4, "the process ran while its interpreter was held"


class Hands:
    """A clock whose time is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.clock = 100.0, Clock()
        monkeypatch.setattr(module, "monotonic", lambda: self.now)


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return Hands(monkeypatch)


@pytest.mark.parametrize(
    ("moment", "age", "slept"),
    [
        (90.0, 5.0 - RETURN, 5.0),  # before the pause of 92 to 97
        (92.0, 3.0 - RETURN, 5.0),
        (94.0, 3.0 - RETURN, 3.0),
        (97.0, 3.0 - RETURN, 0.0),
        (98.0, 2.0, 0.0),
    ],
)
def test_an_age_is_counted_without_pauses(hands: Hands, moment: float, age: float, slept: float) -> None:
    hands.clock.pauses.append(Pause(92.0, 97.0))
    assert hands.clock.age(moment) == pytest.approx(age)
    assert hands.clock.slept_since(moment) == pytest.approx(slept)


def test_a_pause_counts_before_the_thread_has_noticed_it(hands: Hands) -> None:
    hands.clock._thread = object()  # type: ignore[assignment] # it has not run since 95
    hands.clock._ticked = 95.0
    assert hands.clock.behind(hands.now)
    assert hands.clock.age(90.0) == pytest.approx(5.0)
    hands.clock._ticked = hands.now - GAP / 2
    assert hands.clock.age(90.0) == 10.0


def test_the_thread_runs_as_long_as_somebody_needs_it(hands: Hands) -> None:
    with hands.clock as outer:
        with outer:
            thread = outer._thread
        assert outer._thread is thread is not None
    assert hands.clock._thread is None
    assert not thread.is_alive()


def test_a_limit_asks_once_more_when_it_is_over(hands: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "clock", hands.clock)
    limit, asked = Limit(1.0), list[float]()

    def answer(seconds: float) -> bool:
        asked.append(seconds)
        hands.now += 0.6
        return len(asked) == 4

    assert not limit.wait(answer)
    assert asked == [module.LOOK, module.LOOK, 0.0]
    assert limit.wait(answer)


def test_a_pause_is_told_in_words() -> None:
    assert str(Pause(1.0, 3.34)) == "the machine or this run was stopped for 2.3 s; time-outs did not count that time"
    assert "stopped for 83 s;" in str(Pause(1.0, 84.2))


def test_workers_do_not_age_while_all_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    at = SimpleNamespace(monotonic_ns=lambda: 100 * 10**9)
    monkeypatch.setattr("freewheel.transport.workers.heartbeats.time", at)
    monkeypatch.setattr(module.clock, "pauses", [Pause(92.0, 99.0)])
    with closing(Heartbeats(2, 1)) as heartbeats:
        heartbeats.memory["since"][:] = 91 * 10**9, int(99.8e9)
        assert heartbeats.age().tolist() == pytest.approx([2.0 - RETURN, 0.2])


def test_nobody_is_called_slow_because_of_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three workers were stopped in a step, which they count as one of 8 s."""
    monkeypatch.setattr(module.clock, "pauses", [])  # tests before may have seen real ones
    with closing(Heartbeats(3, 1)) as heartbeats:
        times = np.zeros((3, 10), np.int64)
        slow = Stragglers(heartbeats, times)
        for turn in range(4):
            heartbeats.memory["steps"][:] += 100
            times[:, 0] += 100_000_000
            if turn == 2:
                monkeypatch.setattr(module.clock, "pauses", [Pause(time.monotonic() - 8.0, time.monotonic())])
                times[:2, 0] += 8_000_000_000
            heartbeats.enter(0, STEP)
            assert slow.slow() == []
        assert slow.mean_step() == pytest.approx(0.001, rel=1e-3)


def test_a_server_that_alone_was_stopped_goes_on(start: Start, pipe: Pipe) -> None:
    ours, theirs = pipe
    pid = server_pid()
    assert pid is not None
    with module.clock:
        os.kill(pid, signal.SIGSTOP)
        start(children.describe, theirs)
        assert ours.poll(20.0)
    assert psutil.Process(pid).status() != psutil.STATUS_STOPPED


CALLS = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now")


def keeps_the_time_of_day(source: str) -> list[int]:
    """Lines that compute with the time of day or keep it in a variable, from which durations come; writing it down is fine."""
    if not any(word in source for word in (*CALLS, "from time import")):  # most files: parsing takes long
        return []
    tree = ast.parse(source)
    suspects = (ast.BinOp, ast.Compare, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
    found = []
    for outer in ast.walk(tree):
        if isinstance(outer, suspects):
            inside = outer.value if isinstance(outer, ast.Assign | ast.AnnAssign | ast.NamedExpr) else outer
            calls = [inside] if isinstance(inside, ast.Call) else ast.walk(inside) if inside is outer else []
            found += [outer.lineno for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) in CALLS]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "time"]
    return found + [node.lineno for node in imports if {"time", "time_ns"} & {alias.name for alias in node.names}]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("began = time.time()", True),
        ("self.due: float = time.time()", True),
        ("left = due - time.time()", True),
        ("while time.time_ns() < due: pass", True),
        ("from time import time", True),
        ("age = (datetime.now() - began).seconds", True),
        ("about = {'saved': time.time()}", False),
        ("name = datetime.now().strftime('%H')", False),
        ("began = time.monotonic()", False),
    ],
)
def test_the_scan_finds_durations_by_the_time_of_day(line: str, found: bool) -> None:
    assert bool(keeps_the_time_of_day(line)) == found


def test_no_duration_comes_from_the_time_of_day() -> None:
    root = Path(freewheel.__file__).parent
    found = {str(file): lines for file in root.rglob("*.py") if (lines := keeps_the_time_of_day(file.read_text()))}
    assert found == {}
