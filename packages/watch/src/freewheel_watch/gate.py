"""This module decides who may read the page. It accepts requests to this machine by its name, from
the browser that opened the printed address.

The address has a token that works once. It is exchanged for a cookie that scripts cannot read and
that requests of other sites do not carry. The Host header protects against pages elsewhere whose
name leads to 127.0.0.1 (DNS rebinding). Only GET and HEAD are answered, and they change nothing.
"""

from __future__ import annotations

import secrets
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ADDRESS = "127.0.0.1"  # the only address that the server listens on
NAMES = (ADDRESS, "localhost")  # hosts that a browser may ask for, with any port, because it may come through a tunnel
METHODS = ("GET", "HEAD")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
#: A page that continues by itself. A browser sends a SameSite=Strict cookie only if the page before is of the same site,
#: so a redirect would not work for a link in a web terminal.
WELCOME = b"""<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">
<title>Freewheel</title><p><a href="/">Continue</a></p></html>"""
USED = "this address has been used already or is not the one that was printed; restart `freewheel watch` to get a new one\n"
STRANGER = "open the address that `freewheel watch` has printed\n"


class AccessGate:
    """Protects the application. It forwards permitted requests and adds the headers above to every
    answer."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._token: str | None = secrets.token_urlsafe(32)
        self._session = secrets.token_urlsafe(32)
        self._cookie = f"freewheel-watch-{port}"  # cookies do not distinguish ports
        self.address = f"http://{ADDRESS}:{port}/?token={self._token}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = [
                    pair for pair in message.get("headers", ()) if pair[0].decode("latin-1").lower() not in HEADERS
                ]
                message["headers"] = [*given, *((name.encode(), text.encode()) for name, text in HEADERS.items())]
            await send(message)

        if (refusal := self._refusal(scope)) is not None:
            await _answer(signed, scope, *refusal)
        elif self._knows(scope):
            await self._app(scope, receive, signed)
        elif (token := _token_of(scope)) is None:
            await _answer(signed, scope, 403, STRANGER)
        elif scope["method"] == "GET" and self._spend(token):
            cookie = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"
            await _answer(signed, scope, 200, WELCOME, (b"set-cookie", cookie.encode()))
        else:
            await _answer(signed, scope, 403, USED)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0].partition(":")[0].lower() not in NAMES:
            return 421, f"this page is available as {ADDRESS} and localhost only\n"
        if scope["method"] not in METHODS:
            return 405, "only GET and HEAD are allowed, because nothing can be changed here\n"
        return None

    def _knows(self, scope: Scope) -> bool:
        """Return whether the browser has the cookie."""
        text = "; ".join(value.decode("latin-1") for name, value in scope["headers"] if name == b"cookie")
        try:
            found = SimpleCookie(text).get(self._cookie)
        except CookieError:
            return False
        return found is not None and secrets.compare_digest(found.value.encode(), self._session.encode())

    def _spend(self, token: str) -> bool:
        """Return whether this is the token. A correct token is used up."""
        if self._token is None or not secrets.compare_digest(token.encode(), self._token.encode()):
            return False
        self._token = None
        return True


def _token_of(scope: Scope) -> str | None:
    found = (
        parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=20).get("token")
        if scope["path"] == "/"
        else None
    )
    return None if found is None else found[0]


async def _answer(send: Send, scope: Scope, status: int, text: str | bytes, *headers: tuple[bytes, bytes]) -> None:
    body = text if isinstance(text, bytes) else text.encode()
    kind = b"text/html; charset=utf-8" if isinstance(text, bytes) else b"text/plain; charset=utf-8"
    allow = ((b"allow", ", ".join(METHODS).encode()),) if status == 405 else ()
    about = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *allow, *headers]
    await send({"type": "http.response.start", "status": status, "headers": about})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
