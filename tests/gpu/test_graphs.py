"""On a GPU, what is replayed from CUDA graphs is what eager execution computes; what cannot be captured runs all the same."""

from __future__ import annotations

from contextlib import closing
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import WORKER_TIME, BatchSpec, Chunk, Compile, Origin, Snapshot, Transitions
from freewheel.envs.batched import BatchedConfig
from freewheel.envs.family import register_ids
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.mbpo.dynamics import Ensemble, ModelSpec
from freewheel.learn.mbpo.fitting import Fitter
from freewheel.learn.mbpo.model_env import ModelEnv
from freewheel.learn.mbpo.rollouts import Rollouts
from freewheel.learn.mbpo.task import StateColumns
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.ppo.learner import PPO
from freewheel.learn.ppo.torch_engine import TorchEngine
from freewheel.learn.replay.rows import Columns
from freewheel.learn.sac.config import SACConfig
from freewheel.learn.sac.learner import SAC
from freewheel.learn.spec import Compute, LearnerSpec, WorldFacts
from freewheel.policies.nets import TensorPolicy
from freewheel.policies.numpy_actor import make_tensor_actor
from freewheel.policies.spec import FlatParams, PolicyConfig, PolicySpec, full_layout, initialise
from freewheel.rollout.device_runner import DeviceRunner
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.graphs import Program
from freewheel.seeding import generator, training_episodes

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here", allow_module_level=True)

KINDS: tuple[Compile, ...] = ("off", "graphs")
LANES, STEPS = 16, 8
ROWS = LANES * STEPS
close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """CUDA keeps threads and files as long as the process lives."""


def policy_with(head: str) -> PolicySpec:
    return PolicySpec(5, "float32", ((0, 5),), ((0, 5),), (), None, head, 2, (32, 32), "tanh", 0.0, "")


def task_of(head: str, kind: Compile) -> LearnerSpec:
    compute, world = Compute(device="cuda", compile=kind), WorldFacts(batched_on_device=True)
    return LearnerSpec(policy=policy_with(head), batch=BatchSpec(STEPS, LANES), seed=1, compute=compute, world=world)


def chunk_of(number: int, head: str = "squashed") -> Chunk[Tensor]:
    """Random rows on the GPU, the same for the same number."""
    rng = torch.Generator("cuda").manual_seed(number)
    shape = (STEPS, LANES)

    def random(*more: int) -> Tensor:
        return torch.randn(*shape, *more, generator=rng, device="cuda")

    terminated, truncated = random() > 1.5, random() > 1.5
    action = (random() > 0).long() if head == "categorical" else random(2).tanh()
    next_obs = random(5)
    data = Transitions(
        obs=torch.cat([random(5)[:1], next_obs[:-1]]), action=action, log_prob=random() - 2, reward=random(),
        terminated=terminated,
        truncated=truncated & ~terminated, next_obs=next_obs, valid=torch.ones(shape, dtype=torch.bool, device="cuda"),
    )  # fmt: skip
    origin = Origin(0, 0, number, 0)
    return Chunk(data, number, origin, (), torch.zeros(LANES, 0), np.zeros(len(WORKER_TIME), np.int64), ROWS)


SWITCHES: tuple[dict[str, Any], ...] = (
    {}, {"priority": "td"}, {"priority": "recent"}, {"n_step": 3}, {"priority": "td", "n_step": 3}
)  # fmt: skip


@pytest.mark.parametrize(
    ("head", "switches"), [*(("squashed", switches) for switches in SWITCHES), ("categorical", {})], ids=str
)
def test_sac_takes_the_same_steps(head: str, switches: dict[str, Any]) -> None:
    weights = []
    for kind in KINDS:
        config = SACConfig(batch=64, learning_starts=ROWS, updates_per_row=20 / ROWS, buffer=4 * ROWS, **switches)
        learner = SAC(config, task_of(head, kind))
        start = learner.updater.net.vector.clone()
        for number in range(2):
            learner.observe(chunk_of(number, head))
        while learner.pace.due:
            learner.update()
        assert (learner.pace.updates, learner.updater.fallback) == (20, "")
        updater = learner.updater
        weights.append([updater.net.vector, updater.critics.vector, updater.critics.target, updater.log_temperature])
        weights[-1] += [part / 2**20 for part in learner.replay.priority.tensors]
        assert not torch.equal(updater.net.vector, start)
    for eager, graphed in zip(*weights, strict=True):
        close(eager, graphed)


def test_a_model_is_fitted_alike() -> None:
    config = MBPOConfig(members=3, elites=2, model_hidden=(32, 32), model_batch=32, max_epochs=3)
    spec = ModelSpec(Columns(5, 2), 3, (32, 32), "delta", learns_reward=True, learns_termination=True)
    rows = torch.randn(400, spec.columns.width, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    rows[:, 8], rows[:, 9] = (rows[:, 8] > 1).float(), 1.0  # terminated, has_successor
    fitted = []
    for kind in KINDS:
        fitter = Fitter(spec, config, 4, "cuda", kind)
        assert fitter._step.fallback == ""
        fits = [fitter(part) for part in rows.chunk(2)]
        fitted.append([torch.as_tensor(fit.state["vector"]).clone() for fit in fits])
        assert all(np.isfinite(value) for value in fits[-1].metrics.values())
    for eager, graphed in zip(*fitted, strict=True):
        torch.testing.assert_close(eager, graphed, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("target_kl", [None, 0.5])
@pytest.mark.parametrize("head", ["gaussian", "squashed"])
def test_ppo_makes_the_same_update(head: str, target_kl: float | None) -> None:
    results = []
    for kind in KINDS:
        config = PPOConfig(epochs=2, minibatch=32, target_kl=target_kl, reward_scale="returns")
        learner = PPO(config, task_of(head, kind))
        assert isinstance(learner.engine, TorchEngine)
        start = learner.engine.net.vector.clone()
        for number in range(2):
            learner.observe(chunk_of(number))
            assert learner.update()["update/skipped"] == 0.0
        assert learner.fallback == ""
        results.append([learner.engine.net.vector.clone(), learner.engine._scalars.clone()])
        assert not torch.equal(learner.engine.net.vector, start)
    for eager, graphed in zip(*results, strict=True):
        close(eager, graphed)


def test_drones_fly_the_same_way() -> None:
    """Sixty steps in fragments of twelve, with episodes that end on the way."""
    world = BatchedConfig(
        "torch:freewheel_drone.env:RoughDrone", {"lidar": False, "episode_seconds": 1.0}, device="cuda"
    )
    stories = []
    for kind in KINDS:
        with closing(world.make(range(LANES))) as env:
            policy = PolicyConfig(hidden=(32,)).resolve(env.spec)
        params = FlatParams(full_layout(policy))
        initialise(policy, params, generator(7))
        recipe = RunnerFactory(world.make, make_tensor_actor(policy, "cuda", 3), seed=5)
        with closing(DeviceRunner(recipe, range(LANES), 12, kind)) as runner:
            runner.load(Snapshot(1, params.views))
            chunks = [runner.unroll(12) for _ in range(5)]
            assert runner.fallbacks == []
        stories.append(chunks)
    for eager, graphed in zip(*stories, strict=True):
        for part in fields(Transitions):
            here, there = getattr(eager.data, part.name), getattr(graphed.data, part.name)
            if here.dtype == torch.bool:
                assert torch.equal(here, there), part.name
            else:
                close(here, there)
        assert [(one.lane, one.number, one.length) for one in eager.episodes] == [
            (one.lane, one.number, one.length) for one in graphed.episodes
        ]
    assert any(chunk.episodes for chunk in stories[0])


def test_drones_are_imagined_the_same_way() -> None:
    """Rollouts of a model that knows nothing, with the world's own sensors, reward and ends, from real states."""
    register_ids()
    args = {"model_state": True, "levels": 1}
    env = BatchedConfig("freewheel/RoughDrone-v0", args, device="cuda").make(range(LANES))
    policy = PolicyConfig(hidden=(32,), head="squashed").resolve(env.spec)
    with closing(env):
        seen = env.reset([training_episodes(7, 0)]).clone()
        found = []
        for kind in KINDS:
            view = StateColumns(env.spec.model_task, env.spec.slices)
            columns = Columns(view.size, policy.action_size)
            model = Ensemble(ModelSpec(columns, 3, (16,), "delta", False, False, predicted=view.predicted), "cuda")
            model.statistics["out_scale"].fill_(0.01)
            task = view.function("reward"), view.function("termination")
            rollouts = Rollouts(
                ModelEnv(model, 2, LANES, 3, task, view),
                TensorPolicy(policy, generator(1, "weights"), "cuda", 5),
                6,
                kind,
            )
            for _ in range(2):
                rollouts(seen, 6)
            found.append(rollouts.rows)
    assert found[0].shape == found[1].shape
    close(*found)


def test_a_program_starts_where_it_would_have_started_without_a_graph() -> None:
    totals = []
    for kind in KINDS:
        total, rng = torch.zeros(4, device="cuda"), torch.Generator("cuda").manual_seed(3)

        def body(total: Tensor = total, rng: torch.Generator = rng) -> None:
            total.add_(torch.rand(4, device="cuda", generator=rng))

        program = Program(body, kind, state=[total], generators=[rng])
        assert program.fallback == ""
        assert not total.any()
        for _ in range(5):
            program()
        totals.append(total)
    close(*totals)


def test_what_cannot_be_captured_runs_as_it_is() -> None:
    total = torch.zeros(1, device="cuda")

    def body() -> None:
        total.add_(1.0 + float(total) * 0)  # looks at the device in the middle, which no graph can

    program = Program(body, "graphs", state=[total])
    assert program.graph is None
    assert program.fallback
    assert "\n" not in program.fallback
    assert total.item() == 0.0
    for _ in range(3):
        program()
    assert total.item() == 3.0
