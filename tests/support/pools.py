"""The shared-memory wire of a collector, for tests of its worker processes."""

from __future__ import annotations

from freewheel.core import Collector
from freewheel.transport.pool import WorkerPool
from freewheel.transport.shm.wire import SharedMemoryWire


def wire_of(collector: Collector) -> SharedMemoryWire:
    assert isinstance(collector, WorkerPool)
    assert isinstance(collector.wire, SharedMemoryWire)
    return collector.wire
