"""Returns over several steps, against sums by hand: where episodes end, where lanes mix, and where the ring wraps."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.core import Transitions
from freewheel.learn.replay.buffer import ReplayBuffer
from freewheel.learn.replay.n_step import Successors
from tests.support.learning import sign, to_tensors
from tests.support.numbered_rows import COLUMNS, restore

GAMMA = 0.5


def ring(capacity: int, lanes: int, steps: int) -> ReplayBuffer:
    successors = Successors(capacity, lanes, "cpu", steps=steps, gamma=GAMMA)
    return ReplayBuffer(capacity, COLUMNS, "cpu", 0, successors=successors)


def story(lanes: list[str]) -> Transitions:
    """A lane is a word: a letter for every step. '.' goes on, 'x' terminates, 't' truncates, '-' is a gap, '!' loses what
    comes between; 'X' and 'T' end where the next episode happens to begin. The reward of step t is 1 + t, that of lane b 100 b
    more; observations name lane and step."""
    steps, shape = len(lanes[0]), (len(lanes[0]), len(lanes))
    kind = np.array([list(lane) for lane in lanes]).T
    number = 1 + np.arange(steps)[:, None] + 100.0 * np.arange(len(lanes))
    obs, after = number[..., None], number[..., None] + 1 + 0.5 * np.isin(kind, ["x", "t", "!"])[..., None]
    return Transitions(
        obs=obs.astype(np.float32),
        action=np.zeros((*shape, 1), np.float32),
        log_prob=np.zeros(shape, np.float32),
        reward=number.astype(np.float32),
        terminated=np.isin(kind, ["x", "X"]),
        truncated=np.isin(kind, ["t", "T"]),
        next_obs=after.astype(np.float32),
        valid=kind != "-",
    )


def cut(data: Transitions, steps: slice, lanes: slice = slice(None)) -> Transitions:
    return Transitions(*(getattr(data, part.name)[steps, lanes] for part in fields(Transitions)))


def add(replay: ReplayBuffer, data: Transitions, lane0: int = 0, *, tensors: bool = False, final: bool = True) -> None:
    given = to_tensors(sign(data)).data if tensors else data
    rows = COLUMNS.pack(given, "cpu", has_final_obs=final)
    replay.add(rows)
    replay.follow(given, lane0, rows)


def told(replay: ReplayBuffer) -> dict[float, tuple[float, float, float]]:
    """By the observation of a row: its return, the discount of what follows, and what follows."""
    batch = replay.draw(60 * replay.count).minibatch(COLUMNS, GAMMA)
    parts = (batch.obs[:, 0], batch.reward, batch.discount, batch.next_obs[:, 0])
    found = {float(obs): (float(r), float(d), float(n)) for obs, r, d, n in zip(*parts, strict=True)}
    assert len(found) == replay.count, "not every row was drawn"
    return found


def by_hand(data: Transitions, steps: int, *, final: bool = True) -> dict[float, tuple[float, float, float]]:
    """The same by a walk along each lane."""
    found = {}
    for lane in range(data.valid.shape[1]):
        for start in np.flatnonzero(data.valid[:, lane]):
            total, discount, t = 0.0, 1.0, int(start)
            while True:
                total += discount * float(data.reward[t, lane])
                discount *= GAMMA
                over = t + 1 >= len(data.valid) or data.terminated[t, lane] or data.truncated[t, lane]
                if over or t + 1 - start >= steps or not data.valid[t + 1, lane]:
                    break
                if data.obs[t + 1, lane, 0] != data.next_obs[t, lane, 0]:
                    break  # something was lost
                if not final and data.truncated[t + 1, lane]:
                    break
                t += 1
            end = 0.0 if data.terminated[t, lane] else discount
            found[float(data.obs[start, lane, 0])] = (total, end, float(data.next_obs[t, lane, 0]))
    return found


LANES = ["..x...t..x....", ".............x", "tx.......t...."]


@pytest.mark.parametrize("tensors", [False, True])
def test_authors_may_take_turns(tensors: bool) -> None:
    """Lanes 0 and 1 of one author, lane 2 of another, in fragments of different lengths."""
    data, replay = story(LANES), ring(60, 3, 4)
    for begin in (0, 7):
        add(replay, cut(data, slice(begin, begin + 7), slice(2, 3)), 2, tensors=tensors)
        for step in range(begin, begin + 7):
            add(replay, cut(data, slice(step, step + 1), slice(0, 2)), tensors=tensors)
    assert told(replay) == by_hand(data, 4)


def test_a_row_whose_successor_is_hidden_ends_the_sum_before_it() -> None:
    """Where the world does not show the last observation: the value of the last row's own observation is the better end."""
    data, replay = story(["..t..x.."]), ring(20, 1, 3)
    add(replay, data, final=False)
    found = told(replay)
    assert found == by_hand(data, 3, final=False)
    assert found[2.0] == (2.0, 1 / 2, 3.0)
    assert found[5.0] == (5 + 6 / 2, 0.0, 7.5), "a terminated row needs no successor"


Words = st.text(alphabet="....xtXT-!", min_size=9, max_size=9)


@settings(max_examples=60)
@given(
    lanes=st.lists(Words, min_size=1, max_size=3), capacity=st.integers(1, 30), steps=st.integers(2, 6),
    pieces=st.lists(st.integers(1, 4), min_size=9, max_size=9), again=st.integers(0, 8),
)  # fmt: skip
def test_any_story_in_any_pieces(lanes: list[str], capacity: int, steps: int, pieces: list[int], again: int) -> None:
    data, replay, begin = story(lanes), ring(capacity, len(lanes), steps), 0
    for number, piece in enumerate(pieces):
        add(replay, cut(data, slice(begin, begin + piece)))
        begin += piece
        if number == again:
            before, replay = replay, ring(capacity, len(lanes), steps)
            restore(replay, before)
        if begin >= 9:
            break
    expected = by_hand(cut(data, slice(0, min(begin, 9))), steps)
    if replay.count:
        kept = told(replay)
        assert kept == {obs: expected[obs] for obs in kept}


@pytest.mark.parametrize("after", [8, 12, 30])
def test_a_restored_buffer_knows_successors_whatever_its_capacity(after: int) -> None:
    data, replay = story(LANES), ring(12, 3, 3)
    add(replay, cut(data, slice(0, 10)))
    before, replay = replay, ring(after, 3, 3)
    restore(replay, before)
    add(replay, cut(data, slice(10, 14)))
    expected, kept = by_hand(data, 3), told(replay)
    assert kept == {obs: expected[obs] for obs in kept}
    assert sum(row[1] == GAMMA**3 for row in kept.values()) >= 1


def test_one_step_is_the_row_itself() -> None:
    data = story(LANES)
    several, plain = ring(50, 3, 1), ReplayBuffer(50, COLUMNS, "cpu", 0)
    for replay in (several, plain):
        add(replay, data)
    one, other = several.draw(500), plain.draw(500)
    assert torch.equal(one.rows, other.rows)
    assert other.discount is None
    assert torch.equal(*(drawn.minibatch(COLUMNS, GAMMA).discount for drawn in (one, other)))
