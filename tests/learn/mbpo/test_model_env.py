"""The model as an environment: which rows go on, the rules by which they end, and how errors grow with the steps ahead."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.errors import SetupError
from freewheel.learn.mbpo.dynamics import Ensemble, ModelSpec
from freewheel.learn.mbpo.model_env import RULES, ModelEnv, never, open_loop_error, rule, task_function
from freewheel.learn.mbpo.task import TaskFunction, whole
from freewheel.learn.replay.rows import Batch, Columns


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
    return ModelEnv(model, 2, lanes, seed, (reward, termination))


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
    assert not one.truncated.any()
    assert one.terminated.tolist() == [False, True, False]
    assert env.alive.tolist() == [True, False, True]
    two = env.step(column(0.5, -3.0, 2.0))
    torch.testing.assert_close(two.next_obs[[0, 2]], column(1.0, 4.0))
    assert two.valid.tolist() == [True, False, True]
    assert two.terminated.tolist() == [False, False, True]
    assert env.step(column(1.0, 1.0, 1.0)).valid.tolist() == [True, False, False]
    torch.testing.assert_close(env.obs, column(2.0, 2.0, 2.0))  # the dead stay where they were
    env.begin(column(1, 1, 1))
    assert env.alive.all()
    assert env.step(column(0, 0, 0)).valid.all()


def disputed() -> Ensemble:
    """Two members who agree that x grows by the action; the reward is x for one and 2 x for the other."""
    model = counting(noise=-20.0)
    model.params["0.weight"].data[1, 0, 0] = 2
    return model


@pytest.mark.parametrize(("factor", "steps"), [(0.3, 6), (1.0, 10), (3.9, 19), (None, 25)])
def test_a_rollout_stops_where_models_disagree_more_than_is_usual(factor: float | None, steps: int) -> None:
    """With equal variances the divergence is x² times a constant, and 9.5 is usual among 0, 0.5, ... 10. None: no limit."""
    env = ModelEnv(disputed(), 2, 21, 0, (None, never), max_disagreement=factor)
    env.begin(torch.arange(0, 10.5, 0.5)[:, None])
    env.calibrate(lambda obs: (torch.zeros_like(obs), torch.zeros(len(obs))))
    highest = math.inf if factor is None else 9.5 * math.sqrt(factor)
    assert env.step(torch.zeros(21, 1)).valid.tolist() == [x / 2 <= highest for x in range(21)]
    env.begin(torch.zeros(21, 1))
    assert torch.stack([env.step(torch.ones(21, 1)).valid for _ in range(25)]).sum(0).tolist() == [steps] * 21


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
    inverse = model_env(counting(), 2, reward=lambda obs, action, next_obs: 1 / obs[:, 0], termination=never)
    inverse.begin(column(0, 4))
    step = inverse.step(column(1, 1))
    assert (step.valid.tolist(), step.reward.tolist()) == ([False, True], [0.0, 0.25])


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


def test_a_seed_repeats_a_rollout() -> None:
    def play(seed: int) -> Tensor:
        env = model_env(counting(noise=0.0, logit=-1.0), 50, seed=seed)
        env.begin(torch.zeros(50, 1))
        return torch.stack([env.step(torch.ones(50, 1)).next_obs for _ in range(4)])

    assert torch.equal(play(1), play(1))
    assert not torch.equal(play(1), play(2))


def test_only_elites_are_rolled_out_and_they_are_renewed_in_place() -> None:
    model = counting()
    model.params["0.bias"].data[1, 0, 1] = 7.0  # the second member jumps
    env = ModelEnv(model, 1, 20, 0, (None, never))
    env.begin(torch.zeros(20, 1))
    torch.testing.assert_close(env.step(torch.zeros(20, 1)).next_obs, torch.zeros(20, 1))
    env.elites.copy_(torch.tensor([1]))
    torch.testing.assert_close(env.step(torch.zeros(20, 1)).next_obs, torch.full((20, 1), 7.0))


def test_masks_that_are_predicted_are_masks() -> None:
    """Columns x, three of a mask, y: allowed is what is predicted above 0.5, and at least the likeliest."""
    model = Ensemble(ModelSpec(Columns(5, 1), 1, (), "direct", False, False, choices=3), "cpu")
    model.params["min_logvar"].data.fill_(-40)
    model.params["0.bias"].data[..., 5:] = -40
    for column in range(5):  # the prediction is what is there
        model.params["0.weight"].data[0, column, column] = 1
    env = ModelEnv(model, 1, 4, 0, (lambda obs, action, after: action.float(), never), whole(5, (1, 4)))
    states = torch.tensor(
        [[0.7, 0.9, 0.1, 0.6, -2], [5, -1.0, -3, -2, 0.4], [1, 0.2, 0.4, 0.3, 0], [1, math.nan, 1, 1, 0]]
    )
    env.begin(states)
    step = env.step(torch.tensor([0, 1, 2, 0]))
    assert step.next_obs[:3, 1:4].tolist() == [[1, 0, 1], [1, 0, 0], [0, 1, 0]]
    torch.testing.assert_close(step.next_obs[:3, [0, 4]], states[:3, [0, 4]])
    assert step.reward.tolist() == [0, 1, 2, 0], "a function of the task is given the number of the action"
    assert step.valid.tolist() == [True, True, True, False]


def trajectory(steps: int, lanes: int) -> Batch:
    """x grows by the action, [T, B, 1]."""
    action = torch.randn(steps, lanes, 1, generator=torch.Generator().manual_seed(0))
    after = action.cumsum(0)
    obs = after - action
    obs[1:] = after[:-1]
    nothing = torch.zeros(steps, lanes)
    return Batch(obs, action, nothing, nothing, torch.ones(steps, lanes), after)


def test_a_constant_bias_adds_up_and_is_told_in_deviations_of_the_data() -> None:
    model = counting()
    model.params["0.bias"].data[:, 0, 1] = torch.tensor([0.1, 0.3])  # 0.2 on average
    model.statistics["in_scale"].copy_(torch.tensor([4.0, 1.0]))
    model.load(model.state())
    model.params["0.weight"].data[:, 0] *= 4
    error = open_loop_error(model, torch.arange(2), trajectory(12, 3), 6, whole(1))
    torch.testing.assert_close(error, 0.2 / 4 * torch.arange(1.0, 7.0), rtol=1e-4, atol=0)


def test_constant_columns_are_left_out() -> None:
    model = Ensemble(ModelSpec(Columns(2, 1), 2, (), "direct", True, False), "cpu")  # says (0, 0), always
    model.statistics["in_scale"][1] = 0
    seen = torch.full((5, 4, 2), 3.0)
    error = open_loop_error(model, torch.arange(2), trajectory(5, 4)._replace(obs=seen, next_obs=seen), 2, whole(2))
    torch.testing.assert_close(error, torch.tensor([3.0, 3.0]))


#: Steps to play, and how many of them end an episode at least.
TASKS = {
    "Ant-v5": (600, 3), "Hopper-v5": (600, 10), "Humanoid-v5": (300, 5), "InvertedDoublePendulum-v5": (400, 20),
    "InvertedPendulum-v5": (400, 20), "Walker2d-v5": (600, 10), "HumanoidStandup-v5": (50, 0),
    "CartPole-v1": (400, 10), "Acrobot-v1": (100, 0),
} | dict.fromkeys(("HalfCheetah-v5", "Pendulum-v1", "Pusher-v5", "Reacher-v5", "Swimmer-v5"), (100, 0))  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_a_rule_is_the_tasks_own(name: str) -> None:
    pytest.importorskip("mujoco")
    steps, least = TASKS[name]
    env = gymnasium.make(name)
    env.action_space.seed(1)
    obs, _ = env.reset(seed=1)
    rows = []
    for _ in range(steps):
        action = env.action_space.sample()
        successor, _, terminated, truncated, _ = env.step(action)
        rows.append((obs, action, successor, terminated))
        obs = env.reset()[0] if terminated or truncated else successor
    env.close()
    before, actions, after = (torch.as_tensor(np.array(part, np.float32)) for part in list(zip(*rows, strict=True))[:3])
    assert TASKS.keys() == RULES.keys()
    known = rule("auto", name)
    assert known is not None
    reported = known(before, actions, after)
    assert reported.dtype == torch.bool
    assert reported.tolist() == [row[3] for row in rows]
    assert reported.sum() >= least


@pytest.mark.parametrize(
    ("name", "spread", "actions"), [("CartPole-v1", (3.0, 1.0, 0.3, 1.0), 2), ("Acrobot-v1", (3.1, 3.1, 4.0, 8.0), 3)]
)
def test_a_rule_of_classic_control_holds_from_any_state(name: str, spread: tuple[float, ...], actions: int) -> None:
    """Also where random actions would hardly ever lead."""
    env: Any = gymnasium.make(name).unwrapped
    env.reset(seed=1)
    rng, after, ended = np.random.default_rng(1), list[Any](), list[bool]()
    for _ in range(300):
        env.state = rng.uniform(-1, 1, 4) * spread
        env.steps_beyond_terminated = None
        successor, _, terminated, *_ = env.step(int(rng.integers(actions)))
        after.append(successor)
        ended.append(bool(terminated))
    rows = torch.as_tensor(np.array(after, np.float32))
    assert RULES[name](rows, torch.zeros(300, dtype=torch.int64), rows).tolist() == ended
    assert 30 < sum(ended) < 270


@pytest.mark.parametrize(
    ("name", "healthy", "column", "low", "high"),
    [
        ("Hopper-v5", {0: 1.25}, 0, 0.7, None),
        ("Hopper-v5", {0: 1.25}, 1, -0.2, 0.2),
        ("Hopper-v5", {0: 1.25}, 3, -100.0, 100.0),
        ("Walker2d-v5", {0: 1.25}, 0, 0.8, 2.0),
        ("Walker2d-v5", {0: 1.25}, 1, -1.0, 1.0),
        ("InvertedPendulum-v5", {}, 1, -0.2, 0.2),
        ("Ant-v5", {0: 0.75}, 0, 0.2, 1.0),
        ("Humanoid-v5", {0: 1.4}, 0, 1.0, 2.0),
        ("CartPole-v1", {}, 0, -2.4, 2.4),
        ("CartPole-v1", {}, 2, -12 * math.pi / 180, 12 * math.pi / 180),
    ],
)
def test_both_ends_of_ranges(name: str, healthy: dict[int, float], column: int, low: float, high: float | None) -> None:
    bounds = [low] if high is None else [low, high]
    middle = 1.25 if high is None else (low + high) / 2
    values = [value for bound in bounds for value in (bound + 1e-3, bound - 1e-3)]
    rows = torch.zeros(len(values), 12)
    for place, value in healthy.items():
        rows[:, place] = value
    rows[:, column] = torch.tensor(values)
    wrong = [abs(value - middle) > abs(bounds[i // 2] - middle) for i, value in enumerate(values)]
    assert RULES[name](rows, rows[:, :1], rows).tolist() == wrong


def test_what_is_not_a_number_has_ended() -> None:
    row = torch.full((1, 12), torch.nan)
    for name in ("Ant-v5", "Hopper-v5", "Humanoid-v5", "InvertedPendulum-v5", "Walker2d-v5"):
        assert RULES[name](row, row, row).tolist() == [True]


def test_names() -> None:
    assert rule("auto", "SomethingElse-v0") is None
    assert rule("learned", "Hopper-v5") is None
    assert rule("never", "Hopper-v5") is never
    assert rule("torch:where", "Hopper-v5") is torch.where


@pytest.mark.parametrize(
    "name", ["sometimes", "no.such.module:ends", "torch:no_such_name", "torch:float32", "torch", ""]
)
def test_an_unknown_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(SetupError, match=r"^mbpo\.termination '") as caught:
        rule(name, "Hopper-v5")
    assert "\n" not in str(caught.value)
    with pytest.raises(SetupError, match=r"^mbpo\.reward 'a:b' cannot be imported"):
        task_function("mbpo.reward", "a:b")
