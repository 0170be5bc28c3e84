"""What the live page costs a training: the same one with 20 pages open and with none, by turns, while `freewheel watch` runs."""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from benchmarks._common import ONE_THREAD, ROOT, Notebook, Row, bootstrap, number, rotated, spread, table

NAME = "watch_cost"
CLIENTS, MOST = 20, 0.01  # of the training's speed
SETTLE = 1.5  # seconds after clients came or left that do not count
WARM = 6.0  # seconds of training before the first window
LIMIT = 120.0  # seconds for a training to begin
CASES: Mapping[str, Sequence[str]] = {
    "16 that sleep 5 ms": ("--env.kind", "sleep", "--env.mean", "0.005", "--workers", "16"),
    "2 that compute 1 ms": ("--env.kind", "burn", "--env.mean", "0.001", "--workers", "2"),
}
COMMON = (
    "freewheel/Straggler-v0",
    "--mode",
    "continuous",
    "--envs-per-worker",
    "1",
    "--evals",
    "0",
    "--log-every",
    "0.25",
)


@contextmanager
def command(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A `freewheel` command of this tree in a process group of its own, ended by SIGINT."""
    env = os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)}
    with (folder / f"{words[0]}.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "freewheel", *words], cwd=folder, env=env, stdout=output, stderr=output, text=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Clients:
    """Pages that are open: they take what they are told, and count it."""

    def __init__(self, port: int, cookie: str, count: int) -> None:
        self.told = [0] * count
        self._ended, self._streams = False, []
        for _ in range(count):
            stream = socket.create_connection(("127.0.0.1", port), timeout=10)
            lines = ("GET /events?run=watched HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Cookie: {cookie}", "", "")
            stream.sendall("\r\n".join(lines).encode())
            self._streams.append(stream)
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        with selectors.DefaultSelector() as ready:
            for place, stream in enumerate(self._streams):
                ready.register(stream, selectors.EVENT_READ, place)
            while not self._ended:
                for key, _ in ready.select(0.2):
                    data = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                    self.told[key.data] += data.count(b"event: run\n")

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        for stream in self._streams:
            stream.close()


def newest(metrics: Path) -> dict[str, Any]:
    """The newest row."""
    with metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        row: dict[str, Any] = json.loads(file.read().split(b"\n")[-2])
    return row


def wait_for(found: Path, pattern: str) -> str:
    """What matches in a file, as soon as it does."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if found.is_file() and (match := re.search(pattern, found.read_text())):
            return match[0]
        time.sleep(0.05)
    raise SystemExit(f"{pattern} is not in {found}: {found.read_text() if found.is_file() else 'it is missing'}")


def enter(address: str) -> tuple[int, str]:
    """The port and the cookie of a page whose printed address is opened."""
    port = int(address.split(":")[2].partition("/")[0])
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", f"/?{address.partition('?')[2]}")
    cookie = connection.getresponse().headers["set-cookie"].partition(";")[0]
    connection.close()
    return port, cookie


def measure(notebook: Notebook, case: str, pairs: int, seconds: float) -> list[Row]:
    """Windows with and without clients by turns, in one training: first the one, then the other."""
    rows: list[Row] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        words = ("train", *COMMON, *CASES[case], "--minutes", "600", "--run", "watched")
        with command(folder, *words), command(folder, "watch", "--port", "0", "--no-open") as server:
            metrics = folder / "runs" / "watched" / "metrics.jsonl"
            wait_for(metrics, r"\n")
            port, cookie = enter(wait_for(folder / "watch.txt", r"http://\S+"))
            time.sleep(WARM)
            for pair in range(pairs):
                for clients in rotated((0, CLIENTS), pair):
                    row = window(metrics, server.pid, (port, cookie, clients), seconds)
                    rows.append(notebook.keep(row | {"case": case, "pair": pair}))
    return rows


def window(metrics: Path, server: int, pages: tuple[int, str, int], seconds: float) -> dict[str, Any]:
    """Rows produced a second with so many pages open, and what the server itself uses."""
    open_pages = Clients(*pages)
    try:
        time.sleep(SETTLE)
        process, before = psutil.Process(server), newest(metrics)
        used = sum(process.cpu_times()[:2])
        time.sleep(seconds)
        after, used = newest(metrics), sum(process.cpu_times()[:2]) - used
    finally:
        open_pages.close()
    rate = (after["produced"] - before["produced"]) / (after["wall_s"] - before["wall_s"])
    told = min(open_pages.told, default=None)
    about = {"clients": pages[2], "rows_per_s": rate, "server_cpu": used / seconds, "told": told}
    return about | {"server_mb": process.memory_info().rss / 1e6, "load": os.getloadavg()[0]}


def judge(notebook: Notebook, found: Mapping[str, Sequence[Row]]) -> None:
    header = (
        "environments",
        "rows/s, no page",
        f"{CLIENTS} pages",
        "cost",
        "95 % interval",
        "server, of a core",
        "server MB",
    )
    lines = []
    for case, rows in found.items():
        without, with_pages = ([row for row in rows if row["clients"] == clients] for clients in (0, CLIENTS))
        costs = [1 - b["rows_per_s"] / a["rows_per_s"] for a, b in zip(without, with_pages, strict=True)]
        cost, (low, high) = float(np.median(costs)), bootstrap(costs)
        rates = [spread([row["rows_per_s"] for row in part]) for part in (without, with_pages)]
        shares = f"{np.median([row['server_cpu'] for row in with_pages]):.2%}"
        memory = number(max(row["server_mb"] for row in rows))
        lines.append([case, *rates, f"{cost:.2%}", f"{low:.2%} .. {high:.2%}", shares, memory])
        notebook.judge(f"{case}: {CLIENTS} pages cost {cost:.2%} of the speed, at most {MOST:.0%}", cost <= MOST)
        told = min(row["told"] for row in with_pages)
        notebook.judge(
            f"{case}: every page was told what is new, at least {told} times in a window", told >= 1, exact=True
        )
    notebook.write(table(header, lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window")
    parser.add_argument("--quick", action="store_true", help="see that it works: nothing is kept and no figure counts")
    given = parser.parse_args()
    notebook = Notebook(NAME, f"What {CLIENTS} open pages cost a training", quick=given.quick)
    pairs, seconds = (1, 2.0) if given.quick else (given.pairs, given.seconds)
    cases = given.only[:1] if given.quick else given.only
    judge(notebook, {case: measure(notebook, case, pairs, seconds) for case in cases})
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
