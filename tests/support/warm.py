"""Commands that start at once: forked from a process that has imported what they import, each in a session of its own."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
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
    sys.path[0] = told["folder"]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, name in ((1, told["output"] + "out"), (2, told["output"] + "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["freewheel", *told["argv"]]
    sys.exit(main())
"""


class Command:
    def __init__(self, pid: int, folder: Path, output: str, server: Server) -> None:
        self.pid, self.folder, self._output, self._server = pid, folder, output, server
        self.code: int | None = None

    def ended(self, limit: float = 0.0) -> bool:
        """Whether it ends within so many seconds."""
        if self.code is None:
            handle = os.pidfd_open(self.pid)
            try:
                if select.select([handle], [], [], limit)[0]:
                    self.code = int(self._server.ask(self.pid))
            finally:
                os.close(handle)
        return self.code is not None

    def wait(self, limit: float) -> int:
        """The exit code; fails if it does not end in time."""
        assert self.ended(limit), f"it has not ended within {limit:g} s"
        assert self.code is not None, "it has ended"
        return self.code

    @property
    def out(self) -> str:
        return Path(f"{self._output}out").read_text()

    @property
    def err(self) -> str:
        return Path(f"{self._output}err").read_text()


class Server:
    """Starts commands, for any number of threads."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self._lock = process, threading.Lock()

    def ask(self, what: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline()

    @contextmanager
    def command(self, folder: Path, *argv: str, prefix: str = "") -> Iterator[Command]:
        """In this folder; its output is in the files `out` and `err` there, whose names begin with `prefix`. Killed if it has
        not ended."""
        folder.mkdir(parents=True, exist_ok=True)
        output = str(folder / prefix) if prefix else f"{folder}/"
        pid = int(self.ask({"folder": str(folder), "argv": argv, "output": output}))
        command = Command(pid, folder, output, self)
        try:
            yield command
        finally:
            if command.code is None:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                command.wait(60.0)


@contextmanager
def warm_server() -> Iterator[Server]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        yield Server(process)
        assert process.stdin is not None
        process.stdin.close()


@cache
def shared_server() -> Server:
    """The one of this process, for all tests: it takes seconds to start. It ends with the process."""
    running = ExitStack()
    atexit.register(running.close)
    return running.enter_context(warm_server())
