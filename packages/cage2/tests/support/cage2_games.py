"""Games of CAGE Challenge 2 as arrays, counts of their events, and simple defenders that play them on the real simulator."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from freewheel.core import NDArray
from freewheel_cage2.agents import defender
from freewheel_cage2.cyborg import PLACE, Scenario2
from freewheel_cage2.scenario import HOSTS, RED_KINDS, VERB_OF, VERBS
from tests.support.places import ROOT

STEPS = 100
DEFENDERS = ("sleeping", "random", "heuristic")
REDS = ("B_lineAgent", "RedMeanderAgent")
BLUE_KINDS = ("Sleep", "Monitor", *VERBS)
DATA = ROOT / "packages" / "cage2" / "tests" / "data"

Record: TypeAlias = dict[str, NDArray]


@dataclass(frozen=True)
class Games:
    """N episodes of T steps. Arrays with T + 1 entries begin with the state after the reset."""

    seed: NDArray  # [N]
    obs: NDArray  # [N, T + 1, 52] of zeros and ones
    action: NDArray  # [N, T]
    reward: NDArray  # [N, T]
    red_kind: NDArray  # [N, T] of RED_KINDS
    red_success: NDArray  # [N, T] 0 no, 1 yes, 2 not known
    blue_success: NDArray  # [N, T]
    access: NDArray  # [N, T + 1, 13] 0 none, 1 user, 2 root or SYSTEM
    decoys: NDArray  # [N, T + 1, 13] number of decoys
    otservice: NDArray  # [N, T + 1] whether OTService runs


def joined(parts: Sequence[Games]) -> Games:
    return Games(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Games)))


def record(games: Games) -> Record:
    """Summarise games: rewards in tenths, counts of events per episode, and how often red held each host after each step."""
    after = games.obs[:, 1:].reshape(*games.action.shape, len(HOSTS), 4) > 0  # [N, T, 13, 4]
    active, exploited, first, second = np.moveaxis(after, -1, 0)
    access, host_counts = games.access[:, 1:], functools.partial(np.sum, axis=1, dtype=np.uint16)
    return {
        "seed": games.seed.astype(np.int32),
        "reward": np.rint(10 * games.reward).astype(np.int16),  # [N, T]
        "user": host_counts(access == 1),  # [N, 13] steps, and so on
        "root": host_counts(access == 2),
        "scan": host_counts(active & ~exploited),
        "exploit": host_counts(active & exploited),
        "believed_unknown": host_counts(first & ~second),
        "believed_user": host_counts(second & ~first),
        "believed_privileged": host_counts(first & second),
        "decoys": host_counts(games.decoys[:, 1:]),  # summed over steps
        "down": host_counts(~games.otservice[:, 1:, None].astype(bool)),  # [N, 1]
        "red": _by_kind(games.red_kind, games.red_success, len(RED_KINDS)),  # [N, 2 × 6] tries, then successes
        "blue": _by_kind(VERB_OF[games.action], games.blue_success, len(BLUE_KINDS)),  # [N, 2 × 13]
        "held_by_step": (games.access > 0).mean(axis=0, dtype=np.float32),  # [T + 1, 13] share of the games
        "root_by_step": (games.access == 2).mean(axis=0, dtype=np.float32),
    }


def _by_kind(kind: NDArray, success: NDArray, kinds: int) -> NDArray:
    """Return [N, 2 × kinds] how often each kind was tried and how often it succeeded."""
    each = kind[:, :, None] == np.arange(kinds)  # [N, T, kinds]
    counted = [each.sum(axis=1), (each & (success == 1)[:, :, None]).sum(axis=1)]
    return np.concatenate(counted, axis=1).astype(np.uint16)


def stored(defender_name: str, red: str) -> Path:
    return DATA / f"cage2_{red}_{defender_name}.npz"


# ------------------------------------------------------------------------------------------------------ on the real simulator


class Truth(NamedTuple):
    """The true state after a step or a reset, which blue does not see, and the success of the last actions."""

    red_action: str  # includes the name of its host or subnet
    red_success: int  # 0 no, 1 yes, 2 not known
    blue_success: int
    access: NDArray  # [13] int8: 0 no session of red, 1 as a user, 2 as root or SYSTEM
    decoys: NDArray  # [13] int8: number of decoys
    otservice: bool  # whether OTService runs


def truth(env: Scenario2) -> Truth:
    state, access = env._controller.state, np.zeros(len(HOSTS), np.int8)
    for session in state.sessions["Red"].values():
        level = 2 if session.username in ("root", "SYSTEM") else 1
        access[PLACE[session.host]] = max(access[PLACE[session.host]], level)
    processes = [state.hosts[host].processes for host in HOSTS]
    decoys = [sum(process.decoy_type.name != "NONE" for process in there) for there in processes]
    otservice = any(process.name == "OTService" for process in processes[PLACE["Op_Server0"]])
    acted = ("", 2, 2)  # before the first step
    if env._steps:
        # The innermost wrapper knows whether blue's action succeeded.
        successes = env._controller.observation["Red"].data["success"], env._game.env.env.env.success
        red, blue = ({"FALSE": 0, "TRUE": 1}.get(success.name, 2) for success in successes)
        acted = _red_action(env._controller), red, blue
    return Truth(*acted, access, np.array(decoys, np.int8), otservice)


def _red_action(controller: Any) -> str:
    action = controller.action["Red"]
    target = getattr(action, "hostname", "")
    if address := getattr(action, "ip_address", None):
        target = controller.state.ip_addresses[address]
    elif subnet := getattr(action, "subnet", None):
        target = next(name for name, own in controller.subnet_cidr_map.items() if own == subnet)
    return f"{type(action).__name__} {target}".rstrip()


@functools.cache
def _world(red: str) -> Scenario2:
    """Create one environment per process, and exclude everything loaded so far from garbage collection."""
    env = Scenario2(red, max_episode_steps=STEPS)
    env.reset(seed=0)
    gc.collect()
    gc.freeze()
    return env


def play_real(defender_name: str, red: str, seeds: Sequence[int]) -> Games:
    """Play one episode for each seed. A random defender draws from the same seed."""
    return joined([_play(defender_name, red, seed) for seed in seeds])


def _play(defender_name: str, red: str, seed: int) -> Games:
    env, blue = _world(red), defender(defender_name, seed=seed)
    obs, _ = env.reset(seed=seed)
    seen, truths = [obs], [truth(env)]
    actions: list[int] = []
    rewards: list[float] = []
    for _ in range(STEPS):
        actions.append(int(blue.act(obs[None])[0]))
        obs, reward, *_ = env.step(actions[-1])
        rewards.append(reward)
        seen.append(obs)
        truths.append(truth(env))
    return _games(seed, seen, actions, rewards, truths)


def _games(
    seed: int, seen: Sequence[NDArray], actions: Sequence[int], rewards: Sequence[float], truths: Sequence[Truth]
) -> Games:
    return Games(
        seed=np.array([seed]),
        obs=np.array([seen], np.int8),
        action=np.array([actions]),
        reward=np.array([rewards]),
        red_kind=np.array([[RED_KINDS.index(one.red_action.partition(" ")[0]) for one in truths[1:]]]),
        red_success=np.array([[one.red_success for one in truths[1:]]]),
        blue_success=np.array([[one.blue_success for one in truths[1:]]]),
        access=np.array([[one.access for one in truths]]),
        decoys=np.array([[one.decoys for one in truths]]),
        otservice=np.array([[one.otservice for one in truths]]),
    )
