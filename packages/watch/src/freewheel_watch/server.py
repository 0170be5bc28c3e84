"""This module serves the page on 127.0.0.1. It answers a few GET requests behind a gate."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mimetypes
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from freewheel.errors import SetupError
from freewheel.files.stdout import complain
from freewheel_watch.feed import read_timeline
from freewheel_watch.gate import ADDRESS, AccessGate
from freewheel_watch.hub import PageClient, RunHub

PORT = 8765  # default port; any free one if it is taken
STUCK = 30_000  # milliseconds after which the kernel closes a connection whose other side reads nothing
BUFFER = 1 << 18  # bytes that the kernel buffers for one client
GRACE = 2  # seconds that answers have to finish when the server ends
BACKLOG = 64  # connections that wait to be accepted
MOST_WAITING = 64  # connections without a whole request; a new one replaces the oldest
WHOLE = 10.0  # seconds in which a connection must send a whole request after it was opened or answered
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # out of descriptors or memory
AGAIN = 60.0  # seconds between two messages about the same shortage
EVENTS = "text/event-stream"


@cache
def files() -> Mapping[str, tuple[bytes, str]]:
    """Return the content and type of all static files by name. Requests cannot read any other file."""
    here = Path(__file__).parent
    own = here / "static"
    drawn = here / "timeline"
    found = {str(path.relative_to(own)): path for path in own.rglob("*") if path.is_file()}
    found |= {name: drawn / name for name in ("gantt.js", "gantt.css")}
    return {name: (path.read_bytes(), _type(path)) for name, path in found.items()}


def _type(path: Path) -> str:
    kind = {".js": "text/javascript", ".svg": "image/svg+xml"}.get(path.suffix) or mimetypes.guess_type(path.name)[0]
    return f"{kind or 'text/plain'}; charset=utf-8"


def application(hub: RunHub) -> Starlette:
    """Return the application behind the gate."""

    async def page(_: Request) -> Response:
        return _file("index.html")

    async def static(request: Request) -> Response:
        return _file(request.path_params["name"])

    async def nothing(_: Request) -> Response:
        return Response(status_code=204)

    async def timeline_of(request: Request) -> Response:
        path = hub.find(request.query_params.get("run", ""))
        data = None if path is None else await asyncio.to_thread(read_timeline, path)
        if data is None:
            return PlainTextResponse("there is no timeline of this run\n", 404)
        return Response(data, media_type="application/json")

    async def events(request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type=EVENTS)
        client = hub.join(request.query_params.getlist("run"))
        if client is None:
            return PlainTextResponse("too many pages are open\n", 503)
        return StreamingResponse(_event_stream(hub, client), media_type=EVENTS)

    answers = {"/": page, "/favicon.ico": nothing, "/static/{name:path}": static}
    answers |= {"/timeline": timeline_of, "/events": events}
    return Starlette(routes=[Route(path, answer) for path, answer in answers.items()])


def _file(name: str) -> Response:
    found = files().get(name)
    return PlainTextResponse("not found\n", 404) if found is None else Response(found[0], media_type=found[1])


async def _event_stream(hub: RunHub, client: PageClient) -> AsyncIterator[bytes]:
    try:
        async for message in client.events():
            yield message
    finally:
        hub.leave(client)


def listen(port: int | None) -> socket.socket:
    """Return a socket of this machine only. None selects the usual port or any free one. Raise
    SetupError if the port is taken."""
    for wanted in (PORT, 0) if port is None else (port,):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK)  # connections inherit these options
        try:
            listener.bind((ADDRESS, wanted))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            reason = error.strerror
        else:
            return listener
    raise SetupError(f"cannot listen on port {port}: {reason}; choose another --port, or leave it out")


class _TimedConnection(H11Protocol):
    """Closes a connection that does not send a whole request in time. If there are too many of
    them, the oldest is closed, so that others are still answered."""

    waiting: ClassVar[dict[_TimedConnection, asyncio.TimerHandle]] = {}  # the oldest first

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._sort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._sort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._sort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _sort(self) -> None:
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self._forget()
        elif self not in self.waiting:
            self.waiting[self] = asyncio.get_running_loop().call_later(WHOLE, self.transport.abort)
            if len(self.waiting) > MOST_WAITING:
                oldest = next(iter(self.waiting))
                oldest._forget()
                oldest.transport.abort()

    def _forget(self) -> None:
        if (timer := self.waiting.pop(self, None)) is not None:
            timer.cancel()


class _ShortageReporter:
    """Reports in a line that a connection could not be accepted. asyncio tries again after a
    second."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in SHORT:
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + AGAIN
            way_out = "close some of them, or raise the limit of open files (ulimit -n)"
            complain(f"new pages have to wait, {error.strerror}: {way_out}")


class _PageServer(uvicorn.Server):
    """Ends only by `should_exit`, because the caller handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(hub: RunHub, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `ready` is called with the address."""
    gate = AccessGate(application(hub), listener.getsockname()[1])
    quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False, "date_header": False}
    plain: dict[str, Any] = {"lifespan": "off", "ws": "none", "proxy_headers": False}
    limits: dict[str, Any] = {"backlog": BACKLOG, "timeout_graceful_shutdown": GRACE}
    config = uvicorn.Config(gate, http=_TimedConnection, **limits, **plain, **quiet)
    server = _PageServer(config)
    loop = asyncio.get_running_loop()

    def end() -> None:
        server.should_exit = True
        hub.close()

    loop.set_exception_handler(_ShortageReporter())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end)
    await hub.list_runs()
    reading = asyncio.create_task(hub.run())
    reading.add_done_callback(lambda _: end())
    if not server.should_exit:
        ready(gate.address)
    await server.serve(sockets=[listener])
    hub.close()
    await reading
