"""This module connects run directories with browsers. Every run that clients show is read once, and
all of them get the news.

A client that does not take its messages is dropped, so that they do not accumulate. Browsers
reconnect by themselves and start again.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from freewheel.errors import FileError, text_of
from freewheel.files.stdout import complain
from freewheel.run.live.status import STATUS
from freewheel_watch.feed import HELLO, RunFeed, words
from freewheel_watch.listing import RunEntry, list_runs

LOOK = 0.2  # seconds between two checks whether a status was written
POLL = 1.0  # seconds after which a run is read in any case
LIST = 2.0  # seconds between two lists of runs; more if a list takes long
LIST_SHARE = 0.05  # maximum share of time for lists
KEEP = 30.0  # seconds for which a run without clients is remembered
BACKLOG = 64  # messages that may wait for a client
ALIVE = 5.0  # seconds without news after which a client gets a sign of life
MOST_CLIENTS = 100
MOST_RUNS = 12  # runs of one client
LISTED = 500  # number of newest runs in a list


class PageClient:
    """A browser page that shows runs. The first run is open, and the others are compared with it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.unsent = set(names)  # runs of which the client knows nothing yet
        self.gone = False
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue(BACKLOG + 1)

    def send(self, kind: str, text: str) -> None:
        if self.gone:
            return
        if self._waiting.qsize() >= BACKLOG:
            self.end()
        else:
            self._waiting.put_nowait(f"event: {kind}\ndata: {text}\n\n".encode())

    def end(self) -> None:
        """Send nothing more and drop the waiting messages."""
        self.gone = True
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the messages as server-sent events until the client ends."""
        while True:
            try:
                message = await asyncio.wait_for(self._waiting.get(), ALIVE)
            except TimeoutError:
                message = b"event: alive\ndata: {}\n\n"
            if message is None:
                return
            yield message


class _WatchedFeed:
    """A run that clients show or have shown recently."""

    def __init__(self, feed: RunFeed) -> None:
        self.feed = feed
        self.status = 0  # when its status was written
        self.polled = 0.0  # when it was read; 0: never
        self.reading = False  # whether a thread is reading it now
        self.wanted = time.monotonic()  # when it last had a client
        self.failed = False  # whether it could not be read, and this has been reported

    def due(self, now: float) -> bool:
        written = 0
        with suppress(OSError):
            written = os.stat(self.feed.path / STATUS).st_mtime_ns
        if self.feed.more or now - self.polled >= POLL or written != self.status:
            self.status = written
            return True
        return False


class RunHub:
    """Holds all runs of a directory and all clients."""

    def __init__(self, directory: Path, chosen: str | None = None) -> None:
        """Create the hub. `chosen` is the run to open first; None stands for the newest active run."""
        self.directory = directory
        self._chosen = chosen
        self._clients: set[PageClient] = set()
        self._watched: dict[str, _WatchedFeed] = {}
        self._entries: dict[str, RunEntry] = {}
        self._listing = ""  # the last list that was sent
        self._closed = False

    @property
    def clients(self) -> int:
        return len(self._clients)

    def find(self, name: str) -> Path | None:
        """Return the directory of a listed run. A name from a browser is only looked up and never
        becomes part of a path."""
        entry = self._entries.get(name)
        return None if entry is None else entry.path

    def join(self, names: Sequence[str]) -> PageClient | None:
        """Add a client. Return None if there are too many."""
        if self._closed or len(self._clients) >= MOST_CLIENTS:
            return None
        client = PageClient([name for name in dict.fromkeys(names) if name in self._entries][:MOST_RUNS])
        self._clients.add(client)
        client.send("hello", json.dumps({**HELLO, "words": words()}))
        client.send("runs", self._listing)
        for name in client.names:
            if name not in self._watched:
                self._watched[name] = _WatchedFeed(RunFeed(name, self._entries[name].path))
            watched = self._watched[name]
            watched.wanted = time.monotonic()
            if watched.polled and not watched.reading:
                self._send(watched, client, None)
        return client

    def leave(self, client: PageClient) -> None:
        client.end()
        self._clients.discard(client)

    def close(self) -> None:
        self._closed = True
        for client in self._clients:
            client.end()

    async def run(self) -> None:
        """List runs, read those that have clients, and send what is new, until the hub is closed."""
        lists = asyncio.create_task(self._list_now_and_then())
        try:
            while not self._closed:
                for watched in list(self._watched.values()):
                    if watched.due(time.monotonic()):
                        await self._read(watched)
                self._forget()
                await asyncio.sleep(LOOK)
        finally:
            lists.cancel()

    async def _read(self, watched: _WatchedFeed) -> None:
        watched.reading = True
        watched.polled = time.monotonic()
        try:
            await asyncio.to_thread(watched.feed.poll)
        except Exception as error:  # noqa: BLE001 - a run that cannot be shown must not end the page of the others
            if not watched.failed:
                complain(f"run {watched.feed.name} cannot be shown: {type(error).__name__}: {text_of(error)}")
            watched.failed = True
            return
        finally:
            watched.reading = False
        news = watched.feed.news()
        for client in [one for one in self._clients if watched.feed.name in one.names]:
            self._send(watched, client, news)

    def _send(self, watched: _WatchedFeed, client: PageClient, news: tuple[str, str] | None) -> None:
        """Send a run to a client: everything if it knows nothing yet, otherwise the news."""
        name = watched.feed.name
        shared = client.names[0] != name
        if name in client.unsent:
            client.unsent.discard(name)
            client.send("run", watched.feed.everything(shared=shared))
        elif news is not None:
            client.send("run", news[shared])
        if client.gone:
            self._clients.discard(client)

    def _forget(self) -> None:
        now = time.monotonic()
        names = {name for client in self._clients for name in client.names}
        for name, watched in list(self._watched.items()):
            if name in names:
                watched.wanted = now
            elif now - watched.wanted > KEEP:
                del self._watched[name]

    async def _list_now_and_then(self) -> None:
        while True:
            began = time.monotonic()
            await self.list_runs()
            await asyncio.sleep(max(LIST, (time.monotonic() - began) / LIST_SHARE))

    async def list_runs(self) -> None:
        """Update the list of runs. This is called before the first client joins and then at
        intervals."""
        try:
            found = await asyncio.to_thread(list_runs, self.directory, lambda: self._closed)
        except FileError:  # the directory does not exist yet
            found = []
        self._entries = {entry.name: entry for entry in found[:LISTED]}
        if self._chosen is not None and self._chosen not in self._entries:
            self._entries |= {entry.name: entry for entry in found if entry.name == self._chosen}
        listing = {"runs": [_listed(one) for one in self._entries.values()], "place": str(self.directory)}
        text = json.dumps({**listing, "newest": self._first()})
        if text != self._listing:
            self._listing = text
            for client in list(self._clients):
                client.send("runs", text)

    def _first(self) -> str | None:
        """Return the name of the run to open first."""
        if self._chosen in self._entries:
            return self._chosen
        running = (name for name, entry in self._entries.items() if entry.state == "running")
        return next(running, next(iter(self._entries), None))


def _listed(entry: RunEntry) -> Mapping[str, Any]:
    names = ("name", "env", "algo", "mode", "seed", "steps", "best", "state", "problem")
    about = {"group": entry.group or None, "updated": round(entry.updated)}
    return {name: getattr(entry, name) for name in names} | about
