"""Environments under a workflow: their observations and rewards, which are the same in every way of playing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest

from freewheel import Hook, Run
from freewheel.config import resolve as config
from freewheel.core import Episode, NDArray
from freewheel.run.trainer import run
from freewheel.seeding import drawn, training_episodes
from freewheel_cage2.env import Cage2
from freewheel_cage2.scenario import ACTIONS, HOSTS
from freewheel_cage2.workflow import envs

ORDER = envs.CANONICAL["critical-first"]
LAMBDA = 30.0
FIXING = np.array([number for number, name in enumerate(ACTIONS) if name.split()[0] in ("Remove", "Restore")])


class Referee:
    """Judges one episode by the definition, from the actions and red's hosts before each action."""

    def __init__(self, order: envs.Order, compromised: NDArray) -> None:
        self._order, self._compromised = order, compromised.copy()
        self.hits = self.fixes = 0
        self.env_return = 0.0

    def see(self, action: int, reward: float, compromised: NDArray) -> float:
        """Return the expected alignment reward."""
        before = self.hits / max(self.fixes, 1)
        verb, _, host = ACTIONS[action].partition(" ")
        if verb in ("Remove", "Restore"):
            types = {envs.TYPES[envs.TYPE_OF_HOST[number]] for number in np.flatnonzero(self._compromised)}
            first = next((kind for kind in self._order if kind in types), None)
            self.fixes += 1
            self.hits += envs.TYPES[envs.TYPE_OF_HOST[HOSTS.index(host)]] == first
        self._compromised = compromised.copy()
        due = LAMBDA * (self.hits / max(self.fixes, 1) - before)
        self.env_return += reward - due
        return due


def actions_of(seed: int, steps: int = 100) -> NDArray:
    """Return random actions; half of them are fixes."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(steps) < 0.5, rng.choice(FIXING, steps), rng.integers(len(ACTIONS), size=steps))


def play(env: gymnasium.Env[Any, Any], seed: int, order: envs.Order) -> tuple[list[float], dict[str, Any], Referee]:
    seen, info = env.reset(seed=seed, options={"context": envs.encode(order)})
    referee, rewards = Referee(order, info["compromised"]), []
    assert not seen["policy"].any()
    for action in actions_of(seed):
        seen, reward, terminated, truncated, info = env.step(int(action))
        np.testing.assert_array_equal(seen["context"], envs.encode(order))
        assert env.observation_space.contains(seen)
        assert not terminated
        rewards.append(float(reward))
        referee.see(int(action), float(reward), info["compromised"])
    assert truncated
    return rewards, info, referee


@pytest.mark.parametrize(
    "make",
    [
        lambda: gymnasium.make(envs.FAST, red_agent="RedMeanderAgent"),
        lambda: envs.RealWorkflow(red_agent="RedMeanderAgent"),
    ],
)
def test_an_episode_is_judged_as_by_hand(make: Any) -> None:
    """Play two episodes in a row; the first does not affect the second."""
    env = make()
    for seed, order in ((5, ORDER), (6, ORDER[::-1])):
        rewards, info, referee = play(env, seed, order)
        assert referee.hits > 3
        assert info["compliance"] == pytest.approx(referee.hits / referee.fixes)
        assert info["fixes"] == referee.fixes
        assert info["alignment"] == pytest.approx(LAMBDA * info["compliance"])
        assert info["env_return"] == pytest.approx(referee.env_return, abs=1e-4)
        assert sum(rewards) == pytest.approx(info["env_return"] + info["alignment"], abs=1e-4)
    env.close()


def test_the_environments_own_reward_is_that_of_the_bare_game() -> None:
    env, bare = envs.fast_workflow(), Cage2()
    env.reset(seed=1, options={"context": envs.encode(ORDER)})
    bare.reset(seed=1)
    rewards = []
    for action in actions_of(1):
        seen, _, _, _, info = env.step(action)
        own, reward, _, _, _ = bare.step(action)
        np.testing.assert_array_equal(seen["policy"], own)
        rewards.append(float(reward))
    assert info["env_return"] == pytest.approx(sum(rewards), abs=1e-4)
    assert info["fixes"] > 0


@pytest.mark.parametrize(
    "make", [lambda: gymnasium.make(envs.FAST), pytest.param(envs.RealWorkflow, marks=pytest.mark.system)]
)
def test_without_an_order_nothing_is_asked(make: Any) -> None:
    env = make()
    seen, _ = env.reset(seed=0)
    assert not seen["context"].any()
    for action in actions_of(0, 20):
        seen, _, _, _, info = env.step(int(action))
    assert not seen["context"].any()
    assert (info["alignment"], info["fixes"]) == (0.0, 0.0)
    assert np.isnan(info["compliance"])
    env.close()


TABLE = np.stack([envs.encode(envs.ORDERS[index]) for index in (0, 40, 80, 119)])


def streams(*lanes: int) -> list[Any]:
    return [training_episodes(9, lane) for lane in lanes]


def test_the_seed_of_an_episode_chooses_its_order() -> None:
    env = envs.WorkflowVector(3)
    seen, _ = env.reset(options={"seeds": streams(0, 1, 2), "contexts": TABLE})
    expected = [drawn(TABLE, stream.seed(0)) for stream in streams(0, 1, 2)]
    np.testing.assert_array_equal(seen["context"], expected)
    mask = np.array([True, False, True])
    seen, _ = env.reset(options={"reset_mask": mask, "contexts": TABLE})
    again = [drawn(TABLE, stream.seed(int(k))) for stream, k in zip(streams(0, 1, 2), mask, strict=True)]
    np.testing.assert_array_equal(seen["context"], again)
    assert len({tuple(row) for row in [*expected, *again]}) > 1
    seen, _ = env.reset(options={"reset_mask": np.ones(3, np.bool_), "contexts": TABLE[:1]})  # another table
    np.testing.assert_array_equal(seen["context"], np.repeat(TABLE[:1], 3, axis=0))
    env.close()


def rollout(lanes: Sequence[int], episodes: int = 3) -> list[list[tuple[float, ...]]]:
    """Return what the episodes of each lane report."""
    env = envs.WorkflowVector(len(lanes), max_episode_steps=40)
    env.reset(options={"seeds": streams(*lanes), "contexts": TABLE})
    reports: list[list[tuple[float, ...]]] = [[] for _ in lanes]
    for episode in range(episodes):
        table = np.stack([actions_of(100 * lane + episode, 40) for lane in lanes])
        totals = np.zeros(len(lanes))
        for column in table.T:
            seen, reward, _, truncated, info = env.step(column)
            totals += reward
        assert truncated.all()
        for lane, report in enumerate(reports):
            report.append((totals[lane], *(float(info[name][lane]) for name in envs.MEASURES), *seen["context"][lane]))
        env.reset(options={"reset_mask": truncated, "contexts": TABLE})
    env.close()
    return reports


def test_lanes_are_independent_and_rewards_add_up() -> None:
    together, alone = rollout([0, 1, 2, 3]), [rollout([lane])[0] for lane in range(4)]
    np.testing.assert_allclose(together, alone)
    for report in together:
        for total, env_return, alignment, compliance, fixes, *_ in report:
            assert total == pytest.approx(env_return + alignment, abs=1e-4)
            assert alignment == pytest.approx(LAMBDA * compliance)
            assert fixes > 0


def test_a_reset_lane_does_not_affect_its_neighbour() -> None:
    env, table = envs.WorkflowVector(2, max_episode_steps=40), np.stack([actions_of(0, 40), actions_of(100, 40)])
    env.reset(options={"seeds": streams(0, 1), "contexts": TABLE})
    total = 0.0
    for step, column in enumerate(table.T):
        if step == 15:
            env.reset(options={"reset_mask": np.array([False, True]), "contexts": TABLE})
        seen, reward, _, truncated, info = env.step(column)
        total += float(reward[0])
    assert truncated.tolist() == [True, False]
    measures = (float(info[name][0]) for name in envs.MEASURES)
    np.testing.assert_allclose((total, *measures, *seen["context"][0]), rollout([0], 1)[0][0])
    env.close()


WAYS = [
    (envs.FAST, {"mode": "lockstep", "num_envs": 2, "placement": "processes"}),
    (envs.FAST, {"mode": "continuous", "workers": 2, "num_envs": 4}),
    (envs.FAST, {"mode": "episodes", "workers": 2}),
    pytest.param(envs.REAL, {"mode": "episodes", "workers": 1}, marks=pytest.mark.system),
]


@pytest.mark.parametrize(("world", "way"), WAYS, ids=lambda value: value if isinstance(value, str) else value["mode"])
def test_the_parts_of_the_reward_add_up_in_a_run(world: str, way: dict[str, Any], tmp_path: Any) -> None:
    played: list[Episode] = []

    class Watch(Hook):
        def on_episode(self, run: Run, episode: Episode) -> None:
            played.append(episode)

    game = {"env_args": {"red_agent": "RedMeanderAgent"}, "context": TABLE.tolist(), "measures": envs.MEASURES}
    size = {"episodes": 4, "num_steps_per_env": 50, "evals": 0}
    options: dict[str, Any] = {**way, **game, **size, "runs_dir": str(tmp_path)}
    run(config.from_options(world, options), quiet=True, hooks=[Watch()])
    assert len(played) >= 4
    for episode in played:
        env_return, alignment, compliance, fixes = episode.measures
        assert episode.ret == pytest.approx(env_return + alignment, abs=1e-3)
        assert alignment == pytest.approx(LAMBDA * compliance if fixes else 0.0, abs=1e-4)
        assert np.isnan(compliance) == (fixes == 0)
        assert episode.context == tuple(drawn(TABLE, episode.seed).tolist())
