"""Commands for tests that look at running trainers."""

from __future__ import annotations

import pytest

from tests.support.warm import Server, shared_server


@pytest.fixture(scope="session")
def server() -> Server:
    return shared_server()
