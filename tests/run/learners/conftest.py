"""The first store of a process keeps a pipe of its library, which is not a leak of the test that happens to open it."""

from __future__ import annotations

import pytest

from freewheel.transport.learners.rank import open_store


@pytest.fixture(scope="session", autouse=True)
def opened_once() -> None:
    open_store(5.0)
