"""Clients of the hub: what waits for one is bounded, and one that has ended says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

from freewheel.watch.hub import BACKLOG, MOST_CLIENTS, Client, Hub


def test_a_client_that_takes_nothing_is_ended() -> None:
    async def story() -> list[bytes]:
        client = Client(["first"])
        for count in range(BACKLOG):
            client.tell("run", str(count))
        assert not client.gone
        client.tell("run", "one too many")
        assert client.gone
        client.tell("run", "never told")
        return [message async for message in client.events()]

    assert asyncio.run(story()) == []


def test_messages_come_in_their_order_until_the_end() -> None:
    async def story() -> list[bytes]:
        client = Client(["first"])
        client.tell("run", "{}")
        client.tell("runs", "[]")
        events = client.events()
        found = [await anext(events), await anext(events)]
        client.end()
        return found + [message async for message in events]

    assert asyncio.run(story()) == [b"event: run\ndata: {}\n\n", b"event: runs\ndata: []\n\n"]


def test_there_are_only_so_many_clients(tmp_path: Path) -> None:
    async def story() -> None:
        hub = Hub(tmp_path)
        await hub.list_runs()
        clients = [hub.join([]) for _ in range(MOST_CLIENTS)]
        assert hub.join([]) is None
        assert clients[0] is not None
        hub.leave(clients[0])
        assert hub.join([]) is not None
        hub.close()
        assert hub.join([]) is None

    asyncio.run(story())
