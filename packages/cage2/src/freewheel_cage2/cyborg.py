"""CAGE Challenge 2 on the real simulator CybORG: the blue side of Scenario 2 as a Gymnasium environment."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Discrete

from freewheel.core import NDArray
from freewheel.envs.legacy import GlobalRandom
from freewheel.errors import SetupError, UsageError
from freewheel_cage2.env import COLUMNS, BlueMemory
from freewheel_cage2.scenario import ACTIONS, FOOTHOLD, HOSTS, MIXTURE, RED_AGENTS, STEPS, find_red

if TYPE_CHECKING:
    from freewheel_cage2.cyborg_package import CyborgPackage

MIXED = ("B_lineAgent", "RedMeanderAgent")
PLACE = {host: number for number, host in enumerate(HOSTS)}


class Scenario2(gymnasium.Env[NDArray, Any]):
    """Blue plays against red in Scenario 2, and green sleeps.

    The simulator draws all numbers from Python's global `random`. During every call the env replaces that by its own stream, so
    `reset(seed=s)` starts the same episode as `random.seed(s)` before the simulator's `reset()`. `red_agent` is B_lineAgent,
    RedMeanderAgent, SleepAgent, or mixture, which chooses one of the first two by the episode's seed. Episodes are truncated
    after `max_episode_steps` (None: never) and never terminate. info["compromised"] [13] is true where red has a session,
    except on User0. `memory` adds columns to the observation with what blue can know from its actions and observations. With
    `stream`, the env continues this random stream and ignores seeds.
    """

    def __init__(
        self,
        red_agent: str = RED_AGENTS[0],
        max_episode_steps: int | None = STEPS,
        memory: bool = False,
        stream: GlobalRandom | None = None,
    ) -> None:
        red_agent = find_red(red_agent)
        if max_episode_steps is not None and max_episode_steps < 1:
            raise UsageError(f"max_episode_steps is {max_episode_steps}; give at least 1, or None for no limit")
        source = package()
        self._memory = BlueMemory(1) if memory else None
        self.observation_space = Box(0.0, 1.0, (4 * len(HOSTS) + (len(COLUMNS) if memory else 0),), np.float32)
        self.action_space = Discrete(len(ACTIONS))
        self._limit = max_episode_steps
        self._steps = -1
        self._seeded = stream is None
        self._stream = stream or GlobalRandom()
        self._reds = [source.reds[name] for name in (MIXED if red_agent == MIXTURE else (red_agent,))]
        with self._stream:
            simulator = source.start(self._reds[0])
            self._game = source.wrap(simulator)
        self._controller = simulator.environment_controller
        if (count := self._game.action_space.n) != len(ACTIONS):
            wrong = f"blue has {count} actions, not {len(ACTIONS)}; install the right version"
            raise SetupError(f"this {source.name} is not the version of CAGE Challenge 2: {wrong}")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None and self._seeded:
            self._stream.seed(seed)
        if len(self._reds) > 1:
            self._controller.agent_interfaces["Red"].agent = self._reds[self.np_random.integers(len(self._reds))]()
        with self._stream:
            answer = self._game.reset()
        self._steps = 0
        if self._memory is not None:
            self._memory.begin(np.arange(1))
        return self._seen(answer[0] if isinstance(answer, tuple) else answer), self._info()

    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        if self._steps < 0:
            raise ResetNeeded("Scenario2 has no episode yet; call reset() first")
        with self._stream:
            observation, reward, *_ = self._game.step(int(action))  # the other values are unreliable
        self._steps += 1
        if self._memory is not None:
            self._memory.note(np.array([action]), np.asarray(observation)[None])
        return self._seen(observation), float(reward), False, self._steps == self._limit, self._info()

    def _seen(self, observation: Any) -> NDArray:
        seen = np.asarray(observation, np.float32)
        return seen if self._memory is None else np.concatenate((seen, self._memory.columns[0]))

    def _info(self) -> dict[str, Any]:
        held = np.zeros(len(HOSTS), np.bool_)
        for session in self._controller.state.sessions["Red"].values():
            held[PLACE[session.host]] = True
        held[FOOTHOLD] = False  # red always has this host
        return {"compromised": held}


def package() -> CyborgPackage:
    """Return the simulator's package; load it if necessary."""
    try:
        from freewheel_cage2.cyborg_package import PACKAGE
    except ImportError as error:
        raise SetupError(str(error)) from error
    return PACKAGE


#: The environment without a time limit.
UNLIMITED = partial(Scenario2, max_episode_steps=None)
