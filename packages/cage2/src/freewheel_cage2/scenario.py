"""Scenario 2 of CAGE Challenge 2 as tables of hosts, actions, exploits and costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freewheel.core import NDArray
from freewheel.errors import UsageError, nearest

HOSTS = (
    "Defender", "Enterprise0", "Enterprise1", "Enterprise2", "Op_Host0", "Op_Host1", "Op_Host2", "Op_Server0",
    "User0", "User1", "User2", "User3", "User4",
)  # fmt: skip
#: Blue's actions on a host, in the order of their numbers. The actions Sleep and Monitor come first.
VERBS = (
    "Analyse", "Remove", "DecoyApache", "DecoyFemitter", "DecoyHarakaSMPT", "DecoySmss", "DecoySSHD", "DecoySvchost",
    "DecoyTomcat", "DecoyVsftpd", "Restore",
)  # fmt: skip
ACTIONS = ("Sleep", "Monitor", *(f"{verb} {host}" for verb in VERBS for host in HOSTS))
RED_AGENTS = ("B_lineAgent", "RedMeanderAgent", "SleepAgent")
MIXTURE = "mixture"  # one of the first two agents, drawn by the episode's seed
REDS = (*RED_AGENTS, MIXTURE)
STEPS = 100  # default length of an episode
#: The subnets and the kinds of red's actions. The target is a subnet for DiscoverRemoteSystems, otherwise a host.
SUBNETS = ("User", "Enterprise", "Operational")
RED_KINDS = (
    "Sleep", "DiscoverRemoteSystems", "DiscoverNetworkServices", "ExploitRemoteService", "PrivilegeEscalate", "Impact",
)  # fmt: skip

N = len(HOSTS)
OP_SERVER, FOOTHOLD = HOSTS.index("Op_Server0"), HOSTS.index("User0")
#: Ports that can be exploited (by SSHBruteForce, BlueKeep, EternalBlue, HTTPRFI, HTTPSRFI, SQLInjection, HarakaRCE and
#: FTPDirectoryTraversal). The most promising port comes last; red prefers the last port that it knows to be open.
PORTS = (22, 3389, 139, 80, 443, 3390, 25, 21)
BRUTE_FORCE = 0
SQL, WEB = PORTS.index(3390), (PORTS.index(80), PORTS.index(443))

#: The possible outcomes of exploiting a real service.
NOTHING, USER, ROOT, REFUSED = range(4)


def find_red(name: str) -> str:
    """Return the red agent of this name, which may be short (bline, B_line, meander). Raises UsageError if there is none."""
    found = next((red for red in REDS if _short(red) == _short(str(name))), None)
    if found is None:
        raise UsageError(f"unknown red agent '{name}'{nearest(str(name), REDS)}")
    return found


def _short(red: str) -> str:
    return red.lower().replace("_", "").replace("-", "").removeprefix("red").removesuffix("agent")


@dataclass(frozen=True)
class Host:
    """A machine at the start of the scenario."""

    subnet: str
    windows: bool
    open: tuple[int, ...]  # ports in use, one for each connection
    gains: tuple[tuple[int, int], ...]  # (port, outcome of exploiting it)
    cost: int = 1  # tenths of reward per step while red is root there
    reveals: str = ""  # the host whose address red finds there


_LINUX = Host("Operational", False, (22,), ((22, USER),))
_WEB_GAINS = ((22, USER), (3389, ROOT), (80, USER), (443, USER))
_WINDOWS = Host("Enterprise", True, (22, 135, 3389, 445, 139, 80, 443), _WEB_GAINS, 10)
_DESK = Host("User", True, (22, 21), ((22, USER), (21, ROOT)), reveals="Enterprise1")
SETUP = {
    "Defender": Host("Enterprise", False, (22, 53, 53, 68), ((22, REFUSED),)),  # the password is not in red's word list
    "Enterprise0": Host("Enterprise", False, (22,), ((22, USER),), 10),
    "Enterprise1": _WINDOWS,
    "Enterprise2": Host("Enterprise", True, _WINDOWS.open, _WINDOWS.gains, 10, "Op_Server0"),
    "Op_Host0": _LINUX,
    "Op_Host1": _LINUX,
    "Op_Host2": _LINUX,
    "Op_Server0": Host("Operational", False, (22,), ((22, USER),), 10),
    "User0": Host("User", True, _DESK.open, _DESK.gains, 0),
    "User1": _DESK,
    "User2": Host("User", True, (445, 139, 135, 3389), ((139, ROOT), (3389, USER)), reveals="Enterprise1"),
    "User3": Host("User", False, (80, 3389, 443, 25), ((80, USER), (443, USER), (25, ROOT)), reveals="Enterprise0"),
    "User4": Host(
        "User", False, (22, 80, 3390, 443, 25), ((22, USER), (80, USER), (3390, ROOT), (443, USER), (25, ROOT)),
        reveals="Enterprise0",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Decoy:
    """A fake service. It can be placed if its port is free and the operating system fits."""

    opens: int
    needs: int  # the port that must be free; for one decoy this is not the port that it opens
    windows: bool | None = None  # None: any system


DECOYS = {
    "DecoyApache": Decoy(80, 80),
    "DecoyFemitter": Decoy(21, 21, True),
    "DecoyHarakaSMPT": Decoy(25, 25, False),
    "DecoySmss": Decoy(139, 139, True),
    "DecoySSHD": Decoy(22, 22),
    "DecoySvchost": Decoy(3389, 3389, True),
    "DecoyTomcat": Decoy(443, 443),
    "DecoyVsftpd": Decoy(80, 21, False),
}

# The same tables as arrays, to look up many games at once.
# A set of hosts is a number with bit h for host h. A set of exploitable ports is a number with bit p for PORTS[p].

BIT = 1 << np.arange(N)  # [13]
_HOSTS = [SETUP[name] for name in HOSTS]
SUBNET_OF = np.array([SUBNETS.index(host.subnet) for host in _HOSTS])  # [13]
MEMBERS = np.array([sum(BIT[subnet == SUBNET_OF]) for subnet in range(len(SUBNETS))])  # [3] sets of hosts
#: A session on one of these hosts opens the way to the Operational subnet. The Defender is not one of them.
GATEWAYS = int(sum(BIT[h] for h, name in enumerate(HOSTS) if name.startswith("Enterprise")))
OPERATIONAL = int(MEMBERS[SUBNETS.index("Operational")])
REVEALS = np.array([BIT[HOSTS.index(host.reveals)] if host.reveals else 0 for host in _HOSTS])  # [13]
GAINS = np.zeros((N, len(PORTS)), np.int8)  # [13, 8]
for _h, _host in enumerate(_HOSTS):
    for _port, _gain in _host.gains:
        GAINS[_h, PORTS.index(_port)] = _gain
_PORT_BIT = {port: 1 << p for p, port in enumerate(PORTS)}
OPEN = np.array([sum(_PORT_BIT.get(port, 0) for port in set(host.open)) for host in _HOSTS], np.uint8)  # [13] sets
CONNECTIONS = np.array([len(host.open) for host in _HOSTS])  # [13]
DISTINCT = np.array(
    [len(set(host.open)) for host in _HOSTS]
)  # [13] number of ports, including those that cannot be exploited

SLEEP = 0
MONITOR = 1
ANALYSE = 2
REMOVE = 3
RESTORE = len(VERBS) + 1
FIRST_DECOY, LAST_DECOY = ANALYSE + VERBS.index("DecoyApache"), ANALYSE + VERBS.index("DecoyVsftpd")
_number = np.arange(len(ACTIONS))
VERB_OF = np.where(_number < ANALYSE, _number, ANALYSE + (_number - ANALYSE) // N)  # [145] 0 .. 12
HOST_OF = np.where(_number < ANALYSE, 0, (_number - ANALYSE) % N)  # [145]; has no meaning for Sleep and Monitor


def _per_verb(port: str) -> NDArray:
    bits = {ANALYSE + VERBS.index(name): _PORT_BIT[getattr(decoy, port)] for name, decoy in DECOYS.items()}
    return np.array([bits.get(verb, 0) for verb in range(RESTORE + 1)], np.uint8)


OPENS, NEEDS = _per_verb("opens"), _per_verb("needs")  # [13] by verb: sets of ports
FITS = np.zeros((RESTORE + 1, N), np.bool_)  # [verb, host]
for _name, _decoy in DECOYS.items():
    FITS[ANALYSE + VERBS.index(_name)] = [_decoy.windows in (None, host.windows) for host in _HOSTS]
#: (verb, host) of every decoy that can be placed: it fits the system, and its port is free at first.
PLACES = [
    (verb, host)
    for host in range(N)
    for verb in range(FIRST_DECOY, LAST_DECOY + 1)
    if FITS[verb, host] and not OPEN[host] & NEEDS[verb]
]

_members = np.arange(1 << N)[:, None] >> np.arange(N) & 1  # [8192, 13] which hosts a set contains
SIZE = _members.sum(axis=1)  # [8192]
COST = _members @ np.array([host.cost for host in _HOSTS])  # [8192] tenths, by the hosts where red is root
DOWN_COST, RESTORE_COST = 100, 10  # in tenths: each step while OTService is stopped; each Restore
MEMBER = np.argsort(1 - _members, axis=1, kind="stable").astype(np.int8)  # [8192, 13] the k-th host of a set
TOP = np.array([max(ports.bit_length() - 1, 0) for ports in range(256)])  # [256] the most promising port of a set
PORT_SIZE = np.array([ports.bit_count() for ports in range(256)])  # [256]
PORT_MEMBER = np.argsort(1 - (np.arange(256)[:, None] >> np.arange(8) & 1), axis=1, kind="stable")  # [256, 8] the k-th
