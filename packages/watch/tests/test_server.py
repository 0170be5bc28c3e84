"""Tests of the server: everything first, then what is new, to many clients; those that do not read are dropped."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from freewheel.files.lock import FileLock
from freewheel_watch.curve import COLUMNS
from tests.support.watching import Page, add_rows, row, until, watch, worker, write_run, write_status

CLIENTS = 20
PIPES = ("metrics.jsonl", "config.json", "status.json", "timeline.json")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched") / "runs"
    for name in ("first", "second", "sweep-s1", "sweep-s2"):
        write_run(folder / name, [row(1), row(2), row(3)])
    (folder / "sweep-seeds.json").write_text("{}")
    write_run(folder / "slow", [row(count) for count in range(3000)])
    write_hostile(folder / "hostile")
    for name in PIPES:
        write_run(folder / f"pipe-{name}", [row(1)])
        (folder / f"pipe-{name}" / name).unlink(missing_ok=True)
        os.mkfifo(folder / f"pipe-{name}" / name)
    return folder


def write_hostile(path: Path) -> None:
    write_run(path, [{"wall_s": 1e999, "return_mean": "<b>", "dropped": [1], "env_steps": 2**80}])
    add_rows(path, [{"return_mean": {"a": 1}}, {"dropped": {"<i>": "x"}, "produced": True}])
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b"[]\nnot json\n" + b"[" * 5000 + b"\n\xff\xfe\n")
    (path / "status.json").write_text('{"format": 1, "workers": 3}')
    (path / "summary.json").write_text('{"error": 5, "problems": {"a": 1}, "produced": "many"}')
    (path / "targets.json").write_text("{}")


@pytest.fixture(scope="module")
def page(runs: Path) -> Iterator[Page]:
    with watch(runs) as page:
        page.enter()
        yield page


def test_a_new_client_is_told_all_and_then_what_is_new(page: Page, runs: Path) -> None:
    with page.events("first") as events:
        hello, listed, told = until(events, "hello"), until(events, "runs"), until(events, "run")
        assert hello["columns"] == list(COLUMNS)
        assert hello["words"]["shares"]["worker"]["step"]
        groups = {run["name"]: run["group"] for run in listed["runs"]}
        assert groups | {"first": None, "second": None, "sweep-s1": "sweep", "sweep-s2": "sweep"} == groups
        assert told["full"]
        assert [point[COLUMNS.index("env_steps")] for point in told["points"]] == [10, 20, 30]
        assert told["about"] | {"env": "CartPole-v1", "mode": "lockstep"} == told["about"]
        assert told["head"]["state"] == "gone"
        assert told["head"]["progress"] == 0.03
        assert told["ledger"] == {"produced": 30, "trained": 24, "queued": 3, "open": 0, "dropped": {"stale": 3}}
        tiles = {tile["name"]: tile for tile in told["tiles"]}
        assert tiles["return_mean"]["value"] == 3.0
        assert tiles["steps_per_s"]["value"] == 10.0
        add_rows(runs / "first", [row(4, eval_return=9.5)])
        new = until(events, "run")
        assert not new["full"]
        assert [point[0] for point in new["points"]] == [4.0]
        assert [point[0] for point in new["recent"]] == [4.0]
        assert {tile["name"]: tile["value"] for tile in new["tiles"]}["eval_return"] == 9.5
        assert "about" not in new  # it has not changed


def test_who_compares_a_run_is_told_its_curve_alone(page: Page) -> None:
    with page.events("first", "second") as events:
        told = until(events, "run", lambda told: told["name"] == "second")
    assert len(told["points"]) == 3
    assert told["head"]["state"] == "gone"
    assert not {"tiles", "workers", "recent", "ledger"} & set(told)


def test_rows_that_a_resume_cuts_back_vanish(page: Page, runs: Path) -> None:
    path = runs / "second" / "metrics.jsonl"
    with page.events("second") as events:
        until(events, "run")
        path.write_text("".join(json.dumps(one) + "\n" for one in (row(1), row(2, return_mean=-7.0))))
        told = until(events, "run")
    assert told["full"]
    assert [point[COLUMNS.index("return_mean")] for point in told["points"]] == [1.0, -7.0]


def test_messages_are_told_the_newest_first(page: Page, runs: Path) -> None:
    told = [{"time": 1.0, "wall_s": 2.0, "text": f"message {count}"} for count in range(50)]
    lines = [json.dumps(one) for one in told]
    (runs / "first" / "messages.jsonl").write_text("\n".join([*lines, '{"text": 3}', "{", "[]", "half"]))
    with page.events("first") as events:
        found = until(events, "run", lambda told: told.get("messages"))["messages"]
    assert [one["text"] for one in found] == [f"message {count}" for count in range(49, 19, -1)]
    assert found[0]["wall_s"] == 2.0


def test_a_timeline_is_handed_on_where_there_is_one(page: Page, runs: Path) -> None:
    with page.events("first") as events:
        assert until(events, "run")["timeline"] is None
        assert page.get("/timeline?run=first").status == 404
        drawn = {"format": 1, "kinds": ["step"], "rows": [], "seconds": 1.0}
        (runs / "first" / "timeline.json").write_text(json.dumps(drawn))
        assert until(events, "run", lambda told: told.get("timeline"))
        answer = page.get("/timeline?run=first")
        assert answer.headers["content-type"] == "application/json"
        assert json.loads(answer.text) == drawn
        (runs / "first" / "timeline.json").unlink()
        (runs / "first" / "timeline.json").symlink_to("/etc/hostname")
        assert page.get("/timeline?run=first").status == 404
        (runs / "first" / "timeline.json").unlink()


@pytest.mark.parametrize("name", ["hostile", *(f"pipe-{name}" for name in PIPES)])
def test_damaged_and_hostile_files_do_not_end_it_and_no_pipe_is_waited_for(page: Page, name: str) -> None:
    with page.events(name) as events:
        told = until(events, "run")
    assert told["name"] == name
    assert told["ledger"] is None or name != "hostile"
    assert page.get("/").status == 200


def test_twenty_clients_are_told_the_same_and_the_run_is_read_once(page: Page, runs: Path) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(page.events("sweep-s1")) for _ in range(CLIENTS)]
        for events in streams:
            assert len(until(events, "run")["points"]) == 3
        assert len([file.path for file in psutil.Process(page.process.pid).open_files() if "metrics" in file.path]) <= 1
        add_rows(runs / "sweep-s1", [row(4)])
        for events in streams:
            assert [point[0] for point in until(events, "run")["points"]] == [4.0]


def test_a_client_that_reads_nothing_is_dropped_and_the_others_go_on(page: Page, runs: Path) -> None:
    slow = runs / "slow"
    with page.raw_events("slow", buffer=4096), page.events("slow") as events:
        until(events, "run")
        memory = psutil.Process(page.process.pid).memory_info().rss
        for count in range(3):
            text = "".join(json.dumps(row(n, return_mean=count)) + "\n" for n in range(3000))
            (slow / "metrics.jsonl").write_text(text)
            new = 0
            while new < 3000:  # the file may be read before all of it is written
                told = until(events, "run")
                new = (0 if told["full"] else new) + sum(point[2] == count for point in told["points"])
            assert new == 3000
        assert psutil.Process(page.process.pid).memory_info().rss < memory + (50 << 20)


def test_it_reads_and_never_writes(page: Page, runs: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    with page.events("first", "second", "sweep-s1") as events:
        until(events, "run")
    page.get("/timeline?run=first")
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_workers_of_a_training_are_told_and_a_trainer_that_says_nothing_is_silent(page: Page, runs: Path) -> None:
    states = [("step", None), ("wait-credit", None), ("step", 3.0), ("down", 0.5), ("step", 99.0)]
    with FileLock(runs / "sweep-s2" / ".lock"):
        write_status(runs / "sweep-s2", [worker(k, state, died_s=died) for k, (state, died) in enumerate(states)])
        with page.events("sweep-s2") as events:
            told = until(events, "run", lambda told: told["workers"])
        assert told["head"]["state"] == "running"
        assert [bool(one["alert"]) for one in told["workers"]] == [False, False, True, True, False], "one that died"
        assert told["workers"][1]["waits_for"] == "the learner"
        assert told["learner"][0]["doing"] == "wait-data"
        write_status(runs / "sweep-s2", [worker(0)], age=60.0)
        with page.events("sweep-s2") as events:
            told = until(events, "run", lambda told: told["head"]["state"] != "running")
    assert told["head"]["state"] == "silent"
    assert "stopped" in told["head"]["why"]


def connected(stack: ExitStack, page: Page, begin: bytes) -> socket.socket:
    """Open a connection that has sent only this part of a request."""
    link = stack.enter_context(socket.socket())
    link.settimeout(20.0)
    link.connect(("127.0.0.1", page.port))
    link.sendall(begin)
    return link


def until_closed(link: socket.socket, limit: float = 20.0) -> bool:
    """Return whether the connection is closed while a byte is sent now and then."""
    began = time.monotonic()
    with suppress(OSError):
        while time.monotonic() < began + limit:
            link.sendall(b"X")
            time.sleep(0.05)
        return False
    return True


HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.system
def test_connections_without_a_whole_request_are_closed_and_keep_nobody_out(page: Page) -> None:
    """The test opens 1,100 connections at once, which is more than the usual limit of open files."""
    server = psutil.Process(page.process.pid)
    with ExitStack() as stack, page.events("first") as events:
        until(events, "run")
        links = [connected(stack, page, HALF if number % 2 else b"") for number in range(1100)]
        assert page.get("/").status == 200
        until(events, "alive")
        assert server.num_fds() < 300
        assert until_closed(connected(stack, page, HALF))  # single bytes do not make a whole request
        assert page.get("/").status == 200
        for link in links:
            with pytest.raises((ConnectionError, AssertionError)):
                assert link.recv(1)


@pytest.mark.system
def test_a_shortage_of_files_is_told_in_a_line_and_passes(runs: Path) -> None:
    with watch(runs, errors=True) as page, ExitStack() as stack:
        page.enter()
        most = psutil.Process(page.process.pid).num_fds() + 3
        resource.prlimit(page.process.pid, resource.RLIMIT_NOFILE, (most, most))
        links = [connected(stack, page, HALF) for _ in range(20)]
        assert page.process.stderr is not None
        told = page.process.stderr.readline()
        assert told.startswith("freewheel: new pages have to wait, Too many open files: "), told
        for link in links:
            link.close()
        assert page.get("/").status == 200
        page.process.terminate()
        assert "Traceback" not in page.process.stderr.read()
