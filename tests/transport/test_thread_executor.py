"""MakeExecutor: answers come in the order of the questions, beside whoever asked, and nothing is left when the room is."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import psutil
import pytest

from freewheel.core import Executor
from freewheel.errors import EnvError, FreewheelError
from freewheel.transport.executors import Executors, SerialExecutor, ThreadExecutor

LIMIT = 30.0
Kind = Literal["thread", "process"]
KINDS: tuple[Kind, ...] = ("thread", "process")


def doubler() -> Callable[[int], tuple[int, int]]:
    """Doubles, and counts; some numbers it does not like."""
    calls = 0

    def answer(question: int) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        if question == 13:
            raise EnvError("no luck", "nan")
        if question == 99:
            raise ValueError("99 is too much")
        return 2 * question, calls

    return answer


def answers(executor: Executor, count: int) -> list[Any]:
    found = list[Any]()
    deadline = time.monotonic() + LIMIT
    while len(found) < count:
        assert time.monotonic() < deadline, "no answer"
        if (answer := executor.result(0.1)) is not None:
            found.append(answer)
    return found


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("freewheel-")]


# ------------------------------------------------------------------------------------------------------------- of every kind


@pytest.mark.parametrize("kind", KINDS)
def test_questions_are_answered_in_their_order(kind: Kind) -> None:
    with Executors(kind, "cpu") as room:
        executor = room(doubler, "sums")
        assert (executor.busy, executor.result()) == (False, None)
        for question in (1, 2, 3):
            executor.submit(question)
            assert executor.busy
        assert answers(executor, 2) == [(2, 1), (4, 2)]
        assert executor.busy, "one is still to come"
        assert answers(executor, 1) == [(6, 3)]
        assert (executor.busy, executor.result()) == (False, None)


@pytest.mark.parametrize("kind", KINDS)
def test_our_own_errors_are_answers_and_it_goes_on(kind: Kind) -> None:
    with Executors(kind, "cpu") as room:
        executor = room(doubler, "sums")
        executor.submit(13)
        executor.submit(4)
        failed, fine = answers(executor, 2)
    assert isinstance(failed, EnvError)
    assert (str(failed), failed.cause, fine) == ("no luck", "nan", (8, 2))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("thread", "freewheel-sums failed with ValueError('99 is too much'); please report this"),
        ("process", "sums ended its process (exit code 1)"),
    ],
)
def test_any_other_error_is_told_too(kind: Kind, text: str) -> None:
    with Executors(kind, "cpu") as room:
        executor = room(doubler, "sums")
        executor.submit(99)
        (failed,) = answers(executor, 1)
        assert isinstance(failed, FreewheelError)
        assert str(failed) == text
        executor.submit(5)
        assert answers(executor, 1)[0][0] == 10


@pytest.mark.parametrize("kind", KINDS)
def test_each_clock_has_an_answerer_of_its_own(kind: Kind) -> None:
    with Executors(kind, "cpu") as room:
        one, other = room(doubler, "one"), room(doubler, "other")
        one.submit(1)
        one.submit(2)
        other.submit(7)
        assert answers(other, 1) == [(14, 1)]
        assert answers(one, 2) == [(2, 1), (4, 2)]


@pytest.mark.parametrize("asked", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_leaving_the_room_ends_what_was_made_in_it(kind: Kind, asked: int) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with Executors(kind, "cpu") as room:
        for executor in (room(doubler, "one"), room(doubler, "other")):
            for question in range(asked):
                executor.submit(question)
        if kind == "thread":
            assert sorted(threads()) == ["freewheel-one", "freewheel-other"]
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert not threads()
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert not [process for process in left if "multiprocessing" not in " ".join(process.cmdline())]


def test_what_a_process_does_happens_elsewhere() -> None:
    def where() -> Callable[[Any], int]:
        return lambda _: os.getpid()

    pids = set()
    for kind in KINDS:
        with Executors(kind, "cpu") as room:
            executor = room(where, "where")
            executor.submit(None)
            pids.add(answers(executor, 1)[0])
    assert len(pids) == 2
    assert os.getpid() in pids


# ------------------------------------------------------------------------------------------------------------------- threads


class Handshake:
    """An answerer that says that it is at work, and goes on when it is told to."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self.built, self.answered = list[str](), list[Any]()

    def build(self) -> Callable[[Any], Any]:
        self.built.append(threading.current_thread().name)
        return self

    def __call__(self, question: Any) -> Any:
        self.inside.set()
        assert self.go.wait(LIMIT)
        self.answered.append(question)
        return question


def test_a_thread_works_beside_whoever_asked() -> None:
    shake = Handshake()
    with Executors("thread", "cpu") as room:
        executor = room(shake.build, "model")
        assert not shake.built, "built before there was a question"
        executor.submit("first")
        assert shake.inside.wait(LIMIT)  # it is at work, and we are here
        assert (executor.busy, executor.result(), executor.result(0.01)) == (True, None, None)
        executor.submit("second")
        assert not shake.answered
        shake.go.set()
        assert answers(executor, 2) == ["first", "second"]
        assert not executor.busy
    assert shake.built == ["freewheel-model"]


def test_leaving_waits_for_the_answer_under_way_and_gives_up_the_others() -> None:
    shake = Handshake()
    executor = ThreadExecutor(shake.build, "model", "cpu")
    for question in ("first", "second", "third"):
        executor.submit(question)
    assert shake.inside.wait(LIMIT)
    leaving = threading.Thread(target=executor.close)
    leaving.start()
    assert executor._over.wait(LIMIT)
    assert leaving.is_alive(), "it left while an answer was under way"
    shake.go.set()
    leaving.join(LIMIT)
    assert not leaving.is_alive()
    assert not threads()
    assert shake.answered == ["first"]


def test_a_build_that_fails_is_told_and_tried_again() -> None:
    tries = list[int]()

    def build() -> Callable[[int], int]:
        tries.append(0)
        if len(tries) == 1:
            raise FreewheelError("not yet")
        return lambda question: -question

    with Executors("thread", "cpu") as room:
        executor = room(build, "model")
        for question in (1, 2, 3):
            executor.submit(question)
        failed, *fine = answers(executor, 3)
    assert str(failed) == "not yet"
    assert (fine, len(tries)) == ([-2, -3], 2)


# ------------------------------------------------------------------------------------------------------------------- in turn


def test_in_turn_an_answer_is_there_when_the_question_is() -> None:
    executor = SerialExecutor(doubler, "sums")
    assert executor.result() is None
    for question in (1, 2):
        executor.submit(question)
    assert not executor.busy
    assert [executor.result(), executor.result(), executor.result()] == [(2, 1), (4, 2), None]
    with pytest.raises(EnvError, match=r"^no luck$"):
        executor.submit(13)
