"""RoughDrone keeps the contract of Isaac Lab, can be captured, is repeatable by its seed, and can be solved."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from freewheel.errors import UsageError
from freewheel_drone.env import MEASURES, RoughDrone
from freewheel_drone.quadrotor import ATTITUDE, POSITION, VELOCITY
from freewheel_drone.task import RADIUS, DroneConfig
from packages.drone.tests.support.operations import Operations

GOAL_SEEN = slice(10, 13)  # columns of the policy's observation


def make(num_envs: int = 8, **options: Any) -> RoughDrone:
    return RoughDrone(num_envs, **{"lidar": False, "levels": 2, "tiles_per_level": 1} | options)


def noise(env: RoughDrone, seed: int = 0) -> Iterator[Tensor]:
    dice = torch.Generator().manual_seed(seed)
    while True:
        yield torch.rand(env.num_envs, env.cfg.action_size, generator=dice) * 2 - 1


def hover(env: RoughDrone) -> Tensor:
    return torch.zeros(env.num_envs, env.cfg.action_size)


def put(env: RoughDrone, lane: int, position: Tensor) -> None:
    """Put a lane's drone at rest at a position."""
    env.state_tensors()[0][lane, POSITION] = position


def goals(env: RoughDrone) -> Tensor:
    return env.state_tensors()[1][:, :3]


@pytest.mark.parametrize(("control", "lidar"), [("velocity", False), ("thrust", True)])
def test_spaces_and_tensors_agree(control: str, lidar: bool) -> None:
    env = make(5, control=control, lidar=lidar)
    assert env.unwrapped is env
    actions = 3 if control == "velocity" else 4
    sizes = {"policy": 14 + actions + 25 + 280 * lidar, "critic": 14 + actions + 25 + 12 + 12}
    assert isinstance(env.observation_space, gymnasium.spaces.Dict)
    for space, lanes in (env.single_observation_space, ()), (env.observation_space, (5,)):
        assert {name: part.shape for name, part in space.items()} == {name: (*lanes, n) for name, n in sizes.items()}
    assert env.single_action_space == gymnasium.spaces.Box(-1, 1, (actions,))
    assert env.action_space.shape == (5, actions)
    obs, extras = env.reset(seed=1)
    for answer in obs, env.step(next(noise(env)))[0]:
        assert {name: value.shape for name, value in answer.items()} == {name: (5, n) for name, n in sizes.items()}
        assert {value.dtype for value in answer.values()} == {torch.float32}
        assert all(value.isfinite().all() and value.abs().max() <= 5 for value in answer.values())
    assert tuple(extras["measures"]) == MEASURES


def test_what_isaac_lab_shows_is_there() -> None:
    env = make(3, episode_seconds=2.0)
    assert (env.num_envs, env.device, env.max_episode_length) == (3, "cpu", 20)
    assert env.step_dt == pytest.approx(0.1)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert env.metadata["capturable"]
    assert env.metadata["device_world"]
    other = make(3, cfg=DroneConfig(mass=2.0, wind=3.0), wind=1.0, bounded_actions=False)
    assert other.single_action_space == gymnasium.spaces.Box(-np.inf, np.inf, (3,))
    assert (other.cfg.mass, other.cfg.wind) == (2.0, 1.0), "options override a config"


def test_actions_are_clipped() -> None:
    one, two = make(bounded_actions=False), make()
    for env, action in (one, torch.full((8, 3), 1000.0)), (two, torch.ones(8, 3, requires_grad=True)):
        env.reset(seed=0)
        obs, reward, *_ = env.step(action)
        assert not any(value.requires_grad for value in (reward, *obs.values())), "no gradient gets in"
    assert all(torch.equal(a, b) for a, b in zip(one.state_tensors(), two.state_tensors(), strict=True))


def test_answers_are_the_same_objects_at_every_step() -> None:
    env = make(compute_final_obs=True)
    first = env.reset(seed=0)
    actions = noise(env)

    def answers() -> list[object]:
        obs, reward, terminated, truncated, extras = env.step(next(actions))
        has_final_obs, measures = extras["final_obs"], extras["measures"]
        return [obs, reward, terminated, truncated, extras, *obs.values(), *has_final_obs.values(), *measures.values()]

    before = answers()
    kept = before[1].clone() if isinstance(before[1], Tensor) else None
    after = answers()
    assert all(one is two for one, two in zip(before, after, strict=True))
    assert (after[0], after[4]) == first
    assert kept is not None
    assert not torch.equal(kept, env.step(next(actions))[1])


def test_a_time_out_comes_at_exactly_the_last_step_and_every_episode_begins_elsewhere() -> None:
    env = make(64, episode_seconds=1.0, wind=0.0, load_spread=0.0)
    env.reset(seed=0)
    starts = [env.state_tensors()[0][:, POSITION].clone()]
    for step in range(1, 21):
        _, _, terminated, truncated, _ = env.step(hover(env))
        assert not terminated.any()
        assert truncated.all() == (step in (10, 20)) == truncated.any()
        assert (env.episode_length_buf == step % 10).all()
        if truncated.all():
            starts.append(env.state_tensors()[0][:, POSITION].clone())
    for one, two in itertools.combinations(starts, 2):
        assert ((one - two).norm(dim=1) > 0.1).float().mean() > 0.9


def test_never_both_flags() -> None:
    env = make(128, episode_seconds=2.0)
    ends = torch.zeros(2)
    for _, action in zip(range(60), noise(env), strict=False):
        _, _, terminated, truncated, _ = env.step(action)
        assert not (terminated & truncated).any()
        ends += torch.stack((terminated.sum(), truncated.sum()))
    assert (ends > 10).all()


def test_a_crash_at_the_last_step_is_an_end_not_a_time_out() -> None:
    env = make(2, episode_seconds=1.0, wind=0.0)
    env.reset(seed=0)
    env.episode_length_buf[:] = 9
    put(env, 0, torch.tensor([-1.0, 12.0, 2.0]))
    _, _, terminated, truncated, _ = env.step(hover(env))
    assert terminated.tolist() == [True, False]
    assert truncated.tolist() == [False, True]


def test_episode_lengths_can_be_set() -> None:
    env = make(3, episode_seconds=2.0)
    buffer = env.episode_length_buf
    assert buffer.dtype == torch.int64
    env.episode_length_buf = torch.tensor([0, 18, 19])
    assert env.episode_length_buf is buffer
    assert env.step(hover(env))[3].tolist() == [False, False, True]
    assert buffer.tolist() == [1, 19, 0]
    assert env.step(hover(env))[3].tolist() == [False, True, False]


def test_a_finished_lane_restarts_in_the_same_step_and_its_last_observation_is_kept() -> None:
    env, plain = make(3, compute_final_obs=True), make(3)
    for one in env, plain:
        one.reset(seed=0)
        put(one, 1, torch.tensor([12.0, 12.0, 9.0]))  # too high
    obs, _, terminated, _, extras = env.step(hover(env))
    other, *_ = plain.step(hover(plain))
    assert terminated.tolist() == [False, True, False]
    for name in obs:
        assert torch.equal(obs[name], other[name])  # looking twice changes nothing
        final = extras["final_obs"][name]
        assert torch.equal(final[[0, 2]], obs[name][[0, 2]])
        assert not torch.equal(final[1], obs[name][1])
    assert extras["final_obs"]["policy"][1, 9] > 3.5  # the height, over 2
    assert obs["policy"][1, 9] < 1.2
    assert env.episode_length_buf.tolist() == [1, 0, 1]
    assert (obs["policy"][1, :6] == 0).all()  # at rest
    assert (extras["final_obs"]["critic"][1] != obs["critic"][1]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lidr": True}, "has no option 'lidr'; did you mean 'lidar'?"),
        ({"control": "thrusts"}, "has no control 'thrusts'; did you mean 'thrust'?"),
        ({"level": 6}, "has levels 0 to 5, not 6"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        RoughDrone(1, **options)
    assert message in str(error.value)


def story(env: RoughDrone, seed: int) -> str:
    """Return a digest of everything that a user sees in 25 steps."""
    env.reset(seed=seed)
    digest = hashlib.sha256()
    for _, action in zip(range(25), noise(env), strict=False):
        obs, reward, terminated, truncated, extras = env.step(action)
        for value in (*obs.values(), reward, terminated, truncated, *extras["measures"].values()):
            digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def test_the_same_seed_gives_the_same_episodes() -> None:
    """Episodes last a second, and the global generators are not used."""
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    options: dict[str, Any] = {"lidar": True, "curriculum": True, "episode_seconds": 1.0}
    one, two = make(8, **options), make(8, **options)
    first = story(one, 7)
    assert first == story(two, 7) == story(one, 7)
    assert first != story(one, 8)
    assert first != story(make(8, **options, seed=1), 7)  # another terrain
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index]  # noqa: NPY002


@pytest.mark.parametrize("options", [{}, {"control": "thrust", "compute_final_obs": True, "curriculum": True}])
def test_a_step_can_be_captured_as_far_as_a_cpu_can_tell(options: dict[str, Any]) -> None:
    env = make(lidar=True, **options)
    kernels = []
    for _, action in zip(range(3), noise(env), strict=False):
        with Operations() as operations:
            env.step(action)
        kernels.append(operations.names)
    assert kernels[0] == kernels[1] == kernels[2]  # the kernels do not depend on the data
    views = ("slice", "select", "view", "unsqueeze", "expand", "split", "unbind", "alias", "detach", "t", "transpose")
    assert len([name for name in kernels[0] if name not in views]) < 900


SPOILS = lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: bool(x.any()), lambda x: torch.rand(3)


@pytest.mark.parametrize("spoil", [*SPOILS, lambda x: torch.tensor(1.0)])
def test_what_cannot_be_captured_is_noticed(spoil: Callable[[Tensor], Any]) -> None:
    with pytest.raises(AssertionError), Operations():
        spoil(torch.ones(3))


def test_the_state_is_all_in_its_tensors() -> None:
    """After the tensors and the generator are restored, the same steps follow. The warm-up of a CUDA graph needs this."""
    env = make(32, lidar=True, curriculum=True, compute_final_obs=True, episode_seconds=2.0)
    actions = [action for _, action in zip(range(30), noise(env), strict=False)]
    for action in actions[:10]:
        env.step(action)
    addresses = [tensor.data_ptr() for tensor in env.state_tensors()]
    before, dice = [tensor.clone() for tensor in env.state_tensors()], env.generator.get_state()
    ends = []
    for _ in range(2):
        for tensor, old in zip(env.state_tensors(), before, strict=True):
            tensor.copy_(old)
        env.generator.set_state(dice)
        for action in actions:
            env.step(action)
        ends.append([tensor.clone() for tensor in env.state_tensors()])
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))
    assert [tensor.data_ptr() for tensor in env.state_tensors()] == addresses
    assert len(set(addresses)) == len(addresses)


def test_every_way_to_crash() -> None:
    env = make(8, wind=0.0, compute_final_obs=True)
    env.reset(seed=0)
    body = env.state_tensors()[0]
    tile = env.state_tensors()[3]
    pillar = env.terrain.look(tile, body[:, POSITION], body[:, :2]).closest[1, 0, :2] + body[1, :2]
    height, _ = env.terrain.touch(tile, body[:, POSITION])
    body[0, 2] -= height[0, 0] - RADIUS / 2  # in the ground
    body[1, :2] = pillar  # in a pillar
    body[2, 0] = -0.1  # beyond the edge
    body[3, 1] = env.cfg.tile_size + 0.1
    body[4, 2] += env.cfg.max_height  # too high
    body[5, ATTITUDE] = torch.tensor([0.0, 1.0, 0.0, 0.0])  # upside down
    action = hover(env)
    action[6, 2] = torch.nan  # an action that is not a number
    obs, reward, terminated, _, extras = env.step(action)
    assert terminated.tolist() == [True] * 7 + [False]
    assert extras["measures"]["crashed"].tolist() == [1.0] * 7 + [0.0]
    assert not extras["measures"]["success"].any()
    assert (reward[:6] < -8).all()
    assert reward[7].abs() < 0.2
    for value in (*obs.values(), reward, *extras["final_obs"].values()):
        assert value.isfinite().all()


def test_reaching_the_goal_is_a_success() -> None:
    env = make(2, wind=0.0, load_spread=0.0)
    env.reset(seed=0)
    put(env, 1, goals(env)[1] + torch.tensor([0.5, 0.0, 0.0]))
    _, reward, terminated, truncated, extras = env.step(hover(env))
    assert terminated.tolist() == [False, True]
    assert not truncated.any()
    assert extras["measures"]["success"].tolist() == [0.0, 1.0]
    assert extras["measures"]["goal_distance"][1] == pytest.approx(0.5, abs=0.01)
    assert reward[1] > 10


def test_progress_is_worth_what_it_brings_nearer() -> None:
    only = dict.fromkeys(("reward_cell", "reward_success", "reward_crash", "reward_effort", "reward_proximity"), 0.0)
    env = make(8, reward_progress=2.0, **only)
    env.reset(seed=0)
    for _, action in zip(range(5), noise(env), strict=False):
        position, goal = env.state_tensors()[0][:, POSITION].clone(), goals(env).clone()
        _, reward, terminated, truncated, extras = env.step(action)
        after = extras["measures"]["goal_distance"]
        torch.testing.assert_close(reward, 2 * ((goal - position).norm(dim=1) - after), atol=1e-4, rtol=0)
        assert not (terminated | truncated).any()


def test_cells_are_worth_something_the_first_time_they_are_seen() -> None:
    only = dict.fromkeys(("reward_progress", "reward_success", "reward_crash", "reward_effort"), 0.0)
    env = make(1, reward_cell=1.0, reward_proximity=0.0, wind=0.0, **only)
    env.reset(seed=0)
    ground = env.state_tensors()[0][0, 2].clone()

    def seen_from(x: float, y: float) -> tuple[float, float]:
        put(env, 0, torch.stack((torch.tensor(x), torch.tensor(y), ground)))
        env.state_tensors()[0][:, VELOCITY] = 0
        _, reward, *_, extras = env.step(hover(env))
        return reward.item(), extras["measures"]["coverage"].item() * 24 * 24

    def disc(x: float, y: float) -> set[tuple[int, int]]:
        return {(i, j) for i in range(24) for j in range(24) if (i + 0.5 - x) ** 2 + (j + 0.5 - y) ** 2 < 9}

    spots = [(6.0, 6.0), (6.0, 6.0), (8.2, 6.1), (6.0, 6.0), (1.0, 1.0)]
    known: set[tuple[int, int]] = set()
    for step, spot in enumerate(spots):
        new = disc(*spot) - known
        known |= new
        reward, coverage = seen_from(*spot)
        assert reward == (len(new) if step else 0)  # cells seen at the start give no reward
        assert coverage == pytest.approx(len(known), abs=1e-3)


def test_the_curriculum_moves_lanes_by_how_they_end() -> None:
    env = make(4, levels=3, level=1, curriculum=True, wind=0.0)
    env.reset(seed=0)
    goal, out = goals(env), torch.tensor([0.0, 0.0, 9.0])
    put(env, 0, goal[0])  # success: up
    put(env, 1, torch.tensor([-5.0, -5.0, 2.0]))  # a crash far from the goal: down
    put(env, 2, goal[2] + out * 0.3 + torch.tensor([0.0, 0.0, 1.5]))  # a crash near the goal: stays
    _, _, terminated, _, extras = env.step(hover(env))
    assert terminated.tolist() == [True, True, True, False]
    assert extras["measures"]["level"].tolist() == [1.0] * 4  # the level of the episode that has ended
    assert env.state_tensors()[2].tolist() == [2, 0, 1, 1]
    assert env.state_tensors()[3].tolist() == [2, 0, 1, 1]  # there is one tile for each level
    env.reset(seed=0)
    assert env.state_tensors()[2].tolist() == [1] * 4


def success(level: int, choose: Callable[[dict[str, Tensor]], Tensor], **options: Any) -> float:
    """Return the results of the first episodes of 128 lanes."""
    env = RoughDrone(128, level=level, lidar=False, **options)
    obs, _ = env.reset(seed=1)
    open_still, reached = torch.ones(128, dtype=torch.bool), torch.zeros(128, dtype=torch.bool)
    while open_still.any():
        obs, _, terminated, truncated, extras = env.step(choose(obs))
        reached |= open_still & (extras["measures"]["success"] > 0)
        open_still &= ~(terminated | truncated)
    return float(reached.float().mean())


def straight(obs: dict[str, Tensor]) -> Tensor:
    """Fly straight to the goal and ignore obstacles."""
    return 0.7 * torch.nn.functional.normalize(obs["policy"][:, GOAL_SEEN])


def test_flying_straight_reaches_most_goals_at_first_and_fewer_later() -> None:
    easy, hard = (success(level, straight) for level in (0, 5))
    assert easy > 0.85
    assert 0.1 < hard < 0.5


@pytest.mark.parametrize("control", ["velocity", "thrust"])
def test_chance_reaches_almost_none(control: str) -> None:
    dice = torch.Generator().manual_seed(0)
    size = 3 if control == "velocity" else 4
    options: dict[str, Any] = {"control": control, "episode_seconds": 10.0}
    assert success(0, lambda _: torch.rand(128, size, generator=dice) * 2 - 1, **options) < 0.05
