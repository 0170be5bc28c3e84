"""Red's agents: the chain that goes straight on and steps back, and the one that takes whatever it can."""

from __future__ import annotations

import numpy as np
import pytest

from freewheel.core import NDArray
from freewheel.worlds.cage2.agents import Bline, Meander
from freewheel.worlds.cage2.network import ESCALATE, EXPLOIT, IMPACT, SCAN, SWEEP, Networks
from freewheel.worlds.cage2.scenario import BIT, HOSTS, OP_SERVER

ONE = np.ones(1, np.bool_)
LANE = np.zeros(1, np.int64)


def in_words(kind: NDArray, target: NDArray) -> str:
    names = {SWEEP: "sweep", SCAN: "scan", EXPLOIT: "exploit", ESCALATE: "escalate", IMPACT: "impact"}
    where = ("User", "Enterprise")[int(target[0])] if kind[0] == SWEEP else HOSTS[int(target[0])]
    return f"{names[int(kind[0])]} {where}"


def chain(entry: float) -> Bline:
    red = Bline(1)
    red.begin(LANE, np.array([entry]))
    return red


def test_bline_goes_straight_to_the_server() -> None:
    red = chain(0.6)
    acts = [in_words(*red.act(ONE & (step > 0), ONE)) for step in range(17)]
    assert acts == [
        "sweep User", "scan User3", "exploit User3", "escalate User3", "scan Enterprise0", "exploit Enterprise0",
        "escalate Enterprise0", "sweep Enterprise", "scan Enterprise2", "exploit Enterprise2", "escalate Enterprise2",
        "scan Op_Server0", "exploit Op_Server0", "escalate Op_Server0", "impact Op_Server0", "impact Op_Server0",
        "impact Op_Server0",
    ]  # fmt: skip


@pytest.mark.parametrize(("entry", "hosts"), [(0.0, "11"), (0.3, "21"), (0.6, "30"), (0.9, "40")])
def test_bline_comes_in_by_any_of_four_hosts(entry: float, hosts: str) -> None:
    red = chain(entry)
    acts = [in_words(*red.act(ONE & (step > 0), ONE)) for step in range(6)]
    assert acts[2] == f"exploit User{hosts[0]}"
    assert acts[5] == f"exploit Enterprise{hosts[1]}"


@pytest.mark.parametrize(
    ("done", "back"), [(3, "exploit User1"), (7, "exploit Enterprise1"), (13, "exploit Enterprise2")]
)
def test_bline_steps_back_after_a_failure(done: int, back: str) -> None:
    red = chain(0.0)
    for step in range(done):
        red.act(ONE & (step > 0), ONE)
    assert in_words(*red.act(~ONE, ONE)) == back


def test_bline_begins_again_when_the_first_scan_of_the_server_shows_nothing() -> None:
    red = chain(0.0)
    for step in range(12):
        red.act(ONE & (step > 0), ONE)
    assert in_words(*red.act(ONE, ~ONE)) == "scan User1"


def test_bline_goes_on_when_it_has_seen_the_server_before() -> None:
    red = chain(0.0)
    for step in range(13):  # up to the exploit of the server
        red.act(ONE & (step > 0), ONE)
    for expected in ("exploit Enterprise2", "escalate Enterprise2", "scan Op_Server0"):
        assert in_words(*red.act(ONE & (expected != "exploit Enterprise2"), ONE)) == expected
    assert in_words(*red.act(ONE, ~ONE)) == "exploit Op_Server0"


def meander(nets: Networks, *, success: bool = True, chance: float = 0.0, red: Meander | None = None) -> str:
    red = red or Meander(1)
    return in_words(*red.act(np.array([success]), nets, np.array([chance])))


def test_meander_sweeps_then_scans_then_escalates_then_exploits() -> None:
    nets, red = Networks(1), Meander(1)
    acts = [meander(nets, red=red) for _ in range(3)]
    assert acts == ["sweep User", "scan User0", "escalate User0"]
    nets.known[:] |= BIT[HOSTS.index("User2")]
    assert [meander(nets, red=red) for _ in range(2)] == ["scan User2", "exploit User0"]
    assert meander(nets, red=red) == "exploit User2"


def test_meander_impacts_as_soon_as_it_has_escalated_the_server() -> None:
    nets, red = Networks(1), Meander(1)
    red._escalated[:] = BIT[OP_SERVER]
    assert meander(nets, red=red) == "impact Op_Server0"
    red._mapped[:] = red._exploited[:] = BIT[OP_SERVER]
    assert meander(nets, red=red, success=False) == "sweep User", "a failed impact: the server is lost"
    assert not (red._escalated | red._exploited).any()


def test_meander_gives_up_its_deepest_subnet_after_a_failed_exploit() -> None:
    def hosts(*names: str) -> NDArray:
        return np.asarray([sum(BIT[HOSTS.index(name)] for name in names)], np.int64)

    red = Meander(1)
    held = hosts("User1", "Enterprise0", "Enterprise1", "Op_Host0")
    red._escalated[:], red._exploited[:], red._mapped[:] = held, held | hosts("User2"), held
    red._last_exploited = np.array([HOSTS.index("User2")])
    red.learn(~ONE)
    assert red._escalated == red._exploited == hosts("User1", "Enterprise0", "Enterprise1")
    red._exploited |= hosts("User2")
    red._last_exploited = np.array([HOSTS.index("User2")])
    red.learn(~ONE)
    assert red._escalated == red._exploited == hosts("User1")


def test_meander_takes_each_of_its_options_alike() -> None:
    lanes = 4000
    nets, red = Networks(lanes), Meander(lanes)
    nets.known[:] = BIT[9] | BIT[10] | BIT[12]
    red._swept[:], red._scanned[:] = 1, 0
    chance = (np.arange(lanes) + 0.5) / lanes
    kind, target = red.act(np.ones(lanes, np.bool_), nets, chance)
    assert set(kind) == {SCAN}
    assert np.unique(target, return_counts=True)[1].tolist() == pytest.approx([lanes / 3] * 3, abs=1)
