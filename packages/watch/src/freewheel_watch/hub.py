"""Between run directories and browsers: every run that somebody looks at is read once, and told to all who do.

Whoever does not take what is told is dropped, so that nothing piles up; browsers come back by themselves and begin anew.
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
from freewheel.files.output import complain
from freewheel.run.live.status import STATUS
from freewheel_watch.feed import HELLO, RunFeed, words
from freewheel_watch.listing import RunEntry, list_runs

LOOK = 0.2  # seconds between two looks at when a status was written
POLL = 1.0  # seconds after which a run is read in any case
LIST = 2.0  # seconds between two lists of runs; more where a list takes long
LIST_SHARE = 0.05  # of the time that lists may take
KEEP = 30.0  # seconds that a run nobody looks at any more is remembered
BACKLOG = 64  # messages that may wait for a client
ALIVE = 5.0  # seconds without news after which a client is told that nobody has died
MOST_CLIENTS = 100
MOST_RUNS = 12  # of one client
LISTED = 500  # runs, the newest


class PageClient:
    """Somebody who looks at runs: the first is open, the others are compared with it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.untold = set(names)  # those of which it knows nothing yet
        self.gone = False
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue(BACKLOG + 1)

    def tell(self, kind: str, text: str) -> None:
        if self.gone:
            return
        if self._waiting.qsize() >= BACKLOG:
            self.end()
        else:
            self._waiting.put_nowait(f"event: {kind}\ndata: {text}\n\n".encode())

    def end(self) -> None:
        """No more; what waits is thrown away."""
        self.gone = True
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)

    async def events(self) -> AsyncIterator[bytes]:
        """What is told, as server-sent events, until it ends."""
        while True:
            try:
                message = await asyncio.wait_for(self._waiting.get(), ALIVE)
            except TimeoutError:
                message = b"event: alive\ndata: {}\n\n"
            if message is None:
                return
            yield message


class _WatchedFeed:
    """A run that somebody looks at, or did a moment ago."""

    def __init__(self, feed: RunFeed) -> None:
        self.feed = feed
        self.status = 0  # when its status was written
        self.polled = 0.0  # when it was read; 0: never
        self.reading = False  # at this moment, in a thread
        self.wanted = time.monotonic()  # when somebody last looked
        self.failed = False  # it could not be read, and this has been told

    def due(self, now: float) -> bool:
        written = 0
        with suppress(OSError):
            written = os.stat(self.feed.path / STATUS).st_mtime_ns
        if self.feed.more or now - self.polled >= POLL or written != self.status:
            self.status = written
            return True
        return False


class RunHub:
    """All runs of a directory, and all who look at them."""

    def __init__(self, directory: Path, chosen: str | None = None) -> None:
        """chosen: the run that is opened first; None: the newest one that runs."""
        self.directory, self._chosen = directory, chosen
        self._clients: set[PageClient] = set()
        self._watched: dict[str, _WatchedFeed] = {}
        self._entries: dict[str, RunEntry] = {}
        self._listing = ""  # as told last
        self._closed = False

    @property
    def clients(self) -> int:
        return len(self._clients)

    def find(self, name: str) -> Path | None:
        """The directory of a run that is listed. What a browser says is looked up, and never made part of a path."""
        entry = self._entries.get(name)
        return None if entry is None else entry.path

    def join(self, names: Sequence[str]) -> PageClient | None:
        """A new client; None: there are too many."""
        if self._closed or len(self._clients) >= MOST_CLIENTS:
            return None
        client = PageClient([name for name in dict.fromkeys(names) if name in self._entries][:MOST_RUNS])
        self._clients.add(client)
        client.tell("hello", json.dumps({**HELLO, "words": words()}))
        client.tell("runs", self._listing)
        for name in client.names:
            if name not in self._watched:
                self._watched[name] = _WatchedFeed(RunFeed(name, self._entries[name].path))
            watched = self._watched[name]
            watched.wanted = time.monotonic()
            if watched.polled and not watched.reading:
                self._tell(watched, client, None)
        return client

    def leave(self, client: PageClient) -> None:
        client.end()
        self._clients.discard(client)

    def close(self) -> None:
        self._closed = True
        for client in self._clients:
            client.end()

    async def run(self) -> None:
        """Until it is closed: list runs, read those that are looked at, tell what is new."""
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
        watched.reading, watched.polled = True, time.monotonic()
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
            self._tell(watched, client, news)

    def _tell(self, watched: _WatchedFeed, client: PageClient, news: tuple[str, str] | None) -> None:
        """A client of a run: all, if it knows nothing yet, or what is new."""
        name = watched.feed.name
        shared = client.names[0] != name
        if name in client.untold:
            client.untold.discard(name)
            client.tell("run", watched.feed.everything(shared=shared))
        elif news is not None:
            client.tell("run", news[shared])
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
        """Look which runs there are; before anybody joins, and now and then."""
        try:
            found = await asyncio.to_thread(list_runs, self.directory, lambda: self._closed)
        except FileError:  # it is not there yet
            found = []
        self._entries = {entry.name: entry for entry in found[:LISTED]}
        if self._chosen is not None and self._chosen not in self._entries:
            self._entries |= {entry.name: entry for entry in found if entry.name == self._chosen}
        told = {"runs": [_listed(one) for one in self._entries.values()], "place": str(self.directory)}
        text = json.dumps({**told, "newest": self._first()})
        if text != self._listing:
            self._listing = text
            for client in list(self._clients):
                client.tell("runs", text)

    def _first(self) -> str | None:
        """The run to open first."""
        if self._chosen in self._entries:
            return self._chosen
        running = (name for name, entry in self._entries.items() if entry.state == "running")
        return next(running, next(iter(self._entries), None))


def _listed(entry: RunEntry) -> Mapping[str, Any]:
    names = ("name", "env", "algo", "mode", "seed", "steps", "best", "state", "problem")
    about = {"group": entry.group or None, "updated": round(entry.updated)}
    return {name: getattr(entry, name) for name in names} | about
