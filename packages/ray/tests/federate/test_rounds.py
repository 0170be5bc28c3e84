"""Rounds with late, lost, repeated and invalid answers, and properties that hold for any order of events."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel_ray.federate.rounds import FACTOR, LEAST, REASONS, FederationRounds, total_skipped


def joined(*names: str, **options: int) -> FederationRounds:
    rounds = FederationRounds(names, **options)
    for name in names:
        rounds.joined(name)
    return rounds


def test_a_late_site_is_skipped_and_joins_again_with_its_old_answer_thrown_away() -> None:
    rounds = joined("a", "b")
    rounds.begin()
    rounds.answered("a", 1, 10, 1.0)
    assert rounds.over(5.0, 5.0)
    assert rounds.close().skipped == {"b": "late"}
    assert rounds.begin() == ["a"], "b is still busy with round 1"
    assert not rounds.answered("b", 1, 10, 0.5), "of a round that is over"
    assert rounds.over(0.5) is False
    rounds.answered("a", 2, 10, 1.0)
    assert rounds.close().skipped == {"b": "late"}, "it was not asked in round 2"
    assert rounds.begin() == ["a", "b"]
    assert rounds.sites["b"].asked == 3


def test_answers_that_come_twice_too_late_or_for_another_round_change_nothing() -> None:
    rounds = joined("a", "b")
    rounds.begin()
    assert not rounds.answered("a", 7, 10, 1.0)
    assert rounds.waiting == ["a", "b"]
    assert rounds.answered("a", 1, 10, 1.0)
    assert not rounds.answered("a", 1, 99, 1.1)
    rounds.close()
    assert not rounds.answered("b", 1, 10, 9.0), "before the next begins"
    assert rounds.sites["a"].tally.rows == 10
    assert rounds.begin() == ["a", "b"]


@pytest.mark.parametrize(("rows", "problem", "reason"), [(10, "weights are not finite", "invalid"), (0, "", "empty")])
def test_what_cannot_be_averaged_is_skipped_and_the_site_is_asked_again(rows: int, problem: str, reason: str) -> None:
    rounds = joined("a", "b")
    rounds.begin()
    assert not rounds.answered("a", 1, rows, 1.0, problem)
    rounds.answered("b", 1, 10, 1.0)
    assert rounds.over(1.0)
    assert rounds.close().skipped == {"a": reason}
    assert rounds.sites["a"].problem == problem
    assert rounds.begin() == ["a", "b"]


def test_a_lost_site_is_restarted_a_limited_number_of_times() -> None:
    rounds = joined("a", "b", restarts=1)
    for number, reason in ((1, "lost"), (2, "starting"), (3, "lost"), (4, "lost")):
        rounds.begin()
        if number in (1, 3):
            rounds.lost("a", "killed")
        rounds.answered("b", number, 10, 1.0)
        assert rounds.over(1.0)
        assert rounds.close().skipped == {"a": reason}
        assert rounds.to_restart() == (["a"] if number == 1 else [])
        if number == 2:
            rounds.joined("a")
    assert rounds.sites["a"].starts == 2
    assert not rounds.hopeless
    rounds.lost("b", "killed")
    assert rounds.to_restart() == ["b"]
    rounds.lost("b", "killed again")
    assert rounds.hopeless


def test_a_refused_site_is_never_asked_nor_started() -> None:
    rounds = joined("a", "b")
    rounds.refuse("a", "other spaces")
    rounds.joined("a")
    rounds.lost("a", "killed")
    assert rounds.begin() == ["b"]
    assert rounds.to_restart() == []
    rounds.answered("b", 1, 1, 1.0)
    assert rounds.close().skipped == {"a": "refused"}


def test_the_time_of_a_round_is_given_or_follows_from_half_of_the_sites() -> None:
    rounds = joined("a", "b", "c")
    rounds.begin()
    assert rounds.limit(7.0) == 7.0
    rounds.answered("a", 1, 10, 20.0)
    assert rounds.limit(None) == math.inf, "one of three is not half"
    rounds.answered("b", 1, 10, 40.0)
    assert rounds.limit(None) == FACTOR * 40.0
    assert not rounds.over(119.9)
    assert rounds.over(120.0)
    quick = joined("a", "b")
    quick.begin()
    quick.answered("a", 1, 10, 0.1)
    assert quick.limit(None) == LEAST


EVENTS = st.lists(
    st.tuples(st.sampled_from(["answer", "old", "invalid", "lost", "refuse", "join", "restart", "close"]),
              st.integers(0, 2)),
    max_size=60,
)  # fmt: skip


@given(EVENTS, st.integers(1, 3), st.integers(0, 2))
def test_every_site_counts_or_is_skipped_once_a_round(events: list[tuple[str, int]], least: int, restarts: int) -> None:
    names = ("a", "b", "c")
    rounds = joined(*names, least=least, restarts=restarts)
    asked, answers = set(rounds.begin()), dict[str, int]()
    seen, refused = Counter[str](), set[str]()
    for event, which in events:
        name = names[which]
        if event in ("answer", "invalid"):
            counts = rounds.answered(name, rounds.round, 5, 1.0, "" if event == "answer" else "nan")
            assert not counts or (name in asked and name not in answers)
            answers |= {name: 5} if counts else {}
        elif event == "old":
            assert not rounds.answered(name, rounds.round - 1, 5, 1.0)
        elif event == "lost":
            rounds.lost(name, "killed")
        elif event == "refuse":
            rounds.refuse(name, "spaces")
            refused.add(name)
        elif event == "join":
            rounds.joined(name)
        elif event == "restart":
            assert not refused & set(rounds.to_restart())
        else:
            outcome = rounds.close()
            assert set(outcome.counted) == answers.keys()
            assert set(outcome.counted) | outcome.skipped.keys() == set(names)
            assert not set(outcome.counted) & outcome.skipped.keys()
            assert set(outcome.skipped.values()) <= set(REASONS)
            assert outcome.enough == (len(answers) >= least)
            seen.update(outcome.counted if outcome.enough else ())
            asked, answers = set(rounds.begin()), {}
            assert not asked & refused
    for name in names:
        assert rounds.sites[name].tally.rounds == seen[name]
        assert rounds.sites[name].tally.rows == 5 * seen[name]
        assert rounds.sites[name].starts <= restarts + 1
    assert sum(total_skipped(rounds.sites.values()).values()) == sum(
        sum(site.tally.skipped.values()) for site in rounds.sites.values()
    )
