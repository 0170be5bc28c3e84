"""The known rules say what the real tasks say, on every step."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from freewheel.errors import SetupError
from freewheel.learn.mbpo.model_env import RULES, never, rule, task_function

#: Steps to play, and how many of them end an episode at least.
TASKS = {
    "Ant-v5": (600, 3),
    "Hopper-v5": (600, 10),
    "Humanoid-v5": (300, 5),
    "InvertedDoublePendulum-v5": (400, 20),
    "InvertedPendulum-v5": (400, 20),
    "Walker2d-v5": (600, 10),
    "HalfCheetah-v5": (100, 0),
    "HumanoidStandup-v5": (50, 0),
    "Pendulum-v1": (100, 0),
    "Pusher-v5": (100, 0),
    "Reacher-v5": (100, 0),
    "Swimmer-v5": (100, 0),
}


def test_every_rule_is_played() -> None:
    assert TASKS.keys() == RULES.keys()


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
    known = rule("auto", name)
    assert known is not None
    reported = known(before, actions, after)
    assert reported.dtype == torch.bool
    assert reported.tolist() == [row[3] for row in rows]
    assert reported.sum() >= least


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
    ],
)
def test_both_ends_of_a_range(
    name: str, healthy: dict[int, float], column: int, low: float, high: float | None
) -> None:
    bounds = [low] if high is None else [low, high]
    middle = 1.25 if high is None else (low + high) / 2
    values = [value for bound in bounds for value in (bound + 1e-3, bound - 1e-3)]
    rows = torch.zeros(len(values), 12)
    for place, value in healthy.items():
        rows[:, place] = value
    rows[:, column] = torch.tensor(values)
    wrong = [abs(value - middle) > abs(bounds[i // 2] - middle) for i, value in enumerate(values)]
    assert RULES[name](rows, rows[:, :1], rows).tolist() == wrong


@pytest.mark.parametrize("name", ["Ant-v5", "Hopper-v5", "Humanoid-v5", "InvertedPendulum-v5", "Walker2d-v5"])
def test_what_is_not_a_number_has_ended(name: str) -> None:
    row = torch.full((1, 12), torch.nan)
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


def test_the_option_that_is_wrong_is_named() -> None:
    with pytest.raises(SetupError, match=r"^mbpo\.reward 'a:b' cannot be imported"):
        task_function("mbpo.reward", "a:b")
