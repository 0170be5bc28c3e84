"""ProcessExecutor: questions answered one after the other in another process, whatever becomes of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from freewheel.errors import EnvError, FreewheelError
from freewheel.transport.executors import ProcessExecutor

LIMIT = 30.0


def doubler() -> Callable[[int], tuple[int, int]]:
    calls = 0

    def answer(question: int) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        if question == 13:
            raise EnvError("no luck", "nan")
        if question == 666:
            os._exit(7)
        return 2 * question, calls

    return answer


def answers(executor: ProcessExecutor[int, tuple[int, int]], count: int) -> list[tuple[int, int] | FreewheelError]:
    found: list[tuple[int, int] | FreewheelError] = []
    deadline = time.monotonic() + LIMIT
    while len(found) < count:
        assert time.monotonic() < deadline, "no answer"
        if (answer := executor.result(0.1)) is not None:
            found.append(answer)
    return found


def test_questions_wait_their_turn() -> None:
    with ProcessExecutor(doubler, "sums") as executor:
        assert not executor.busy
        for question in (1, 2, 3):
            executor.submit(question)
        assert executor.busy
        assert answers(executor, 3) == [(2, 1), (4, 2), (6, 3)]
        assert not executor.busy
        assert executor.result() is None


def test_what_it_raises_is_the_answer_and_it_goes_on() -> None:
    with ProcessExecutor(doubler, "sums") as executor:
        for question in (13, 4):
            executor.submit(question)
        failed, fine = answers(executor, 2)
    assert isinstance(failed, EnvError)
    assert (str(failed), failed.cause, fine) == ("no luck", "nan", (8, 2))


def test_a_process_that_dies_is_named_and_replaced() -> None:
    with ProcessExecutor(doubler, "sums") as executor:
        executor.submit(666)
        (died,) = answers(executor, 1)
        assert str(died) == "sums ended its process (exit code 7)"
        executor.submit(5)
        assert answers(executor, 1) == [(10, 1)]


@pytest.mark.parametrize("asked", [0, 1])
def test_leaving_leaves_nothing(asked: int) -> None:
    def sleeper() -> Callable[[int], None]:
        return lambda _: time.sleep(600)

    with ProcessExecutor(sleeper, "sleep") as executor:
        for question in range(asked):
            executor.submit(question)
        began = time.monotonic()
    assert time.monotonic() - began < 5
