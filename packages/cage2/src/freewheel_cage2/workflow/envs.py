"""Environments with a workflow, which is an order of the five host types. A defender should fix taken hosts in this order.

A *fix* is a Remove or Restore. Among the types on which red has a session just before the action, the fix should go to the type
that comes first in the order; then it is a *hit*. Neither the choice of the host within the type nor the success of the fix
matters. User0 never counts as taken, because red always has it. A fix while nothing is taken is not a hit.

Compliance is hits / fixes of the episode so far, or NaN without a fix.

The alignment reward of a step is weight × (compliance after - compliance before), where compliance without a fix is 0. Over an
episode it adds up to weight × final compliance.

`FAST` and `REAL` are the names that `train` uses for our fast environment and for the real simulator under a workflow.
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
#: The last info of an episode reports both parts of the reward, hits / fixes (NaN without a fix), and the number of fixes.
MEASURES = ("env_return", "alignment", "compliance", "fixes")
WEIGHT = 30.0  # default weight of compliance in the reward
TYPES = ("defender", "enterprise", "op_server", "op_host", "user")
ORDERS: tuple[Order, ...] = tuple(itertools.permutations(TYPES))  # all 120
COLUMNS = len(TYPES) ** 2  # length of an encoded order
#: [13] the index of each host's type.
TYPE_OF_HOST = np.array([[host.lower().startswith(kind) for kind in TYPES].index(True) for host in HOSTS])
#: Plausible orders by name.
CANONICAL: dict[str, Order] = {
    "critical-first": ("op_server", "enterprise", "defender", "op_host", "user"),  # the most expensive losses first
    "enterprise-first": (
        "enterprise",
        "op_server",
        "defender",
        "op_host",
        "user",
    ),  # enterprise is on every path to the server
    "outside-in": ("user", "enterprise", "defender", "op_host", "op_server"),  # the order in which red attacks
    "inside-out": ("op_server", "op_host", "defender", "enterprise", "user"),  # the reverse order
    "defender-first": (
        "defender",
        "op_server",
        "enterprise",
        "op_host",
        "user",
    ),  # blue's own host, then critical-first
    "cheapest-first": ("user", "op_host", "defender", "enterprise", "op_server"),  # the reverse of critical-first
}


def spelt(order: Order) -> str:
    """Return the text form of an order, which also serves in file names."""
    return "-".join(order)


def parse(text: str) -> Order:
    """Read an order that `spelt` has written, or the name of a canonical order."""
    order = CANONICAL.get(text, tuple(text.split("-")))
    if sorted(order) != sorted(TYPES):
        raise UsageError(f"'{text}' is not an order of the host types; join {', '.join(TYPES)} by '-', each once")
    return order


def encode(order: Order) -> NDArray:
    """Encode an order as [25] one-hot numbers: five for the first type, five for the second, and so on."""
    return np.array([[float(kind == other) for other in TYPES] for kind in order], np.float32).reshape(COLUMNS)


def ranks(contexts: NDArray) -> NDArray:
    """Decode [..., 25] encoded orders to [..., 5] the rank of each type; 0 is the first."""
    places: NDArray = contexts.reshape(*contexts.shape[:-1], len(TYPES), len(TYPES)).argmax(axis=-2)
    return places


def precedence(orders: Sequence[Order]) -> NDArray:
    """Return [N, 10] whether the first type of each pair comes before the second, as 0 and 1."""
    place = ranks(np.stack([encode(order) for order in orders]))
    first, second = np.triu_indices(len(TYPES), 1)
    return (place[:, first] < place[:, second]).astype(np.float64)


def distance(one: Order, other: Order) -> int:
    """Return Kendall's distance: the number of pairs of types in opposite order, 0 to 10."""
    return int(np.abs(np.subtract(*precedence([one, other]))).sum())


FIXES = np.isin(VERB_OF, (REMOVE, RESTORE))  # [145]
NOTHING = len(TYPES)  # stands for the rank of the first taken type if none is taken


class Compliance:
    """Counts the fixes and both parts of the reward of B lanes, each with its order. Under an order of zeros no fix counts."""

    def __init__(self, lanes: int, weight: float) -> None:
        self._env_return = np.zeros(lanes)
        self._alignment = np.zeros(lanes)
        self._weight = weight
        self._lane = np.arange(lanes)
        self.hits = np.zeros(lanes, np.int64)
        self.fixes = np.zeros(lanes, np.int64)
        self._place = np.zeros((lanes, len(HOSTS)), np.int64)  # [B, 13] rank of each host's type in the lane's order
        self._ordered = np.zeros(lanes, np.bool_)
        self._taken = np.zeros((lanes, len(HOSTS)), np.bool_)  # [B, 13] hosts that are taken before the next action

    def begin(self, lanes: NDArray, orders: NDArray, compromised: NDArray) -> None:
        """Start episodes in these lanes [B] bool, under orders [B, 25], with these hosts compromised [B, 13]."""
        self.hits[lanes] = self.fixes[lanes] = 0
        self._env_return[lanes] = self._alignment[lanes] = 0.0
        self._place[lanes] = ranks(orders[lanes])[:, TYPE_OF_HOST]
        self._ordered[lanes] = orders[lanes].any(axis=1)
        self._look(lanes, compromised)

    def judge(self, action: NDArray, compromised: NDArray) -> NDArray:
        """Return the alignment reward [B] of actions [B] that led to this state of the hosts [B, 13]."""
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
        """Return the total reward [B] of actions [B] with these rewards of the game [B]."""
        self._env_return += reward
        return reward + self.judge(action, compromised)

    def measures(self) -> dict[str, NDArray]:
        """Return each of MEASURES, [B]."""
        values = (self._env_return, self._alignment, self.share, self.fixes)
        return {name: value.astype(np.float64) for name, value in zip(MEASURES, values, strict=True)}

    @property
    def share(self) -> NDArray:
        """Hits / fixes [B], NaN without a fix."""
        return np.where(self.fixes > 0, self._potential(), np.nan)

    def _potential(self) -> NDArray:
        return self.hits / np.maximum(self.fixes, 1)

    def _look(self, lanes: NDArray | slice, compromised: NDArray) -> None:
        self._taken[lanes] = compromised[lanes]
        self._taken[:, FOOTHOLD] = False


def _with_context(space: gymnasium.Space[Any]) -> Dict:
    return Dict({"policy": space, "context": Box(0.0, 1.0, (COLUMNS,), np.float32)})


class Workflow(gymnasium.Wrapper[Any, Any, NDArray, Any]):
    """One game of CAGE 2 under the order in options["context"] of its reset. Without an order there is no alignment reward."""

    def __init__(self, env: gymnasium.Env[NDArray, Any], alignment_lambda: float = WEIGHT) -> None:
        super().__init__(env)
        self.observation_space = _with_context(env.observation_space)
        self._scores = Compliance(1, alignment_lambda)
        self._order = np.zeros(COLUMNS, np.float32)

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
    """Many games of CAGE 2 under orders. The seed of a lane's episode chooses its order from the rows of options["contexts"]."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED, "lane_seeds": True, "contexts": True}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, alignment_lambda: float = WEIGHT, **world: Any) -> None:
        self.num_envs = num_envs
        self._games = Cage2Vector(num_envs, **world)
        self.single_observation_space = _with_context(self._games.single_observation_space)
        self.single_action_space = self._games.single_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = self._games.action_space
        self._scores = Compliance(num_envs, alignment_lambda)
        self._orders = np.zeros((num_envs, COLUMNS), np.float32)
        self._streams: list[Any] = []
        self._episode = np.zeros(num_envs, np.int64)  # number of the episode in each lane's stream

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
    """Create one game of our fast environment. It has no time limit, but its registered id adds one."""
    return Workflow(Cage2(**world), alignment_lambda)


class RealWorkflow(Workflow):
    """One game of the real simulator under an order."""

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
