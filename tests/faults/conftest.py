"""The server that starts commands without the seconds that their imports take."""

from __future__ import annotations

import pytest

from tests.support.warm import Server, shared_server


@pytest.fixture(scope="session")
def server() -> Server:
    return shared_server()
