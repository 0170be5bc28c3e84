"""One Ray cluster for all tests of the mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from freewheel.transport.ray.cluster import Cluster
from tests.support.clusters import shared_cluster


@pytest.fixture(scope="package", autouse=True)
def cluster() -> Iterator[Cluster]:
    with shared_cluster() as cluster:
        yield cluster
