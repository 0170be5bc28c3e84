"""A simulator on one device and the learner on another: rows and weights cross without a race, in every mode.

This machine need not have a GPU: see tests/support/pretend_gpus.py. tests/gpu/test_devices.py does the same on a real one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from freewheel.collect.batch import WholeBatches
from freewheel.collect.quota import Quota
from freewheel.collect.serial import SerialCollector
from freewheel.core import BatchSpec, Chunk, Collector, Decision, Snapshot, Transitions
from freewheel.envs.device import DeviceEnv
from freewheel.pacing.lag_bound import LagBound
from freewheel.pacing.one_ahead import OneAhead
from freewheel.rollout.device_runner import DeviceRunner
from freewheel.rollout.factory import CollectSpec, RunnerFactory, SimulationSpec
from freewheel.rollout.graphs import Program
from freewheel.run.process import learner_stream
from freewheel.transport.executors import Executors
from freewheel.transport.pool import AsTheyCome
from freewheel.transport.stream import SimulationCollector, simulation_wire
from tests.support.device_story import SEED, assert_rows, expected_rows, joined
from tests.support.isaac_like import IsaacLike
from tests.support.pretend_gpus import HazardError, PretendStream, plain, pretend_gpus, told

LANES, STEPS, FRAGMENT, VERSIONS, RESERVED = 4, 6, 3, 4, 2
ROWS = LANES * STEPS
APART = [("cuda:1", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:1", "cpu"), ("cpu", "cuda:1")]
TOGETHER = [("cuda:1", "cuda:1"), ("cpu", "cpu")]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    with pretend_gpus(monkeypatch) as check:
        yield check


class Scaling:
    """Acts with obs × weight. Implements DeviceActor."""

    state_size, generators = 0, list[torch.Generator]()

    def __init__(self, device: str) -> None:
        self.weight = torch.zeros(1, device=device)

    def act(self, obs: Tensor, rng: Any, *, state: Tensor | None = None, greedy: bool = False) -> Decision[Tensor]:
        assert state is not None
        return Decision(obs[:, :1] * self.weight * 0.01, obs[:, 0] * 0, state)

    def load(self, snapshot: Snapshot) -> None:
        weight: Any = snapshot.params["weight"]
        self.weight.copy_(torch.as_tensor(weight), non_blocking=self.weight.is_cuda)


class Particular(IsaacLike):
    """A simulator that means the current device when it says "cuda"."""

    def _at_home(self) -> None:
        assert self.device.type == "cpu" or torch.cuda.current_device() == self.device.index

    def reset(self, **given: Any) -> Any:
        self._at_home()
        return super().reset(**given)

    def step(self, action: Tensor) -> Any:
        self._at_home()
        return super().step(action)


class Apart:
    """A simulator and a learner, each on its device."""

    def __init__(self, simulator: str, learner: str) -> None:
        self.simulator, self.learner = simulator, learner
        with torch.cuda.device("cuda:0" if simulator == "cpu" else simulator):
            self.spec = DeviceEnv(Particular(LANES, device=simulator), "planted").spec
        assert self.spec.device == simulator
        simulation = SimulationSpec(deliver_to=learner, reserved_lanes=RESERVED)
        self.collect_spec = CollectSpec(env=self.spec, batch=BatchSpec(STEPS, LANES), simulation=simulation)
        self.factory = RunnerFactory(self.make, lambda: Scaling(simulator), SEED)

    def make(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> DeviceEnv:
        with torch.cuda.device("cuda:0" if self.simulator == "cpu" else self.simulator):
            return DeviceEnv(Particular(len(lanes), device=self.simulator), "planted")

    def free(self) -> Collector:
        pacing = LagBound(
            workers=1, lanes=LANES, steps=FRAGMENT, batch_rows=ROWS, ahead=1, max_lag=1, whole_fragments=True
        )
        wire = simulation_wire(self.factory, self.collect_spec, pacing, authors=1, slots=4, steps=FRAGMENT)
        return SimulationCollector(wire, AsTheyCome(), self.collect_spec)

    def one_ahead(self) -> Collector:
        pacing = OneAhead(workers=1, lanes=LANES, steps=FRAGMENT, batch_steps=STEPS)
        wire = simulation_wire(self.factory, self.collect_spec, pacing, authors=1, slots=4, steps=FRAGMENT)
        return SimulationCollector(wire, WholeBatches(pacing, authors=1, quota=ROWS), self.collect_spec)

    def in_turn(self) -> Collector:
        runner = DeviceRunner(self.factory, range(LANES), STEPS, "off", RESERVED, self.learner)
        return SerialCollector(runner, Quota(STEPS, LANES))

    def train(self, build: Callable[[], Collector]) -> list[Chunk[Tensor]]:
        """Every version is computed from the rows before it, on the learner's stream, and nothing is kept but plain copies."""
        kept: list[Chunk[Tensor]] = []
        with learner_stream(self.learner), build() as collector:
            weight: Any = torch.ones(1, device=self.learner)
            for version in range(VERSIONS):
                held = weight.clone() if self.learner != "cpu" else plain(weight).numpy().copy()
                collector.publish(Snapshot(version, {"weight": held}), version * ROWS)
                del held
                while sum(chunk.rows for chunk in kept) < (version + 1) * ROWS:
                    weight = self._learn(weight, collector.collect(wait=True), kept)
            self.evaluated = collector.eval_episodes() or []
        return kept

    def _learn(self, weight: Any, chunks: Sequence[Chunk[Tensor]], kept: list[Chunk[Tensor]]) -> Any:
        for chunk in chunks:
            devices = {getattr(chunk.data, field.name).device for field in fields(Transitions)}
            assert devices == {torch.device(self.learner)}
            weight = weight * 0.5 + chunk.data.reward.mean() * 1e-4
            kept.append(copied(chunk))
        return weight


def copied(chunk: Chunk[Tensor]) -> Chunk[Tensor]:
    """Its numbers, as they are now."""
    data = {field.name: plain(getattr(chunk.data, field.name)).clone() for field in fields(Transitions)}
    return Chunk(
        Transitions(**data), chunk.version, chunk.origin, chunk.episodes, torch.zeros(0), chunk.time, chunk.rows
    )


def assert_episodes(chunks: Sequence[Chunk[Tensor]]) -> None:
    wanted = expected_rows(joined(chunks, "action")).episodes
    ended = [(one.lane, one.length) for chunk in chunks for one in chunk.episodes]
    assert ended == [(one.lane, one.length) for step in wanted for one in step]


MODES = ("free", "one_ahead", "in_turn")


@pytest.mark.parametrize(
    ("simulator", "learner", "mode"),
    [
        *((*where, mode) for mode in MODES for where in APART[::3]),
        *((*where, mode) for where, mode in zip([*APART[1:3], *TOGETHER], ("free", "one_ahead") * 2, strict=True)),
    ],
)
def test_rows_and_weights_do_not_race(machine: Callable[[], None], simulator: str, learner: str, mode: str) -> None:
    setup = Apart(simulator, learner)
    chunks = setup.train(getattr(setup, mode))
    assert sum(chunk.rows for chunk in chunks) >= VERSIONS * ROWS
    assert_rows(chunks)
    assert_episodes(chunks)
    actions = [float(chunk.data.action.abs().mean()) for chunk in chunks]
    assert len({chunk.version for chunk in chunks}) >= VERSIONS - 1
    assert len(set(actions)) > 3, "newer weights act in another way"
    assert {episode.lane for episode in setup.evaluated} == {LANES, LANES + 1}, "reserved lanes"
    gc.collect()
    machine()


def ignored(*_: Any) -> None:
    """What is left out."""


@pytest.mark.parametrize("learner", ["cuda:0", "cuda:1", "cpu"])
def test_a_missing_wait_is_found(machine: Callable[[], None], monkeypatch: pytest.MonkeyPatch, learner: str) -> None:
    """The stand-ins notice what the wire does for nothing else."""
    setup = Apart("cuda:1", learner)
    monkeypatch.setattr(PretendStream, "wait_event", ignored)
    with pytest.raises(HazardError, match="may not have written yet"):
        setup.train(setup.free)


@pytest.mark.parametrize("learner", ["cuda:0", "cuda:1", "cpu"])
def test_unrecorded_memory_is_found(machine: Callable[[], None], monkeypatch: pytest.MonkeyPatch, learner: str) -> None:
    setup = Apart("cuda:1", learner)
    monkeypatch.setattr("tests.support.pretend_gpus.Pretend.record_stream", ignored)
    setup.train(setup.free)
    gc.collect()
    with pytest.raises(HazardError, match="is given back while"):
        machine()


def test_tensors_of_two_devices_do_not_mix(machine: Callable[[], None]) -> None:
    here, there = (torch.ones(2, device=f"cuda:{number}") for number in range(2))
    with pytest.raises(HazardError, match="add of tensors on cuda:0 and cuda:1"):
        torch.add(here, there)


def test_the_learner_has_a_stream_of_its_own_gpu(machine: Callable[[], None]) -> None:
    """Which comes after what was made there before."""
    before = torch.zeros(1, device="cuda:1")
    with learner_stream("cuda:1"):
        assert torch.cuda.current_device() == 1
        before.add_(1)
    assert torch.cuda.current_device() == 0


def test_work_beside_the_learner_is_done_on_its_gpu(machine: Callable[[], None]) -> None:
    """Its thread would be on the first one."""

    def build() -> Callable[[Tensor], Tensor]:
        assert torch.cuda.current_device() == 1
        return lambda rows: rows * 2

    with Executors("thread", "cuda:1") as executors, learner_stream("cuda:1"):
        executor = executors(build, "doubling")
        with torch.cuda.device("cuda:0"):  # wherever the caller stands: the argument is the learner's
            executor.submit(torch.ones(2, device="cuda:1"))
        doubled = executor.result(wait=20.0)
        told()  # by the queue of results
        assert plain(doubled + 1).tolist() == [3.0, 3.0]


def test_graphs_are_captured_on_their_tensors_gpu(machine: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []
    monkeypatch.setattr("freewheel.rollout.graphs._capture", lambda *_: captured.append(torch.cuda.current_device()))
    here, there = (torch.zeros(1, device=device) for device in ("cuda:0", "cuda:1"))
    Program(lambda: None, "graphs", state=[there])
    Program(lambda: None, "graphs", state=[here])
    assert (captured, torch.cuda.current_device()) == ([1, 0], 0)
    assert Program(lambda: None, "graphs", state=[here, there]).fallback == "its tensors are on several devices"
