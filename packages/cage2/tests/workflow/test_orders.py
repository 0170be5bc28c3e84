"""Orders as numbers and as text, and compliance with them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.core import NDArray
from freewheel.errors import UsageError
from freewheel_cage2.scenario import ACTIONS, HOSTS
from freewheel_cage2.workflow import envs
from freewheel_cage2.workflow.envs import ORDERS, TYPES, distance, encode, parse, precedence, ranks, spelt


def test_there_are_120_orders_with_different_encodings() -> None:
    assert len(ORDERS) == len(set(ORDERS)) == 120
    numbers = {tuple(encode(order).tolist()) for order in ORDERS}
    assert len(numbers) == 120
    assert all(len(row) == 25 and sum(row) == 5 and set(row) == {0.0, 1.0} for row in numbers)
    rows = encode(ORDERS[42]).reshape(5, 5)
    assert [TYPES[column] for column in rows.argmax(axis=1)] == list(ORDERS[42]), "a row of five a place"
    together = ranks(np.stack([encode(order) for order in ORDERS]))
    assert together.tolist() == [[order.index(kind) for kind in TYPES] for order in ORDERS]


def test_every_host_has_its_type() -> None:
    assert {host: TYPES[kind] for host, kind in zip(HOSTS, envs.TYPE_OF_HOST, strict=True)} == {
        "Defender": "defender",
        **dict.fromkeys(("Enterprise0", "Enterprise1", "Enterprise2"), "enterprise"),
        **dict.fromkeys(("Op_Host0", "Op_Host1", "Op_Host2"), "op_host"),
        "Op_Server0": "op_server",
        **dict.fromkeys(("User0", "User1", "User2", "User3", "User4"), "user"),
    }


def pairs_the_other_way_round(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    pairs = itertools.combinations(TYPES, 2)
    return sum((one.index(a) < one.index(b)) != (other.index(a) < other.index(b)) for a, b in pairs)


def test_distances_are_counted_pairs() -> None:
    for one, other in itertools.product(ORDERS[::7], ORDERS[::11]):
        assert distance(one, other) == pairs_the_other_way_round(one, other)
    assert precedence([*ORDERS[:2]]).shape == (2, 10)


def test_orders_can_be_spelt_and_six_have_names() -> None:
    assert len(set(envs.CANONICAL.values())) == 6
    assert set(envs.CANONICAL.values()) <= set(ORDERS)
    assert [parse(spelt(order)) for order in ORDERS] == list(ORDERS)
    assert parse("outside-in") == envs.CANONICAL["outside-in"]
    for text in ("", "user-user-defender-op_host-op_server", "user-enterprise"):
        with pytest.raises(UsageError, match="is not an order of the host types"):
            parse(text)


ORDER = ("op_server", "enterprise", "defender", "op_host", "user")
LAMBDA = 30.0


def taken(*hosts: str) -> NDArray:
    """[1, 13] where red is."""
    return np.array([[host in hosts for host in HOSTS]])


def act(name: str) -> NDArray:
    return np.array([ACTIONS.index(name)])


def played(steps: list[tuple[set[str], str]], order: tuple[str, ...] = ORDER) -> tuple[envs.Compliance, list[float]]:
    """Return the rewards of actions, each taken while red is on the given hosts."""
    compliance = envs.Compliance(1, LAMBDA)
    compliance.begin(np.ones(1, np.bool_), encode(order)[None], taken(*steps[0][0]))
    rewards = [
        float(compliance.judge(act(action), taken(*next_hosts))[0])
        for (_, action), next_hosts in zip(steps, [*(hosts for hosts, _ in steps[1:]), set[str]()], strict=True)
    ]
    return compliance, rewards


def test_the_reward_is_the_change_of_compliance() -> None:
    steps = [
        ({"User1"}, "Sleep"),
        ({"User1"}, "Remove User1"),  # 1 of 1
        (set[str](), "Restore User1"),  # 1 of 2
        ({"User1", "Enterprise0"}, "Restore User1"),  # 1 of 3
        ({"User1", "Enterprise0"}, "Monitor"),
        ({"User1", "Enterprise0"}, "Restore Enterprise1"),  # 2 of 4
    ]
    compliance, rewards = played(steps)
    np.testing.assert_allclose(rewards, LAMBDA * np.array([0, 1, -1 / 2, 1 / 3 - 1 / 2, 0, 1 / 2 - 1 / 3]))
    assert compliance.share.item() == 0.5
    assert sum(rewards) == pytest.approx(LAMBDA * 0.5)


def test_without_an_order_nothing_is_counted() -> None:
    compliance = envs.Compliance(1, LAMBDA)
    compliance.begin(np.ones(1, np.bool_), np.zeros((1, 25), np.float32), taken("Defender"))
    assert compliance.judge(act("Restore Defender"), taken()).item() == 0.0
    assert np.isnan(compliance.share.item())


def test_a_new_episode_forgets_and_leaves_the_others_alone() -> None:
    compliance = envs.Compliance(2, LAMBDA)
    orders = np.stack([encode(ORDER), encode(ORDER)])
    both = np.repeat(taken("User1"), 2, axis=0)
    compliance.begin(np.ones(2, np.bool_), orders, both)
    compliance.judge(np.repeat(act("Remove User1"), 2), both)
    orders[1] = encode(ORDER[::-1])
    now = np.concatenate([taken("Op_Host0"), taken("Op_Server0", "Op_Host0")])
    compliance.begin(np.array([False, True]), orders, now)
    assert (compliance.hits.tolist(), compliance.fixes.tolist()) == ([1, 0], [1, 0])
    rewards = compliance.judge(np.array([ACTIONS.index("Remove User2"), ACTIONS.index("Remove Op_Host2")]), both)
    assert compliance.share.tolist() == [1.0, 1.0]  # in lane 0 User1 is still taken
    assert rewards.tolist() == [0.0, LAMBDA]


@given(
    st.integers(0, 119),
    st.lists(st.tuples(st.integers(0, 144), st.sets(st.sampled_from(HOSTS))), min_size=1, max_size=30),
)
def test_any_episode_is_judged_as_by_hand(number: int, steps: list[tuple[int, set[str]]]) -> None:
    order = ORDERS[number]
    hits = fixes = 0
    for action, hosts in steps:
        verb, _, host = ACTIONS[action].partition(" ")
        if verb in ("Remove", "Restore"):
            types = {TYPES[envs.TYPE_OF_HOST[HOSTS.index(one)]] for one in hosts - {"User0"}}
            first = next((kind for kind in order if kind in types), None)
            fixes += 1
            hits += TYPES[envs.TYPE_OF_HOST[HOSTS.index(host)]] == first
    compliance, rewards = played([(hosts, ACTIONS[action]) for action, hosts in steps], order)
    assert (compliance.hits.item(), compliance.fixes.item()) == (hits, fixes)
    assert sum(rewards) == pytest.approx(LAMBDA * hits / fixes if fixes else 0.0)
