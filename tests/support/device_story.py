"""A setup of the simulator isaac_like: environment, policy and factory, and its rows computed from the actions alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from torch import Tensor

from freewheel.core import Chunk, Episode, NDArray, Snapshot, Transitions
from freewheel.envs.device import DeviceEnv
from freewheel.policies.numpy_actor import make_tensor_actor
from freewheel.policies.spec import FlatParams, PolicyConfig, PolicySpec, full_layout, initialise
from freewheel.rollout.factory import RunnerFactory
from freewheel.seeding import generator, training_episodes
from tests.support.isaac_like import IsaacLike, Traps, start

SEED, SHORTEST = 5, 3
UNBOUNDED, BOUNDED = Traps(), Traps(bounds=(-1.0, 1.0))


def build(
    num_envs: int = 4,
    device: str = "cpu",
    *,
    has_final_obs: bool = True,
    bounded: bool = True,
    explodes_at: int | None = None,
) -> IsaacLike:
    """For torch:tests.support.device_story:build."""
    traps = replace(BOUNDED if bounded else UNBOUNDED, has_final_obs=has_final_obs)
    return IsaacLike(num_envs, traps) if explodes_at is None else Explosive(num_envs, traps, explodes_at)


class Explosive(IsaacLike):
    """Raises in its step number `at`."""

    def __init__(self, lanes: int, traps: Traps, at: int) -> None:
        super().__init__(lanes, traps)
        self._at = at

    def step(self, action: Tensor) -> Any:
        if len(self.journal.actions) == self._at:
            raise ZeroDivisionError("a rotor came off")
        return super().step(action)


class DeviceSetup:
    """The simulator, its policy and its factory, visible to the test."""

    def __init__(
        self, traps: Traps = UNBOUNDED, lanes: int = 4, *, head: str = "gaussian", explodes_at: int | None = None
    ) -> None:
        self.traps, self.lanes, self.explodes_at = traps, lanes, explodes_at
        self.worlds: list[IsaacLike] = []
        self.spec = self.make(range(lanes)).spec
        self.worlds.clear()
        self.policy = PolicyConfig(hidden=(8,), head=head).resolve(self.spec)
        self.factory = RunnerFactory(self.make, make_tensor_actor(self.policy, "cpu", 3), SEED)

    def make(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> DeviceEnv:
        world = (
            IsaacLike(len(lanes), self.traps)
            if self.explodes_at is None
            else Explosive(len(lanes), self.traps, self.explodes_at)
        )
        self.worlds.append(world)
        return DeviceEnv(world, "planted")

    def snapshot(self, version: int) -> Snapshot:
        return weights(self.policy, version)

    @property
    def closed(self) -> list[int]:
        """How often each simulator was closed."""
        return [world.journal.closed for world in self.worlds]


def weights(policy: PolicySpec, version: int) -> Snapshot:
    """Small weights, different for every version."""
    params = FlatParams(full_layout(policy))
    initialise(policy, params, generator(version))
    return Snapshot(version, params.views)


@dataclass(frozen=True)
class ExpectedRows:
    """Rows and episodes that follow from these actions."""

    data: Transitions  # log_prob is zero: the world does not know it
    episodes: list[list[Episode]]  # by the step they ended in


def expected_rows(action: NDArray, seed: int = SEED, *, has_final_obs: bool = True) -> ExpectedRows:
    """Rows [T, B] from actions [T, B, 1], computed lane by lane. Columns: x and t; x, t and the episode's number."""
    steps, lanes, _ = action.shape
    begins = training_episodes(seed, 0).seed(0)
    blank, columns = (steps, lanes), (steps, lanes, 5)
    obs, next_obs, reward = np.zeros(columns, np.float32), np.zeros(columns, np.float32), np.zeros(blank, np.float32)
    ends = np.zeros((2, *blank), np.bool_)  # truncated, terminated
    episodes: list[list[Episode]] = [[] for _ in range(steps)]
    for lane in range(lanes):
        length, ret, x = SHORTEST + lane, np.float32(0), np.float32(0)
        for row in range(steps):
            number, t = divmod(row, length)
            x = np.float32(start(begins, lane, number)) if t == 0 else x
            obs[row, lane] = (x, t, x, t, number)
            x = x + action[row, lane, 0]
            reward[row, lane] = x / np.float32(2)
            ret = reward[row, lane] + (np.float32(0) if t == 0 else ret)
            next_obs[row, lane] = (x, t + 1, x, t + 1, number)
            if t + 1 == length:
                ends[number % 2, row, lane] = True
                next_obs[row, lane] = next_obs[row, lane] if has_final_obs else obs[row, lane]
                episodes[row].append(Episode(lane, number, 0, (), float(ret), length, 0.0, (float(x), float(length))))
    valid = np.ones(blank, np.bool_)
    return ExpectedRows(Transitions(obs, action, np.zeros(blank), reward, ends[1], ends[0], next_obs, valid), episodes)


#: What the world knows of a row.
FIELDS = [field.name for field in fields(Transitions) if field.name != "log_prob"]


def joined(chunks: Sequence[Chunk[Tensor]], name: str) -> NDArray:
    return np.concatenate([getattr(chunk.data, name).numpy() for chunk in chunks])


def assert_rows(chunks: Sequence[Chunk[Tensor]], *, has_final_obs: bool = True) -> None:
    """They follow from their actions."""
    wanted = expected_rows(joined(chunks, "action"), has_final_obs=has_final_obs).data
    for name in FIELDS:
        got = joined(chunks, name)
        np.testing.assert_array_equal(got, getattr(wanted, name), name)
        assert got.dtype == getattr(wanted, name).dtype
