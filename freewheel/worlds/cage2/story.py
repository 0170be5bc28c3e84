"""Story: a step of a game in words, for a person to read."""

from __future__ import annotations

from freewheel.worlds.cage2.network import ESCALATE, EXPLOIT, IMPACT, SCAN, SUCCESS, SWEEP
from freewheel.worlds.cage2.scenario import ACTIONS, HOSTS, SUBNETS

HEADLINE = f"{'':>3} {'blue':<29} {'red':<33} {'cost':>5} {'total':>6}"


def line(step: int, blue: str, red: str, reward: float, total: float) -> str:
    """One step as a row under the headline: it fits a terminal of 80 columns."""
    cost = f"{reward:.1f}" if reward else ""
    return f"{step:>3} {blue:<29} {red:<33} {cost:>5} {total:>6.1f}"


def blue_in_words(action: int, success: int) -> str:
    """What blue did."""
    verb, _, host = ACTIONS[action].partition(" ")
    if verb == "Sleep":
        return "sleeps"
    if verb == "Monitor":
        return "watches"
    if verb.startswith("Decoy"):
        decoy = f"{verb.removeprefix('Decoy')}, {host}"
        return f"decoy {decoy}" if success == SUCCESS else f"no room: {decoy}"
    third = {"Analyse": "analyses", "Remove": "cleans", "Restore": "restores"}[verb]
    return f"{third} {host}"


def red_in_words(kind: int, target: int, success: bool, *, access: int, noticed: bool) -> str:
    """What red did, how far it got (access to its target after this step), and whether blue saw an exploit."""
    if kind == SWEEP:
        return f"sweeps the {SUBNETS[target]} subnet" + ("" if success else ": no way in")
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
