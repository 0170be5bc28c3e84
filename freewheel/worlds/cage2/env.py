"""Scenario 2 of CAGE Challenge 2 as a fast environment of many games at once, and what a defender can remember of a game."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from freewheel.core import NDArray, SeedStream
from freewheel.worlds.cage2 import replay
from freewheel.worlds.cage2.network import Draws, Networks
from freewheel.worlds.cage2.red import Bline, Meander
from freewheel.worlds.cage2.scenario import (
    ACTIONS,
    BIT,
    FIRST_DECOY,
    FITS,
    FOOTHOLD,
    HOST_OF,
    HOSTS,
    LAST_DECOY,
    NEEDS,
    OPEN,
    OPENS,
    RED_AGENTS,
    REDS,
    RESTORE,
    STEPS,
    VERB_OF,
    VERBS,
    N,
    check_red,
)

#: (verb, host) of every decoy that can be placed: it fits the system, and its port is free at the start.
PLACES = [
    (verb, host)
    for host in range(N)
    for verb in range(FIRST_DECOY, LAST_DECOY + 1)
    if FITS[verb, host] and not OPEN[host] & NEEDS[verb]
]
COLUMNS = (
    *(f"{VERBS[verb - 2]} {HOSTS[host]}" for verb, host in PLACES),
    *(f"scanned {host}" for host in HOSTS),
    *(f"restored {host}" for host in HOSTS),
)
_PLACE = np.full((RESTORE + 1, N), -1)  # [verb, host] its column
for _column, (_verb, _host) in enumerate(PLACES):
    _PLACE[_verb, _host] = _column
_AT = np.array([host for _, host in PLACES])
LATEST, EARLIER = 1.0, 0.5  # values of a scanned host


class Memory:
    """[B, 67]: decoys in place (blue knows the conditions under which placing one works), hosts that red has scanned, in its
    last scan and before, and hosts that were ever restored."""

    def __init__(self, lanes: int) -> None:
        self.columns = np.zeros((lanes, len(COLUMNS)), np.float32)
        self._decoys = self.columns[:, : len(PLACES)]
        self._scanned = self.columns[:, len(PLACES) : len(PLACES) + N]
        self._restored = self.columns[:, len(PLACES) + N :]
        self._ports = np.tile(OPEN, (lanes, 1))  # [B, 13] ports in use

    def begin(self, lanes: NDArray) -> None:
        """Clear the memory of these lanes: new games start there."""
        self.columns[lanes] = 0.0
        self._ports[lanes] = OPEN

    def note(self, action: NDArray, obs: NDArray) -> None:
        """Update the memory with actions [B] and the observations that followed [B, 52]."""
        verb, host = VERB_OF[action], HOST_OF[action]
        if (lanes := np.flatnonzero(verb == RESTORE)).size:
            at = host[lanes]
            self._ports[lanes, at] = OPEN[at]
            self._restored[lanes, at] = 1.0
            self._decoys[lanes] *= at[:, None] != _AT
        column = _PLACE[verb, host]
        lanes = np.flatnonzero((column >= 0) & (self._ports[np.arange(len(host)), host] & NEEDS[verb] == 0))
        self._ports[lanes, host[lanes]] |= OPENS[verb[lanes]]
        self._decoys[lanes, column[lanes]] = 1.0
        activity = obs[:, : 4 * N].reshape(-1, N, 4)
        scans = (activity[..., 0] == 1) & (activity[..., 1] == 0)
        fresh = scans.any(axis=1)
        self._scanned[fresh] = np.where(scans[fresh], LATEST, np.minimum(self._scanned[fresh], EARLIER))


BLINE, MEANDER, ASLEEP = range(len(RED_AGENTS))
#: Hosts that green scans now and then, if it is active.
GREEN_HOSTS = np.array([h for h, name in enumerate(HOSTS) if name.startswith(("User", "Enterprise"))])
GREEN_ACTS = 0.5
_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Turn:
    """[B] the actions and outcomes of the last step."""

    blue: NDArray
    blue_success: NDArray  # 0 no, 1 yes, 2 unknown
    red_kind: NDArray  # one of RED_KINDS
    red_target: NDArray  # of a subnet for a sweep, else of a host
    red_success: NDArray


class Cage2Vector(VectorEnv[NDArray, NDArray, NDArray]):
    """Many games. The random events of an episode depend only on its seed, not on the other lanes."""

    metadata = {  # noqa: RUF012 - Gymnasium's name and type
        "render_modes": [],
        "autoreset_mode": AutoresetMode.DISABLED,
        "lane_seeds": True,
    }

    def __init__(
        self,
        num_envs: int = 1,
        red_agent: str = "B_lineAgent",
        max_episode_steps: int = STEPS,
        green: bool = False,
        memory: bool = False,
    ) -> None:
        check_red(red_agent)
        self.num_envs, self._limit, self._green = num_envs, max_episode_steps, green
        self._red = REDS.index(red_agent)
        self.nets = Networks(num_envs)
        self._memory = Memory(num_envs) if memory else None
        self._bline, self._meander = Bline(num_envs), Meander(num_envs)
        self._which = np.full(num_envs, self._red)  # [B] which red plays
        self._key = np.zeros(num_envs, np.uint64)  # [B] the key of all random numbers of an episode
        self._time = np.zeros(num_envs, np.int64)
        self._success = np.zeros(num_envs, np.bool_)  # of red's last action, and whether it saw anything
        self._shown = np.ones(num_envs, np.bool_)
        self._streams: Sequence[SeedStream] | None = None
        self._played = np.zeros(num_envs, np.int64)
        self.turn: Turn | None = None
        size = 4 * N + (len(COLUMNS) if memory else 0)
        self.single_observation_space = Box(0.0, 1.0, (size,), np.float32)
        self.single_action_space = Discrete(len(ACTIONS))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[NDArray, dict[str, Any]]:
        """Start games in all lanes, by `seed` or streams of seeds (options["seeds"]), or in the lanes of a reset_mask."""
        options = options or {}
        lanes = np.arange(self.num_envs)
        if (mask := options.get("reset_mask")) is not None:
            lanes = np.flatnonzero(mask)
            seeds = self._next_seeds(lanes)
        elif (streams := options.get("seeds")) is not None:
            self._streams, self._played[:] = streams, 0
            seeds = self._next_seeds(lanes)
        else:
            self._streams, seeds = None, np.array(self._own_seeds(seed), np.uint64)
        self._begin(lanes, _mix(seeds))
        return self._look(), self._info()

    def _next_seeds(self, lanes: NDArray) -> NDArray:
        """The keys of the next episodes: from the stream of the lane, or from the key before."""
        if self._streams is None:
            return np.asarray(self._key[lanes] + _FIRST)
        seeds = [self._streams[lane].seed(k) for lane, k in zip(lanes, self._played[lanes], strict=True)]
        self._played[lanes] += 1
        return np.array(seeds, np.uint64)

    def _own_seeds(self, seed: int | Sequence[int | None] | None) -> list[int]:
        if isinstance(seed, Sequence):
            return [self._own_seeds(one)[0] for one in seed]
        super().reset(seed=seed)
        first = int(self.np_random.integers(2**31)) if seed is None else int(seed)
        return [first + lane for lane in range(self.num_envs)]

    def _begin(self, lanes: NDArray, key: NDArray) -> None:
        self._key[lanes] = key
        entry, choice = _uniform(_mix(key + _SECOND))
        if self._red == len(RED_AGENTS):
            self._which[lanes] = np.where(choice < 0.5, BLINE, MEANDER)
        self.nets.begin(lanes)
        self._bline.begin(lanes, entry)
        self._meander.begin(lanes)
        if self._memory is not None:
            self._memory.begin(lanes)
        self._time[lanes], self._success[lanes], self._shown[lanes] = 0, False, True

    def step(self, actions: NDArray) -> tuple[NDArray, NDArray, NDArray, NDArray, dict[str, Any]]:
        actions = np.asarray(actions)
        base = self._key + (self._time.astype(np.uint64) << np.uint64(1)) * _GOLDEN
        exploit, notice = _uniform(_mix(base))
        choice, green = _uniform(_mix(base + _GOLDEN))
        blue_success = self.nets.blue(actions)
        kind, target = self._red_acts(choice)
        self._success, self._shown = self.nets.red(kind, target, Draws(exploit, notice))
        self.turn = Turn(actions, blue_success, kind, target, self._success)
        reward = self.nets.reward()
        self.nets.observe(self._green_scans(green) if self._green else None)
        if self._memory is not None:
            self._memory.note(actions, self.nets.obs)
        self._time += 1
        truncated = self._time >= self._limit
        return self._look(), reward, np.zeros(self.num_envs, np.bool_), truncated, self._info()

    def _red_acts(self, choice: NDArray) -> tuple[NDArray, NDArray]:
        if self._red == BLINE:
            return self._bline.act(self._success, self._shown)
        if self._red == MEANDER:
            return self._meander.act(self._success, self.nets, choice)
        if self._red == ASLEEP:
            return np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, np.int64)
        straight = self._which == BLINE
        pairs = zip(
            self._bline.act(self._success, self._shown),
            self._meander.act(self._success, self.nets, choice),
            strict=True,
        )
        kind, target = (np.where(straight, one, other) for one, other in pairs)
        return kind, target

    def _green_scans(self, chance: NDArray) -> NDArray:
        which = ((chance / GREEN_ACTS) * len(GREEN_HOSTS)).astype(np.int64)
        return np.where(chance < GREEN_ACTS, GREEN_HOSTS[np.minimum(which, len(GREEN_HOSTS) - 1)], -1)

    def _look(self) -> NDArray:
        if self._memory is None:
            return self.nets.obs.copy()
        return np.concatenate((self.nets.obs, self._memory.columns), axis=1)

    def _info(self) -> dict[str, Any]:
        return {"compromised": self.nets.among(self.nets.held & ~BIT[FOOTHOLD])}


class Cage2(gymnasium.Env[NDArray, np.int64]):
    """One game without a time limit; its registered id adds one. It renders steps as text."""

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 - as gymnasium declares it

    def __init__(
        self,
        red_agent: str = "B_lineAgent",
        green: bool = False,
        memory: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.games = Cage2Vector(1, red_agent, sys.maxsize, green, memory)
        self.observation_space = self.games.single_observation_space
        self.action_space = self.games.single_action_space
        self.render_mode = render_mode
        self._rewards: list[float] = []

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[NDArray, dict[str, Any]]:
        super().reset(seed=seed)
        self._rewards = []
        obs, info = self.games.reset(seed=int(self.np_random.integers(2**31)) if seed is None else seed)
        return obs[0], {"compromised": info["compromised"][0]}

    def step(self, action: np.int64) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.games.step(np.array([action]))
        self._rewards.append(float(reward[0]))
        last = {"compromised": info["compromised"][0]}
        return obs[0], self._rewards[-1], bool(terminated[0]), bool(truncated[0]), last

    def render(self) -> str:
        """The last step as text."""
        turn, nets = self.games.turn, self.games.nets
        if not self._rewards or turn is None:
            return replay.HEADLINE
        kind, target = int(turn.red_kind[0]), int(turn.red_target[0])
        red = replay.red_in_words(
            kind,
            target,
            bool(turn.red_success[0]),
            access=int(nets.access[0, target]),
            noticed=bool(nets.obs[0, 4 * target + 1]),
        )
        blue = replay.blue_in_words(int(turn.blue[0]), int(turn.blue_success[0]))
        return replay.line(len(self._rewards), blue, red, self._rewards[-1], sum(self._rewards))


def _mix(state: NDArray) -> NDArray:
    """[B] uint64, a hash of each number (the finaliser of splitmix64)."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return np.asarray(state ^ (state >> np.uint64(31)))


def _uniform(bits: NDArray) -> tuple[NDArray, NDArray]:
    """Two numbers in [0, 1) of 32 bits each."""
    return (bits >> np.uint64(32)) * 2.0**-32, (bits & np.uint64(0xFFFFFFFF)) * 2.0**-32
