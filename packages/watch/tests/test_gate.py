"""Tests of the access to the page, over a real socket and with the real command."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.watching import Page, row, until, watch, write_run

SECRET = "nobody reads this"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("watched")
    write_run(folder / "runs" / "first", [row(1), row(2)])
    write_run(folder / "secret", [row(1)])
    (folder / "secret.txt").write_text(SECRET)
    with watch(folder / "runs") as page:
        yield page


@pytest.fixture
def known(page: Page) -> Page:
    """Return an answer to a browser that has the cookie."""
    if not page.cookie:
        page.enter()
    return page


def test_it_listens_on_this_machine_only(page: Page) -> None:
    listening = [line.split()[1] for line in Path(f"/proc/{page.process.pid}/net/tcp").read_text().splitlines()[1:]]
    port = f"{page.port:04X}"
    assert [place for place in listening if place.endswith(f":{port}")] == [f"0100007F:{port}"]


def test_a_token_is_exchanged_once_for_a_cookie_that_scripts_and_other_sites_do_not_have(page: Page) -> None:
    host = {"Host": f"127.0.0.1:{page.port}"}
    query = page.address.partition("?")[2]
    assert page.get("/", headers=host).status == 403
    assert page.get("/?token=wrong", headers=host).status == 403
    assert page.get(f"/?{query}", "HEAD", host).status == 403  # a preview of the link does not use up the token
    assert page.get(f"/events?{query}", headers=host).status == 403
    cookie = page.enter().headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    again = page.get(f"/?{query}", headers=host)
    assert again.status == 403
    assert "has been used" in again.text
    assert page.get("/").status == 200
    assert page.get("/", headers=host | {"Cookie": f"{page.cookie}x"}).status == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "[::1]"])
def test_other_names_are_refused_but_that_of_a_tunnel_is_not(known: Page, host: str) -> None:
    assert known.get("/", headers={"Host": host, "Cookie": known.cookie}).status in (400, 421)
    assert known.get("/", headers={"Host": "localhost:1234", "Cookie": known.cookie}).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_nothing_can_be_changed(known: Page, method: str) -> None:
    for path in ("/", "/events", "/nowhere"):
        answer = known.get(path, method)
        assert answer.status == 405
        assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/nowhere", "/events", "/timeline?run=first"])
def test_every_answer_forbids_foreign_and_inline_code_and_head_has_no_body(known: Page, path: str) -> None:
    answer = known.get(path, "HEAD")
    assert (answer.status in (200, 404), answer.text) == (True, "")
    headers = answer.headers if path == "/events" else known.get(path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


def test_the_page_names_no_other_host(known: Page) -> None:
    for name in ("", *(f"static/{name}" for name in ("page.js", "panels.js", "charts.js", "format.js", "page.css"))):
        text = known.get(f"/{name}").text
        assert text
        assert not re.search(r"https?://|//\w+\.\w+", text), name
    assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", known.get("/").text)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../../secret.txt", "/static/%2e%2e/%2e%2e/secret.txt", "/static/..%2f..%2fsecret.txt",
        "/static//etc/passwd", "/static/../server.py", "/../secret.txt", "/timeline?run=../secret",
        "/timeline?run=..%2Fsecret", "/timeline?run=/etc", "/timeline?run=first/../../secret",
        "/timeline?run=%00", "/timeline",
    ],
)  # fmt: skip
def test_no_path_leads_out(known: Page, path: str) -> None:
    answer = known.get(path)
    assert answer.status == 404
    assert SECRET not in answer.text
    assert "root:" not in answer.text


def test_runs_that_are_not_listed_are_not_told(known: Page) -> None:
    with known.events("../secret", "first/../../secret", "first") as events:
        told = until(events, "run")
    assert told["name"] == "first"


def test_what_is_no_http_does_not_end_the_server(known: Page) -> None:
    with socket.create_connection(("127.0.0.1", known.port), timeout=5) as stream:
        stream.sendall(b"\x00\xff" * 3000 + b"\r\n\r\n")
        while stream.recv(4096):
            pass
    assert known.get("/").status == 200
