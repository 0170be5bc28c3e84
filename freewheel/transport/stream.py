"""The CUDA-stream wire: a batched simulator in a thread with its own stream, which runs while the learner learns, on the same
device or on another."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from freewheel.core import TRANSITION_FIELDS, WORKER_TIME, Chunk, Episode, RowCounts, Snapshot, Transitions
from freewheel.errors import EnvError
from freewheel.metrics.workers import WorkerState
from freewheel.pacing.pacing import Pacing, Tally, Woken
from freewheel.policies.spec import NamedWeights
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.timeline.recording import SpanRecording
from freewheel.transport.pool import Assembly, WorkerPool
from freewheel.transport.wire import Fragment, Permits, Wire

if TYPE_CHECKING:
    import torch

    from freewheel.rollout.device_runner import DeviceRunner, LaunchedRows

WAIT_CREDIT = WORKER_TIME.index("wait-credit")
TURN = 0.1  # seconds between two checks of a thread that waits
GRACE = 30.0  # seconds that the thread may take to end
SIMULATION = 0  # the only worker of the pacing


class StreamWire(Wire):
    """A Wire whose lanes are one simulation. Each of its fragments is split by lanes into one fragment per author."""

    all_at_once = True

    def __init__(
        self, make: Callable[[], DeviceRunner], spec: CollectSpec, pacing: Pacing, *, authors: int, slots: int
    ) -> None:
        self.authors, self.lanes = authors, spec.env.lanes // authors
        self._make, self._spec, self._slots = make, spec, slots
        self._changed = threading.Condition()
        self.permits = Permits(pacing, self._changed, self._wake)
        self._learner = spec.simulation.deliver_to or spec.env.device
        self._crossing: _Crossing | None = None  # if the learner has another device
        self._snapshots: dict[int, tuple[Snapshot, torch.cuda.Event | None]] = {}
        self._written: deque[LaunchedRows] = deque()
        self._waited = self._produced = 0
        self._trace = None if spec.trace is None else _SimulationTracks(spec.trace, on_gpu=spec.env.device != "cpu")
        self._error: BaseException | None = None
        self._over = False
        self._runner: DeviceRunner | None = None
        self._side: torch.cuda.Stream | None = None  # a stream of the learner's device, for the check of rows
        self._idle_since: int | None = perf_counter_ns()  # since when the simulation waits; None: it runs
        self._failed = 0  # rows of fragments with values that are not finite
        self._thread = threading.Thread(target=self.serve, name="freewheel-simulation", daemon=True)

    def __enter__(self) -> Self:
        import torch

        self._runner = self._make()
        here = self._runner.spec.device
        self._side = _stream(self._learner)
        with ExitStack() as undo:
            undo.callback(self._runner.close)
            if here != self._learner:
                self._crossing = _Crossing(here, self._learner)
            self._runner.begin()
            undo.pop_all()
        if here != "cpu":
            torch.cuda.synchronize(here)  # everything made on this stream is complete before the thread uses it
        if not self._spec.simulation.main_thread:
            self._thread.start()
        return self

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

    def _wake(self, woken: Woken) -> None:
        if woken:
            with self._changed:
                self._changed.notify_all()

    def post(self, snapshot: Snapshot) -> None:
        import torch

        ready = None
        if self._side is not None:
            ready = torch.cuda.Event()  # the snapshot is complete when the learner's stream has reached this point
            ready.record(torch.cuda.current_stream(self._learner))
        with self._changed:
            kept = ((version, known) for version, known in self._snapshots.items() if version >= snapshot.version - 1)
            self._snapshots = dict(kept) | {snapshot.version: (snapshot, ready)}

    def take(self) -> Iterator[Fragment]:
        while True:
            with self._changed:
                if not self._written or not self._written[0].finished:
                    return
                written = self._written.popleft()
                self._changed.notify_all()
                waited, self._waited = self._waited, 0
            yield from self._received(written, waited)

    def _received(self, written: LaunchedRows, waited: int) -> Iterator[Fragment]:
        """Return fragments that the learner's stream may read, although another stream allocated and wrote them."""
        import torch

        assert self._runner is not None
        self._runner.spend(WAIT_CREDIT, waited)
        if self._trace is not None:
            self._trace.finished(written.step_ns())
        with _on(self._side):
            try:
                chunk = self._runner.sign(written)
            except EnvError:
                self._failed += written.data.reward.numel()
                raise
        if self._side is not None:
            here = torch.cuda.current_stream(self._learner)
            for tensor in (chunk.state, *(getattr(chunk.data, name) for name in TRANSITION_FIELDS)):
                tensor.record_stream(here)
        return self._by_author(chunk)

    def _by_author(self, chunk: Chunk[Any]) -> Iterator[Fragment]:
        """Split a chunk: rows and episodes go to the author of their lane, the time goes to the first author."""
        for author in range(self.authors):
            begin, end = author * self.lanes, (author + 1) * self.lanes
            data = chunk.data
            if self.authors > 1:
                columns = {name: getattr(data, name)[:, begin:end] for name in TRANSITION_FIELDS}
                data = Transitions(**columns)
            episodes = tuple(episode for episode in chunk.episodes if begin <= episode.lane < end)
            time = chunk.time if author == 0 else np.zeros_like(chunk.time)
            rows = data.reward.numel()
            yield Fragment(author, 0, chunk.version, data, chunk.state[begin:end], episodes, rows, {}, False, time)

    def wait(self, seconds: float) -> bool:
        with self._changed:
            if not self._written and self._error is None:
                self._changed.wait(seconds)
            first = self._written[0] if self._written else None
        if first is not None:
            first.step_ns()  # waits until the device has finished it
        if self._error is not None:
            raise self._error
        return first is not None

    def queued_versions(self) -> Sequence[int]:
        with self._changed:
            return [written.version for written in self._written]

    def produced(self, worker: int) -> int:
        return self._produced

    def rows(self) -> RowCounts:
        with self._changed:
            queued = sum(written.data.reward.numel() for written in self._written)
            return RowCounts(produced=self._produced, queued=queued, open=self._failed)

    def stats(self) -> Mapping[str, float | None]:
        waiting = len(self._written)
        return {"queue_util": waiting / self._slots, "queue/fragments": float(waiting)}

    def eval_episodes(self) -> list[Episode]:
        """Return the episodes of reserved lanes since the last call."""
        return [] if self._runner is None else self._runner.take_eval_episodes()

    def workers(self) -> list[WorkerState]:
        """Return one state, because all lanes are one simulation."""
        idle, now = self._idle_since, perf_counter_ns()
        slots = len(self._written) >= self._slots
        state = "step" if idle is None else "wait-slot" if slots else "wait-credit"
        since = 0.0 if idle is None else (now - idle) * 1e-9
        return [WorkerState(worker=0, state=state, since_s=since, steps=self._produced, pid=os.getpid())]

    def messages(self) -> Sequence[str]:
        return [] if self._runner is None else self._runner.messages()

    def serve(self) -> None:
        """Simulate in this thread until `stop`."""
        assert self._runner is not None
        try:
            stream = _stream(self._runner.spec.device)
            with _on(stream):
                while self._fragment(stream):
                    pass
            if stream is not None:
                stream.synchronize()  # the simulation's memory can then be freed
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that collects
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _fragment(self, stream: torch.cuda.Stream | None) -> bool:
        """Wait for a grant, act with its version and queue the rows. Return False at the end."""
        runner = self._runner
        assert runner is not None
        began, pacing = perf_counter_ns(), self.permits.pacing
        with self._changed:
            grant, self._idle_since = None, began
            while not self._over:
                if len(self._written) < self._slots:
                    grant, _ = pacing.take(SIMULATION, Tally(runner.produced, 0, ended=False))
                    if grant is not None:
                        break
                self._changed.wait(TURN)
            if grant is None:
                return False
            self._idle_since = None
            snapshot, ready = self._snapshots[grant.version]
            granted = perf_counter_ns()
            self._waited += granted - began
        if grant.version != runner.version or runner.produced == 0:
            self._load(runner, snapshot, ready, stream)
        loaded = perf_counter_ns()
        written = runner.launch(grant.steps)
        if self._crossing is not None:
            written = self._crossing.send(written)
        if self._trace is not None:
            self._trace.launched(began, granted, loaded)
        with self._changed:
            self._written.append(written)
            self._produced = runner.produced
            pacing.give_back(SIMULATION, Tally(runner.produced, 0, ended=False))
            self._changed.notify_all()
        return True

    def _load(
        self, runner: DeviceRunner, snapshot: Snapshot, ready: torch.cuda.Event | None, stream: torch.cuda.Stream | None
    ) -> None:
        """Load a snapshot once it is computed. Its weights share one tensor, which is not reused before it is read."""
        if ready is None:  # numpy: the learner is on the CPU
            runner.load(snapshot)
            return
        if stream is None:
            ready.synchronize()
        else:
            stream.wait_event(ready)
        reader = stream if self._crossing is None else self._crossing.back
        with _on(reader), _on(stream):
            runner.load(snapshot)
        if reader is not None:
            _any_tensor(snapshot).record_stream(reader)


class _Crossing:
    """Copies rows from the simulator's device to the learner's, and weights back. Torch copies between two GPUs on the
    current stream of the source, and the current stream of the destination waits. Copies therefore have separate
    streams, so that the simulation and the learner continue meanwhile."""

    def __init__(self, simulator: str, learner: str) -> None:
        self._simulator, self._learner = simulator, learner
        self._out, self._in = _stream(simulator), _stream(learner)
        self.back = _stream(learner)  # reads weights

    def send(self, written: LaunchedRows) -> LaunchedRows:
        """Return the same rows on the learner's device. Only the simulation's thread may call this."""
        import torch

        if self._out is not None and written.done is not None:
            self._out.wait_event(written.done)
        with _on(self._in), _on(self._out):
            sent = written.copied(self._learner, non_blocking=True)
        if self._out is not None:  # the rows must not be reused before they are read
            for tensor in written.tensors():
                tensor.record_stream(self._out)
            if self._in is not None:
                self._in.wait_stream(self._out)
        last = self._in or self._out
        if last is None:
            return sent
        arrived = torch.cuda.Event()
        arrived.record(last)
        return replace(sent, arrived=arrived)


def _stream(device: str) -> torch.cuda.Stream | None:
    """Return a new stream of a GPU; None for the CPU."""
    if device == "cpu":
        return None
    import torch

    return torch.cuda.Stream(device)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Make this the current stream, and its device the current device; None changes nothing."""
    if stream is None:
        return nullcontext()
    import torch

    return torch.cuda.stream(stream)


class _SimulationTracks:
    """The simulation in the timeline: what its thread does, and when a GPU has worked on its fragments."""

    def __init__(self, trace: SpanRecording, *, on_gpu: bool) -> None:
        self._thread = trace.track("simulation", "envs")
        self._gpu = trace.track("GPU simulation", "gpu") if on_gpu else None
        self._until = 0
        trace.latest = trace.number("simulation", "envs")

    def launched(self, began: int, granted: int, loaded: int) -> None:
        self._thread.add("wait-credit", began, granted)
        self._thread.add("load", granted, loaded)
        self._thread.add("step", loaded, perf_counter_ns())

    def finished(self, ns: int) -> None:
        """Record a fragment that finishes now, after `ns` on the GPU."""
        if self._gpu is not None:
            now = perf_counter_ns()
            self._gpu.add("step", max(now - ns, self._until), now)
            self._until = now


def _any_tensor(snapshot: Snapshot) -> Any:
    params = snapshot.params
    return params.vector if isinstance(params, NamedWeights) else next(iter(params.values()))


class SimulationCollector(WorkerPool):
    """A pool over a StreamWire."""

    def __init__(self, wire: StreamWire, assembly: Assembly, spec: CollectSpec) -> None:
        super().__init__(wire, assembly, spec)
        self._simulation, self.main_thread = wire, spec.simulation.main_thread

    def serve(self) -> None:
        self._simulation.serve()

    def stop(self) -> None:
        self._simulation.stop()

    def eval_episodes(self) -> list[Episode]:
        return self._simulation.eval_episodes()


def simulation_wire(
    factory: RunnerFactory, spec: CollectSpec, pacing: Pacing, *, authors: int, slots: int, steps: int
) -> StreamWire:
    """Return the wire of a simulator that runs while the learner learns. A fragment has at most `steps` steps."""

    def make() -> DeviceRunner:
        from freewheel.rollout.device_runner import DeviceRunner

        simulation = spec.simulation
        return DeviceRunner(factory, range(spec.env.lanes), steps, simulation.compile, simulation.reserved_lanes)

    return StreamWire(make, spec, pacing, authors=authors, slots=slots)
