"""Whatever a batched simulator does to its buffers, the rows that DeviceEnv hands on are the ones that happened."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from freewheel.core import NO_CONTEXT, ActionSpec, NDArray, Slice
from freewheel.envs.device import DeviceEnv
from freewheel.errors import EnvError, SetupError
from freewheel.policies.layout import Layout
from freewheel.seeding import training_episodes
from tests.support.isaac_like import IsaacLike, Traps, start

LANES, STEPS, SEED = 4, 100, 5
SEEDS = [training_episodes(SEED, lane) for lane in range(LANES)]
WORLD_SEED = SEEDS[0].seed(0)
WAITS = ("item", "nonzero", "tolist", "cpu", "numpy")  # methods of a tensor that wait for the device


@dataclass
class Story:
    """Rows [T, B, ...] as they were played, or as they have to be."""

    obs: NDArray
    reward: NDArray
    terminated: NDArray
    truncated: NDArray
    next_obs: NDArray
    measures: NDArray


def push(row: int, lane: int) -> float:
    """In eighths, so that sums are exact."""
    return ((row + lane) % 5 - 2) / 8


def action_at(row: int) -> Tensor:
    return torch.tensor([[push(row, lane)] for lane in range(LANES)])  # [B, 1]


def played(world: IsaacLike, steps: int = STEPS, bounds: float | None = None) -> Story:
    env = DeviceEnv(world, "like", bounds)
    obs, rows = env.reset(SEEDS).clone(), []
    for row in range(steps):
        step = env.step(action_at(row))
        assert step.valid.all()
        values = (obs, step.reward, step.terminated, step.truncated, step.next_obs, step.measures)
        rows.append([value.numpy().copy() for value in values])
        obs = env.autoreset().clone()
    return Story(*(np.stack(column) for column in zip(*rows, strict=True)))


def closed_form(steps: int = STEPS, *, has_final_obs: bool = True, shortest: int = 3) -> Story:
    """What the rows are, worked out for each lane and row alone. Columns of the policy, then those of the critic."""
    blank = (steps, LANES)
    obs, next_obs, measures = (np.zeros((*blank, columns)) for columns in (5, 5, 2))
    story = Story(obs, np.zeros(blank), np.zeros(blank, bool), np.zeros(blank, bool), next_obs, measures)
    for row, lane in np.ndindex(*blank):
        episode, t = divmod(row, shortest + lane)
        grown = [sum(push(before, lane) for before in range(row - t, stop)) for stop in (row, row + 1)]
        x, after = (start(WORLD_SEED, lane, episode) + distance for distance in grown)
        over = t + 1 == shortest + lane
        story.obs[row, lane] = (x, t, x, t, episode)
        shown = has_final_obs or not over
        story.next_obs[row, lane] = (after, t + 1, after, t + 1, episode) if shown else story.obs[row, lane]
        story.reward[row, lane] = after / 2
        story.terminated[row, lane], story.truncated[row, lane] = over and episode % 2 == 1, over and episode % 2 == 0
        story.measures[row, lane] = (after, t + 1)
    return story


def assert_same(got: Story, wanted: Story) -> None:
    for part in fields(Story):
        np.testing.assert_array_equal(getattr(got, part.name), getattr(wanted, part.name), part.name)


TRAPS = ("in_place", "views", "stale", "both_flags")


@pytest.mark.parametrize("sprung", [TRAPS, (), *((trap,) for trap in TRAPS)], ids="-".join)
def test_rows_are_what_happened(sprung: tuple[str, ...]) -> None:
    traps: dict[str, Any] = {trap: trap in sprung for trap in TRAPS}
    assert_same(played(IsaacLike(LANES, Traps(**traps))), closed_form())


@pytest.mark.parametrize(("in_place", "shortest", "promised"), [(True, 3, False), (False, 1, False), (True, 3, True)])
def test_with_hidden_finals_a_last_row_repeats_its_observation(in_place: bool, shortest: int, promised: bool) -> None:
    """Also where they are promised: none is made up from the next episode."""
    world = IsaacLike(LANES, Traps(in_place=in_place, has_final_obs=False, shortest=shortest))
    if promised:
        world.cfg.compute_final_obs = True
    assert_same(played(world), closed_form(has_final_obs=False, shortest=shortest))
    assert DeviceEnv(world, "like").spec.has_final_obs == promised


def test_arrays_keep_their_addresses_and_are_out_of_the_worlds_reach() -> None:
    world = IsaacLike(LANES)
    env = DeviceEnv(world, "like")
    first = env.reset(SEEDS)
    addresses = set()
    for row in range(20):
        step = env.step(action_at(row))
        told = step.next_obs.clone()
        acted_on = env.autoreset()
        assert acted_on is first
        assert torch.equal(step.next_obs, told), "autoreset does not change the step"
        names = ("reward", "terminated", "truncated", "next_obs", "valid", "measures")
        addresses.add(tuple(getattr(step, name).data_ptr() for name in names))
    assert len(addresses) == 1
    assert first.data_ptr() not in next(iter(addresses))
    ours = [*(getattr(step, name) for name in names), acted_on]
    kept = [tensor.clone() for tensor in ours]
    for tensor in [*vars(world._out).values(), *world.state_tensors(), *world.extras["measures"].values()]:
        tensor.fill_(1)
    assert all(torch.equal(here, there) for here, there in zip(ours, kept, strict=True))


def test_state_tensors_are_all_that_a_step_needs_to_be_repeated() -> None:
    world = IsaacLike(LANES, Traps(stale=False))
    env = DeviceEnv(world, "like")
    env.reset(SEEDS)
    for row in range(7):
        env.step(action_at(row))
    before = [tensor.clone() for tensor in env.state_tensors()]

    def some_steps() -> list[Tensor]:
        return [env.step(action_at(row)).next_obs.clone() for row in range(7, 20)]

    once = some_steps()
    for tensor, value in zip(env.state_tensors(), before, strict=True):
        tensor.copy_(value)
    assert all(torch.equal(here, there) for here, there in zip(once, some_steps(), strict=True))
    assert env.generators == [world.generator]
    assert env.capturable


def test_a_step_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> NoReturn:
        raise AssertionError("this waits for the device")

    for has_final_obs in (True, False):
        env = DeviceEnv(IsaacLike(LANES, Traps(stale=False, has_final_obs=has_final_obs, bounds=(-1, 1))), "like")
        env.reset(SEEDS)
        actions = [action_at(row) for row in range(20)]
        with monkeypatch.context() as patch:
            for name in (*(f"__{kind}__" for kind in ("bool", "float", "int", "index", "contains")), *WAITS):
                patch.setattr(torch.Tensor, name, refuse)
            for name in ("nonzero", "masked_select", "unique", "equal"):
                patch.setattr(torch, name, refuse)
            for action in actions:
                env.step(action)
                env.autoreset()


def test_one_seed_rules_the_simulation_and_the_first_reset_is_like_any_other() -> None:
    world = IsaacLike(LANES)
    env = DeviceEnv(world, "like")
    first = env.reset(SEEDS).clone()
    assert torch.equal(first, env.reset(SEEDS))
    assert first[:, 0].tolist() == [start(WORLD_SEED, lane, 0) for lane in range(LANES)]
    assert world.journal.seeds[1:] == [WORLD_SEED, WORLD_SEED]


def test_spec_says_what_the_world_is() -> None:
    spec = DeviceEnv(IsaacLike(LANES), "like", one_per_process=True).spec
    assert (spec.name, spec.lanes, spec.obs_size, spec.obs_dtype) == ("like", LANES, 5, "float32")
    assert spec.slices == (Slice("policy", 0, 2, (2,)), Slice("critic", 2, 5, (3,)))
    assert spec.action == ActionSpec("box", 1, (-np.inf,), (np.inf,))
    assert spec.measures == ("position", "steps")
    assert (spec.device, spec.one_per_process, spec.batched_on_device, spec.has_final_obs) == ("cpu", True, True, True)


def test_nested_groups_become_columns_and_actor_means_policy() -> None:
    world = IsaacLike(LANES, Traps(nested=True, policy_group="actor", measures=False))
    assert DeviceEnv(world, "like").spec.slices == (Slice("policy", 0, 2, (2,)), Slice("critic", 2, 5, (3,)))
    assert_same(played(IsaacLike(LANES, Traps(nested=True, policy_group="actor"))), closed_form())


class Shaped(IsaacLike):
    """Groups of every kind: a picture, and a dict of two."""

    def __init__(self) -> None:
        super().__init__(2, Traps(measures=False))
        box = spaces.Box(-1, 1, (2, 3))
        deep = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Dict({"c": spaces.Box(-1, 1, (1,))})})
        self.single_observation_space = spaces.Dict({"scan": box, "policy": deep})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        scan = torch.arange(12.0).view(2, 2, 3)
        deep = {"a": torch.tensor([[20.0, 21.0], [30.0, 31.0]]), "b": {"c": torch.tensor([[22.0], [32.0]])}}
        return {"scan": scan, "policy": deep}, {}


def test_groups_of_any_shape_are_flattened_policy_first() -> None:
    env = DeviceEnv(Shaped(), "shaped")
    assert env.spec.slices == (Slice("policy", 0, 3, (3,)), Slice("scan", 3, 9, (2, 3)))
    assert env.spec.measures == ()
    assert env.reset(SEEDS).tolist() == [[20, 21, 22, *range(6)], [30, 31, 32, *range(6, 12)]]


def test_contexts_groups_without_a_policy_and_discrete_actions_are_refused() -> None:
    env = DeviceEnv(IsaacLike(LANES), "like")
    env.set_context(NO_CONTEXT)
    with pytest.raises(SetupError, match=r"^like does not take contexts: all its lanes are one simulation"):
        env.set_context(np.ones((3, 2), np.float32))
    with pytest.raises(SetupError, match="like observes critic, eyes: one group must be named policy"):
        DeviceEnv(IsaacLike(LANES, Traps(policy_group="eyes")), "like")
    world = IsaacLike(LANES)
    world.single_action_space = spaces.Discrete(3)  # type: ignore[assignment]
    with pytest.raises(SetupError, match=r"like has the action space Discrete\(3\): only Box"):
        DeviceEnv(world, "like")


INFINITE = (-np.inf, np.inf)


@pytest.mark.parametrize(
    ("own", "bounds", "clip", "inside", "sent"),
    [
        ((-2.0, 6.0), None, None, 1.0, [-2.0, 0.0, 4.0, 6.0]),
        ((-2.0, 6.0), 3.0, 1.0, 1.0, [-2.0, 0.0, 4.0, 6.0]),
        (INFINITE, 3.0, None, 1.0, [-3.0, -1.5, 1.5, 3.0]),
        (INFINITE, None, 0.75, np.inf, [-0.75, -0.5, 0.5, 0.75]),
        (INFINITE, None, None, np.inf, [-9.0, -0.5, 0.5, 9.0]),
        ((0.0, np.inf), None, None, np.inf, [0.0, 0.0, 0.5, 9.0]),
    ],
)
def test_actions_are_scaled_or_clipped(
    own: tuple[float, float], bounds: float | None, clip: float | None, inside: float, sent: list[float]
) -> None:
    world = IsaacLike(LANES, Traps(bounds=own))
    env = DeviceEnv(world, "like", bounds, clip)
    assert env.spec.action == ActionSpec("box", 1, (-inside,), (inside,))
    env.reset(SEEDS)
    env.step(torch.tensor([[-9.0], [-0.5], [0.5], [9.0]]))
    assert world.journal.actions[-1][:, 0].tolist() == sent
    kept = Layout.from_json(json.loads(json.dumps(env.spec.layout, allow_nan=False)))
    encoded = kept.action.encoder()(np.array([[-9.0], [-0.5], [0.5], [9.0]], np.float32))
    assert encoded[:, 0].tolist() == sent, "a policy that is used elsewhere does the same"
    assert kept.observation.size == env.spec.obs_size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_world_gets_an_action_of_its_own_without_a_graph(dtype: torch.dtype) -> None:
    env = DeviceEnv(IsaacLike(LANES), "like")
    env.reset(SEEDS)
    action = action_at(0).to(dtype).requires_grad_()
    step = env.step(action)  # the world spoils what it gets
    assert torch.equal(action, action_at(0).to(dtype))
    assert not step.reward.requires_grad


class Lying(IsaacLike):
    """Rewards have one column too many, the critic is missing, has_final_obs are overwritten by the reset, or it raises."""

    def __init__(self, lie: str) -> None:
        super().__init__(LANES)
        self.lie, self.metadata = lie, {}

    def step(self, action: Tensor) -> Any:
        if self.lie == "raises":
            raise ValueError("no ground")
        obs, reward, terminated, truncated, extras = super().step(action)
        if self.lie == "critic":
            del obs["critic"]
        if self.lie == "has_final_obs":
            extras["final_obs"] = obs
        if self.lie == "shape":
            obs["policy"] = obs["policy"][:1]
        return obs, reward[:, None] if self.lie == "reward" else reward, terminated, truncated, extras


@pytest.mark.parametrize(
    ("lie", "cause", "text"),
    [
        ("raises", "env_error", r"^like raised ValueError: no ground \(in step\(\)\)\nTraceback"),
        ("reward", "shape", r"reward: expected a tensor of shape \(4,\), got shape \(4, 1\)"),
        ("critic", "shape", r"like gave a wrong answer in step\(\): 'critic' is missing"),
        ("has_final_obs", "shape", r"final_obs uses the same memory as the observation after the reset: return"),
        ("shape", "shape", r"policy: expected a tensor of shape \(4, 2\), got shape \(1, 2\)"),
    ],
)
def test_a_world_that_lies_is_named(lie: str, cause: str, text: str) -> None:
    env = DeviceEnv(Lying(lie), "like")
    env.reset(SEEDS)
    with pytest.raises(EnvError, match=text) as caught:
        env.step(action_at(0))
    assert caught.value.cause == cause
    assert not env.capturable
    if lie == "raises":  # a capture sees the device's own error
        env._simulator.metadata = {"capturable": True}
        with pytest.raises(ValueError, match="no ground"):
            DeviceEnv(env._simulator, "like").step(action_at(0))


def test_render_and_close_are_the_worlds_own() -> None:
    world = IsaacLike(LANES)
    env = DeviceEnv(world, "like")
    assert env.render() is None
    picture = np.zeros((2, 2, 3), np.uint8)
    world.render_mode, world.render = "rgb_array", lambda: picture  # type: ignore[method-assign]
    assert env.render() is picture
    env.close()
    assert world.journal.closed == 1
