"""Commands that start at once: forked from a process that has imported what they import, each in a session of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.places import ROOT

#: Reads commands and ids of processes to wait for, a line each; answers with ids and exit codes.
SERVER = """
import json, os, signal, sys
import torch, freewheel.run.trainer, freewheel.config.resolve, freewheel.cli.train, freewheel.learn.ppo, tests.support.stuck
from freewheel.__main__ import main
for line in sys.stdin:
    told = json.loads(line)
    if isinstance(told, int):
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(told, 0)[1])), flush=True)
        continue
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    os.setsid()
    os.chdir(told["folder"])
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["freewheel", *told["argv"]]
    sys.exit(main())
"""


class Command:
    """A command that runs."""

    def __init__(self, pid: int, folder: Path, server: subprocess.Popen[str]) -> None:
        self.pid, self.folder, self._server = pid, folder, server
        self.code: int | None = None

    def wait(self, limit: float) -> int:
        """The exit code; fails if it does not end in time."""
        if self.code is None:
            handle = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([handle], [], [], limit)
            finally:
                os.close(handle)
            assert ended, f"it has not ended within {limit:g} s"
            self.code = int(_ask(self._server, self.pid))
        return self.code

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()


class Server:
    """Starts commands."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @contextmanager
    def command(self, folder: Path, *argv: str) -> Iterator[Command]:
        """Killed if it has not ended."""
        pid = int(_ask(self._process, {"folder": str(folder), "argv": argv}))
        command = Command(pid, folder, self._process)
        try:
            yield command
        finally:
            if command.code is None:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                command.wait(10.0)


@contextmanager
def warm_server() -> Iterator[Server]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        yield Server(process)
        assert process.stdin is not None
        process.stdin.close()


def _ask(server: subprocess.Popen[str], what: object) -> str:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(what) + "\n")
    server.stdin.flush()
    return server.stdout.readline()
