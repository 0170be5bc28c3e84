"""`python -m freewheel.transport.ray.head FOLDER CPUS BYTES`: starts the one node of a local cluster and prints its address.

`ray start --head` would also start a server for clients (`ray://`) on a fixed port, and there is no flag against it.
"""

from __future__ import annotations

import sys

LOOPBACK = "127.0.0.1"


def main(folder: str, cpus: int, store: int) -> None:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters = RayParams(
        node_ip_address=LOOPBACK,
        num_cpus=cpus,
        object_store_memory=store,
        temp_dir=folder,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
    )
    node = Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=False)
    sys.stdout.write(f"{node.address}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
