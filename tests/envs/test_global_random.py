"""GlobalRandom: a stream of its own in place of the global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from freewheel.envs.legacy import GlobalRandom, GlobalRandoms


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """The streams of the caller continue as if nothing had happened."""
    python, numpy = random.Random(7), np.random.RandomState(7)
    before, bits = random.getstate(), np.random.mtrand.get_bit_generator()
    random.setstate(python.getstate())
    np.random.set_state(numpy.get_state())  # noqa: NPY002
    yield
    assert [random.random() for _ in range(3)] == [python.random() for _ in range(3)]
    assert np.random.rand(3).tolist() == numpy.rand(3).tolist()  # noqa: NPY002
    random.setstate(before)
    assert np.random.mtrand.get_bit_generator() is bits


@pytest.mark.parametrize("seed", [0, 5, 2**31 - 1])
def test_they_begin_where_seeding_the_global_generator_begins(seed: int) -> None:
    known = {0: 0.8444218515250481, 5: 0.6229016948897019, 2**31 - 1: random.Random(2**31 - 1).random()}
    with GlobalRandom(seed):
        assert random.random() == known[seed]


def test_a_stream_goes_on_where_it_was_left() -> None:
    stream, whole = GlobalRandom(3), random.Random(3)
    for _ in range(4):
        with stream:
            assert random.gauss(0.0, 1.0) == whole.gauss(0.0, 1.0)


def test_two_streams_do_not_see_each_other() -> None:
    pairs = [(GlobalRandom(seed), random.Random(seed)) for seed in (1, 2)]
    for _ in range(3):
        for stream, alone in pairs:
            with stream:
                assert random.random() == alone.random()


def test_the_callers_stream_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="empty"), GlobalRandom(4):
        random.randrange(random.randrange(1))


def test_a_state_that_was_kept_can_be_put_back() -> None:
    stream = GlobalRandom(9)
    kept = stream.state
    with stream:
        first = random.random()
    stream.state = kept
    with stream:
        assert random.random() == first


def test_streams_without_a_seed_differ() -> None:
    with GlobalRandom():
        one = random.random()
    with GlobalRandom():
        assert random.random() != one


def test_numpy_has_a_stream_too() -> None:
    stream, again = GlobalRandoms(6), GlobalRandoms(6)
    with stream:
        first = np.random.rand(), random.random()  # noqa: NPY002
    with again:
        assert (np.random.rand(), random.random()) == first  # noqa: NPY002
    with stream:
        assert np.random.rand() != first[0]  # noqa: NPY002
    stream.seed(6)
    with stream:
        assert np.random.rand() == first[0]  # noqa: NPY002
