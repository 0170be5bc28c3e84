"""A simulator and a learner on two devices, of which one is a real GPU; and the way between two GPUs, where one plays both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import freewheel
from freewheel.core import BatchSpec, Chunk, Snapshot, Transitions
from freewheel.envs.batched import BatchedConfig
from freewheel.errors import SetupError
from freewheel.pacing.lag_bound import LagBound
from freewheel.pacing.one_ahead import OneAhead
from freewheel.policies.nets import TensorPolicy
from freewheel.policies.numpy_actor import make_tensor_actor
from freewheel.policies.spec import PolicyConfig
from freewheel.rollout.device_runner import DeviceRunner
from freewheel.rollout.factory import CollectSpec, RunnerFactory, SimulationSpec
from freewheel.run.process import learner_stream
from freewheel.seeding import generator
from freewheel.transport.pool import AsTheyCome
from freewheel.transport.stream import SimulationCollector, simulation_wire

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)

DRONE = "freewheel/RoughDrone-v0"
LANES, STEPS, FRAGMENT, BATCHES = 64, 16, 8, 6
ROWS = LANES * STEPS
#: The last is the way between two GPUs: "cuda" is another name of the same one, so rows and weights are copied all the same.
APART = [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda")]
WORLD = {"lidar": False, "episode_seconds": 1.0, "levels": 1, "tiles_per_level": 1}
close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """CUDA keeps threads and files as long as the process lives."""


def collector_of(simulator: str, learner: str, kind: Any, pacing: Any) -> tuple[SimulationCollector, TensorPolicy]:
    """A simulation in its thread, and a policy of the learner."""
    world = BatchedConfig("torch:freewheel_drone.env:RoughDrone", WORLD, device=simulator)
    env = world.make(range(LANES))
    spec, policy = env.spec, PolicyConfig(hidden=(32,)).resolve(env.spec)
    env.close()
    assert spec.device == simulator
    factory = RunnerFactory(world.make, make_tensor_actor(policy, simulator, 3), seed=5)
    simulation = SimulationSpec(compile=kind, deliver_to=learner, reserved_lanes=4)
    given = CollectSpec(env=spec, batch=BatchSpec(STEPS, LANES), simulation=simulation)
    wire = simulation_wire(factory, given, pacing, authors=1, slots=4, steps=FRAGMENT)
    return SimulationCollector(wire, AsTheyCome(), given), TensorPolicy(policy, generator(7), learner, 0)


def collected(collector: SimulationCollector, policy: TensorPolicy, learner: str) -> list[Chunk[Tensor]]:
    """Every version changes the weights a little; the learner's stream is kept busy, so that it is always behind its host."""
    kept: list[Chunk[Tensor]] = []
    busy = torch.zeros(2048, 2048, device=learner if learner != "cpu" else "cuda:0")
    with learner_stream(learner), collector:
        for version in range(BATCHES):
            for _ in range(20):
                busy = busy @ busy
            policy.net.vector.data.mul_(0.9)
            collector.publish(Snapshot(version, policy.weights(on_device=True)), version * ROWS)
            limit = time.monotonic() + 60
            while sum(chunk.rows for chunk in kept) < (version + 1) * ROWS:
                assert time.monotonic() < limit
                kept += collector.collect(wait=True)
    torch.cuda.synchronize()
    return kept


def assert_followed(chunks: Sequence[Chunk[Tensor]], learner: str) -> None:
    """Rows follow each other: a copy that was read too early would not."""
    joined = {
        field.name: torch.cat([getattr(chunk.data, field.name) for chunk in chunks]) for field in fields(Transitions)
    }
    assert {value.device.type for value in joined.values()} == {torch.device(learner).type}
    going_on = ~(joined["terminated"] | joined["truncated"])[:-1]
    assert going_on.any()
    assert torch.equal(joined["obs"][1:][going_on], joined["next_obs"][:-1][going_on])


@pytest.mark.parametrize("kind", ["off", "graphs"])
@pytest.mark.parametrize("mode", ["continuous", "batch"])
@pytest.mark.parametrize(("simulator", "learner"), APART)
def test_rows_and_weights_cross(simulator: str, learner: str, mode: str, kind: str) -> None:
    pacing: Any = OneAhead(workers=1, lanes=LANES, steps=FRAGMENT, batch_steps=STEPS)
    if mode == "continuous":
        pacing = LagBound(
            workers=1, lanes=LANES, steps=FRAGMENT, batch_rows=ROWS, ahead=1, max_lag=1, whole_fragments=True
        )
    collector, policy = collector_of(simulator, learner, kind, pacing)
    chunks = collected(collector, policy, learner)
    assert_followed(chunks, learner)
    assert len({chunk.version for chunk in chunks}) > 2
    assert any(chunk.episodes for chunk in chunks)
    assert {one.lane for one in collector.eval_episodes()} <= set(range(LANES, LANES + 4))


@pytest.mark.parametrize(("simulator", "learner"), APART)
def test_rows_are_chosen_by_the_weights_that_were_sent(simulator: str, learner: str) -> None:
    """The learner gives them the log-probability that they were chosen with."""
    pacing = OneAhead(workers=1, lanes=LANES, steps=FRAGMENT, batch_steps=STEPS)
    collector, policy = collector_of(simulator, learner, "graphs", pacing)
    sent: dict[int, Tensor] = {}
    publish = collector.publish

    def remembering(snapshot: Snapshot, done: int) -> None:
        sent[snapshot.version] = policy.flat
        publish(snapshot, done)

    collector.publish = remembering  # type: ignore[method-assign]
    for chunk in collected(collector, policy, learner):
        policy.load_flat(sent[chunk.version])
        with torch.no_grad():
            inputs = policy.inputs(chunk.data.obs.flatten(0, 1))
            found = policy.distribution(inputs).log_prob(chunk.data.action.flatten(0, 1))
        close(found, chunk.data.log_prob.flatten(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("simulator", "learner"), APART)
def test_in_turn_rows_are_those_of_one_device(simulator: str, learner: str) -> None:
    world = BatchedConfig("torch:freewheel_drone.env:RoughDrone", WORLD, device=simulator)
    env = world.make(range(LANES))
    policy = PolicyConfig(hidden=(32,)).resolve(env.spec)
    env.close()
    stories: list[list[Chunk[Tensor]]] = []
    for deliver_to in (simulator, learner):
        factory = RunnerFactory(world.make, make_tensor_actor(policy, simulator, 3), seed=5)
        weights = TensorPolicy(policy, generator(7), deliver_to, 0).weights(on_device=True)
        with learner_stream(deliver_to):
            runner = DeviceRunner(factory, range(LANES), STEPS, "graphs", 0, deliver_to)
            runner.load(Snapshot(1, weights))
            stories.append([runner.unroll(STEPS) for _ in range(3)])
            runner.close()
    for here, there in zip(*stories, strict=True):
        assert there.data.obs.device.type == torch.device(learner).type
        for field in fields(Transitions):
            assert torch.equal(getattr(here.data, field.name).cpu(), getattr(there.data, field.name).cpu()), field.name
        assert here.episodes == there.episodes


@pytest.mark.parametrize(
    ("device", "algo", "mode"),
    [
        ("cuda:0,cpu", "ppo", "continuous"), ("cpu,cuda:0", "ppo", "continuous"), ("cuda:0,cpu", "sac", "batch"),
        ("cpu,cuda:0", "mbpo", "continuous"), ("cuda:0,cpu", "mbpo", "lockstep"),
        ("cuda:0", "ppo", "continuous"),
    ],
)  # fmt: skip
def test_whole_runs_learn_apart(tmp_path: Path, device: str, algo: Any, mode: Any) -> None:
    options: dict[str, Any] = {"policy": {"hidden": [32]}, "evals": 1, "eval_episodes": 2, "eval_max_steps": 20}
    args = dict(WORLD)
    if algo != "ppo":
        options[algo] = {"batch": 64, "learning_starts": 512, "updates_per_row": 0.02, "buffer": 20_000}
        options["policy"]["head"] = "squashed"
    if algo == "mbpo":
        args["model_state"] = True
        options[algo] |= {"model_hidden": [32], "members": 3, "elites": 2, "max_epochs": 2, "model_every": 1024}
        options[algo] |= {"rollouts_per_row": 1.0, "model_buffer": 20_000}
    result = freewheel.train(
        DRONE, algo=algo, mode=mode, device=device, num_envs=LANES, num_steps_per_env=STEPS, steps=6 * ROWS,
        env_args=args, runs_dir=str(tmp_path), quiet=True, **options,
    )  # fmt: skip
    assert result.summary["env_steps"] >= 6 * ROWS
    assert result.summary["updates"] > 1
    assert result.summary["eval_episodes"] == 2


def test_a_gpu_that_is_not_here_is_refused(tmp_path: Path) -> None:
    missing = f"cuda:0,cuda:{torch.cuda.device_count()}"
    with pytest.raises(SetupError, match=r'torch sees only cuda:0.* here; use device="cuda"'):
        freewheel.train(DRONE, device=missing, runs_dir=str(tmp_path), quiet=True)
