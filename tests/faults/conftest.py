"""Makes tests.support importable, also in worker processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests.support.warm import Server, warm_server  # noqa: E402


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Starts commands without the seconds that their imports take."""
    with warm_server() as server:
        yield server
