"""`freewheel watch` in a process of its own, and requests to it over a real socket."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from freewheel.metrics.workers import WorkerState
from freewheel.run.live.status import boot
from tests.support.places import ROOT

LIMIT = 20.0  # seconds


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    text: str


class Page:
    """The server of a page. `enter` exchanges the token for the cookie that `get` then sends."""

    def __init__(self, address: str, process: subprocess.Popen[str]) -> None:
        self.address, self.process = address, process
        self.port = urlsplit(address).port or 0
        self.cookie = ""

    def get(self, path: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
        """One request; `headers` replace the usual ones."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        try:
            sent = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie} if headers is None else headers
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read().decode())
        finally:
            connection.close()

    def enter(self) -> Answer:
        answer = self.get(f"/?{urlsplit(self.address).query}", headers={"Host": f"127.0.0.1:{self.port}"})
        self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return answer

    @contextmanager
    def events(self, *runs: str) -> Iterator[Iterator[tuple[str, Any]]]:
        """What the server tells of these runs: (kind, value)."""
        with self.raw_events(*runs) as stream, stream.makefile("rb") as file:
            yield _events(file)

    @contextmanager
    def raw_events(self, *runs: str, buffer: int = 0) -> Iterator[socket.socket]:
        stream = socket.socket()
        if buffer:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        with stream:
            stream.settimeout(LIMIT)
            stream.connect(("127.0.0.1", self.port))
            asked = urlencode([("run", name) for name in runs])
            lines = (f"GET /events?{asked} HTTP/1.1", f"Host: localhost:{self.port}", f"Cookie: {self.cookie}", "", "")
            stream.sendall("\r\n".join(lines).encode())
            yield stream


def _events(file: Any) -> Iterator[tuple[str, Any]]:
    kind = ""
    for line in file:  # among them the lengths of HTTP's chunks, which are of no interest
        text = line.decode().rstrip("\r\n")
        if text.startswith("event: "):
            kind = text.removeprefix("event: ")
        elif text.startswith("data: "):
            yield kind, json.loads(text.removeprefix("data: "))


def until(events: Iterator[tuple[str, Any]], kind: str, fits: Any = lambda told: True, limit: float = LIMIT) -> Any:
    """The first value of this kind that fits."""
    deadline = time.monotonic() + limit
    for found, told in events:
        if found == kind and fits(told):
            return told
        assert time.monotonic() < deadline, f"no {kind} as it should be within {limit:g} s"
    raise AssertionError("the server has ended the events")


QUICK = """
import sys
from freewheel.cli.main import main
from freewheel_watch import hub, server
server.WHOLE = 2.0
hub.LOOK, hub.POLL, hub.LIST, hub.LIST_SHARE = 0.02, 0.1, 0.1, 1.0
sys.exit(main())
"""


@contextmanager
def watch(runs: Path, *argv: str, quick: bool = True, errors: bool = False) -> Iterator[Page]:
    """`freewheel watch` of a directory of runs, ended by Ctrl-C. quick: it looks at its files more often than it usually does."""
    program = ["-c", QUICK] if quick else ["-m", "freewheel"]
    command = [sys.executable, *program, "watch", *argv, "--runs-dir", str(runs), "--port", "0", "--no-open"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE if errors else None}
    with subprocess.Popen(command, **pipes, text=True, env=env, cwd=runs.parent) as process:
        try:
            assert process.stdout is not None
            found = next((match for line in process.stdout if (match := re.search(r"http://\S+", line))), None)
            assert found is not None, "it has printed no address"
            yield Page(found[0], process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


class Workers:
    """As much of a collector as a status asks. Implements metrics.workers.ObservedCollector."""

    def __init__(self, *states: WorkerState) -> None:
        self.states = list(states)

    def workers(self) -> list[WorkerState]:
        return self.states

    def stats(self) -> dict[str, float | None]:
        return {"queue_util": 0.25, "queue/fragments": 5.0}


def write_run(path: Path, rows: list[dict[str, Any]], **config: Any) -> Path:
    """A run directory with these rows, as its trainer would have left it when it was killed."""
    path.mkdir(parents=True)
    about = {"env": "CartPole-v1", "algo": "ppo", "mode": "lockstep", "seed": 0, "num_envs": 2, "steps": 1000}
    (path / "config.json").write_text(json.dumps(about | config))
    add_rows(path, rows)
    return path


def add_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]


def row(number: int, **values: Any) -> dict[str, Any]:
    """The number-th row of a run that makes ten steps a second."""
    counts = {"produced": 10 * number, "trained": 8 * number, "queued": number, "open": 0, "dropped": {"stale": number}}
    times = {"time/worker_step": 0.75, "time/worker_other": 0.25, "time/learner_update": 0.4, "time/learner_other": 0.6}
    scores = {"return_mean": float(number), "return_episodes": 10, "eval_return": None, "steps_per_s": 10.0}
    return {"wall_s": float(number), "env_steps": 10 * number, "episodes": number} | scores | counts | times | values


def worker(number: int, state: str = "step", **values: Any) -> dict[str, Any]:
    """A worker as status.json has it."""
    waits = "the learner" if state.startswith("wait") else None
    about = {"since_s": 0.01, "steps": 100 + number, "steps_per_s": 30.0 + number, "restarts": 0, "pid": 1000 + number}
    return {"worker": number, "state": state, **about, "lane": number, "seed": number, "waits_for": waits, **values}


def write_status(path: Path, workers: list[dict[str, Any]], age: float = 0.0) -> None:
    """The status of a trainer that runs, written so many seconds ago."""
    learner = {"doing": "wait-data", "since_s": 0.2, "waits_for": "rows of the environments"}
    about = {"format": 1, "pid": os.getpid(), "run": path.name, "env": "CartPole-v1", "wall_s": 3.0}
    about |= {"time": time.time() - age, "boot": boot(), "clock": time.monotonic() - age}
    counts = {"env_steps": 30, "episodes": 3, "updates": 1, "best_eval": 4.5, "log_every": 1.0, "state": "running"}
    parts = {"learner": learner, "queue": {"fragments": 2.0, "util": 0.5}, "evaluator": None, "workers": workers}
    (path / "status.json").write_text(json.dumps(about | counts | parts))
