"""Worlds that are told contexts: many at once, and some that get it wrong."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from freewheel.core import Decision, NDArray, Snapshot
from freewheel.seeding import drawn
from tests.support.worlds import Conditioned


class ToldVector(VectorEnv[Any, NDArray, NDArray]):
    """B worlds of Conditioned, as a vector env that is told the whole table."""

    metadata: dict[str, Any] = {  # noqa: RUF012 - as Gymnasium has it
        "render_modes": [], "autoreset_mode": AutoresetMode.DISABLED, "lane_seeds": True, "contexts": True,
    }  # fmt: skip

    def __init__(self, num_envs: int, length: int = 3) -> None:
        self.num_envs, self.envs = num_envs, [Conditioned(length) for _ in range(num_envs)]
        self.single_observation_space, self.single_action_space = (
            self.envs[0].observation_space,
            self.envs[0].action_space,
        )
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.room: Any = create_empty_array(self.single_observation_space, num_envs)
        self.played = [0] * num_envs
        self.options: list[Any] = []  # of every reset

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.options.append(options)
        if options is None or "seeds" in options:
            self.streams, self.played = (options or {}).get("seeds"), [-1] * self.num_envs
        begins = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        for lane in np.flatnonzero(begins).tolist():
            self.begin(lane, (options or {}).get("contexts"))
        return self.batched([env.observe() for env in self.envs]), {}

    def begin(self, lane: int, table: NDArray | None) -> None:
        self.played[lane] += 1
        seed = self.streams[lane].seed(self.played[lane]) if self.streams else 0
        self.envs[lane].reset(seed=seed, options=None if table is None else {"context": drawn(table, seed)})

    def batched(self, seen: list[Any]) -> Any:
        return concatenate(self.single_observation_space, seen, self.room)

    def step(self, actions: NDArray) -> Any:
        seen, *numbers, _ = zip(*(env.step(0) for env in self.envs), strict=True)
        return self.batched(list(seen)), *map(np.array, numbers), {}


class StuckVector(ToldVector):
    """An episode takes over the context of the one before it."""

    def begin(self, lane: int, table: NDArray | None) -> None:
        before = self.envs[lane].context
        super().begin(lane, table)
        if self.played[lane]:
            self.envs[lane].context = before


class Shows(Conditioned):
    """Shows the context of the episode before, and plays by it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        before, (_, info) = self.context, super().reset(seed=seed, options=options)
        self.context, self.next = before, self.context
        return self.observe(), info

    def step(self, action: Any) -> Any:
        answer = super().step(action)
        if answer[3]:
            self.context = self.next
        return answer


class Plays(Conditioned):
    """Shows its own context, and plays by the one of the episode before."""

    played_by = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.played_by = self.context
        return super().reset(seed=seed, options=options)

    def judge(self, action: Any) -> float:
        own, self.context = self.context, self.played_by
        reward = super().judge(action)
        self.context = own
        return reward


for name, many in (("Told-v0", ToldVector), ("Stuck-v0", StuckVector)):
    gymnasium.register(
        name, "tests.support.worlds:Conditioned", vector_entry_point=f"tests.support.contexts:{many.__name__}"
    )


class Counting:
    """Its memory is how many steps of the episode it has acted in, and minus that; its log-probability shows it."""

    state_size = 2

    def load(self, snapshot: Snapshot) -> None:
        """It has no weights."""

    def act(self, obs: NDArray, rng: np.random.Generator, *, state: Any = None, greedy: bool = False) -> Decision:
        before = np.zeros((len(obs), 2), np.float32) if state is None else state
        return Decision(np.zeros(len(obs), np.int64), before[:, 0].copy(), before + np.array([1, -1], np.float32))
