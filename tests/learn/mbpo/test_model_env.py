"""Dreams: who is alive, what stays finite, whose rewards and ends count, and how errors grow with the steps ahead."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from freewheel.learn.mbpo.dynamics import Ensemble, ModelSpec
from freewheel.learn.mbpo.model_env import ModelEnv, TaskFunction, never, open_loop_error
from freewheel.learn.replay import Columns


def counting(*, logit: float = -100.0, noise: float = -40.0, reward: bool = True, ends: bool = True) -> Ensemble:
    """Says that x grows by the action and that the reward is x, with next to no noise, and ends at these odds."""
    model = Ensemble(ModelSpec(Columns(1, 1), 2, (), "delta", reward, ends), "cpu")
    weight, bias = model.params["0.weight"].data, model.params["0.bias"].data
    model.params["min_logvar"].data.fill_(-40)
    targets = model.spec.targets
    weight[:, 1, targets - 1] = 1
    bias[:, 0, targets : 2 * targets] = noise
    if reward:
        weight[:, 0, 0] = 1
    if ends:
        bias[:, 0, -1] = logit
    return model


def model_env(
    model: Ensemble,
    lanes: int,
    reward: TaskFunction | None = None,
    termination: TaskFunction | None = None,
    seed: int = 0,
) -> ModelEnv:
    return ModelEnv(model, 2, lanes, torch.Generator().manual_seed(seed), reward, termination)


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def above_three(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
    return next_obs[:, 0] > 3


def test_rows_step_from_where_they_began_until_they_end() -> None:
    env = model_env(counting(), 3, termination=above_three)
    env.begin(column(0, 2, 3))
    one = env.step(column(0.5, 1.5, -1.0))
    torch.testing.assert_close(one.next_obs, column(0.5, 3.5, 2.0))
    torch.testing.assert_close(one.reward, torch.tensor([0.0, 2.0, 3.0]))
    assert one.valid.tolist() == [True, True, True]  # the last row of an episode counts
    assert one.terminated.tolist() == [False, True, False]
    assert env.alive.tolist() == [True, False, True]
    two = env.step(column(0.5, -3.0, 2.0))
    torch.testing.assert_close(two.next_obs[[0, 2]], column(1.0, 4.0))
    assert two.valid.tolist() == [True, False, True]
    assert two.terminated.tolist() == [False, False, True]
    three = env.step(column(1.0, 1.0, 1.0))
    assert three.valid.tolist() == [True, False, False]
    torch.testing.assert_close(env.autoreset(), column(2.0, 2.0, 2.0))  # the dead stay where they were
    env.begin(column(1, 1, 1))
    assert env.alive.all()
    assert env.step(column(0, 0, 0)).valid.all()


def test_nothing_is_ever_truncated() -> None:
    env = model_env(counting(), 4, termination=never)
    env.begin(torch.zeros(4, 1))
    for _ in range(50):
        step = env.step(torch.ones(4, 1))
        assert not step.truncated.any()
        assert not step.terminated.any()
        assert step.valid.all()
    torch.testing.assert_close(env.obs, torch.full((4, 1), 50.0))


@pytest.mark.parametrize("wild", [math.inf, math.nan])
def test_what_is_not_finite_is_not_valid_and_goes_no_further(wild: float) -> None:
    env = model_env(counting(), 2, termination=above_three)
    env.begin(column(1, 2))
    step = env.step(column(wild, 0.5))
    assert step.valid.tolist() == [False, True]
    assert step.terminated.tolist() == [False, False]
    assert step.next_obs.isfinite().all()
    assert step.reward.isfinite().all()
    after = env.step(column(0.1, 0.1))
    assert after.valid.tolist() == [False, True]
    assert after.next_obs.isfinite().all()


def test_a_reward_that_is_not_finite_is_not_valid_either() -> None:
    env = model_env(counting(), 2, reward=lambda obs, action, next_obs: 1 / obs[:, 0], termination=never)
    env.begin(column(0, 4))
    step = env.step(column(1, 1))
    assert step.valid.tolist() == [False, True]
    assert step.reward.tolist() == [0.0, 0.25]


def test_task_functions_see_the_step_and_replace_what_is_learned() -> None:
    model = counting(reward=False, ends=False)
    env = model_env(model, 2, lambda obs, action, after: 100 * obs[:, 0] + 10 * action[:, 0] + after[:, 0], above_three)
    env.begin(column(1, 2))
    step = env.step(column(0.5, 2))
    torch.testing.assert_close(step.reward, torch.tensor([106.5, 224.0]))
    assert step.terminated.tolist() == [False, True]


def test_learned_ends_are_drawn_at_their_odds() -> None:
    env = model_env(counting(logit=math.log(0.25 / 0.75)), 4000)
    env.begin(torch.zeros(4000, 1))
    first = env.step(torch.zeros(4000, 1)).terminated
    second = env.step(torch.zeros(4000, 1))
    assert first.float().mean() == pytest.approx(0.25, abs=0.03)
    assert torch.equal(second.valid, ~first)
    assert not second.terminated[first].any()  # nobody ends twice
    assert second.terminated[~first].float().mean() == pytest.approx(0.25, abs=0.03)


def test_a_seed_repeats_a_dream() -> None:
    def play(seed: int) -> Tensor:
        env = model_env(counting(noise=0.0, logit=-1.0), 50, seed=seed)
        env.begin(torch.zeros(50, 1))
        return torch.stack([env.step(torch.ones(50, 1)).next_obs for _ in range(4)])

    assert torch.equal(play(1), play(1))
    assert not torch.equal(play(1), play(2))


def test_only_elites_are_dreamt_and_they_are_renewed_in_place() -> None:
    model = counting()
    model.params["0.bias"].data[1, 0, 1] = 7.0  # the second member jumps
    env = ModelEnv(model, 1, 20, torch.Generator(), None, never)
    env.begin(torch.zeros(20, 1))
    torch.testing.assert_close(env.step(torch.zeros(20, 1)).next_obs, torch.zeros(20, 1))
    env.elites.copy_(torch.tensor([1]))
    torch.testing.assert_close(env.step(torch.zeros(20, 1)).next_obs, torch.full((20, 1), 7.0))


def trajectory(steps: int, lanes: int) -> tuple[Tensor, Tensor, Tensor]:
    """x grows by the action: obs, action, next_obs [T, B, 1]."""
    action = torch.randn(steps, lanes, 1, generator=torch.Generator().manual_seed(0))
    after = action.cumsum(0)
    return after - action, action, after


def test_a_perfect_model_makes_no_error_however_far_it_looks() -> None:
    obs, action, after = trajectory(20, 3)
    obs[1:] = after[:-1]
    error = open_loop_error(counting(), torch.arange(2), obs, action, after, 10)
    torch.testing.assert_close(error, torch.zeros(10), rtol=0, atol=1e-5)


def test_a_constant_bias_adds_up_and_is_told_in_deviations_of_the_data() -> None:
    model = counting()
    model.params["0.bias"].data[:, 0, 1] = torch.tensor([0.1, 0.3])  # 0.2 on average
    model.statistics["in_scale"].copy_(torch.tensor([4.0, 1.0]))
    model.load(model.state())
    model.params["0.weight"].data[:, 0] *= 4
    obs, action, after = trajectory(12, 3)
    obs[1:] = after[:-1]
    error = open_loop_error(model, torch.arange(2), obs, action, after, 6)
    torch.testing.assert_close(error, 0.2 / 4 * torch.arange(1.0, 7.0), rtol=1e-4, atol=0)


def test_an_error_is_not_followed_into_the_next_episode() -> None:
    obs, action, after = trajectory(12, 2)
    obs[1:] = after[:-1]
    obs[5, 0] = 100.0  # lane 0 begins again, far away, at row 5
    after[5:, 0] = 100 + action[5:, 0].cumsum(0)
    obs[6:, 0] = after[5:-1, 0]
    error = open_loop_error(counting(), torch.arange(2), obs, action, after, 4)
    torch.testing.assert_close(error, torch.zeros(4), rtol=0, atol=1e-4)


def test_constant_columns_are_left_out() -> None:
    model = Ensemble(ModelSpec(Columns(2, 1), 2, (), "direct", True, False), "cpu")  # says (0, 0), always
    model.statistics["in_scale"][1] = 0
    obs, after = torch.full((2, 5, 4, 2), 3.0)
    error = open_loop_error(model, torch.arange(2), obs, torch.zeros(5, 4, 1), after, 2)
    torch.testing.assert_close(error, torch.tensor([3.0, 3.0]))
