"""A Ray cluster that several tests use, because starting one takes seconds."""

from __future__ import annotations

from freewheel.transport.ray.cluster import Cluster


def shared_cluster() -> Cluster:
    """Runs of this process that are given no address use it while it is open."""
    return Cluster(None, workers=8, cpus_per_worker=1.0)
