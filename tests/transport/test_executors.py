"""Executors: calls in another thread or process, in order; errors are results, and nothing is left running."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]
import psutil
import pytest

from freewheel.core import Executor
from freewheel.errors import EnvError, FreewheelError, SetupError, UsageError
from freewheel.transport import executors
from freewheel.transport.workers.call_tracker import CallTracker

LIMIT = 30.0
Kind = Literal["thread", "process"]
KINDS: tuple[Kind, ...] = ("thread", "process")


def doubler() -> Callable[[int], tuple[int, int]]:
    """Doubles, and counts its calls; some numbers make it fail."""
    calls = 0

    def double(number: int) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        if number == 13:
            raise EnvError("no luck", "nan")
        if number == 99:
            raise ValueError("99 is too much")
        if number == 666:
            os._exit(7)
        return 2 * number, calls

    return double


def results(executor: Executor, count: int) -> list[Any]:
    found = list[Any]()
    deadline = time.monotonic() + LIMIT
    while len(found) < count:
        assert time.monotonic() < deadline, "no result"
        if (result := executor.result(0.1)) is not None:
            found.append(result)
    return found


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("freewheel-")]


def counter() -> Callable[[int], Generator[None, None, int]]:
    """Counts up to a number, and can be interrupted at each."""

    def count(number: int) -> Generator[None, None, int]:
        done = 0
        while done < number:
            done += 1
            time.sleep(0.001)
            yield
        return done

    return count


ENDLESS = 10**9


class EnoughError(Exception): ...


def test_a_call_in_turn_is_interrupted_where_it_yields() -> None:
    looks = list[int]()

    def look() -> None:
        looks.append(0)
        if len(looks) == 8:
            raise EnoughError

    executor = executors.SerialExecutor(counter, "numbers", look)
    executor.submit(3)
    assert (executor.result(), len(looks)) == (3, 3)
    with pytest.raises(EnoughError):
        executor.submit(ENDLESS)
    assert (executor.result(), len(looks)) == (None, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_returns_its_result_and_is_not_waited_for_at_the_end(kind: Kind) -> None:
    with executors.Executors(kind, "cpu") as make:
        executor = make(counter, "numbers")
        executor.submit(5)
        assert results(executor, 1) == [5]
        executor.submit(ENDLESS)
        assert executor.result(0.05) is None
        began = time.monotonic()
    assert time.monotonic() - began < LIMIT
    assert not threads()


@pytest.mark.parametrize("kind", KINDS)
def test_results_come_in_the_order_of_the_calls(kind: Kind) -> None:
    with executors.Executors(kind, "cpu") as make:
        executor = make(doubler, "sums")
        assert (executor.busy, executor.result()) == (False, None)
        for number in (1, 2, 3):
            executor.submit(number)
            assert executor.busy
        assert results(executor, 2) == [(2, 1), (4, 2)]
        assert executor.busy, "one is still to come"
        assert results(executor, 1) == [(6, 3)]
        assert (executor.busy, executor.result()) == (False, None)


@pytest.mark.parametrize(
    ("kind", "number", "text", "calls"),
    [
        *((kind, 13, "no luck", 2) for kind in KINDS),
        ("thread", 99, "freewheel-sums failed with ValueError('99 is too much'); please report this", 2),
        ("process", 99, "sums ended its process (exit code 1)", 1),  # which is replaced
        ("process", 666, "sums ended its process (exit code 7)", 1),
    ],
)
def test_errors_are_results_and_later_calls_work(kind: Kind, number: int, text: str, calls: int) -> None:
    with executors.Executors(kind, "cpu") as make:
        executor, other = make(doubler, "sums"), make(doubler, "others")
        other.submit(7)
        executor.submit(number)
        (failed,) = results(executor, 1)
        assert isinstance(failed, FreewheelError)
        assert str(failed) == text
        assert number != 13 or (isinstance(failed, EnvError) and failed.cause == "nan")
        executor.submit(5)
        assert results(executor, 1) == [(10, calls)]
        assert results(other, 1) == [(14, 1)], "each has its own function"


@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_leaving_ends_all_executors(kind: Kind, calls: int) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with executors.Executors(kind, "cpu") as make:
        for executor in (make(doubler, "one"), make(doubler, "other")):
            for number in range(calls):
                executor.submit(number)
        if kind == "thread":
            assert sorted(threads()) == ["freewheel-one", "freewheel-other"]
        began = time.monotonic()
    assert time.monotonic() - began < LIMIT
    assert not threads()
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert not [process for process in left if "multiprocessing" not in " ".join(process.cmdline())]


class Handshake:
    """A function that signals when it is called, and returns when the test allows it."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self.built, self.finished = list[str](), list[Any]()

    def build(self) -> Callable[[Any], Any]:
        self.built.append(threading.current_thread().name)
        return self

    def __call__(self, argument: Any) -> Any:
        self.inside.set()
        assert self.go.wait(LIMIT)
        self.finished.append(argument)
        return argument


def test_a_thread_works_beside_its_caller() -> None:
    shake = Handshake()
    with executors.Executors("thread", "cpu") as make:
        executor = make(shake.build, "model")
        assert not shake.built, "built before the first call"
        executor.submit("first")
        assert shake.inside.wait(LIMIT)
        assert (executor.busy, executor.result(), executor.result(0.01)) == (True, None, None)
        executor.submit("second")
        assert not shake.finished
        shake.go.set()
        assert results(executor, 2) == ["first", "second"]
        assert not executor.busy
    assert shake.built == ["freewheel-model"]


def test_closing_waits_for_the_running_call_and_drops_the_others() -> None:
    shake = Handshake()
    executor = executors.ThreadExecutor(shake.build, "model", "cpu")
    for argument in ("first", "second", "third"):
        executor.submit(argument)
    assert shake.inside.wait(LIMIT)
    later = threading.Timer(0.3, shake.go.set)
    later.start()
    executor.close()
    assert shake.go.is_set(), "it did not wait for the running call"
    later.join()
    assert not threads()
    assert shake.finished == ["first"]


def test_a_build_that_fails_is_reported_and_repeated() -> None:
    tries = list[int]()

    def build() -> Callable[[int], int]:
        tries.append(0)
        if len(tries) == 1:
            raise FreewheelError("not yet")
        return lambda number: -number

    with executors.Executors("thread", "cpu") as make:
        executor = make(build, "model")
        for number in (1, 2, 3):
            executor.submit(number)
        failed, *fine = results(executor, 3)
    assert str(failed) == "not yet"
    assert (fine, len(tries)) == ([-2, -3], 2)


def test_a_serial_executor_has_the_result_after_submit() -> None:
    executor = executors.SerialExecutor(doubler, "sums")
    assert executor.result() is None
    for number in (1, 2):
        executor.submit(number)
    assert not executor.busy
    assert [executor.result(), executor.result(), executor.result()] == [(2, 1), (4, 2), None]
    with pytest.raises(EnvError, match=r"^no luck$"):
        executor.submit(13)


def test_a_value_comes_from_another_process() -> None:
    here, given = os.getpid(), [1, 2, 3]
    value, there = executors.call_in_process(lambda: (sum(given), os.getpid()), "a sum", LIMIT)
    assert value == 6
    assert there != here
    assert executors.call_in_process(lambda: bytes(5_000_000), "many zeros", LIMIT) == bytes(5_000_000)


@pytest.mark.parametrize(
    "error", [UsageError("--num-envs must be positive, not 0"), EnvError("lane 0 observed nan\nand more", "nan")]
)
def test_our_own_errors_are_raised_in_the_caller(error: FreewheelError) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        executors.call_in_process(fail, "a question", LIMIT)
    assert caught.value.args == error.args


def fail() -> None:
    raise ValueError("boom")


def wait() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()


@pytest.mark.parametrize(
    ("call", "limit", "message"),
    [
        (fail, LIMIT, "the env ended its process (exit code 1)"),
        (threading.Lock, LIMIT, "the env ended its process (exit code 1)"),  # the value cannot be pickled
        (lambda: os.kill(os.getpid(), signal.SIGKILL), LIMIT, "the env ended its process (exit code -9)"),
        (wait, 0.3, "the env did not return within 0.3 s; is it waiting for something?"),
    ],
    ids=["raises", "value cannot be pickled", "dies", "hangs"],
)
def test_a_call_that_fails_is_reported_in_one_line(call: Callable[[], Any], limit: float, message: str) -> None:
    with pytest.raises(EnvError) as caught:
        executors.call_in_process(call, "the env", limit)
    assert str(caught.value) == message


def test_a_call_that_cannot_be_pickled_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(
        SetupError, match=r"^the env cannot be pickled for another process \(.*\): pass an importable factory$"
    ):
        executors.call_in_process(lambda: lock, "the env", LIMIT)


def test_a_result_that_nobody_waits_for_ends_the_process_quietly() -> None:
    """The trainer may have ended while the call was under way; a traceback of that would be its last words."""
    ours, theirs = multiprocessing.Pipe()
    place = CallTracker()
    ours.send_bytes(cloudpickle.dumps(21))
    ours.close()
    with closing(theirs), closing(place):
        executors._serve(cloudpickle.dumps(doubler), theirs, 0, place)  # raises nothing
    gc.unfreeze()
