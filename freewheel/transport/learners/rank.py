"""The place of a process among several learners, and where they meet. torchrun sets it in environment variables."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from freewheel.errors import PeerLostError, SetupError, UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LOOPBACK = "127.0.0.1"
MESSAGE = "message"  # the key of the first learner's message
LOOK = 0.05  # seconds between two checks for the message
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets


@dataclass(frozen=True)
class RankInfo:
    """One of `count` learners. `local` learners run on this machine, and this one is number `local_rank` of them."""

    rank: int
    count: int
    local_rank: int
    local: int
    host: str = LOOPBACK
    port: int = 0
    by_torchrun: bool = False

    def meet(self, seconds: float) -> Store:
        """Connect to the store of all learners, which survives the end of any learner except rank 0."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore
        from torch.distributed.rendezvous import rendezvous

        limit = timedelta(seconds=seconds)
        try:
            if self.by_torchrun:
                found = rendezvous("env://", self.rank, self.count, timeout=limit)
                store: Store = next(iter(found))[0]
                return PrefixStore("freewheel", store)
            return TCPStore(self.host, self.port, None, False, limit, wait_for_workers=False)
        except RuntimeError as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise SetupError(f"learner {self.rank} cannot reach {self.host}:{self.port}: {reason}") from None


def open_store(seconds: float) -> tuple[Store, int]:
    """Open a store for learners of this machine, which only this machine can reach. Return the store and its port."""
    from torch._C._distributed_c10d import TCPStore

    with socket.socket() as listening:
        listening.bind((LOOPBACK, 0))
        listening.listen()
        port = listening.getsockname()[1]
        limit, given = timedelta(seconds=seconds), listening.detach()
    return TCPStore(LOOPBACK, port, None, True, limit, wait_for_workers=False, master_listen_fd=given), port


def send(store: Store, message: bytes) -> None:
    """Send the first learner's message to all others, once."""
    store.set(MESSAGE, message)  # type: ignore[arg-type] # it accepts bytes


def receive(store: Store) -> bytes:
    """Return the message that the first learner sends after its plan; PeerLostError if it cannot be reached."""
    try:
        while not store.check([MESSAGE]):
            time.sleep(LOOK)  # a signal can end the wait
        message: bytes = store.get(MESSAGE)
    except RuntimeError:
        raise PeerLostError("the first learner has ended before it had a plan") from None
    return message


def of_torchrun(environ: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Return the place that torchrun has set; None if torchrun has not started this process, or only this one."""
    if any(name not in environ for name in VARIABLES):
        return None
    try:
        rank, count = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_rank, local = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", str(count)))
        port = int(environ["MASTER_PORT"])
    except ValueError:
        said = ", ".join(f"{name}={environ[name]}" for name in VARIABLES)
        raise UsageError(f"{said} are not what torchrun sets: unset them, or start the run with torchrun") from None
    if count <= 1:
        return None
    return RankInfo(rank, count, local_rank, local, environ["MASTER_ADDR"], port, by_torchrun=True)
