"""A Ray cluster that several tests use, because starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from freewheel_ray.actors import cluster, local_cluster


@contextmanager
def shared_cluster() -> Iterator[None]:
    """While this context is open, runs of this process without an address use the same cluster."""
    with cluster._local(8, cluster.STORE[0]) as started:

        @contextmanager
        def again(cpus: int, store: int) -> Iterator[tuple[local_cluster.StartedCluster, int]]:
            yield started

        with mock.patch.object(cluster, "_local", again):
            yield
