"""A simulator in a thread with a CUDA stream of its own: it runs on while the learner learns, within its permits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import fields, replace
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from freewheel.core import WORKER_TIME, Chunk, Episode, Origin, RowCounts, Snapshot, Transitions
from freewheel.errors import EnvError
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.transport.pool import Size

if TYPE_CHECKING:
    import torch

    from freewheel.rollout.device_runner import DeviceRunner, Written

WAIT_CREDIT = WORKER_TIME.index("wait-credit")
TURN = 0.1  # seconds between two looks around of whoever waits
GRACE = 30.0  # seconds that the thread may take to end


class Permits(Protocol):
    """When the next fragment may be begun, and with which version."""

    def grant(self, produced: int, posted: int, done: int) -> tuple[int, int] | None: ...  # steps, version; None: wait


class FreeRunning:
    """Permits of `continuous`: (ahead + 1) updates' worth of rows may be under way; always with the newest weights."""

    def __init__(self, spec: CollectSpec, ahead: int, steps: int) -> None:
        self._allowance, self._steps = (ahead + 1) * spec.batch.rows, steps

    def grant(self, produced: int, posted: int, done: int) -> tuple[int, int] | None:
        return (self._steps, posted) if posted >= 0 and produced < self._allowance + done else None


class OneAhead:
    """Permits of `batch`: batch k is acted with version k - 1, exactly."""

    def __init__(self, spec: CollectSpec, steps: int) -> None:
        self._rows, self._lanes, self._steps = spec.batch.rows, spec.env.lanes, steps

    def grant(self, produced: int, posted: int, done: int) -> tuple[int, int] | None:
        batch, inside = divmod(produced, self._rows)
        version = max(batch - 1, 0)
        return (min(self._steps, (self._rows - inside) // self._lanes), version) if posted >= version else None


class Simulation:
    """A Collector over a DeviceRunner in a thread. For every worker that there would be, a fragment is a chunk of its lanes."""

    def __init__(self, make: Callable[[], DeviceRunner], spec: CollectSpec, permits: Permits, size: Size) -> None:
        self._make, self._spec, self._permits, self._size = make, spec, permits, size
        self._changed = threading.Condition()
        self._snapshots: dict[int, tuple[Snapshot, torch.cuda.Event | None]] = {}
        self._posted, self._done = -1, 0
        self._written: deque[Written] = deque()
        self._opened: int | None = None  # version of the fragment that is being launched
        self._waited = 0
        self._rows = RowCounts()
        self._error: BaseException | None = None
        self._over = False
        self._runner: DeviceRunner | None = None
        self._side: torch.cuda.Stream | None = None
        self._failed = 0  # rows of a fragment that holds numbers that are not finite
        self._thread = threading.Thread(target=self._run, name="freewheel-simulation", daemon=True)

    def __enter__(self) -> Self:
        import torch

        self._runner = self._make()
        if self._runner.spec.device.startswith("cuda"):
            self._side = torch.cuda.Stream()
        with ExitStack() as undo:
            undo.callback(self._runner.close)
            self._runner.begin()
            undo.pop_all()
        if self._side is not None:
            torch.cuda.synchronize()  # what was made on this stream is there before the thread's own begins
        if not self._spec.simulation.main_thread:
            self._thread.start()
        return self

    def serve(self) -> None:
        """Simulate in the caller's thread until `stop`, for simulators that only live in the main one."""
        self._run()

    def stop(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(GRACE)
        if self._runner is not None:
            self._runner.close()

    def publish(self, snapshot: Snapshot, done: int) -> None:
        ready = self._record()
        with self._changed:
            self._snapshots[snapshot.version] = (snapshot, ready)
            self._snapshots = {
                version: known for version, known in self._snapshots.items() if version >= snapshot.version - 1
            }
            self._posted, self._done = snapshot.version, done
            self._changed.notify_all()

    def collect(self, wait: bool) -> Sequence[Chunk[Any]]:
        chunks = self._take()
        while wait and not chunks:
            self._spec.while_waiting()
            with self._changed:
                if not self._written and self._error is None:
                    self._changed.wait(TURN)
                first = self._written[0] if self._written else None
            if first is not None:
                first.step_ns()  # until the device is through with it
            if self._error is not None:
                raise self._error
            chunks = self._take()
        return chunks

    def oldest(self) -> int | None:
        with self._changed:
            versions = [written.version for written in self._written]
            return min([*versions, *([] if self._opened is None else [self._opened])], default=None)

    def rows(self) -> RowCounts:
        with self._changed:
            queued = sum(written.data.reward.numel() for written in self._written)
            return replace(self._rows, queued=queued, open=self._failed)

    def stats(self) -> Mapping[str, float | None]:
        return {"queue_util": len(self._written) / self._size.slots, "queue/fragments": len(self._written)}

    def eval_episodes(self) -> list[Episode]:
        """Episodes of reserved lanes since this was last asked."""
        if self._runner is None:
            return []
        found, self._runner.eval_episodes = self._runner.eval_episodes, []
        return found

    def messages(self) -> Sequence[str]:
        return () if self._runner is None else self._runner.messages()

    def summary(self) -> Mapping[str, Any]:
        return {}

    def _record(self) -> torch.cuda.Event | None:
        """Where the learner's stream is now."""
        import torch

        if self._side is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _take(self) -> list[Chunk[Any]]:
        chunks: list[Chunk[Any]] = []
        while True:
            with self._changed:
                if not self._written or not self._written[0].finished:
                    return chunks
                written = self._written.popleft()
                self._changed.notify_all()
                waited, self._waited = self._waited, 0
            chunks += self._signed(written, waited)

    def _signed(self, written: Written, waited: int) -> list[Chunk[Any]]:
        """Handed over to the learner's stream: it may read what the simulation's stream has allocated and written."""
        import torch

        assert self._runner is not None
        self._runner.spend(WAIT_CREDIT, waited)
        with torch.cuda.stream(self._side) if self._side is not None else nullcontext():
            try:
                chunk = self._runner.sign(written)
            except EnvError:
                self._failed += written.data.reward.numel()
                raise
        if self._side is not None:
            here = torch.cuda.current_stream()
            for field in fields(Transitions):
                getattr(chunk.data, field.name).record_stream(here)
        return split(chunk, self._size.workers)

    def _run(self) -> None:
        import torch

        try:
            stream = torch.cuda.Stream() if self._side is not None else None
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                while self._fragment(stream):
                    pass
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that collects
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _grant(self, runner: DeviceRunner) -> tuple[int, int] | None:
        if len(self._written) >= self._size.slots:
            return None
        return self._permits.grant(runner.produced, self._posted, self._done)

    def _fragment(self, stream: torch.cuda.Stream | None) -> bool:
        """Wait for a permit, act with its version, hand over; False at the end."""
        runner = self._runner
        assert runner is not None
        began = perf_counter_ns()
        with self._changed:
            while not self._over and (grant := self._grant(runner)) is None:
                self._changed.wait(TURN)
            if self._over or grant is None:
                return False
            steps, version = grant
            self._opened = version
            snapshot, ready = self._snapshots[version]
            self._waited += perf_counter_ns() - began
        if version != runner.version or runner.produced == 0:
            if stream is not None and ready is not None:
                stream.wait_event(ready)
            runner.load(snapshot)
            if stream is not None:  # all weights are views of one tensor: it must not be reused before it was read
                _any_tensor(snapshot).record_stream(stream)
        written = runner.launch(steps)
        with self._changed:
            self._written.append(written)
            self._rows = RowCounts(produced=runner.produced)
            self._opened = None
            self._changed.notify_all()
        return True


def simulate_beside(recipe: RunnerFactory, spec: CollectSpec, permits: Permits, size: Size) -> Simulation:
    """A batched simulator that runs on while the learner learns."""

    def make() -> DeviceRunner:
        from freewheel.rollout.device_runner import DeviceRunner

        return DeviceRunner(
            recipe, range(spec.env.lanes), size.steps, spec.simulation.compile, spec.simulation.reserved_lanes
        )

    return Simulation(make, spec, permits, size)


def _any_tensor(snapshot: Snapshot) -> Any:
    return next(iter(snapshot.params.values()))


def split(chunk: Chunk[Any], parts: int) -> list[Chunk[Any]]:
    """By lanes, each with an author of its own: rows and episodes go with their lane, time with the first."""
    if parts == 1:
        return [chunk]
    lanes = chunk.data.reward.shape[1]
    chunks = []
    for part in range(parts):
        begin, end = lanes * part // parts, lanes * (part + 1) // parts
        data = Transitions(
            **{field.name: getattr(chunk.data, field.name)[:, begin:end] for field in fields(Transitions)}
        )
        chunks.append(
            Chunk(
                data=data,
                version=chunk.version,
                origin=Origin(part, 0, chunk.origin.sequence, begin),
                episodes=tuple(episode for episode in chunk.episodes if begin <= episode.lane < end),
                state=chunk.state[begin:end],
                time=chunk.time if part == 0 else chunk.time * 0,
                rows=data.reward.numel(),
            )
        )
    return chunks
