"""Scenario 2 of CAGE Challenge 2 as a fast environment of many games, with an optional memory for the defender."""

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
from freewheel_cage2 import scenario as s2
from freewheel_cage2.agents import BlineAgent, MeanderAgent
from freewheel_cage2.network import ESCALATE, EXPLOIT, IMPACT, SCAN, SUCCESS, SWEEP, NetworkStates
from freewheel_cage2.scenario import ACTIONS, HOSTS, PLACES, N

COLUMNS = (
    *(f"{s2.VERBS[verb - 2]} {HOSTS[host]}" for verb, host in PLACES),
    *(f"scanned {host}" for host in HOSTS),
    *(f"restored {host}" for host in HOSTS),
)
_PLACE = np.full((s2.RESTORE + 1, N), -1)  # [verb, host] its column
for _column, (_verb, _host) in enumerate(PLACES):
    _PLACE[_verb, _host] = _column
_AT = np.array([host for _, host in PLACES])
LATEST, EARLIER = 1.0, 0.5  # values of a scanned host


class BlueMemory:
    """Blue's memory, [B, 67]: the decoys in place (blue knows when placing one succeeds), the hosts that red has scanned
    (its last scan differs from earlier ones), and the hosts that were ever restored."""

    def __init__(self, lanes: int) -> None:
        self.columns = np.zeros((lanes, len(COLUMNS)), np.float32)
        self._decoys = self.columns[:, : len(PLACES)]
        self._scanned = self.columns[:, len(PLACES) : len(PLACES) + N]
        self._restored = self.columns[:, len(PLACES) + N :]
        self._ports = np.tile(s2.OPEN, (lanes, 1))  # [B, 13] ports in use

    def begin(self, lanes: NDArray) -> None:
        """Clear the memory of these lanes, where new games start."""
        self.columns[lanes] = 0.0
        self._ports[lanes] = s2.OPEN

    def note(self, action: NDArray, obs: NDArray) -> None:
        """Update the memory with actions [B] and the observations that followed [B, 52]."""
        verb, host = s2.VERB_OF[action], s2.HOST_OF[action]
        if (lanes := np.flatnonzero(verb == s2.RESTORE)).size:
            at = host[lanes]
            self._ports[lanes, at] = s2.OPEN[at]
            self._restored[lanes, at] = 1.0
            self._decoys[lanes] *= at[:, None] != _AT
        column = _PLACE[verb, host]
        lanes = np.flatnonzero((column >= 0) & (self._ports[np.arange(len(host)), host] & s2.NEEDS[verb] == 0))
        self._ports[lanes, host[lanes]] |= s2.OPENS[verb[lanes]]
        self._decoys[lanes, column[lanes]] = 1.0
        activity = obs[:, : 4 * N].reshape(-1, N, 4)
        scans = (activity[..., 0] == 1) & (activity[..., 1] == 0)
        fresh = scans.any(axis=1)
        self._scanned[fresh] = np.where(scans[fresh], LATEST, np.minimum(self._scanned[fresh], EARLIER))


BLINE, MEANDER, ASLEEP = range(len(s2.RED_AGENTS))
#: Hosts that green may scan if it is active.
GREEN_HOSTS = np.array([h for h, name in enumerate(HOSTS) if name.startswith(("User", "Enterprise"))])
GREEN_ACTS = 0.5
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class GameTurn:
    """The actions and outcomes of the last step, [B] each."""

    blue: NDArray
    blue_success: NDArray  # 0 no, 1 yes, 2 unknown
    red_kind: NDArray  # one of RED_KINDS
    red_target: NDArray  # the index of a subnet for a sweep, otherwise of a host
    red_success: NDArray


class Cage2Vector(VectorEnv[NDArray, NDArray, NDArray]):
    """Many games at once. The random events of an episode depend only on its seed, not on the other lanes."""

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.DISABLED, "lane_seeds": True}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int = 1,
        red_agent: str = "B_lineAgent",
        max_episode_steps: int = s2.STEPS,
        green: bool = False,
        memory: bool = False,
    ) -> None:
        red_agent = s2.find_red(red_agent)
        self.num_envs = num_envs
        self._limit = max_episode_steps
        self._green = green
        self._red = s2.REDS.index(red_agent)
        self.nets = NetworkStates(num_envs)
        self._memory = BlueMemory(num_envs) if memory else None
        self._bline = BlineAgent(num_envs)
        self._meander = MeanderAgent(num_envs)
        self._which = np.full(num_envs, self._red)  # [B] which red plays
        self._key = np.zeros(num_envs, np.uint64)  # [B] the key of all random numbers of an episode
        self._time = np.zeros(num_envs, np.int64)
        self._success = np.zeros(num_envs, np.bool_)  # whether red's last action succeeded
        self._shown = np.ones(num_envs, np.bool_)  # whether red's last action found anything
        self._streams: Sequence[SeedStream] | None = None
        self._played = np.zeros(num_envs, np.int64)
        self.turn: GameTurn | None = None
        size = 4 * N + (len(COLUMNS) if memory else 0)
        self.single_observation_space = Box(0.0, 1.0, (size,), np.float32)
        self.single_action_space = Discrete(len(ACTIONS))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[NDArray, dict[str, Any]]:
        """Start games in all lanes, with `seed` or streams of seeds (options["seeds"]), or only in the lanes of a reset_mask."""
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
        """Return the keys of the next episodes, from the lanes' streams or from the previous keys."""
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
        if self._red == len(s2.RED_AGENTS):
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
        self._success, self._shown = self.nets.red(kind, target, exploit, notice)
        self.turn = GameTurn(actions, blue_success, kind, target, self._success)
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
        one = self._bline.act(self._success, self._shown)
        other = self._meander.act(self._success, self.nets, choice)
        return np.where(straight, one[0], other[0]), np.where(straight, one[1], other[1])

    def _green_scans(self, chance: NDArray) -> NDArray:
        which = ((chance / GREEN_ACTS) * len(GREEN_HOSTS)).astype(np.int64)
        return np.where(chance < GREEN_ACTS, GREEN_HOSTS[np.minimum(which, len(GREEN_HOSTS) - 1)], -1)

    def _look(self) -> NDArray:
        if self._memory is None:
            return self.nets.obs.copy()
        return np.concatenate((self.nets.obs, self._memory.columns), axis=1)

    def _info(self) -> dict[str, Any]:
        return {"compromised": self.nets.among(self.nets.held & ~s2.BIT[s2.FOOTHOLD])}


class Cage2(gymnasium.Env[NDArray, np.int64]):
    """One game, rendered as text. It has no time limit, but its registered id adds one."""

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 - as gymnasium declares it

    def __init__(
        self, red_agent: str = "B_lineAgent", green: bool = False, memory: bool = False, render_mode: str | None = None
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
        """Return the last step as a row of text, or the headline before the first step. Both fit into 80 columns."""
        turn, nets = self.games.turn, self.games.nets
        if not self._rewards or turn is None:
            return f"{'':>3} {'blue':<29} {'red':<33} {'cost':>5} {'total':>6}"
        kind, target = int(turn.red_kind[0]), int(turn.red_target[0])
        access, noticed = int(nets.access[0, target]), bool(nets.obs[0, 4 * target + 1])
        red = _red_in_words(kind, target, bool(turn.red_success[0]), access, noticed)
        blue = _blue_in_words(int(turn.blue[0]), int(turn.blue_success[0]))
        cost = f"{self._rewards[-1]:.1f}" if self._rewards[-1] else ""
        return f"{len(self._rewards):>3} {blue:<29} {red:<33} {cost:>5} {sum(self._rewards):>6.1f}"


def _blue_in_words(action: int, success: int) -> str:
    """Describe what blue did."""
    verb, _, host = ACTIONS[action].partition(" ")
    if verb.startswith("Decoy"):
        decoy = f"{verb.removeprefix('Decoy')}, {host}"
        return f"decoy {decoy}" if success == SUCCESS else f"no room: {decoy}"
    plain = {"Sleep": "sleeps", "Monitor": "watches", "Analyse": "analyses", "Remove": "cleans", "Restore": "restores"}
    return f"{plain[verb]} {host}".rstrip()


def _red_in_words(kind: int, target: int, success: bool, access: int, noticed: bool) -> str:
    """Describe what red did, how far it got (its access to the target after this step), and whether blue saw an exploit."""
    if kind == SWEEP:
        return f"sweeps the {s2.SUBNETS[target]} subnet" + ("" if success else ": no way in")
    host = HOSTS[target]
    seen = "seen" if noticed else "unseen"
    if kind == SCAN:
        return f"scans {host}"
    if kind == EXPLOIT:
        return f"enters {host} as {('', 'user', 'root')[access]}, {seen}" if success else f"fails to enter {host}"
    if kind == ESCALATE:
        return f"becomes root on {host}" if success else f"has lost {host}"
    if kind == IMPACT:
        return f"stops the service on {host}" if success else f"cannot harm {host}"
    return "sleeps"


def _mix(state: NDArray) -> NDArray:
    """Hash each number with the finaliser of splitmix64; [B] uint64."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return np.asarray(state ^ (state >> np.uint64(31)))


def _uniform(bits: NDArray) -> tuple[NDArray, NDArray]:
    """Return two numbers in [0, 1) with 32 bits each."""
    return (bits >> np.uint64(32)) * 2.0**-32, (bits & np.uint64(0xFFFFFFFF)) * 2.0**-32
