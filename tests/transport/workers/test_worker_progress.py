"""How far a worker's lanes have come, by the fragments that were delivered."""

from __future__ import annotations

import numpy as np
import pytest

from freewheel.core import NO_CONTEXT, WORKER_TIME, Episode, NDArray, Transitions
from freewheel.rollout.recording import UNKNOWN
from freewheel.rollout.restoring import LaneStates
from freewheel.seeding import Position, generator, generator_state
from freewheel.transport.wire import After, Fragment
from freewheel.transport.workers.worker_progress import WorkerProgress

RNG = Position(generator(1).bit_generator.state).packed()


def progress(memory: int = 0) -> WorkerProgress:
    return WorkerProgress(2, memory, RNG, NO_CONTEXT, workers=1)


def fragment(
    steps: int, ended: int | None = None, *, after: After | None = None, gap: bool = False, **episode: int
) -> Fragment:
    """ended: the step in which lane 0 ended."""
    shape = (steps, 2)
    over = np.zeros(shape, np.bool_)
    episodes: tuple[Episode, ...] = ()
    if ended is not None:
        over[ended, 0] = True
        episodes = (Episode(episode.get("lane", 0), episode.get("number", 0), 0, (), 0.0, 1, 0.0, ()),)
    data = Transitions(
        obs=np.zeros((*shape, 1)),
        action=np.arange(2 * steps).reshape(shape),
        log_prob=np.zeros(shape),
        reward=np.ones(shape, np.float32),
        terminated=over,
        truncated=np.zeros(shape, np.bool_),
        next_obs=np.zeros((*shape, 1), np.float32),
        valid=np.ones(shape, np.bool_),
    )
    time = np.zeros(len(WORKER_TIME), np.int64)
    return Fragment(0, 0, 0, data, np.zeros((2, 0)), episodes, 2 * steps, {}, gap, time, (), after)


def at(*numbers: int, rng: NDArray | None = None, memory: int = 0) -> After:
    return After(list(numbers), np.zeros((2, memory), np.float32), rng)


def steps(found: WorkerProgress) -> list[int]:
    recorded: list[int] = np.asarray(LaneStates.from_arrays(found.state()).recording["steps"]).tolist()
    return recorded


def test_lanes_go_on_from_fragment_to_fragment_and_begin_anew_where_an_episode_ends() -> None:
    found = progress()
    assert (found.numbers, steps(found), "rng" in found.state()) == ([0, 0], [0, 0], True)
    found.add(fragment(3, after=at(0, 0)), NO_CONTEXT)
    assert (found.numbers, steps(found), "rng" in found.state()) == ([0, 0], [3, 3], False)
    found.add(fragment(3, ended=2, after=at(1, 0, rng=RNG)), NO_CONTEXT)
    assert (found.numbers, steps(found)) == ([1, 0], [0, 6])
    assert found.under_way.tolist() == [False, True]
    assert found.state()["rng"].tolist() == generator_state(generator(1)).tolist()


@pytest.mark.parametrize(
    ("following", "numbers", "known"),
    [
        (fragment(2, after=at(1, 0)), [1, 0], [2, 5]),
        (fragment(3, ended=0, gap=True, after=at(5, 4)), [5, 4], [2, UNKNOWN]),
        (fragment(0, after=at(0, 0)), [0, 0], [3, 3]),
    ],
    ids=["a number that has changed without an end", "an episode that began somewhere in a gap", "an empty fragment"],
)
def test_what_is_known_after_three_steps_and_another(following: Fragment, numbers: list[int], known: list[int]) -> None:
    """A number changes so where a lane could not be brought back, a reset failed or a worker was replaced."""
    found = progress()
    found.add(fragment(3, after=at(0, 0)), NO_CONTEXT)
    found.add(following, NO_CONTEXT)
    assert (found.numbers, steps(found)) == (numbers, known)


@pytest.mark.parametrize(("memory", "known"), [(0, [5, 5]), (2, [UNKNOWN, UNKNOWN])])
def test_the_first_rows_of_an_open_fragment_count_but_a_memory_is_not_known(memory: int, known: list[int]) -> None:
    found = progress(memory)
    found.add(fragment(3, after=at(0, 0, memory=memory)), NO_CONTEXT)
    found.add(fragment(2), NO_CONTEXT)
    assert (found.numbers, steps(found), "rng" in found.state()) == ([0, 0], known, False)
    found.add(fragment(2, ended=1, number=0), NO_CONTEXT)
    assert (found.numbers[0], steps(found)[0]) == (1, 0)


def test_it_goes_on_from_its_state() -> None:
    first, second = progress(), progress()
    first.add(fragment(3, ended=0, after=at(1, 0, rng=RNG)), NO_CONTEXT)
    second.restore({name: np.asarray(value) for name, value in first.state().items()})
    for one in (first, second):
        one.add(fragment(2, after=at(1, 0, rng=RNG)), NO_CONTEXT)
    assert steps(first) == steps(second) == [4, 5]
    for name, value in first.state().items():
        np.testing.assert_array_equal(np.asarray(second.state()[name]), np.asarray(value), err_msg=name)
