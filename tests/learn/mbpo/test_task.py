"""What the model learns: columns by name, or the state that a simulator declares; everything else stays or is computed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import BatchSpec, Slice
from freewheel.envs.device import DeviceEnv
from freewheel.errors import SetupError, UsageError
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.mbpo.dynamics import Ensemble, ModelSpec
from freewheel.learn.mbpo.fitting import Fitter
from freewheel.learn.mbpo.learner import MBPO
from freewheel.learn.mbpo.model_env import ModelEnv, look
from freewheel.learn.mbpo.task import ModelTask, NamedColumns, StateColumns, find_columns, model_rows, task_on, whole
from freewheel.learn.replay.rows import Columns, pack
from freewheel.learn.spec import LearnerSpec, WorldFacts
from freewheel.policies.numpy_actor import make_tensor_actor
from freewheel.policies.spec import PolicyConfig
from freewheel.rollout.device_runner import DeviceRunner
from freewheel.rollout.factory import RunnerFactory
from freewheel.testing.conformance import copy_state
from freewheel_drone.env import RoughDrone
from tests.support.model_story import SMALL, mbpo_for

SLICES = (Slice("policy", 0, 4, (4,)), Slice("critic", 4, 6, (2,)), Slice("model_state", 6, 9, (3,)))


class Slider(ModelTask):
    """A state is (where it is, how fast, how heavy); a sensor shows ten times where it is, critics the rest."""

    predicted, read = 2, 1

    def observe(self, state: Tensor) -> Mapping[str, Tensor]:
        return {"policy": state[:, :1].expand(-1, 4) * 10, "critic": state[:, 1:]}

    def reward(self, state: Tensor, action: Tensor, next_state: Tensor) -> Tensor:
        return next_state[:, 0] - state[:, 0] + 100 * action[:, 0]


def observed(*states: tuple[float, float, float]) -> Tensor:
    state = torch.tensor(states, dtype=torch.float32)
    return torch.cat((state[:, :1].expand(-1, 4) * 10, state[:, 1:], state), 1)


def faster(size: int, predicted: int) -> Ensemble:
    """Says that the second predicted column grows by the action."""
    model = Ensemble(ModelSpec(Columns(size, 1), 2, (), "delta", False, True, predicted=predicted), "cpu")
    model.params["min_logvar"].data.fill_(-40)
    model.params["0.weight"].data[:, size, 1] = 1
    model.params["0.bias"].data[:, 0, predicted : 2 * predicted] = -40
    model.params["0.bias"].data[:, 0, -1] = -100
    return model


def test_named_columns_are_predicted_or_read_and_the_others_stay() -> None:
    view = NamedColumns(6, ((3, 5),), ((0, 1),))
    obs = torch.arange(12.0).view(2, 6)
    assert (view.predicted, view.size, view.width) == (2, 3, 6)
    assert view.encode(obs, obs).tolist() == [[3, 4, 0], [9, 10, 6]]
    after = view.successor(obs, torch.zeros(2, 1), torch.full((2, 2), -1.0))
    assert after.tolist() == [[0, 1, 2, -1, -1, 5], [6, 7, 8, -1, -1, 11]]
    assert obs[0, 3] == 3


def test_by_default_the_model_sees_rows_as_they_are() -> None:
    view, rows = whole(3), torch.rand(5, Columns(3, 2).width)
    assert model_rows(view, Columns(3, 2), rows) is rows
    predicted = torch.rand(5, 3)
    assert view.successor(rows[:, :3], rows[:, 3:5], predicted) is predicted


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (["policy"], ((0, 4),)),
        (["critic", "policy[1:3]"], ((4, 6), (1, 3))),
        (["policy[2:]", "critic[:1]"], ((2, 4), (4, 5))),
    ],
)
def test_columns_have_names(names: list[str], columns: tuple[tuple[int, int], ...]) -> None:
    assert find_columns("mbpo.predicted", names, SLICES) == columns


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["polcy"], "mbpo.predicted: no observation is called 'polcy'; did you mean 'policy'?"),
        (["critic[1:3]"], "mbpo.predicted: critic[1:3] is not a part of the 2 columns of critic"),
        (["policy[2:2]"], "mbpo.predicted: policy[2:2] is not a part of the 4 columns of policy"),
        (["policy", "policy[1:2]"], "mbpo.predicted: a column is named twice in policy policy[1:2]"),
    ],
)
def test_wrong_names_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        find_columns("mbpo.predicted", names, SLICES)
    assert str(error.value) == message


def test_what_is_read_needs_what_is_predicted() -> None:
    with pytest.raises(UsageError, match=r"mbpo\.read needs mbpo\.predicted"):
        MBPOConfig(read=("policy",))


def test_rollouts_are_of_the_state_and_all_else_is_computed_from_it() -> None:
    view = StateColumns(Slider(), SLICES)
    env = ModelEnv(faster(3, 2), 2, 2, 0, (view.function("reward"), None), view)
    env.begin(observed((1, 0, 7), (2, 3, 8)))
    step = env.step(torch.tensor([[0.5], [-1.0]]))
    torch.testing.assert_close(step.next_obs, observed((1, 0.5, 7), (2, 2, 8)))
    torch.testing.assert_close(step.reward, torch.tensor([50.0, -100.0]))
    torch.testing.assert_close(env.step(torch.ones(2, 1)).next_obs, observed((1, 1.5, 7), (2, 3, 8)))


def test_the_model_never_sees_what_it_does_not_read() -> None:
    view, model = StateColumns(Slider(), SLICES), faster(3, 2)
    obs = observed((1, 0, 7), (2, 3, 8))
    blind = obs.clone()
    blind[:, :6] = torch.inf
    assert torch.equal(view.encode(obs, obs), view.encode(blind, blind))
    assert model.spec.inputs == 3 + 1
    rows = pack(blind, torch.ones(2, 1), torch.zeros(2), torch.zeros(2), torch.ones(2), blind)
    seen = model_rows(view, Columns(9, 1), rows)
    assert seen.shape == (2, Columns(3, 1).width)
    assert seen.isfinite().all()


def test_a_prediction_that_is_not_finite_reaches_no_function_of_the_task() -> None:
    class Picky(Slider):
        def observe(self, state: Tensor) -> Mapping[str, Tensor]:
            assert state.isfinite().all()
            return super().observe(state)

    view, model = StateColumns(Picky(), SLICES), faster(3, 2)
    model.params["0.bias"].data[:, 0, 0] = torch.inf
    env = ModelEnv(model, 2, 1, 0, (None, None), view)
    env._reward = view.function("reward")
    env.begin(observed((1, 0, 7)))
    step = env.step(torch.zeros(1, 1))
    assert not step.valid.any()
    assert step.next_obs.isfinite().all()


def facts(task: ModelTask | None, slices: tuple[Slice, ...] = SLICES, **options: Any) -> Any:
    policy = replace(mbpo_for().spec.policy, obs_size=9)
    world = WorldFacts(slices=slices, model_task=task, name="Hopper-v5")
    return look(MBPOConfig(**options), LearnerSpec(policy=policy, batch=BatchSpec(1, 1), seed=0, world=world))


def test_what_is_chosen_goes_before_what_is_declared_and_that_before_what_is_known() -> None:
    view, (reward, termination) = facts(Slider())
    assert isinstance(view, StateColumns)
    assert reward is not None
    assert termination is not None  # of Hopper: Slider declares none
    assert facts(Slider(), reward="learned", termination="learned")[1] == (None, None)
    view, (reward, _) = facts(Slider(), predicted=("critic",), read=("policy[0:1]",))
    assert (view.predicted, view.size, reward) == (2, 3, None)
    assert facts(None)[0].size == 9


@pytest.mark.parametrize(
    ("options", "declared", "said"),
    [
        ({}, None, "all columns"),
        ({}, Slider(), "2 numbers, by the simulator's model_task"),
        ({"predicted": ("critic", "policy[0:1]")}, Slider(), "critic policy[0:1]"),
    ],
)
def test_the_plan_says_what_is_predicted(options: dict[str, Any], declared: ModelTask | None, said: str) -> None:
    spec = replace(mbpo_for().spec, world=WorldFacts(slices=SLICES, model_task=declared))
    assert MBPOConfig(**options).describe(spec).endswith(f"which predict {said}")


def test_a_task_without_its_group_is_refused() -> None:
    with pytest.raises(SetupError, match="has a model_task but observes no group 'model_state', only policy, critic"):
        facts(Slider(), SLICES[:2])


def test_a_task_that_cannot_observe_is_refused_before_the_first_rollout() -> None:
    class Blind(ModelTask):
        predicted = 2

    with pytest.raises(SetupError, match=r"^Blind has no observe\(state\), which computes the other groups"):
        facts(Blind())


LANES, STEPS = 8, 8


def drone() -> DeviceEnv:
    return DeviceEnv(RoughDrone(LANES, lidar_channels=2, levels=1, model_state=True), "drone")


def drone_learner(env: DeviceEnv, **options: Any) -> MBPO:
    policy = PolicyConfig(hidden=(8,), head="squashed").resolve(env.spec)
    known = env.spec.slices, env.spec.model_task
    world = WorldFacts(batched_on_device=True, has_final_obs=False, slices=known[0], model_task=known[1])
    config = replace(
        SMALL, learning_starts=LANES * STEPS, model_every=LANES * STEPS, buffer=2000, termination="auto", **options
    )
    return mbpo_for(config, policy=policy, batch=BatchSpec(STEPS, LANES), world=world)


def runner_of(env: DeviceEnv, learner: MBPO) -> DeviceRunner:
    actor = make_tensor_actor(learner.spec.policy, "cpu", 3)
    return DeviceRunner(RunnerFactory(lambda lanes, **_: env, actor, seed=5), range(LANES), STEPS)


def test_a_learner_on_another_device_has_a_copy_of_the_task() -> None:
    """No tensor is left behind: on the meta device one that is would be an error."""
    task, state = drone().spec.model_task, drone().spec.slice("model_state")
    assert state is not None
    rows, action = torch.zeros(3, state.stop - state.start, device="meta"), torch.zeros(3, 4, device="meta")
    moved: Any = task_on("meta", task)
    predicted = torch.zeros(3, task.predicted, device="meta")
    assert moved.successor(rows, action, predicted).device.type == moved.encode(rows, rows).device.type == "meta"
    assert moved.reward(rows, action, rows).shape == (3,)
    assert {part.device.type for part in moved.observe(rows).values()} == {"meta"}
    assert task.observe(torch.zeros(3, rows.shape[1]))["policy"].device.type == "cpu"  # which stays as it was


def test_a_task_that_cannot_be_copied_is_refused() -> None:
    class Held(Slider):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    with pytest.raises(SetupError, match=r"Held cannot be copied to meta .*: give learner and simulator the same"):
        task_on("meta", Held())


def test_neither_actor_nor_critic_reads_the_state() -> None:
    modelled, plain = drone(), DeviceEnv(RoughDrone(LANES, lidar_channels=2, levels=1), "drone")
    policy, without = (PolicyConfig(head="squashed", normalize_obs=True).resolve(env.spec) for env in (modelled, plain))
    assert (policy.actor_columns, policy.critic_columns) == (without.actor_columns, without.critic_columns)
    assert policy.normalised == without.normalised == ((0, plain.spec.obs_size),)
    state = modelled.spec.slice("model_state")
    assert state is not None
    assert (state.start, state.stop) == (plain.spec.obs_size, modelled.spec.obs_size)
    assert plain.spec.model_task is None


def test_the_drone_is_modelled_by_21_numbers_and_goes_on_after_a_restart_as_without_one() -> None:
    env = drone()
    learner = drone_learner(env, rollout_schedule=(0, 0, 2, 2))
    assert learner.model.spec.inputs == 17 + 4 + 3
    assert learner.model.spec.targets == 17
    runner, chunks = runner_of(env, learner), list[Any]()
    for _ in range(5):
        runner.load(learner.snapshot())
        chunks.append(runner.unroll(STEPS))

    def feed(one: MBPO, some: list[Any]) -> MBPO:
        for chunk in some:
            one.observe(chunk)
            while one.ready:
                one.update()
        return one

    feed(learner, chunks[:3])
    again = drone_learner(env, rollout_schedule=(0, 0, 2, 2))
    copy_state(learner, again)
    ends = [feed(one, chunks[3:]).state_dict() for one in (learner, again)]
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        assert np.array_equal(np.asarray(value), np.asarray(ends[1][name])), name
    rows = learner.replay.columns.split(learner.model_buffer.newest(learner.model_buffer.count))
    policy, critic, state_after = rows.next_obs.split([part.stop - part.start for part in env.spec.slices], 1)
    for name, columns in env.spec.model_task.observe(state_after).items():
        assert torch.equal(columns, {"policy": policy, "critic": critic}[name])


def test_a_model_of_the_drone_predicts_it_within_centimetres_after_two_thousand_rows() -> None:
    """One step ahead, and five in a row, of random actions, on rows that it has not seen."""
    env = RoughDrone(64, lidar=False, levels=1, model_state=True, compute_final_obs=True)
    task, dice, chunks = env.model_task, torch.Generator().manual_seed(0), list[Tensor]()
    assert task is not None
    obs, _ = env.reset(seed=1)
    for _ in range(40):
        state, action = obs["model_state"].clone(), torch.rand(64, 3, generator=dice) * 2 - 1
        obs, reward, terminated, _, extras = env.step(action)
        chunks.append(pack(state, action, reward, terminated, torch.ones(64), extras["final_obs"]["model_state"]))
    rows, columns = torch.stack(chunks), Columns(57, 3)
    view = StateColumns(task, [Slice("model_state", 0, 57, (57,))])
    spec = ModelSpec(replace(columns, obs_size=view.size), 2, (64, 64), "delta", False, False, predicted=17)
    fitter = Fitter(spec, replace(SMALL, members=2, elites=2, model_batch=64, max_epochs=40), 0, "cpu", "off")
    fitter(model_rows(view, columns, rows[:33].flatten(0, 1)).numpy())
    test, elites = columns.split(rows[33:]), torch.arange(2)
    state, going = test.obs[0], torch.ones(64)
    for ahead in range(5):
        predicted = fitter.ensemble.expect(task.encode(state, state), test.action[ahead], elites)
        state = task.successor(state, test.action[ahead], predicted)
        gap = (state - test.next_obs[ahead])[:, :3].norm(dim=1)  # metres
        assert float((gap * going).sum() / going.sum()) < (0.02 if ahead == 0 else 0.15)
        going *= 1 - test.terminated[ahead]
    assert going.sum() > 30
