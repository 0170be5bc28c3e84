"""The true network state of many games of Scenario 2, the effect of every action on it, and what blue sees of it."""

from __future__ import annotations

import numpy as np

from freewheel.core import NDArray
from freewheel_cage2 import scenario as s2
from freewheel_cage2.scenario import N

SWEEP, SCAN, EXPLOIT, ESCALATE, IMPACT = range(1, len(s2.RED_KINDS))
FAILURE = 0
SUCCESS = 1
UNKNOWN = 2
NOTICED = 0.95  # probability that blue sees the process of a new session; it never sees one after a brute force attack
PREFERENCE = 0.75  # probability of the most promising exploit; otherwise red chooses one of the others
BRUTE_ATTEMPTS = 10
#: What blue believes about a host, as two columns of the observation.
NO, UNSURE, AS_USER, AS_ROOT = range(4)
BELIEF = np.array([[0, 0], [1, 0], [0, 1], [1, 1]], np.float32)  # [4, 2]
#: What blue has just seen on a host, also as two columns.
QUIET, SCANNED, EXPLOITED = range(3)
ACTIVITY = np.array([[0, 0], [1, 0], [1, 1]], np.float32)  # [3, 2]
_WEB = sum(1 << port for port in s2.WEB)
_PER_HOST = ("root", "seen", "unseen", "files", "decoys", "decoy_ports", "belief", "ports")
_PER_GAME = ("rooted", "held", "known", "named", "scanned", "subnets", "ot_up", "ot_stoppable", "ot_known", "obs")


class NetworkStates:
    """The state of B games. Arrays per host are flat, [B × 13]; a set of hosts is one number per game (see scenario.py)."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self._base = np.arange(lanes) * N
        cells = lanes * N
        # Red's sessions:
        self.root = np.zeros(cells, np.int16)  # as root
        self.seen = np.zeros(cells, np.int16)  # as a user, with a process that blue has seen and can remove
        self.unseen = np.zeros(cells, np.int16)  # as a user, not seen by blue
        self.files = np.zeros(cells, np.int16)  # malware that an analysis finds
        self.decoys = np.zeros(cells, np.int16)
        self.decoy_ports = np.zeros(cells, np.uint8)  # sets of ports
        self.belief = np.zeros(cells, np.int8)
        self.ports = np.zeros(cells, np.uint8)  # sets of ports that red's last scan has found open
        # Sets of hosts:
        self.rooted = np.zeros(lanes, np.int64)  # red is root there
        self.held = np.zeros(lanes, np.int64)  # red has any session there
        self.known = np.zeros(lanes, np.int64)  # red knows the address
        self.named = np.zeros(lanes, np.int64)  # red knows the name
        self.scanned = np.zeros(lanes, np.int64)  # red knows the ports
        self.subnets = np.zeros(lanes, np.int64)  # sets of subnets that red knows
        self.ot_up = np.ones(lanes, np.bool_)
        self.ot_stoppable = np.ones(lanes, np.bool_)  # False after a restore, when the service has lost its process
        self.ot_known = np.zeros(lanes, np.bool_)
        self.obs = np.zeros((lanes, N * 4), np.float32)
        self._view = self.obs.reshape(cells, 4)
        # Events of this step:
        self._placed = np.full(lanes, -1)  # [B] the cell where blue has just placed a decoy
        self._found = np.zeros(0, np.int64)  # cells in which blue's analysis has found malware
        self._touched = [np.zeros(0, np.int64)]  # cells that show activity
        self._restored = np.zeros(lanes, np.bool_)
        self.begin(np.arange(lanes))

    def begin(self, lanes: NDArray) -> None:
        """Start new games in these lanes."""
        cells = self._cells(lanes)
        for name in _PER_HOST:
            getattr(self, name)[cells] = 0
        self._view[cells] = 0.0
        foothold = s2.BIT[s2.FOOTHOLD]
        self.root[self._base[lanes] + s2.FOOTHOLD] = 1
        self.rooted[lanes] = self.held[lanes] = self.known[lanes] = self.named[lanes] = foothold
        self.scanned[lanes], self.subnets[lanes] = 0, 1
        self.ot_up[lanes] = self.ot_stoppable[lanes] = True
        self.ot_known[lanes] = False

    def copies(self, lanes: NDArray) -> NetworkStates:
        """Copy these games. A lane that is listed twice is copied twice."""
        others, cells = NetworkStates(len(lanes)), self._cells(lanes)
        for name in _PER_HOST:
            getattr(others, name)[:] = getattr(self, name)[cells]
        for name in _PER_GAME:
            getattr(others, name)[:] = getattr(self, name)[lanes]
        others._touched = [np.flatnonzero(others._view[:, 0])]
        return others

    def _cells(self, lanes: NDArray) -> NDArray:
        return np.asarray((self._base[lanes, None] + np.arange(N)).ravel())

    def among(self, sets: NDArray) -> NDArray:
        """Return [B, 13] whether each host is in its game's set."""
        return np.asarray((sets[:, None] & s2.BIT) != 0)

    @property
    def access(self) -> NDArray:
        """[B, 13] 0 none, 1 user, 2 root."""
        return np.where(self.among(self.rooted), 2, self.among(self.held).astype(np.int8))

    @property
    def sessions(self) -> NDArray:
        """[B, 13] the number of red's sessions."""
        return (self.root + self.seen + self.unseen).reshape(self.lanes, N)

    def blue(self, action: NDArray) -> NDArray:
        """Apply blue's actions and return [B] the success that blue sees."""
        verb, cell = s2.VERB_OF[action], self._base + s2.HOST_OF[action]
        success = np.where(verb == s2.SLEEP, UNKNOWN, SUCCESS)
        self._placed[:] = -1
        analysed = cell[verb == s2.ANALYSE]
        self._found = analysed[self.files[analysed] > 0]
        if (lanes := np.flatnonzero(verb == s2.REMOVE)).size:
            self._remove(lanes, cell[lanes])
        self._restored = verb == s2.RESTORE
        if (lanes := np.flatnonzero(self._restored)).size:
            self._restore(lanes, cell[lanes])
        if (lanes := np.flatnonzero((verb >= s2.FIRST_DECOY) & (verb <= s2.LAST_DECOY))).size:
            success[lanes] = self._pretend(lanes, cell[lanes], verb[lanes])
        return success

    def _remove(self, lanes: NDArray, cells: NDArray) -> None:
        self.seen[cells] = 0
        lost = (self.root[cells] == 0) & (self.unseen[cells] == 0)
        self.held[lanes] &= ~np.where(lost, s2.BIT[cells % N], 0)
        suspected = cells[self.belief[cells] != NO]
        self._believe(suspected, np.full(len(suspected), UNSURE))

    def _restore(self, lanes: NDArray, cells: NDArray) -> None:
        host = cells % N
        for counts in (self.seen, self.unseen, self.files, self.decoys, self.decoy_ports):
            counts[cells] = 0
        self.root[cells] = host == s2.FOOTHOLD
        kept = ~np.where(host == s2.FOOTHOLD, 0, s2.BIT[host])
        self.held[lanes] &= kept
        self.rooted[lanes] &= kept
        server = lanes[host == s2.OP_SERVER]
        self.ot_up[server], self.ot_stoppable[server] = True, False
        self._believe(cells, np.full(len(cells), NO))

    def _pretend(self, lanes: NDArray, cells: NDArray, verb: NDArray) -> NDArray:
        host = cells % N
        fits = s2.FITS[verb, host] & ((s2.OPEN[host] | self.decoy_ports[cells]) & s2.NEEDS[verb] == 0)
        placed = cells[fits]
        self.decoy_ports[placed] |= s2.OPENS[verb[fits]]
        self.decoys[placed] += 1
        self._placed[lanes[fits]] = placed
        return np.asarray(fits)

    def red(self, kind: NDArray, target: NDArray, exploit: NDArray, notice: NDArray) -> tuple[NDArray, NDArray]:
        """Apply red's actions after blue's. Returns [B] whether they succeed, and whether a scan or sweep found anything.

        `exploit` and `notice` are [B] random numbers in [0, 1). The first chooses an exploit; the second decides whether blue
        sees a new session, or which session is escalated.
        """
        success = np.zeros(self.lanes, np.bool_)
        shown = np.ones(self.lanes, np.bool_)
        traces = ActionTraces(self.lanes)
        way = (self.held & s2.GATEWAYS) != 0  # whether red can reach the Operational subnet
        if (lanes := np.flatnonzero(kind == SWEEP)).size:
            members = s2.MEMBERS[target[lanes]]
            success[lanes] = reached = way[lanes] | (members != s2.OPERATIONAL)
            self.known[lanes] |= np.where(reached, members, 0)
        if (lanes := np.flatnonzero(kind == SCAN)).size:
            success[lanes] = True
            shown[lanes] = reached = self._reachable(lanes, target, way)
            self._scan(lanes[reached], target[lanes[reached]], traces)
        if (lanes := np.flatnonzero(kind == EXPLOIT)).size:
            lanes = lanes[(self.scanned[lanes] & s2.BIT[target[lanes]]) != 0]
            lanes = lanes[self._reachable(lanes, target, way)]
            success[lanes] = self._exploit(lanes, target[lanes], (exploit[lanes], notice[lanes]), traces)
        if (lanes := np.flatnonzero(kind == ESCALATE)).size:
            lanes = lanes[(self.held[lanes] & s2.BIT[target[lanes]]) != 0]
            self._escalate(lanes, target[lanes], notice[lanes])
            success[lanes] = True
        if (lanes := np.flatnonzero(kind == IMPACT)).size:
            lanes = lanes[((self.held[lanes] & s2.BIT[s2.OP_SERVER]) != 0) & self.ot_known[lanes]]
            self.ot_up[lanes] &= ~self.ot_stoppable[lanes]
            success[lanes] = True
        self._traces = traces
        self._target = target
        return success, shown

    def _reachable(self, lanes: NDArray, target: NDArray, way: NDArray) -> NDArray:
        return np.asarray(way[lanes] | ((s2.BIT[target[lanes]] & s2.OPERATIONAL) == 0))

    def _scan(self, lanes: NDArray, host: NDArray, traces: ActionTraces) -> None:
        cells = self._base[lanes] + host
        self.ports[cells] = s2.OPEN[host] | self.decoy_ports[cells]
        self.scanned[lanes] |= s2.BIT[host]
        traces.scanned[lanes] = 1

    def _exploit(self, lanes: NDArray, host: NDArray, draws: tuple[NDArray, NDArray], traces: ActionTraces) -> NDArray:
        cells = self._base[lanes] + host
        exploit = choose_exploit(self.ports[cells], draws[0])
        gain = s2.GAINS[host, exploit]
        brute, trapped = exploit == s2.BRUTE_FORCE, (self.decoy_ports[cells] >> exploit & 1).astype(np.bool_)
        landed = (gain != s2.NOTHING) & (gain != s2.REFUSED)
        # Blue sees one connection, two if a decoy answered, and many for a brute force attack.
        there = (gain != s2.NOTHING) | trapped
        attempts = np.where(brute, BRUTE_ATTEMPTS + landed, 1 + ((gain == s2.NOTHING) & trapped))
        noticed = landed & ~brute & (draws[1] < NOTICED)
        traces.port[lanes] = np.where(there, exploit, -1)
        traces.entries[lanes] = np.where(there, attempts + noticed, 0)
        traces.noticed[lanes] = noticed
        as_root = gain == s2.ROOT
        self.root[cells] += as_root
        self.seen[cells] += noticed & ~as_root
        self.unseen[cells] += landed & ~noticed & ~as_root
        self.files[cells] += landed & ~brute
        bit = np.where(landed, s2.BIT[host], 0)
        self.held[lanes] |= bit
        self.named[lanes] |= bit
        self.rooted[lanes] |= np.where(as_root, s2.BIT[host], 0)
        return np.asarray(landed)

    def _escalate(self, lanes: NDArray, host: NDArray, chance: NDArray) -> None:
        cells = self._base[lanes] + host
        climbing = cells[self.root[cells] == 0]
        chance = chance[self.root[cells] == 0]
        seen, unseen = self.seen[climbing], self.unseen[climbing]
        from_seen = chance * (seen + unseen) < seen
        self.seen[climbing] -= from_seen
        self.unseen[climbing] -= ~from_seen
        self.root[climbing] = 1
        self.files[climbing] += 1
        self.rooted[lanes] |= s2.BIT[host]
        self.known[lanes] |= s2.REVEALS[host]
        self.subnets[lanes] |= 1 << s2.SUBNET_OF[host]
        self.ot_known[lanes] |= host == s2.OP_SERVER

    def reward(self) -> NDArray:
        """Return [B] the reward as float64, a multiple of 0.1."""
        tenths = s2.COST[self.rooted] + s2.DOWN_COST * ~self.ot_up + s2.RESTORE_COST * self._restored
        return np.asarray(tenths / -10.0)

    def observe(self, green: NDArray | None = None) -> NDArray:
        """Return [B, 52] what blue sees after a step. green [B] is the host that green has scanned, or -1. Reuses its array."""
        for cells in self._touched:
            self._view[cells, :2] = 0.0
        traces, cell = self._traces, self._base + self._target
        self._touched = [self._show(np.arange(self.lanes), cell, traces)]
        if green is not None:
            self._touched.append(self._show_green(green, cell, traces))
        self._believe(self._found, np.full(len(self._found), AS_ROOT))
        return self.obs

    def _show_green(self, green: NDArray, cell: NDArray, traces: ActionTraces) -> NDArray:
        """Show green's scans. If red acted on the same host, blue sees a single event."""
        lanes = np.flatnonzero(green >= 0)
        cells = self._base[lanes] + green[lanes]
        both = (cells == cell[lanes]) & (traces.entries[lanes] + traces.scanned[lanes] > 0)
        mixed = ActionTraces(self.lanes)
        for name in ("port", "entries", "noticed", "scanned"):
            getattr(mixed, name)[lanes[both]] = getattr(traces, name)[lanes[both]]
        mixed.scanned[lanes] += 1
        self._view[cells[both], :2] = 0.0
        return self._show(lanes, cells, mixed)

    def _show(self, lanes: NDArray, cells: NDArray, traces: ActionTraces) -> NDArray:
        """Write the activity that these traces show, and return the cells with activity."""
        entries = traces.entries[lanes]
        scans = traces.scanned[lanes]
        noticed = traces.noticed[lanes]
        seen = np.flatnonzero(entries + scans > 0)
        lanes = lanes[seen]
        cells = cells[seen]
        entries = entries[seen]
        scans = scans[seen]
        noticed = noticed[seen]
        host, placed = cells % N, self._placed[lanes] == cells
        new_ports = s2.PORT_SIZE[self.decoy_ports[cells] & ~s2.OPEN[host]]
        port = traces.port[lanes]
        is_open = (s2.OPEN[host] | self.decoy_ports[cells]) >> np.maximum(port, 0) & 1
        others = (port >= 0) & ((scans == 0) | (is_open == 0))
        different = np.where(scans > 0, s2.DISTINCT[host] + new_ports, 0) + others + noticed
        count = placed + entries + scans * (s2.CONNECTIONS[host] + self.decoys[cells])
        activity = np.where(placed, QUIET, SCANNED)
        activity[noticed | ((count >= 3) & (different == 1))] = EXPLOITED
        activity[(count >= 3) & (different >= 3)] = SCANNED
        self._view[cells, :2] = ACTIVITY[activity]
        struck = cells[activity == EXPLOITED]
        self._believe(struck, np.full(len(struck), AS_USER))
        return cells

    def _believe(self, cells: NDArray, belief: NDArray) -> None:
        self.belief[cells] = belief
        self._view[cells, 2:] = BELIEF[belief]


class ActionTraces:
    """The traces of red's action that blue can see on the target, [B] each."""

    def __init__(self, lanes: int) -> None:
        self.scanned = np.zeros(lanes, np.int64)  # scans of all open ports
        self.port = np.full(lanes, -1)  # index in PORTS of the exploited port; -1: none
        self.entries = np.zeros(lanes, np.int64)  # connections that an exploit made
        self.noticed = np.zeros(lanes, np.bool_)


def choose_exploit(ports: NDArray, chance: NDArray) -> NDArray:
    """Return [B] the exploit that red chooses for the open ports it knows: the most promising one, or one of the others."""
    ports = np.where(ports & _WEB == 0, ports & ~np.uint8(1 << s2.SQL), ports)
    top = s2.TOP[ports]
    others = ports & ~(1 << top).astype(np.uint8)
    count = s2.PORT_SIZE[others]
    which = ((chance - PREFERENCE) / (1.0 - PREFERENCE) * count).astype(np.int64)
    prefers = (chance < PREFERENCE) | (count == 0)
    return np.where(prefers, top, s2.PORT_MEMBER[others, np.maximum(which, 0)])
