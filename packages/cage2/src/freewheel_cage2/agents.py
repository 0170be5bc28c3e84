"""Agents for many games at once. One red agent attacks the server on the shortest path, the other takes every host it can. The
blue agents (sleeping, random, rule-based) serve as baselines."""

from __future__ import annotations

import numpy as np

from freewheel.core import NDArray
from freewheel.errors import UsageError, nearest
from freewheel.seeding import generator
from freewheel_cage2 import scenario as s2
from freewheel_cage2.network import ESCALATE, EXPLOIT, IMPACT, SCAN, SWEEP, NetworkStates
from freewheel_cage2.scenario import ACTIONS, BIT, HOSTS, N

NONE = -1


class BlineAgent:
    """A chain of fifteen actions. After a success the next action follows, after a failure an earlier one."""

    KIND = np.array([
        SWEEP, SCAN, EXPLOIT, ESCALATE, SCAN, EXPLOIT, ESCALATE, SWEEP, SCAN, EXPLOIT, ESCALATE, SCAN, EXPLOIT, ESCALATE,
        IMPACT,
    ])  # fmt: skip
    BACK = np.array([0, 1, 2, 2, 2, 2, 5, 5, 5, 5, 9, 9, 9, 12, 13])
    ENTRY = np.array([HOSTS.index(name) for name in ("User1", "User2", "User3", "User4")])
    NEXT = np.array([HOSTS.index(name) for name in ("Enterprise1", "Enterprise1", "Enterprise0", "Enterprise0")])
    LAST, AFTER_SCAN = 14, 12

    def __init__(self, lanes: int) -> None:
        self._stage = np.zeros(lanes, np.int64)
        self._scanned_server = np.zeros(lanes, np.bool_)  # whether it has already tried to exploit the server
        self._targets = np.zeros((lanes, len(self.KIND)), np.int64)  # [B, 15]
        server, enterprise2 = s2.OP_SERVER, HOSTS.index("Enterprise2")
        self._targets[:, 0], self._targets[:, 7] = s2.SUBNETS.index("User"), s2.SUBNETS.index("Enterprise")
        self._targets[:, 8:11], self._targets[:, 11:] = enterprise2, server

    def begin(self, lanes: NDArray, chance: NDArray) -> None:
        """Start new games in these lanes. chance [len(lanes)] chooses the host through which red enters."""
        entry = (chance * len(self.ENTRY)).astype(np.int64)
        self._stage[lanes], self._scanned_server[lanes] = 0, False
        self._targets[lanes, 1:4] = self.ENTRY[entry][:, None]
        self._targets[lanes, 4:7] = self.NEXT[entry][:, None]

    def act(self, success: NDArray, shown: NDArray) -> tuple[NDArray, NDArray]:
        """Return [B] the kind and target of the next action, given the outcome of the last one."""
        stage = np.where(success, np.minimum(self._stage + 1, self.LAST), self.BACK[self._stage])
        arrived = stage == self.AFTER_SCAN
        lost = arrived & ~self._scanned_server & ~shown  # the scan found nothing, so start again
        stage[lost] = 1
        self._scanned_server |= arrived & ~lost
        self._stage = stage
        return self.KIND[stage], self._targets[np.arange(len(stage)), stage]


class MeanderAgent:
    """Scans, escalates and exploits every host it can, subnet by subnet, in random order."""

    def __init__(self, lanes: int) -> None:
        self._swept = np.zeros(lanes, np.int64)  # set of subnets
        self._scanned, self._exploited, self._escalated, self._mapped = (np.zeros(lanes, np.int64) for _ in range(4))
        self._last_exploited = np.full(lanes, NONE)
        self._last_host = np.full(lanes, NONE)

    def begin(self, lanes: NDArray) -> None:
        """Start new games in these lanes."""
        for known in (self._swept, self._scanned, self._exploited, self._escalated, self._mapped):
            known[lanes] = 0
        self._last_exploited[lanes] = self._last_host[lanes] = NONE

    def act(self, success: NDArray, nets: NetworkStates, chance: NDArray) -> tuple[NDArray, NDArray]:
        """Return [B] the kind and target of the next action, given the last outcome; chance [B] chooses among targets."""
        self.learn(success)
        kind, options = self.options(nets)
        target = s2.MEMBER[options, (chance * s2.SIZE[options]).astype(np.int64)].astype(np.int64)
        self.remember(kind, target)
        return kind, target

    def options(self, nets: NetworkStates) -> tuple[NDArray, NDArray]:
        """Return [B] the kind of the next action, and the set from which its target is drawn uniformly."""
        subnets = nets.subnets & ~self._swept
        unscanned = nets.known & ~self._scanned
        ready = nets.named & ~self._escalated & (~self._mapped | self._exploited)
        untried = nets.known & ~self._exploited
        server = self._escalated & BIT[s2.OP_SERVER]
        first = subnets & -subnets
        kind, options = np.full(len(server), EXPLOIT), untried
        for what, where in ((ESCALATE, ready), (SCAN, unscanned), (SWEEP, first), (IMPACT, server)):
            can = where != 0
            kind[can] = what
            options = np.where(can, where, options)
        return kind, options

    def learn(self, success: NDArray) -> None:
        """Learn from the outcome of the last action."""
        tried = self._last_exploited != NONE
        bit = np.where(tried, BIT[self._last_exploited], 0)
        self._mapped |= np.where(success, bit, 0)
        failed = tried & ~success
        self._exploited &= ~np.where(failed, bit, 0)
        # After a failed exploit it assumes that it has lost the deepest subnet it holds.
        deepest = np.where(self._escalated & s2.OPERATIONAL, s2.OPERATIONAL, s2.GATEWAYS)
        lost = np.where(failed, self._escalated & deepest, 0)
        self._escalated &= ~lost
        self._exploited &= ~lost
        refused = (self._last_host != NONE) & ~success
        bit = np.where(refused, BIT[self._last_host], 0)
        self._escalated &= ~bit
        self._exploited &= ~(bit & self._mapped)

    def remember(self, kind: NDArray, target: NDArray) -> None:
        """Remember the action that is taken now."""
        bit = BIT[target]
        self._swept |= np.where(kind == SWEEP, 1 << target, 0)
        self._scanned |= np.where(kind == SCAN, bit, 0)
        self._exploited |= np.where(kind == EXPLOIT, bit, 0)
        self._escalated |= np.where(kind == ESCALATE, bit, 0)
        self._last_exploited = np.where(kind == EXPLOIT, target, NONE)
        self._last_host = np.where((kind == ESCALATE) | (kind == IMPACT), target, NONE)


#: The hosts and decoys that the rules consider, the most valuable first. User0 is missing because red always has it.
VALUABLE = (
    "Op_Server0", "Enterprise2", "Enterprise1", "Enterprise0", "User1", "User2", "User3", "User4", "Op_Host0", "Op_Host1",
    "Op_Host2", "Defender",
)  # fmt: skip
KINDS = ("HarakaSMPT", "Femitter", "Apache", "Tomcat", "Smss", "Svchost", "SSHD", "Vsftpd")
URGENT = np.array([HOSTS.index(host) for host in VALUABLE])
ANALYSE, REMOVE, RESTORE = (ACTIONS.index(f"{verb} {HOSTS[0]}") for verb in ("Analyse", "Remove", "Restore"))
_RANKED = [ACTIONS.index(f"Decoy{kind} {host}") for host in VALUABLE for kind in KINDS]
#: [D] the action that places each possible decoy, and its host.
PLACING = np.array([one for one in _RANKED if (s2.VERB_OF[one], s2.HOST_OF[one]) in s2.PLACES])
PLACES = s2.HOST_OF[PLACING]


class Defender:
    """The blue agent of a number of games. This base class always sleeps."""

    def begin(self, lanes: NDArray) -> None:
        """Forget the old games in lanes [B] bool, where new ones have begun."""

    def act(self, obs: NDArray) -> NDArray:
        """Return [B] actions for observations [B, 52]. Further columns are ignored."""
        return np.zeros(len(obs), np.int64)


class RandomDefender(Defender):
    """Chooses each of the 145 actions with equal probability."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = generator(seed, "defender")

    def act(self, obs: NDArray) -> NDArray:
        return self._rng.integers(len(ACTIONS), size=len(obs))


class RuleDefender(Defender):
    """Follows rules: restore hosts that red is known to have, remove sessions after an exploit, analyse suspicious hosts once
    (after a scan, or a removal with unknown success), otherwise place decoys, otherwise sleep."""

    def __init__(self, lanes: int) -> None:
        self._settled = np.zeros((lanes, N), np.bool_)  # analysed hosts where nothing has happened since
        self._placed = np.zeros((lanes, len(PLACES)), np.bool_)  # decoys tried since the host was last restored

    def begin(self, lanes: NDArray) -> None:
        self._settled[lanes] = self._placed[lanes] = False

    def act(self, obs: NDArray) -> NDArray:
        bits = np.asarray(obs)[:, : 4 * N].reshape(len(obs), N, 4) > 0.5
        active, exploited, first, second = np.moveaxis(bits, -1, 0)  # [B, 13] each
        self._settled &= ~(active | second)
        wanted = np.stack([first & second, exploited | second, (active | first) & ~self._settled], axis=1)[:, :, URGENT]
        found: NDArray = np.any(wanted, axis=2)  # [B, 3] whether there is a host to restore, remove from or analyse
        rule = np.where(found.any(axis=1), found.argmax(axis=1), 3)  # [B] the first rule that applies
        rows = np.arange(len(obs))
        host = URGENT[wanted[rows, np.minimum(rule, 2)].argmax(axis=1)]
        decoy = self._placed.argmin(axis=1)  # the first decoy that was not tried yet
        left = ~self._placed[rows, decoy]
        self._remember(rule, host, decoy)
        quiet = np.where(left, PLACING[decoy], 0)
        return np.choose(rule, [RESTORE + host, REMOVE + host, ANALYSE + host, quiet])

    def _remember(self, rule: NDArray, host: NDArray, decoy: NDArray) -> None:
        restored, analysed, quiet = (np.flatnonzero(rule == number) for number in (0, 2, 3))
        self._placed[restored] &= host[restored, None] != PLACES
        self._settled[analysed, host[analysed]] = True
        self._placed[quiet, decoy[quiet]] = True


#: The names of the defenders, and their labels in tables of scores.
DEFENDERS = {"heuristic": "simple rules", "random": "at random", "sleeping": "asleep"}


def defender(name: str, lanes: int = 1, seed: int = 0) -> Defender:
    """Create a defender by name for this many games. Only the random one uses the seed."""
    if name not in DEFENDERS:
        raise UsageError(f"unknown defender '{name}'{nearest(name, DEFENDERS)}")
    if name == "sleeping":
        return Defender()
    return RandomDefender(seed) if name == "random" else RuleDefender(lanes)
