"""The tree of seeds: the same in every process, and different for every path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.core import SeedStream
from freewheel.seeding import (
    EpisodeSeeds,
    Position,
    drawn,
    evaluation_episodes,
    generator,
    generator_state,
    pick,
    restore_generator,
    training_episodes,
    tree,
    words_at,
)
from tests.support.runs import python

#: If these change, no earlier run can be repeated.
GOLDEN = {
    (): 1844803038, (0,): 127352378, (1, "env", 0, 0): 1106785040, (1, "env", 3, 17): 902062649,
    (7, "eval", 5): 1905805625, ("learner",): 1580304456,
}  # fmt: skip
GOLDEN_PICKS = [76, 105, 73]
GOLDEN_BITS = [0x11C819F99CA6ECF8, 0x2AE7AB0711881E6B, 0x4EB99C3FB411BBF9]


def test_seeds_generators_and_picks_never_change() -> None:
    assert {path: tree(*path) for path in GOLDEN} == GOLDEN
    assert generator(1, "actor", 0).bit_generator.random_raw(3).tolist() == GOLDEN_BITS
    assert [pick(seed, 120) for seed in (0, 1, 2**31 - 1)] == GOLDEN_PICKS
    assert pick(np.int64(1), 120) == pick(1, 120)  # type: ignore[arg-type]


def test_seeds_are_the_same_in_every_process() -> None:
    script = f"from freewheel.seeding import tree; print([tree(*path) for path in {list(GOLDEN)!r}])"
    assert python("-c", script, PYTHONHASHSEED="1").stdout.strip() == str(list(GOLDEN.values()))


paths = st.lists(st.integers(-10, 10**12) | st.text(max_size=5), max_size=4)


@given(one=paths, other=paths)
def test_different_paths_have_different_seeds(one: list[int | str], other: list[int | str]) -> None:
    assert 0 <= tree(*one) < 2**31
    assert (tree(*one) == tree(*other)) == (one == other)
    same = generator(*one).integers(2**63, size=2).tolist() == generator(*other).integers(2**63, size=2).tolist()
    assert same == (one == other)
    assert tree(1, 2) != tree(1, "2") != tree("1, 2"), "a number and its name are different branches"


@given(count=st.integers(1, 200), first=st.integers(0, 2**31 - 10**4))
def test_picks_are_uniform(count: int, first: int) -> None:
    """Pearson's statistic of consecutive seeds, and of seeds with a common stride."""
    for stride in (1, 5, count):
        picks = np.bincount([pick(first + stride * k, count) for k in range(20 * count)], minlength=count)
        assert len(picks) == count
        statistic = float(((picks - 20) ** 2 / 20).sum())
        assert statistic <= count + 6 * np.sqrt(2 * count) + 20, "six standard deviations above its mean"


@given(seed=st.integers(0, 2**31 - 1), rows=st.integers(1, 9))
def test_a_context_is_the_row_that_was_picked(seed: int, rows: int) -> None:
    table = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
    row = drawn(table, seed)
    assert row.tolist() == table[pick(seed, rows)].tolist()
    row[:] = -1
    assert table.min() == 0, "a copy"


@given(before=st.integers(0, 5), narrow=st.booleans())
def test_a_generator_is_restored(before: int, narrow: bool) -> None:
    rng = generator("run", 1)
    rng.normal(size=before)
    if narrow:
        rng.integers(2**32, dtype=np.uint32)  # leaves half of a 64-bit number
    state = generator_state(rng)
    other = generator("elsewhere")
    restore_generator(other, state)
    for _ in range(3):
        assert rng.integers(2**32, dtype=np.uint32) == other.integers(2**32, dtype=np.uint32)
        assert rng.random() == other.random()
    assert np.array_equal(generator_state(rng), generator_state(other))
    assert not np.array_equal(generator_state(rng), state)


def test_a_lanes_episodes_are_the_same_wherever_one_starts() -> None:
    whole: SeedStream = training_episodes(5, lane=2)
    later = training_episodes(5, lane=2, start=3)
    assert [whole.number(k) for k in range(6)] == list(range(6))
    assert [later.number(k) for k in range(3)] == [3, 4, 5]
    assert [later.seed(k) for k in range(3)] == [whole.seed(k) for k in range(3, 6)]
    assert whole.seed(4) == tree(5, "env", 2, 4)


@given(lanes=st.integers(1, 12))
def test_evaluation_plays_the_same_episodes_on_any_number_of_lanes(lanes: int) -> None:
    played = {
        stream.number(k): stream.seed(k)
        for stream in (evaluation_episodes(9, lane, lanes) for lane in range(lanes))
        for k in range(24 // lanes + 1)
    }
    assert set(range(24)) <= set(played)
    for number in range(24):
        assert played[number] == tree(9, "eval", number)


def test_training_and_evaluation_have_no_common_seed() -> None:
    trained = {training_episodes(9, lane).seed(k) for lane in range(8) for k in range(100)}
    assert not trained & {evaluation_episodes(9, 0, 1).seed(k) for k in range(100)}
    assert len(trained) == 800


def test_a_stream_is_a_value_and_takes_a_count_from_an_array() -> None:
    stream = training_episodes(5, lane=2)
    (k,) = np.array([4])
    assert type(stream.number(k)) is int
    assert stream.seed(k) == stream.seed(4)
    assert EpisodeSeeds((1, "x"), 2, 3) == EpisodeSeeds((1, "x"), 2, 3)
    assert [EpisodeSeeds((1, "x"), 2, 3).number(k) for k in range(3)] == [2, 5, 8]


@pytest.mark.parametrize("used", [0, 1, 17, 256])
def test_a_position_in_a_block_is_a_state_that_goes_on_with_the_next_number(used: int) -> None:
    rng, other = generator(3, "actor"), generator(9)
    rng.random(5)
    before = rng.bit_generator.state
    block = rng.random(300)
    restore_generator(other, words_at(Position(before, used).packed()))
    assert other.random(300 - used).tolist() == block[used:].tolist()
