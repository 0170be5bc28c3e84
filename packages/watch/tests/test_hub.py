"""Tests of the clients of the hub. Their waiting messages are bounded, and they report their end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from freewheel.files.lock import FileLock
from freewheel_watch import hub
from freewheel_watch.hub import BACKLOG, MOST_CLIENTS, PageClient, RunHub
from freewheel_watch.listing import RunEntry
from freewheel_watch.server import listen, serve
from tests.support.watching import LIMIT, row, worker, write_run, write_status


def test_a_client_that_takes_nothing_is_ended() -> None:
    async def story() -> list[bytes]:
        client = PageClient(["first"])
        for count in range(BACKLOG):
            client.send("run", str(count))
        assert not client.gone
        client.send("run", "one too many")
        assert client.gone
        client.send("run", "never sent")
        return [message async for message in client.events()]

    assert asyncio.run(story()) == []


def test_messages_come_in_their_order_until_the_end() -> None:
    async def story() -> list[bytes]:
        client = PageClient(["first"])
        client.send("run", "{}")
        client.send("runs", "[]")
        events = client.events()
        found = [await anext(events), await anext(events)]
        client.end()
        return found + [message async for message in events]

    assert asyncio.run(story()) == [b"event: run\ndata: {}\n\n", b"event: runs\ndata: []\n\n"]


def test_a_new_status_is_told_at_once_and_not_at_the_next_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "POLL", 1e9)
    run = write_run(tmp_path / "it", [row(1)])

    async def story() -> list[str]:
        watching = RunHub(tmp_path)
        await watching.list_runs()
        reading, client = asyncio.create_task(watching.run()), watching.join(["it"])
        assert client is not None
        events = (event async for event in client.events() if b"event: run\n" in event)
        told = (json.loads(event.partition(b"data: ")[2]) async for event in events)
        found = []
        async with asyncio.timeout(LIMIT):
            for state in ("step", "down"):
                write_status(run, [worker(0, state)])
                found.append((await anext(told))["workers"][0]["state"])
        watching.close()
        await reading
        return found

    with FileLock(run / ".lock"):
        assert asyncio.run(story()) == ["step", "down"]


def test_there_are_only_so_many_clients(tmp_path: Path) -> None:
    async def story() -> None:
        many = RunHub(tmp_path)
        await many.list_runs()
        clients = [many.join([]) for _ in range(MOST_CLIENTS)]
        assert many.join([]) is None
        assert clients[0] is not None
        many.leave(clients[0])
        assert many.join([]) is not None
        many.close()
        assert many.join([]) is None

    asyncio.run(story())


def test_a_signal_ends_it_while_runs_are_still_being_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory may have many folders. The reader checks after each one whether the list is still wanted."""

    def reading(directory: Path, over: Callable[[], bool]) -> list[RunEntry]:
        os.kill(os.getpid(), signal.SIGINT)
        while not over():
            time.sleep(0.01)
        return []

    monkeypatch.setattr(hub, "list_runs", reading)
    told = list[str]()

    async def story() -> None:
        async with asyncio.timeout(LIMIT):
            await serve(RunHub(tmp_path), listen(0), told.append)

    asyncio.run(story())
    assert told == []
