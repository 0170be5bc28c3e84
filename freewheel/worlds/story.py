"""Story: a step of a game in words, for a person to read."""

from __future__ import annotations

from freewheel.worlds.network import ESCALATE, EXPLOIT, IMPACT, SCAN, SUCCESS, SWEEP
from freewheel.worlds.scenario2 import ACTIONS, HOSTS, SUBNETS

HEADLINE = f"{'step':>4}  {'blue':<32} {'red':<50} {'cost':>6} {'total':>7}"


def line(step: int, blue: str, red: str, reward: float, total: float) -> str:
    """One step as a row under the headline."""
    cost = "" if reward == 0 else f"{reward:.1f}"
    return f"{step:>4}  {blue:<32} {red:<50} {cost:>6} {total:>7.1f}"


def blue_in_words(action: int, success: int) -> str:
    """What blue did."""
    verb, _, host = ACTIONS[action].partition(" ")
    if verb == "Sleep":
        return "sleeps"
    if verb == "Monitor":
        return "watches"
    if verb.startswith("Decoy"):
        decoy = f"{verb.removeprefix('Decoy')} on {host}"
        return f"decoy {decoy}" if success == SUCCESS else f"no room for {decoy}"
    third = {"Analyse": "analyses", "Remove": "removes red from", "Restore": "restores"}[verb]
    return f"{third} {host}"


def red_in_words(kind: int, target: int, success: bool, *, access: int, noticed: bool) -> str:
    """What red did, how far it got (access to its target after this step), and whether blue saw an exploit."""
    if kind == SWEEP:
        return f"sweeps the {SUBNETS[target]} subnet" + ("" if success else ": no way in")
    host = HOSTS[target]
    seen = " (blue sees it)" if noticed else " (unseen)"
    if kind == SCAN:
        return f"scans {host}"
    if kind == EXPLOIT:
        return (
            f"breaks into {host} as {('', 'a user', 'root')[access]}{seen}"
            if success
            else f"fails to break into {host}"
        )
    if kind == ESCALATE:
        return f"becomes root on {host}" if success else f"finds its session on {host} gone"
    if kind == IMPACT:
        return f"stops what it can on {host}" if success else f"fails to stop the service on {host}"
    return "sleeps"
