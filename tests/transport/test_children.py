"""What a child process does first: it leaves the caller's script and interrupts alone, and does not outlive its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from freewheel.transport.forkserver import ignore_interrupts, without_main
from tests.support.places import ROOT

TIED = """
import sys
from freewheel.transport.forkserver import tie
if {wait}:
    sys.stdin.readline()
tie({descriptor})
print("tied", flush=True)
while True:
    pass  # hung, and not asleep
"""


@contextmanager
def tied(descriptor: int, *, wait: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that ties itself to this descriptor, at once or when it is told to."""
    command = [sys.executable, "-c", TIED.format(descriptor=descriptor, wait=wait)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor]
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def pipe() -> Iterator[list[int]]:
    """The read end and the write end, closed in the end unless taken from the list."""
    ends = list(os.pipe())
    yield ends
    for end in ends:
        os.close(end)


def test_a_tied_process_is_killed_when_the_other_end_is_let_go(pipe: list[int]) -> None:
    with tied(pipe[0]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "tied\n"
        assert process.poll() is None
        os.close(pipe.pop())
        assert process.wait(timeout=5) == -signal.SIGKILL


def test_it_is_killed_too_if_that_was_before_it_tied_itself(pipe: list[int]) -> None:
    with tied(pipe[0], wait=True) as process:
        os.close(pipe.pop())
        out, _ = process.communicate("now\n", timeout=5)
        assert (out, process.returncode) == ("", -signal.SIGKILL)


def test_the_script_is_hidden_and_comes_back_whatever_happens() -> None:
    main = sys.modules["__main__"]
    before = {name: vars(main).get(name, "none") for name in ("__file__", "__spec__", "__name__")}
    assert "__file__" in vars(main)

    def start() -> None:
        with without_main():
            assert "__file__" not in vars(main)
            assert main.__spec__ is None
            assert main.__name__ == "__main__"
            raise RuntimeError("no more processes")

    with pytest.raises(RuntimeError):
        start()
    assert {name: vars(main).get(name, "none") for name in before} == before


def test_interrupts_are_ignored() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        ignore_interrupts()
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
