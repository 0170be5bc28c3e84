"""Workflows: orders of the five host types in which a defender fixes hosts that red has taken, and environments that show one.

A *fix* is a Remove or Restore. It *hits* if the type of its host is the first type in the order among the types on which red has
a session just before the action. Neither the choice of the host within the type nor the success of the fix matters. User0
never counts as taken, because red always has it. A fix while nothing is taken counts as a fix that hits nothing.

Compliance is hits / fixes of the episode so far; NaN without a fix.

The alignment reward of a step is weight × (compliance after - compliance before), where compliance without a fix is 0. Over an
episode it adds up to weight × final compliance.

`FAST` and `REAL` are the names for `train` of our fast environment and of the real simulator under a workflow.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from freewheel.core import NDArray
from freewheel.errors import UsageError
from freewheel.seeding import drawn
from freewheel_cage2.env import Cage2, Cage2Vector
from freewheel_cage2.scenario import FOOTHOLD, HOST_OF, HOSTS, REMOVE, RESTORE, STEPS, VERB_OF

Order: TypeAlias = tuple[str, ...]

FAST = "freewheel_cage2.workflow.envs:freewheel/Cage2Workflow-v0"
REAL = "freewheel_cage2.workflow.envs:RealWorkflow"
#: What an episode's last info reports: both parts of the reward, hits / fixes (NaN without a fix), and the fixes.
MEASURES = ("env_return", "alignment", "compliance", "fixes")
WEIGHT = 30.0  # of compliance in the reward
TYPES = ("defender", "enterprise", "op_server", "op_host", "user")
ORDERS: tuple[Order, ...] = tuple(itertools.permutations(TYPES))  # all 120
COLUMNS = len(TYPES) ** 2  # of an order as numbers
#: [13] the number of each host's type.
TYPE_OF_HOST = np.array([[host.lower().startswith(kind) for kind in TYPES].index(True) for host in HOSTS])
#: Plausible orders by name.
CANONICAL: dict[str, Order] = {
    "critical-first": ("op_server", "enterprise", "defender", "op_host", "user"),  # by the cost of a lost host
    "enterprise-first": ("enterprise", "op_server", "defender", "op_host", "user"),  # on every path to the servers
    "outside-in": ("user", "enterprise", "defender", "op_host", "op_server"),  # in the order in which red attacks
    "inside-out": ("op_server", "op_host", "defender", "enterprise", "user"),  # in the reverse order
    "defender-first": ("defender", "op_server", "enterprise", "op_host", "user"),  # blue's own, then critical-first
    "cheapest-first": ("user", "op_host", "defender", "enterprise", "op_server"),  # critical-first reversed
}


def spelt(order: Order) -> str:
    """The text form of an order, also for file names."""
    return "-".join(order)


def parse(text: str) -> Order:
    """An order as `spelt` writes it, or the name of a canonical one."""
    order = CANONICAL.get(text, tuple(text.split("-")))
    if sorted(order) != sorted(TYPES):
        raise UsageError(f"'{text}' is no order of the host types: join {', '.join(TYPES)} by '-', each once")
    return order


def encode(order: Order) -> NDArray:
    """[25] one-hot numbers: five for the first type, five for the second, and so on."""
    return np.array([[float(kind == other) for other in TYPES] for kind in order], np.float32).reshape(COLUMNS)


def ranks(contexts: NDArray) -> NDArray:
    """[..., 25] orders as numbers -> [..., 5] the place of each type, 0 the first."""
    places: NDArray = contexts.reshape(*contexts.shape[:-1], len(TYPES), len(TYPES)).argmax(axis=-2)
    return places


def precedence(orders: Sequence[Order]) -> NDArray:
    """[N, 10] whether the first of each pair of types comes before the second, as 0 and 1."""
    place = ranks(np.stack([encode(order) for order in orders]))
    first, second = np.triu_indices(len(TYPES), 1)
    return (place[:, first] < place[:, second]).astype(np.float64)


def distance(one: Order, other: Order) -> int:
    """Kendall's distance: the number of pairs of types in opposite order, 0 to 10."""
    return int(np.abs(np.subtract(*precedence([one, other]))).sum())


FIXES = np.isin(VERB_OF, (REMOVE, RESTORE))  # [145]
NOTHING = len(TYPES)  # the place of the first taken type if none is taken


class Compliance:
    """The fixes and both parts of the reward of B lanes, each under its own order; if that is all zeros, no fix is counted."""

    def __init__(self, lanes: int, weight: float) -> None:
        self._env_return, self._alignment = np.zeros(lanes), np.zeros(lanes)
        self._weight, self._lane = weight, np.arange(lanes)
        self.hits, self.fixes = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
        self._place = np.zeros((lanes, len(HOSTS)), np.int64)  # [B, 13] of each host's type in the lane's order
        self._ordered = np.zeros(lanes, np.bool_)
        self._taken = np.zeros((lanes, len(HOSTS)), np.bool_)  # [B, 13] before the next action

    def begin(self, lanes: NDArray, orders: NDArray, compromised: NDArray) -> None:
        """Start episodes in these lanes [B] bool, under orders [B, 25], with these hosts compromised [B, 13]."""
        self.hits[lanes] = self.fixes[lanes] = 0
        self._env_return[lanes] = self._alignment[lanes] = 0.0
        self._place[lanes] = ranks(orders[lanes])[:, TYPE_OF_HOST]
        self._ordered[lanes] = orders[lanes].any(axis=1)
        self._look(lanes, compromised)

    def judge(self, action: NDArray, compromised: NDArray) -> NDArray:
        """The alignment reward [B] of actions [B] that were followed by this state of hosts [B, 13]."""
        fixes = FIXES[action] & self._ordered
        first = np.where(self._taken, self._place, NOTHING).min(axis=1)
        before = self._potential()
        self.fixes += fixes
        self.hits += fixes & (self._place[self._lane, HOST_OF[action]] == first)
        self._look(slice(None), compromised)
        reward: NDArray = self._weight * (self._potential() - before)
        self._alignment += reward
        return reward

    def add(self, action: NDArray, reward: NDArray, compromised: NDArray) -> NDArray:
        """The total reward [B] of actions [B] with these rewards of the game [B]."""
        self._env_return += reward
        return reward + self.judge(action, compromised)

    def measures(self) -> dict[str, NDArray]:
        """[B] each of MEASURES."""
        values = (self._env_return, self._alignment, self.share, self.fixes)
        return {name: value.astype(np.float64) for name, value in zip(MEASURES, values, strict=True)}

    @property
    def share(self) -> NDArray:
        """Hits / fixes [B], NaN where it is not applicable."""
        return np.where(self.fixes > 0, self._potential(), np.nan)

    def _potential(self) -> NDArray:
        return self.hits / np.maximum(self.fixes, 1)

    def _look(self, lanes: NDArray | slice, compromised: NDArray) -> None:
        self._taken[lanes] = compromised[lanes]
        self._taken[:, FOOTHOLD] = False


def _with_context(space: gymnasium.Space[Any]) -> Dict:
    return Dict({"policy": space, "context": Box(0.0, 1.0, (COLUMNS,), np.float32)})


class Workflow(gymnasium.Wrapper[Any, Any, NDArray, Any]):
    """One game of CAGE 2 under the order in options["context"] of its reset; without one there is no alignment reward."""

    def __init__(self, env: gymnasium.Env[NDArray, Any], alignment_lambda: float = WEIGHT) -> None:
        super().__init__(env)
        self.observation_space = _with_context(env.observation_space)
        self._scores, self._order = Compliance(1, alignment_lambda), np.zeros(COLUMNS, np.float32)

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

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED, "lane_seeds": True, "contexts": True}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, alignment_lambda: float = WEIGHT, **world: Any) -> None:
        self.num_envs, self._games = num_envs, Cage2Vector(num_envs, **world)
        self.single_observation_space = _with_context(self._games.single_observation_space)
        self.single_action_space = self._games.single_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = self._games.action_space
        self._scores, self._orders = Compliance(num_envs, alignment_lambda), np.zeros((num_envs, COLUMNS), np.float32)
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
        from freewheel_cage2.cyborg import Scenario2

        super().__init__(Scenario2(**world), alignment_lambda)


gymnasium.register(
    FAST.rpartition(":")[2],
    "freewheel_cage2.workflow.envs:fast_workflow",
    vector_entry_point="freewheel_cage2.workflow.envs:WorkflowVector",
    max_episode_steps=STEPS,
    order_enforce=False,
    disable_env_checker=True,
)
