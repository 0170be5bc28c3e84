"""Check the address of a Ray cluster from a separate process, because Ray itself may wait for minutes or abort.

`python -m freewheel_ray.actors.address_check ADDRESS` writes JSON objects, one per line. The last line holds the result. Each
line before it holds the problem to report if the check gets no further.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from freewheel.errors import SetupError, UsageError, text_of
from freewheel.files.own_folders import python
from freewheel.transport import forkserver

LIMIT = 13.0  # seconds for the whole check, so that the user has an answer within 15
REACH = 5.0  # seconds to reach a machine
RPC = 5.0  # seconds for an answer from Ray
AUTO = "auto"
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # Ray looks for a token here first
PYTHON = sys.version_info[:3]
NO_HEAD = "the program that listens there is not the head of a Ray cluster"


class ClusterInfo(NamedTuple):
    """A cluster that answers and that this program can join."""

    address: str
    guarded: bool  # the cluster requires a token, and ours is right
    loopback: bool  # all nodes are on this machine's loopback device
    autoscales: bool
    cpus: dict[str, float]  # CPUs of every live node by node id


def find(address: str) -> ClusterInfo:
    """Return the cluster at an address, or raise a one-line error within 15 s if it cannot be used."""
    if address != AUTO:
        check_form(address)
    with forkserver.signals_blocked(*forkserver.TERMINAL):
        process = subprocess.Popen(
            [*python(__name__), address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        answer = _last_line(process)
    finally:
        process.kill()
        process.communicate()
    if "found" in answer:
        return ClusterInfo(*answer["found"])
    raise SetupError(f"--address {address}: {answer.get('problem', f'Python does not start within {LIMIT:g} s')}")


def _last_line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return the last line that a process has printed when it ends or its time is over."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    printed = b""
    deadline = time.monotonic() + LIMIT
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(pipe, 65536)
        if not part:
            break
        printed += part
    lines = printed.decode().split("\n")[:-1]  # leaves out an incomplete line
    answer: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return answer


def check_form(address: str) -> tuple[str, int]:
    """Return the host and port of an address; raise UsageError if it has another form."""
    scheme, separator, _ = address.partition("://")
    if separator:
        hint = "run this program on a node of the cluster and give the address of the head as host:port"
        raise UsageError(f"--address {address}: {scheme}:// is not supported; {hint}")
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--address {address}: give host:port of the cluster's head (port 6379 unless you chose another), or auto"
        )
    return host.strip("[]"), int(port)


class AddressError(Exception):
    """The reason why the cluster cannot be used, as the user reads it."""


def main(address: str) -> None:
    _report(problem="ray cannot be imported")
    import ray  # noqa: F401 - everything below needs it

    try:
        _report(found=_look(_current() if address == AUTO else address))
    except AddressError as problem:
        _report(problem=str(problem))
    except Exception as error:  # noqa: BLE001 - Ray raises many types of errors
        _report(problem=f"{NO_HEAD}: {text_of(error).splitlines()[0]}")


def _report(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def _current() -> str:
    """Return the address in the environment, or the one that `ray start` has written down on this machine."""
    from ray._common.utils import get_ray_address_file

    address = os.environ.get("RAY_ADDRESS", "")
    with contextlib.suppress(OSError):
        address = address or Path(get_ray_address_file(None)).read_text().strip()
    if not address:
        raise AddressError(
            "no cluster is known on this machine; start one with `ray start --head`, or leave out --address"
        )
    try:
        check_form(address)
    except UsageError as error:
        raise AddressError(f"in RAY_ADDRESS: {error}") from error
    return address


def _look(address: str) -> ClusterInfo:
    _reach(*check_form(address))
    _report(problem=f"{NO_HEAD}, or it does not respond")
    client, guarded = _client(address)
    metadata = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=RPC) or b"{}")
    check_versions(metadata)
    nodes = [node for node in client.get_all_node_info(timeout=RPC).values() if node.state == 0]  # alive
    if not any(os.path.exists(node.raylet_socket_name) for node in nodes):
        raise AddressError(
            f"this machine is not a node of that cluster; run `ray start --address={address}` on it first"
        )
    cpus = {node.node_id.hex(): float(node.resources_total.get("CPU", 0.0)) for node in nodes}
    loopback = all(node.node_manager_address == "127.0.0.1" for node in nodes)
    return ClusterInfo(address, guarded, loopback, _autoscales(client), cpus)


def _reach(host: str, port: int) -> None:
    _report(problem=f"the host {host} cannot be looked up because no name server answers")
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"there is no host {host} ({error.strerror})") from error
    _report(problem="the host does not answer")
    try:
        socket.create_connection((str(places[0][4][0]), port), REACH).close()
    except ConnectionRefusedError as error:
        raise AddressError("nothing listens there; is the head of the cluster running (`ray start --head`)?") from error
    except OSError as error:
        raise AddressError(f"the host does not answer ({error}); check the address and the firewalls") from error


def _client(address: str) -> tuple[Any, bool]:
    """Return a client of the head, and whether the cluster requires a token. Other clusters never see our token."""
    from ray._raylet import AuthenticationTokenLoader, Config, GcsClient
    from ray.exceptions import AuthenticationError

    os.environ["RAY_AUTH_MODE"] = "disabled"
    Config.initialize("")
    try:
        return GcsClient(address=address), False
    except AuthenticationError:
        loader = AuthenticationTokenLoader.instance()
        if not loader.has_token(ignore_auth_mode=True):
            raise AddressError(
                "the cluster asks for a token; set RAY_AUTH_TOKEN_PATH to a file that holds it"
            ) from None
    os.environ["RAY_AUTH_MODE"] = "token"
    Config.initialize("")
    loader.reset_cache()
    try:
        return GcsClient(address=address), True
    except AuthenticationError as error:
        raise AddressError(
            "the cluster refuses this user's token; set RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
        ) from error


def check_versions(metadata: dict[str, str]) -> None:
    import ray

    theirs = metadata.get("ray_version", "?"), metadata.get("python_version", "?")
    ours = ray.__version__, ".".join(map(str, PYTHON))
    if theirs != ours:
        here = f"this program has Ray {ours[0]} and Python {ours[1]}"
        raise AddressError(f"the cluster has Ray {theirs[0]} and Python {theirs[1]}, {here}; they must be the same")


def _autoscales(client: Any) -> bool:
    """Return whether the cluster starts nodes on demand. Nodes of a fixed cluster can be recognised by their types."""
    if client.internal_kv_get(b"__autoscaler_v2_enabled", b"autoscaler", timeout=RPC) == b"1":
        return True
    status = json.loads(client.internal_kv_get(b"__autoscaling_status", None, timeout=RPC) or b"{}")
    kinds = status.get("autoscaler_report", {}).get("active_nodes", {})
    return any(not kind.startswith("node_") for kind in kinds)


if __name__ == "__main__":
    main(sys.argv[1])
