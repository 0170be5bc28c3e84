"""Child processes for tests: forked from the forkserver, killed when the test is over."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # child processes import tests.support.children
    sys.path.append(str(ROOT))

from freewheel.transport import forkserver  # noqa: E402

LIMIT = 20.0  # seconds for anything that these tests wait for, on a busy machine
Pipe: TypeAlias = tuple[Connection, Connection]


class Start(Protocol):
    def __call__(self, target: Callable[..., None], *args: Any) -> ForkServerProcess: ...


@pytest.fixture(scope="session", autouse=True)
def prepared() -> None:
    forkserver.prepare(["tests.support.children"])


@pytest.fixture
def start(prepared: None) -> Iterator[Start]:
    lifeline = forkserver.Lifeline()
    processes: list[ForkServerProcess] = []

    def run(target: Callable[..., None], *args: Any) -> ForkServerProcess:
        process = lifeline.process(target, *args, name=f"test-{target.__name__}")
        forkserver.start(process)
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.join(LIMIT)
        process.close()
    lifeline.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """The receiving end and the sending end."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        yield ours, theirs
