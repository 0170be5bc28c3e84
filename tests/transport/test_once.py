"""An errand: its value, its error, or one clear line; and its process is gone."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from freewheel.errors import EnvError, SetupError, UsageError
from freewheel.transport.executors import call_in_process

LIMIT = 30.0


def one_line(error: BaseException) -> str:
    (line,) = str(error).splitlines()
    return line


def test_a_value_comes_back_from_another_process() -> None:
    here, given = os.getpid(), [1, 2, 3]
    value, there = call_in_process(lambda: (sum(given), os.getpid()), "a sum", LIMIT)
    assert value == 6
    assert there != here


def test_a_large_value_comes_back_whole() -> None:
    assert call_in_process(lambda: bytes(5_000_000), "many zeros", LIMIT) == bytes(5_000_000)


def test_an_error_of_ours_is_raised_here() -> None:
    def usage() -> None:
        raise UsageError("--num-envs must be positive, not 0")

    with pytest.raises(UsageError, match=r"^--num-envs must be positive, not 0$"):
        call_in_process(usage, "a question", LIMIT)

    def world() -> None:
        raise EnvError("lane 0 observed nan\nand more", "nan")

    with pytest.raises(EnvError) as caught:
        call_in_process(world, "a question", LIMIT)
    assert (caught.value.report, caught.value.cause) == ("lane 0 observed nan\nand more", "nan")


def test_any_other_error_ends_its_process() -> None:
    def fail() -> None:
        raise ValueError("boom")

    with pytest.raises(EnvError) as caught:
        call_in_process(fail, "the world", LIMIT)
    assert one_line(caught.value) == "the world ended its process (exit code 1)"


def test_a_death_is_told_in_one_line() -> None:
    with pytest.raises(EnvError) as caught:
        call_in_process(lambda: os.kill(os.getpid(), signal.SIGKILL), "the world", LIMIT)
    assert one_line(caught.value) == "the world ended its process (exit code -9)"


def test_an_errand_that_does_not_come_back_is_ended_in_time() -> None:
    def wait() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()

    began = time.monotonic()
    with pytest.raises(EnvError) as caught:
        call_in_process(wait, "the world", 0.3)
    assert one_line(caught.value) == "the world did not return within 0.3 s; is it waiting for something?"
    assert time.monotonic() - began < 5.0


def test_what_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(SetupError) as caught:
        call_in_process(lambda: lock, "the world", LIMIT)
    assert one_line(caught.value).startswith("the world cannot be pickled for another process (")
    assert one_line(caught.value).endswith("): pass an importable factory")


def test_a_value_that_cannot_be_sent_back_is_told() -> None:
    with pytest.raises(EnvError, match=r"^the world ended its process \(exit code 1\)$"):
        call_in_process(threading.Lock, "the world", LIMIT)
