"""The group of learners that train together, over torch.distributed. They sum arrays, agree on numbers and leave notes.

gloo carries arrays in main memory; nccl carries arrays on GPUs if every learner has a separate one. A learner that has
ended or cannot be reached raises PeerLostError in all others: at once if its connection closes, otherwise after LIMIT.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from freewheel.core import Array, NDArray
from freewheel.errors import PeerLostError, SetupError
from freewheel.transport.learners.rank import LOOPBACK, RankInfo

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store, Work

JOIN = 120.0  # seconds for all learners to connect; they import torch first
LIMIT = 1800.0  # seconds that a sum may take: all learners are in the same update then, but one may be fitting a model first
LOOK = 0.02  # seconds between two checks in a wait for others
AGES = timedelta(days=3650)  # in place of no limit: an agreement waits as long as environments take
ENDING = "ending"  # the name of a note


class Group:
    """Implements learn.spec.Peers."""

    def __init__(self, place: RankInfo, store: Store) -> None:
        self.rank, self.count = place.rank, place.count
        self.why: Callable[[], str] = lambda: ""  # says which learner is gone, if this is known
        self.waited_s = 0.0  # seconds of waits for others, in sums and agreements
        self._store, self._own = store, place.host == LOOPBACK
        try:
            self._sums, self._agreements = self._gloo("sums", LIMIT), self._gloo("agreements", None)
        except RuntimeError as error:
            raise SetupError(f"the {self.count} learners cannot reach each other: {_first(error)}") from None
        self._nccl: Any = None
        self._devices: tuple[str, ...] = ()

    def _gloo(self, name: str, limit: float | None) -> Any:
        """Return a group that is not torch's default one, because a process may use several groups in turn."""
        from torch._C import _distributed_c10d as c10d

        gloo: Any = c10d.ProcessGroupGloo  # its methods have no types
        options = gloo._Options()
        device = gloo.create_device(hostname=LOOPBACK) if self._own else gloo.create_default_device()
        options._devices = [device]
        options._timeout = AGES if limit is None else timedelta(seconds=limit)
        return gloo(c10d.PrefixStore(name, self._store), self.rank, self.count, options)

    def close(self) -> None:
        """End the connections: learners that wait for this one get a PeerLostError."""
        for group in (self._sums, self._agreements, self._nccl):
            if group is not None:
                with suppress(RuntimeError):
                    group.abort()
        self._sums = self._agreements = self._nccl = None

    # ---------------------------------------------------------------------------------------------------------------- sums

    def sum(self, array: Array) -> None:
        """Sum in place over all learners. The result has the same bits in each."""
        import torch

        began = time.perf_counter()
        try:
            if isinstance(array, np.ndarray):
                self._sum_of(torch.from_numpy(array))
            elif array.device.type == "cpu":
                self._sum_of(array)
            else:
                self._sum_on_device(array)
        except RuntimeError as error:
            raise self._lost(error) from None
        finally:
            self.waited_s += time.perf_counter() - began

    def _sum_of(self, tensor: torch.Tensor) -> None:
        if tensor.is_contiguous():
            self._sums.allreduce([tensor.detach()]).wait()
        else:
            whole = tensor.detach().contiguous()
            self._sums.allreduce([whole]).wait()
            tensor.detach().copy_(whole)

    def _sum_on_device(self, tensor: torch.Tensor) -> None:
        """Sum by nccl if every learner has a separate device, otherwise through main memory."""
        if not self._devices:
            self._devices = self._all_devices(tensor)
        if self._nccl is None and len(set(self._devices)) == self.count and _has_nccl():
            self._nccl = self._make_nccl()
        if self._nccl is not None:
            self._nccl.allreduce([tensor.detach()]).wait()
        else:
            there = tensor.detach().cpu()
            self._sum_of(there)
            tensor.detach().copy_(there)

    def _all_devices(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Return the device of each learner, as an identifier that is unique across machines."""
        import torch

        own = str(torch.cuda.get_device_properties(tensor.device).uuid)
        self.note(f"device/{self.rank}", own)
        return tuple(str(self.noted(f"device/{rank}", JOIN)) for rank in range(self.count))

    def _make_nccl(self) -> Any:
        from torch._C import _distributed_c10d as c10d

        nccl: Any = getattr(c10d, "ProcessGroupNCCL")  # noqa: B009 - builds of torch for CPUs lack it
        options = nccl.Options()
        options._timeout = timedelta(seconds=LIMIT)
        return nccl(c10d.PrefixStore("nccl", self._store), self.rank, self.count, options)

    # ---------------------------------------------------------------------------------------------------------- agreements

    def agree(self, word: NDArray, while_waiting: Callable[[], None] = lambda: None) -> NDArray:
        """Return the words [count, n] of all learners, which must all call this. The wait has no limit, because others
        may wait for slow environments: `while_waiting` is called repeatedly."""
        import torch

        began = time.perf_counter()
        given = torch.from_numpy(np.ascontiguousarray(word, np.float64))
        words = [torch.empty_like(given) for _ in range(self.count)]
        try:
            work = self._agreements.allgather([words], [given])
            while not _done(work):
                while_waiting()
        except RuntimeError as error:
            raise self._lost(error) from None
        finally:
            self.waited_s += time.perf_counter() - began
        return np.stack([one.numpy() for one in words])

    # --------------------------------------------------------------------------------------------------------------- notes

    def note(self, name: str, value: Any) -> None:
        """Leave a value for all others, which JSON can express."""
        self._ask(lambda: self._store.set(name, json.dumps(value)))

    def noted(self, name: str, limit: float) -> Any:
        """Return the value that a learner leaves under this name within `limit` seconds; None if there is none."""

        until = time.monotonic() + limit
        while not self._ask(lambda: self._store.check([name])):
            if time.monotonic() > until:
                return None
            time.sleep(LOOK)
        return self._ask(lambda: json.loads(self._store.get(name)))

    def end(self, why: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask all learners to end the run. Return the reason that was given first."""
        return self._ask(lambda: json.loads(self._store.compare_set(ENDING, "", json.dumps(why)) or json.dumps(why)))  # type: ignore[no-any-return]

    @property
    def ending(self) -> Mapping[str, Any] | None:
        """The reason why a learner has asked all to end; None if none has."""
        found: Mapping[str, Any] | None = self._ask(
            lambda: json.loads(self._store.get(ENDING)) if self._store.check([ENDING]) else None
        )
        return found

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise self._lost(error) from None

    def _lost(self, error: RuntimeError) -> PeerLostError:
        known = self.why()
        return PeerLostError(known or f"another learner is gone, or cannot be reached ({_first(error)})")


def _done(work: Work) -> bool:
    """Wait a short time. Return whether the work has ended; raise if it has failed."""
    with suppress(RuntimeError):  # the wait timed out, or the work has failed
        work.wait(timedelta(seconds=LOOK))
    if not work.is_completed():
        return False
    work.wait()
    return True


def _has_nccl() -> bool:
    import torch.distributed

    return torch.distributed.is_nccl_available()


def _first(error: BaseException) -> str:
    """Return the part of torch's long message that says what happened."""
    text = (str(error).splitlines() or [""])[0]
    return text.rpartition("] ")[2].partition(". This is typically")[0] or repr(error)
