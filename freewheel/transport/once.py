"""Errand: one call in a process of its own, with a time limit; what it raises is raised here, whatever it does to itself."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from freewheel.errors import EnvError, FreewheelError, SetupError
from freewheel.transport import forkserver

Out = TypeVar("Out")


def ask(call: Callable[[], Out], what: str, limit: float, modules: Sequence[str] = ()) -> Out:
    """What `call` returns over there. `what` names the errand where it goes wrong; `modules` see forkserver.prepare."""
    try:
        blob = cloudpickle.dumps(call)
    except Exception as error:
        raise SetupError(f"{what} cannot be sent to another process ({error}): pass an importable factory") from error
    forkserver.prepare(modules)
    ours, theirs = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    leash = forkserver.Leash()
    process = leash.process(_run, blob, theirs, name="freewheel-errand")
    try:
        forkserver.start(process)
        theirs.close()
        if not connection.wait([ours], limit):
            raise EnvError(f"{what} did not come back within {limit:g} s; is it waiting for something?")
        answer = ours.recv_bytes()
    except EOFError:
        process.join(1.0)
        raise EnvError(f"{what} ended its process (exit code {process.exitcode})") from None
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        leash.close()
    result = cloudpickle.loads(answer)
    if isinstance(result, FreewheelError):
        raise result
    value: Out = result
    return value


def _run(blob: bytes, answer: Any) -> None:
    try:
        result: Any = cloudpickle.loads(blob)()
    except FreewheelError as error:
        result = error
    answer.send_bytes(cloudpickle.dumps(result))
