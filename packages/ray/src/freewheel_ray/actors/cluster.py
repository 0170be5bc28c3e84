"""Connect to a Ray cluster, or start one on this machine for a single run and end it completely afterwards."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import select
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal, NamedTuple, Self

import psutil

from freewheel.errors import SetupError, UsageError
from freewheel.files.own_folders import python
from freewheel.transport import forkserver
from freewheel_ray.actors import address_check, local_cluster

Placement = Literal["spread", "pack"]

MIB = 2**20
STORE = (256 * MIB, 4 * MIB, 1024 * MIB)  # bytes of a local object store: base size, size for each worker, maximum
LEAST_STORE = 80 * MIB  # Ray refuses smaller stores
ANSWERS = 1.0  # seconds that a node has to answer
ENDS = 2 * local_cluster.ENDS  # seconds that the process of a local cluster has to end it


class NodeInfo(NamedTuple):
    """A machine of the cluster."""

    id: str
    host: str
    alive: bool
    cpus: float


def require_ray() -> None:
    """Raise UsageError unless Ray is installed."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--mode ray and --federate need Ray, which is not installed: pip install 'freewheel-ray[ray]'")


def cluster_cpus(address: str | None) -> float:
    """Return the CPUs of a cluster. Without an address these are the CPUs of this machine, where a cluster would be started."""
    if address is None:
        return float(len(psutil.Process().cpu_affinity() or [0]))
    require_ray()
    return sum(address_check.find(address).cpus.values())


class Cluster:
    """A context manager for a connection to Ray. A process can have only one at a time."""

    def __init__(
        self,
        address: str | None,
        *,
        workers: int,
        cpus_per_worker: float,
        placement: Placement = "spread",
        object_store: int | None = None,
    ) -> None:
        self.address = address
        self.workers = workers
        self.cpus_per_worker = cpus_per_worker
        self.placement = placement
        self._started: local_cluster.StartedCluster | None = None
        self.autoscales = False  # whether the cluster adds nodes when there is work for them
        self.notes: list[str] = []  # messages about the cluster for the user
        self._store = object_store  # bytes of the object store of a local cluster
        self._placed: dict[int, str] = {}  # the node that was chosen for each worker
        self._gone: set[str] = set()  # nodes that no longer answer although Ray believes that they are alive
        self._held = ExitStack()

    def __enter__(self) -> Self:
        require_ray()
        with ExitStack() as held:
            self.start_outside(held)
            if self._started is None:
                self._join(self.address or "", held)
            elif not _initialized():  # a program that has called ray.init() stays connected
                self._enter(self._started, held)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def start_outside(self, held: ExitStack) -> list[int]:
        """Start or find the cluster for another process. Returns descriptors that become readable when the cluster ends."""
        if _initialized():
            there: str = sys.modules["ray"].get_runtime_context().gcs_address
            if self.address not in (None, "auto", there):
                raise UsageError(
                    f"this program is connected to Ray at {there} already; leave out --address {self.address}"
                )
            self._started = local_cluster.StartedCluster(there, "")
        elif self.address is None and self._started is None:
            cpus = max(math.ceil(self.workers * self.cpus_per_worker), os.cpu_count() or 1)
            self._started, ended = held.enter_context(_local(cpus, self._store or _store_bytes(self.workers)))
            return [ended]
        return []

    def _enter(self, started: local_cluster.StartedCluster, held: ExitStack) -> None:
        """Connect to a cluster that runs on this machine."""
        if started.folder:  # this cluster has a separate token
            held.enter_context(forkserver.environment(local_cluster.with_token(started.folder)))
        _connect(started.address, held, loopback=started.address.startswith("127.0.0.1:"))

    def _join(self, address: str, held: ExitStack) -> None:
        found = address_check.find(address)
        self.autoscales = found.autoscales
        largest = max(found.cpus.values())
        if largest < self.cpus_per_worker and not self.autoscales:
            raise SetupError(
                f"no node of the cluster has {self.cpus_per_worker:g} CPUs for a worker; the largest has {largest:g}"
            )
        held.enter_context(forkserver.environment({"RAY_AUTH_MODE": "token" if found.guarded else "disabled"}))
        _connect(found.address, held, loopback=found.loopback)
        if not found.guarded:
            self.notes.append(
                f"Ray at {found.address} does not require a token: everyone who can reach it can run programs on its nodes"
            )
        if (room := self.room()) < self.workers:
            later = "when the cluster has grown" if self.autoscales else "when there is room"
            self.notes.append(
                f"the cluster has room for {room} of {self.workers} workers now; the others will start {later}"
            )

    # ------------------------------------------------------------------------------------------------------- where workers go

    def actor_options(self, worker: int) -> dict[str, Any]:
        """Return arguments of `ActorClass.options()`: the resources of a worker, and the node that it prefers."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {"num_cpus": self.cpus_per_worker, "max_restarts": 0, "max_task_retries": 0}
        before = self._placed.pop(worker, None)
        if before is not None and not self._answers(before):
            self._gone.add(before)
        node = self._choose()
        if node is not None:
            self._placed[worker] = node
            strategy = NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
            options["scheduling_strategy"] = strategy
        return options

    def _choose(self) -> str | None:
        """Choose the emptiest node (spread) or the first node with room (pack). Returns None if all seem to be full."""
        placed = Counter(self._placed.values())
        load = {node.id: (placed[node.id] + 1) * self.cpus_per_worker / node.cpus for node in self._usable()}
        fitting = {node: share for node, share in load.items() if share <= 1}
        if not fitting:
            return None
        return next(iter(fitting)) if self.placement == "pack" else min(fitting, key=lambda node: fitting[node])

    def _usable(self) -> list[NodeInfo]:
        """Return the nodes that are large enough for a worker. The driver's node comes first."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        alive = [node for node in self.nodes() if node.alive and node.id not in self._gone]
        nodes = [node for node in alive if node.cpus >= max(self.cpus_per_worker, 1e-3)]
        return sorted(nodes, key=lambda node: node.id != here)

    def _answers(self, node: str) -> bool:
        """Return whether the node of a lost worker still answers. Ray needs 15 seconds to notice the loss of a node, and would
        place workers on it until then."""
        import ray

        place = next(
            ((one["NodeManagerAddress"], one["NodeManagerPort"]) for one in ray.nodes() if one["NodeID"] == node), None
        )
        try:
            socket.create_connection(place or ("", 0), ANSWERS).close()
        except OSError:
            return False
        return True

    def room(self) -> int:
        """Return how many more workers fit now."""
        if self.cpus_per_worker == 0:
            return self.workers
        from ray._private.state import available_resources_per_node

        free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
        return sum(int(resources.get("CPU", 0.0) / self.cpus_per_worker + 1e-6) for resources in free.values())

    def nodes(self) -> list[NodeInfo]:
        import ray

        return [
            NodeInfo(
                id=node["NodeID"],
                host=node["NodeManagerHostname"] or node["NodeManagerAddress"],
                alive=node["Alive"],
                cpus=float(node["Resources"].get("CPU", 0.0)),
            )
            for node in ray.nodes()
        ]


@contextmanager
def _local(cpus: int, store: int) -> Iterator[tuple[local_cluster.StartedCluster, int]]:
    """Start a cluster on this machine that ends with the block or with this process. Also yields a descriptor that becomes
    readable when the cluster has ended."""
    words = [*python("freewheel_ray.actors.local_cluster"), str(os.getpid()), str(cpus), str(store)]
    with forkserver.environment(forkserver.for_server()), forkserver.signals_blocked(*forkserver.TERMINAL):
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    assert process.stdin is not None
    assert process.stdout is not None
    folder = ""
    try:
        started = _answer(process.stdout.fileno())
        folder = started.folder
        if started.error:
            raise SetupError(f"Ray cannot be started on this machine: {started.error}")
        yield started, process.stdout.fileno()
    finally:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS)
        if process.poll() != 0:  # the process was killed
            process.kill()
            process.wait()
            if folder:
                local_cluster.end_all(folder, descendants=False)
        process.stdout.close()


def _answer(pipe: int) -> local_cluster.StartedCluster:
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], 2 * local_cluster.SERVES)
        part = os.read(pipe, 65536) if ready else b""
        if not part:
            return local_cluster.StartedCluster("", "", "the process that starts it has ended or does not respond")
        line += part
    return local_cluster.StartedCluster(*json.loads(line))


def _store_bytes(workers: int) -> int:
    first, each, most = STORE
    return max(LEAST_STORE, min(first + each * workers, most, psutil.virtual_memory().available // 8))


def _initialized() -> bool:
    """Return whether this process is connected to Ray."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _connect(address: str, held: ExitStack, *, loopback: bool) -> None:
    """Connect this process to Ray. This changes the process permanently, even after it disconnects."""
    import ray
    from ray._private import ray_constants, worker

    worker._worker_logs_enabled = False  # our supervisor reports actors that have ended
    if loopback:  # otherwise Ray would replace this address by the machine's external one
        ray_constants.ENABLE_RAY_CLUSTER = False
    _reload_authentication()
    held.callback(ray.shutdown)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, job_config=_job_config())
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SetupError(f"cannot connect to Ray at {address}: {error}") from error


def _job_config() -> Any:
    """Give actors the import path of this program without the current folder, which Ray would put first."""
    from ray.job_config import JobConfig

    script = os.path.dirname(os.path.realpath(sys.argv[0]))
    config = JobConfig(_py_driver_sys_path=[script] if script in sys.path else [])
    config._runtime_env_has_working_dir = lambda: True
    return config


def _reload_authentication() -> None:
    """Make this process read its token from the environment again."""
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
