"""Orders: 120 of them, as numbers and back, and how far apart they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from freewheel.errors import UsageError
from freewheel.worlds.cage2.scenario import HOSTS
from freewheel.worlds.cage2.workflow.orders import (
    CANONICAL,
    ORDERS,
    TYPE_OF_HOST,
    TYPES,
    decode,
    distance,
    encode,
    parse,
    precedence,
    ranks,
    spelt,
)


def test_there_are_120_orders_and_each_has_numbers_of_its_own() -> None:
    assert len(ORDERS) == len(set(ORDERS)) == 120
    numbers = {tuple(encode(order).tolist()) for order in ORDERS}
    assert len(numbers) == 120
    assert all(len(row) == 25 and sum(row) == 5 and set(row) == {0.0, 1.0} for row in numbers)
    assert [decode(encode(order)) for order in ORDERS] == list(ORDERS)


def test_the_numbers_are_a_row_of_five_a_place() -> None:
    order = ("op_server", "user", "defender", "enterprise", "op_host")
    rows = encode(order).reshape(5, 5)
    assert [TYPES[column] for column in rows.argmax(axis=1)] == list(order)
    assert ranks(encode(order)).tolist() == [2, 3, 0, 4, 1]  # of defender, enterprise, op_server, op_host, user


@pytest.mark.parametrize("place", [0, 7, 24])
def test_numbers_that_are_no_order_are_refused(place: int) -> None:
    numbers = encode(ORDERS[17]).copy()
    numbers[place] = 1.0 - numbers[place]
    with pytest.raises(UsageError, match="no order of the host types"):
        decode(numbers)


def test_every_host_has_its_type() -> None:
    types = {host: TYPES[kind] for host, kind in zip(HOSTS, TYPE_OF_HOST, strict=True)}
    assert types == {
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


def test_distance_knows_neighbours_and_opposites() -> None:
    order = ORDERS[42]
    swapped = (order[1], order[0], *order[2:])
    assert (distance(order, order), distance(order, swapped), distance(order, order[::-1])) == (0, 1, 10)
    assert precedence([order, swapped]).shape == (2, 10)


def test_there_are_six_canonical_orders() -> None:
    assert len(set(CANONICAL.values())) == 6
    assert set(CANONICAL.values()) <= set(ORDERS)


def test_orders_can_be_spelt() -> None:
    assert [parse(spelt(order)) for order in ORDERS] == list(ORDERS)
    assert parse("outside-in") == CANONICAL["outside-in"]
    for text in ("", "user-user-defender-op_host-op_server", "user-enterprise"):
        with pytest.raises(UsageError, match="is no order of the host types"):
            parse(text)


def test_many_orders_are_ranked_at_once() -> None:
    together = ranks(np.stack([encode(order) for order in ORDERS]))
    assert together.tolist() == [[order.index(kind) for kind in TYPES] for order in ORDERS]
