"""Simple defenders of Scenario 2 to compare others with: sleeping, random, and rule-based; many games at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from freewheel.core import NDArray
from freewheel.errors import UsageError, nearest
from freewheel.seeding import generator
from freewheel.worlds.cage2.scenario import ACTIONS, HOSTS, N

#: Decoys that fit the system of a host and whose port is free there, by host; the most valuable first.
DECOYS: Mapping[str, tuple[str, ...]] = {
    "Op_Server0": ("HarakaSMPT", "Apache", "Tomcat", "Vsftpd"),
    "Enterprise2": ("Femitter",),
    "Enterprise1": ("Femitter",),
    "Enterprise0": ("HarakaSMPT", "Apache", "Tomcat", "Vsftpd"),
    "User1": ("Apache", "Tomcat", "Smss", "Svchost"),
    "User2": ("Femitter", "Apache", "Tomcat", "SSHD"),
    "User3": ("SSHD", "Vsftpd"),
    "User4": ("Vsftpd",),
    "Op_Host0": ("HarakaSMPT", "Apache", "Tomcat", "Vsftpd"),
    "Op_Host1": ("HarakaSMPT", "Apache", "Tomcat", "Vsftpd"),
    "Op_Host2": ("HarakaSMPT", "Apache", "Tomcat", "Vsftpd"),
    "Defender": ("HarakaSMPT", "Apache", "Tomcat", "Vsftpd"),
}
#: The hosts that the rules consider, the most valuable first. Red always has User0.
URGENT = np.array([HOSTS.index(host) for host in DECOYS])
ANALYSE, REMOVE, RESTORE = (ACTIONS.index(f"{verb} {HOSTS[0]}") for verb in ("Analyse", "Remove", "Restore"))
PLACES = np.array([HOSTS.index(host) for host, kinds in DECOYS.items() for _ in kinds])  # [D] of each decoy
PLACING = np.array([ACTIONS.index(f"Decoy{kind} {host}") for host, kinds in DECOYS.items() for kind in kinds])  # [D]


class Defender:
    """Acts for blue in a number of games; this one does nothing."""

    def begin(self, lanes: NDArray) -> None:
        """Forget the games of lanes [B] bool in which a new one has begun."""

    def act(self, obs: NDArray) -> NDArray:
        """[B] actions after observations [B, 52], or more columns that are ignored."""
        return np.zeros(len(obs), np.int64)


class Uniform(Defender):
    """Any of the 145 actions with equal probability."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = generator(seed, "defender")

    def act(self, obs: NDArray) -> NDArray:
        return self._rng.integers(len(ACTIONS), size=len(obs))


class Reactive(Defender):
    """By rules: restore hosts that red is known to have, remove sessions after an exploit, analyse suspicious hosts once (a scan
    now, or a removal whose success is unknown), else place decoys, else sleep."""

    def __init__(self, lanes: int) -> None:
        self._settled = np.zeros((lanes, N), np.bool_)  # analysed, and nothing has happened there since
        self._placed = np.zeros((lanes, len(PLACES)), np.bool_)  # decoys tried since the last restoring

    def begin(self, lanes: NDArray) -> None:
        self._settled[lanes] = self._placed[lanes] = False

    def act(self, obs: NDArray) -> NDArray:
        bits = np.asarray(obs)[:, : 4 * N].reshape(len(obs), N, 4) > 0.5
        active, exploited, first, second = np.moveaxis(bits, -1, 0)  # [B, 13] each
        self._settled &= ~(active | second)
        wanted = np.stack([first & second, exploited | second, (active | first) & ~self._settled], axis=1)[:, :, URGENT]
        found: NDArray = np.any(wanted, axis=2)  # [B, 3] a host to restore, remove from, analyse
        rule = np.where(found.any(axis=1), found.argmax(axis=1), 3)  # [B] the first that applies
        rows = np.arange(len(obs))
        host = URGENT[wanted[rows, np.minimum(rule, 2)].argmax(axis=1)]
        decoy = self._placed.argmin(axis=1)  # the first that is not there yet
        left = ~self._placed[rows, decoy]
        self._remember(rule, host, decoy)
        quiet = np.where(left, PLACING[decoy], 0)
        return np.choose(rule, [RESTORE + host, REMOVE + host, ANALYSE + host, quiet])

    def _remember(self, rule: NDArray, host: NDArray, decoy: NDArray) -> None:
        restored, analysed, quiet = (np.flatnonzero(rule == number) for number in (0, 2, 3))
        self._placed[restored] &= host[restored, None] != PLACES
        self._settled[analysed, host[analysed]] = True
        self._placed[quiet, decoy[quiet]] = True


#: The names of the defenders, and what to call them beside other scores.
DEFENDERS = {"heuristic": "simple rules", "random": "at random", "sleeping": "asleep"}


def defender(name: str, lanes: int = 1, seed: int = 0) -> Defender:
    """A defender by name, for this many games; only the random one uses the seed."""
    if name not in DEFENDERS:
        raise UsageError(f"unknown defender '{name}'{nearest(name, DEFENDERS)}")
    if name == "sleeping":
        return Defender()
    return Uniform(seed) if name == "random" else Reactive(lanes)


def simple_returns(name: str, red_agent: str, steps: int, episodes: int) -> NDArray:
    """[episodes] the returns of a defender on the fast environment."""
    from freewheel.worlds.cage2.env import Cage2Vector

    games, blue = Cage2Vector(episodes, red_agent, steps), defender(name, episodes)
    obs, _ = games.reset(seed=0)
    blue.begin(np.ones(episodes, np.bool_))
    total = np.zeros(episodes)
    for _ in range(steps):
        obs, reward, _, _, _ = games.step(blue.act(obs))
        total += reward
    return total
