"""One Ray cluster for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from packages.ray.tests.support.clusters import shared_cluster
from tests.collect.conftest import factory, policy, snapshot, spec  # noqa: F401 - fixtures
from tests.plugins.leaks import ACTOR, command_of
from tests.support.trainers import wait_until


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with shared_cluster():
        yield


@pytest.fixture(autouse=True)
def actors_end(leaves_nothing_behind: None) -> Iterator[None]:
    """Wait until Ray has killed the actors, which can take time on a busy machine."""
    yield
    wait_until(lambda: not any(command_of(one).startswith(ACTOR) for one in psutil.Process().children(recursive=True)))
