"""Environments that show a defender its workflow and reward it for following it: our fast one, and the real simulator.

`FAST` and `REAL` are their names for `train`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from freewheel.core import NDArray
from freewheel.seeding import drawn
from freewheel.worlds.cage2.env import Cage2, Cage2Vector
from freewheel.worlds.cage2.scenario import STEPS
from freewheel.worlds.cage2.workflow.orders import COLUMNS, Compliance

FAST, REAL = (
    "freewheel.worlds.cage2.workflow.envs:freewheel/Cage2Workflow-v0",
    "freewheel.worlds.cage2.workflow.envs:RealWorkflow",
)
#: What an episode's last info reports: both parts of the reward, hits / fixes (NaN without a fix), and the fixes.
MEASURES = ("env_return", "alignment", "compliance", "fixes")
WEIGHT = 30.0  # of compliance in the reward


def _with_context(space: gymnasium.Space[Any]) -> Dict:
    return Dict({"policy": space, "context": Box(0.0, 1.0, (COLUMNS,), np.float32)})


class _Scores:
    """The two parts of the reward of B lanes."""

    def __init__(self, lanes: int, weight: float) -> None:
        self._compliance = Compliance(lanes, weight)
        self._env_return, self._alignment = np.zeros(lanes), np.zeros(lanes)

    def begin(self, lanes: NDArray, orders: NDArray, compromised: NDArray) -> None:
        self._compliance.begin(lanes, orders, compromised)
        self._env_return[lanes] = self._alignment[lanes] = 0.0

    def add(self, action: NDArray, reward: NDArray, compromised: NDArray) -> NDArray:
        """The total reward [B] of actions [B] with these rewards of the game [B]."""
        alignment = self._compliance.judge(action, compromised)
        self._env_return += reward
        self._alignment += alignment
        return reward + alignment

    def measures(self) -> dict[str, NDArray]:
        values = (self._env_return, self._alignment, self._compliance.share, self._compliance.fixes)
        return {name: value.astype(np.float64) for name, value in zip(MEASURES, values, strict=True)}


class Workflow(gymnasium.Wrapper[Any, Any, NDArray, Any]):
    """One game of CAGE 2 under the order in options["context"] of its reset; without one there is no alignment reward."""

    def __init__(self, env: gymnasium.Env[NDArray, Any], alignment_lambda: float = WEIGHT) -> None:
        super().__init__(env)
        self.observation_space = _with_context(env.observation_space)
        self._scores, self._order = _Scores(1, alignment_lambda), np.zeros(COLUMNS, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray], dict[str, Any]]:
        self._order = np.array((options or {}).get("context", np.zeros(COLUMNS)), np.float32)
        observation, info = self.env.reset(seed=seed)
        self._scores.begin(np.ones(1, np.bool_), self._order[None], info["compromised"][None])
        return {"policy": observation, "context": self._order}, info

    def step(self, action: Any) -> tuple[dict[str, NDArray], float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        whole = self._scores.add(np.array([action]), np.array([reward]), info["compromised"][None])
        measures = {name: float(value[0]) for name, value in self._scores.measures().items()}
        seen = {"policy": observation, "context": self._order}
        return seen, float(whole[0]), terminated, truncated, {**info, **measures}


class WorkflowVector(VectorEnv[dict[str, NDArray], NDArray, NDArray]):
    """The same for many games at once: the order of a lane is the row of options["contexts"] chosen by its episode's seed."""

    metadata: dict[str, Any] = {  # noqa: RUF012 - as Gymnasium declares it
        "autoreset_mode": AutoresetMode.DISABLED,
        "lane_seeds": True,
        "contexts": True,
    }

    def __init__(self, num_envs: int = 1, alignment_lambda: float = WEIGHT, **world: Any) -> None:
        self.num_envs, self._games = num_envs, Cage2Vector(num_envs, **world)
        self.single_observation_space = _with_context(self._games.single_observation_space)
        self.single_action_space = self._games.single_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = self._games.action_space
        self._scores, self._orders = _Scores(num_envs, alignment_lambda), np.zeros((num_envs, COLUMNS), np.float32)
        self._streams: list[Any] = []
        self._episode = np.zeros(num_envs, np.int64)  # of each lane's stream

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray], dict[str, Any]]:
        asked = dict(options or {})
        contexts = asked.pop("contexts", None)
        lanes = asked.get("reset_mask", np.ones(self.num_envs, np.bool_))
        observation, info = self._games.reset(seed=seed, options=asked or None)
        self._number(lanes, asked)
        self._orders[lanes] = 0.0
        if contexts is not None:
            for lane in np.flatnonzero(lanes):
                self._orders[lane] = drawn(contexts, self._streams[lane].seed(self._episode[lane]))
        self._scores.begin(lanes, self._orders, info["compromised"])
        return self._seen(observation), info

    def step(self, actions: NDArray) -> tuple[dict[str, NDArray], NDArray, NDArray, NDArray, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._games.step(actions)
        whole = self._scores.add(np.asarray(actions), reward, info["compromised"])
        if (terminated | truncated).any():
            info = {**info, **self._scores.measures()}
        return self._seen(observation), whole, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        self._games.close()

    def _number(self, lanes: NDArray, asked: Mapping[str, Any]) -> None:
        """Update the number of each lane's episode in its stream."""
        if "seeds" in asked:
            self._streams, self._episode[:] = asked["seeds"], 0
        else:
            self._episode[lanes] += 1

    def _seen(self, observation: NDArray) -> dict[str, NDArray]:
        return {"policy": observation, "context": self._orders.copy()}


def fast_workflow(alignment_lambda: float = WEIGHT, **world: Any) -> Workflow:
    """One game of our own environment without a time limit; its registered id adds one."""
    return Workflow(Cage2(**world), alignment_lambda)


class RealWorkflow(Workflow):
    """One game of the real simulator."""

    def __init__(self, alignment_lambda: float = WEIGHT, **world: Any) -> None:
        from freewheel.worlds.cage2.cyborg import Scenario2

        super().__init__(Scenario2(**world), alignment_lambda)


gymnasium.register(
    FAST.rpartition(":")[2],
    "freewheel.worlds.cage2.workflow.envs:fast_workflow",
    vector_entry_point="freewheel.worlds.cage2.workflow.envs:WorkflowVector",
    max_episode_steps=STEPS,
    order_enforce=False,
    disable_env_checker=True,
)
