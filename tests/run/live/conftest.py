"""Commands for tests that look at running trainers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.warm import Server, warm_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with warm_server() as server:
        yield server
