"""A real Ray cluster of several nodes on this machine, as a user would start it by hand. Nodes can join, leave and be killed.

`python -m packages.ray.tests.support.ray_nodes HOST` is the process that starts the nodes.
They always end when its standard input is closed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import psutil

from freewheel_ray.actors import local_cluster

LOOPBACK = "127.0.0.1"
LOST = 10.0  # seconds that a killed process has to end
BYTES = 80 * 2**20  # size of a node's object store


class Nodes:
    """Runs the nodes. The first one is the head, and drivers on this machine connect to it."""

    def __init__(self, *cpus: int, host: str = LOOPBACK) -> None:
        self.ids: list[str] = []  # in the order in which they were added
        self._cpus = cpus
        self._host = host

    def __enter__(self) -> Self:
        words = [sys.executable, "-m", "packages.ray.tests.support.ray_nodes", self._host]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._process = subprocess.Popen(words, **pipes, text=True, start_new_session=True)
        try:
            self.folder: str = self._receive()["folder"]
            self.environment = local_cluster.with_token(self.folder)  # variables for programs that connect
            for cpus in self._cpus:
                self.add(cpus)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.communicate(timeout=30)

    def add(self, cpus: int) -> str:
        """Let a node join and return its id."""
        answer = self._ask(add=cpus)
        self.address: str = answer["address"]
        self.ids.append(answer["id"])
        return self.ids[-1]

    def kill(self, node: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Simulate a machine that is lost (SIGKILL) or that its provider takes away (SIGTERM)."""
        self._ask(kill=node, number=int(number))

    def actors(self, node: str) -> int:
        """Return how many actors run on a node."""
        return int(self._ask(actors=node)["count"])

    def _ask(self, **words: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the nodes do not start: {self._process.communicate()[1][-2000:]}")
        return dict(json.loads(line))


def main(host: str) -> None:
    ctypes.CDLL(None).prctl(local_cluster.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in local_cluster.FOREIGN:
        os.environ.pop(name, None)
    folder = local_cluster.make_folder()
    os.environ.update(local_cluster.with_token(folder), RAY_USAGE_STATS_ENABLED="0")
    if host == LOOPBACK:
        os.environ.update(local_cluster.LOOPBACK)
    nodes: dict[str, _Node] = {}
    try:
        _say(folder=folder)
        for line in sys.stdin:
            words = json.loads(line)
            if "add" in words:
                node = _start(words["add"], host, folder, next(iter(nodes.values()), None))
                nodes[node.id] = node
                _say(id=node.id, address=node.address)
            elif "actors" in words:
                _say(count=nodes[words["actors"]].actors())
            else:
                raylet = nodes[words["kill"]].raylet
                raylet.send_signal(words["number"])
                if words["number"] == signal.SIGKILL:
                    raylet.wait(LOST)  # the raylet's workers believe that it is alive until somebody has waited for it
                _say()
    finally:
        local_cluster.end_all(folder, descendants=True)


@dataclass
class _Node:
    """A node of the cluster, in the process that starts the nodes."""

    id: str
    address: str
    raylet: psutil.Process
    seen: set[psutil.Process] = field(default_factory=set)  # processes that were started on the node

    def actors(self) -> int:
        with suppress(psutil.Error):
            self.seen |= set(self.raylet.children())
        return sum(map(_is_actor, self.seen))


def _is_actor(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE and process.name().startswith("ray::RayWorker")
    return False


def _start(cpus: int, host: str, folder: str, head: _Node | None) -> _Node:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters = RayParams(
        node_ip_address=host or None, num_cpus=cpus, object_store_memory=BYTES, temp_dir=f"{folder}/r",
        include_dashboard=False, include_log_monitor=False, gcs_address=head.address if head else None,
    )  # fmt: skip
    node = Node(parameters, head=head is None, shutdown_at_exit=False, spawn_reaper=False)
    return _Node(node.node_id, node.address, psutil.Process(node.all_processes["raylet"][0].process.pid))


def _say(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
