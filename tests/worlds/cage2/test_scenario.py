"""The tables of Scenario 2 say what the challenge's own documents and sources say."""

from __future__ import annotations

import numpy as np
import pytest

from freewheel.worlds.cage2 import scenario as s2

DECOYS_AT_START = {
    "Defender": "Apache HarakaSMPT Tomcat Vsftpd",
    "Enterprise0": "Apache HarakaSMPT Tomcat Vsftpd",
    "Enterprise1": "Femitter",
    "Enterprise2": "Femitter",
    "Op_Host0": "Apache HarakaSMPT Tomcat Vsftpd",
    "Op_Host1": "Apache HarakaSMPT Tomcat Vsftpd",
    "Op_Host2": "Apache HarakaSMPT Tomcat Vsftpd",
    "Op_Server0": "Apache HarakaSMPT Tomcat Vsftpd",
    "User0": "Apache Smss Svchost Tomcat",
    "User1": "Apache Smss Svchost Tomcat",
    "User2": "Apache Femitter SSHD Tomcat",
    "User3": "SSHD Vsftpd",
    "User4": "Vsftpd",
}


@pytest.mark.parametrize(
    ("first", "verb"),
    [
        (2, "Analyse"),
        (15, "Remove"),
        (28, "DecoyApache"),
        (41, "DecoyFemitter"),
        (54, "DecoyHarakaSMPT"),
        (67, "DecoySmss"),
        (80, "DecoySSHD"),
        (93, "DecoySvchost"),
        (106, "DecoyTomcat"),
        (119, "DecoyVsftpd"),
        (132, "Restore"),
    ],
)
def test_actions_are_numbered_as_in_the_challenge(first: int, verb: str) -> None:
    block = range(first, first + 13)
    assert [s2.ACTIONS[number] for number in block] == [f"{verb} {host}" for host in s2.HOSTS]
    assert {int(s2.VERB_OF[number]) for number in block} == {2 + s2.VERBS.index(verb)}
    assert [int(s2.HOST_OF[number]) for number in block] == list(range(13))


def test_there_are_145_actions_and_13_hosts() -> None:
    assert len(s2.ACTIONS) == 145
    assert s2.ACTIONS[:2] == ("Sleep", "Monitor")
    assert len(s2.HOSTS) == 13


@pytest.mark.parametrize("host", s2.HOSTS)
def test_decoys_that_can_stand_at_the_start(host: str) -> None:
    h = s2.HOSTS.index(host)
    fitting = {
        name.removeprefix("Decoy")
        for verb, name in enumerate(s2.VERBS, start=2)
        if s2.FITS[verb, h] and not s2.OPEN[h] & s2.NEEDS[verb]
    }
    assert fitting == set(DECOYS_AT_START[host].split())


def test_what_root_costs_adds_up_over_hosts() -> None:
    cost = {"Enterprise0": 10, "Enterprise1": 10, "Enterprise2": 10, "Op_Server0": 10, "User0": 0}
    for h, host in enumerate(s2.HOSTS):
        assert s2.COST[s2.BIT[h]] == cost.get(host, 1)
    some = s2.BIT[[1, 4, 7, 12]]
    assert s2.COST[some.sum()] == 10 + 1 + 10 + 1


def test_members_of_every_set_of_hosts() -> None:
    for members in (0b1, 0b1010000000001, 0b1111111111111):
        expected = [h for h in range(13) if members >> h & 1]
        assert s2.SIZE[members] == len(expected)
        assert s2.MEMBER[members, : len(expected)].tolist() == expected


def test_the_most_promising_port_is_the_last_of_a_set() -> None:
    ports = np.array([0b1, 0b101, 0b10000000, 0b01011000])
    assert s2.TOP[ports].tolist() == [0, 2, 7, 6]
    assert [s2.PORTS[p] for p in (0, 7)] == [22, 21]
