"""Agents of CAGE 2: the red agents and the simple defenders."""

from __future__ import annotations

import numpy as np
import pytest

from freewheel.core import NDArray
from freewheel.errors import UsageError
from freewheel_cage2.agents import (
    DEFENDERS,
    PLACING,
    BlineAgent,
    Defender,
    MeanderAgent,
    RandomDefender,
    RuleDefender,
    defender,
)
from freewheel_cage2.network import ESCALATE, EXPLOIT, IMPACT, SCAN, SWEEP, NetworkStates
from freewheel_cage2.scenario import ACTIONS, BIT, HOSTS

ONE = np.ones(1, np.bool_)
LANE = np.zeros(1, np.int64)


def in_words(kind: NDArray, target: NDArray) -> str:
    names = {SWEEP: "sweep", SCAN: "scan", EXPLOIT: "exploit", ESCALATE: "escalate", IMPACT: "impact"}
    where = ("User", "Enterprise")[int(target[0])] if kind[0] == SWEEP else HOSTS[int(target[0])]
    return f"{names[int(kind[0])]} {where}"


def chain(entry: float) -> BlineAgent:
    red = BlineAgent(1)
    red.begin(LANE, np.array([entry]))
    return red


@pytest.mark.parametrize(
    ("done", "success", "shown", "next_act"),
    [
        (3, False, True, "exploit User1"),  # a failure leads to an earlier action
        (7, False, True, "exploit Enterprise1"),
        (13, False, True, "exploit Enterprise2"),
        (12, True, False, "scan User1"),  # the first scan of the server finds nothing, so it starts again
    ],
)
def test_bline_steps_back_or_begins_again(done: int, success: bool, shown: bool, next_act: str) -> None:
    red = chain(0.0)
    for step in range(done):
        red.act(ONE & (step > 0), ONE)
    assert in_words(*red.act(ONE & success, ONE & shown)) == next_act


def test_bline_continues_when_it_has_seen_the_server_before() -> None:
    red = chain(0.0)
    for step in range(13):  # up to the exploit of the server
        red.act(ONE & (step > 0), ONE)
    for expected in ("exploit Enterprise2", "escalate Enterprise2", "scan Op_Server0"):
        assert in_words(*red.act(ONE & (expected != "exploit Enterprise2"), ONE)) == expected
    assert in_words(*red.act(ONE, ~ONE)) == "exploit Op_Server0"


def test_meander_takes_each_of_its_options_alike() -> None:
    lanes = 4000
    nets, red = NetworkStates(lanes), MeanderAgent(lanes)
    nets.known[:] = BIT[9] | BIT[10] | BIT[12]
    red._swept[:], red._scanned[:] = 1, 0
    kind, target = red.act(np.ones(lanes, np.bool_), nets, (np.arange(lanes) + 0.5) / lanes)
    assert set(kind) == {SCAN}
    assert np.unique(target, return_counts=True)[1].tolist() == pytest.approx([lanes / 3] * 3, abs=1)


QUIET = np.zeros(52, np.float32)
SCANNED, EXPLOITED, UNKNOWN, USER, PRIVILEGED = (1, 0, 0, 0), (1, 1, 0, 1), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 1, 1)


def seen(**hosts: tuple[int, ...]) -> NDArray:
    """Return an observation with activity on these hosts."""
    bits = QUIET.reshape(13, 4).copy()
    for host, shown in hosts.items():
        bits[HOSTS.index(host)] = shown
    return bits.reshape(-1)


def acts(blue: Defender, *observations: NDArray) -> list[str]:
    """Return a defender's actions for observations of one game."""
    return [ACTIONS[int(blue.act(obs[None])[0])] for obs in observations]


def placing() -> list[str]:
    return [ACTIONS[action] for action in PLACING]


def test_sleeping_sleeps_and_others_are_named() -> None:
    assert acts(defender("sleeping"), QUIET, seen(User1=EXPLOITED)) == ["Sleep", "Sleep"]
    assert set(DEFENDERS) == {"sleeping", "random", "heuristic"}
    with pytest.raises(UsageError, match=r"unknown defender 'heuristics'; did you mean 'heuristic'\?"):
        defender("heuristics")


def test_random_draws_every_action_alike_and_repeats_itself_by_its_seed() -> None:
    drawn = RandomDefender(3).act(np.zeros((14_500, 52)))
    counts = np.bincount(drawn, minlength=145)
    assert (counts.min() > 60, counts.max() < 140, len(counts)) == (True, True, 145)  # 100 each, four deviations
    assert np.array_equal(drawn, RandomDefender(3).act(np.zeros((14_500, 52))))
    assert not np.array_equal(drawn, RandomDefender(4).act(np.zeros((14_500, 52))))


@pytest.mark.parametrize(
    ("obs", "action"),
    [
        (seen(User1=PRIVILEGED), "Restore User1"),
        (seen(User1=(1, 1, 1, 1)), "Restore User1"),
        (seen(User1=EXPLOITED), "Remove User1"),
        (seen(User1=USER), "Remove User1"),
        (seen(User1=UNKNOWN), "Analyse User1"),
        (seen(User1=SCANNED), "Analyse User1"),
        (seen(Enterprise1=SCANNED, Op_Host0=EXPLOITED, User4=PRIVILEGED), "Restore User4"),  # the worst first
        (seen(User1=PRIVILEGED, Op_Server0=PRIVILEGED), "Restore Op_Server0"),  # then the most valuable
        (seen(User1=SCANNED, Enterprise2=SCANNED), "Analyse Enterprise2"),
        (seen(User0=PRIVILEGED), "DecoyHarakaSMPT Op_Server0"),  # red always has User0
        (QUIET, "DecoyHarakaSMPT Op_Server0"),
    ],
)
def test_the_heuristic_answers_what_it_sees(obs: NDArray, action: str) -> None:
    assert acts(RuleDefender(1), obs) == [action]
    assert acts(RuleDefender(1), np.append(obs, np.ones(7))) == [action]  # further columns are ignored


def test_it_puts_up_every_decoy_and_then_sleeps() -> None:
    assert acts(RuleDefender(1), *[QUIET] * 40) == [*placing(), *["Sleep"] * (40 - len(placing()))]
    assert not any("User0" in action for action in placing())


def test_decoys_of_a_restored_host_are_put_up_again() -> None:
    blue = RuleDefender(1)
    acts(blue, *[QUIET] * len(placing()))
    done = acts(blue, seen(User3=PRIVILEGED), *[QUIET] * 3)
    assert done == ["Restore User3", "DecoySSHD User3", "DecoyVsftpd User3", "Sleep"]


def test_what_was_analysed_is_not_analysed_again_until_something_happens_there() -> None:
    blue, unknown = RuleDefender(1), seen(Enterprise0=UNKNOWN)
    assert acts(blue, unknown, unknown, unknown)[::2] == ["Analyse Enterprise0", "DecoyApache Op_Server0"]
    assert acts(blue, seen(Enterprise0=(1, 0, 1, 0)), unknown) == ["Analyse Enterprise0", "DecoyTomcat Op_Server0"]
    assert acts(blue, seen(Enterprise0=USER), unknown) == ["Remove Enterprise0", "Analyse Enterprise0"]


def test_games_are_independent_and_new_ones_start_fresh() -> None:
    rng = np.random.default_rng(0)
    shown = rng.random((40, 3, 13)) < 0.05
    patterns = np.array([SCANNED, EXPLOITED, UNKNOWN, USER, PRIVILEGED])[rng.integers(5, size=(40, 3, 13))]
    games = (patterns * shown[..., None]).reshape(40, 3, 52)
    together = defender("heuristic", 3)
    acted = []
    for step, obs in enumerate(games):
        if step == 20:
            together.begin(np.array([False, True, False]))
        acted.append(together.act(obs).tolist())
    for lane in range(3):
        alone = defender("heuristic")
        own = []
        for step, obs in enumerate(games[:, lane]):
            if (step, lane) == (20, 1):
                alone = defender("heuristic")
            own += alone.act(obs[None]).tolist()
        assert own == [actions[lane] for actions in acted]
