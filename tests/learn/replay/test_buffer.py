"""Replay keeps the newest rows, draws every one of them as often as any other, and forgets by version."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freewheel.core import Transitions
from freewheel.errors import SetupError
from freewheel.learn.replay import buffer as module
from freewheel.learn.replay.buffer import ReplayBuffer
from freewheel.learn.replay.rows import Columns, Drawn, pack
from tests.support.learning import sign, to_tensors
from tests.support.numbered_rows import COLUMNS, assert_drawn_like, frequencies, names, numbered, restore

SHAPE = (5, 3)


def replay_of(capacity: int, seed: int = 0) -> ReplayBuffer:
    return ReplayBuffer(capacity, COLUMNS, "cpu", seed)


def test_rows_are_copied() -> None:
    replay, rows = replay_of(4), numbered(0, 3).clone()
    replay.add(rows)
    rows.fill_(-1)
    replay.sample(50).fill_(-2)
    replay.newest(3).fill_(-3)
    assert names(replay.newest(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("filled", "oldest", "expected"),
    [
        ([40], 0, range(40)), ([100], 0, range(100)), ([100, 37], 0, range(37, 137)),
        ([60, 30, 45], 1, range(60, 135)), ([60, 30, 45], 2, range(90, 135)), ([90, 70], 1, range(90, 160)),
    ],
    ids=["partly full", "full", "wrapped", "expired", "expired twice", "expired over the wrap"],
)  # fmt: skip
def test_all_rows_that_are_there_are_drawn_alike(filled: list[int], oldest: int, expected: range) -> None:
    replay = replay_of(100)
    for version, rows in enumerate(filled):
        replay.add(numbered(replay.added, replay.added + rows), version)
    replay.expire(oldest)
    assert replay.count == len(expected)
    assert names(replay.newest(replay.count)) == list(expected)
    assert_drawn_like(frequencies(replay, 8_000), np.full(len(expected), 1 / len(expected)))


class Listed:
    """The model: a plain list of (name, version)."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.rows = capacity, list[tuple[int, int]]()

    def add(self, new: range, version: int) -> None:
        self.rows = [*self.rows, *((name, version) for name in new)][-self.capacity :]

    def expire(self, oldest: int) -> int:
        before, self.rows = len(self.rows), [row for row in self.rows if row[1] >= oldest]
        return before - len(self.rows)

    @property
    def names(self) -> list[int]:
        return [name for name, _ in self.rows]


Adding = st.tuples(st.just("add"), st.integers(0, 12), st.integers(0, 2))
Expiring = st.tuples(st.just("expire"), st.integers(-3, 1), st.just(0))
Restoring = st.tuples(st.just("restore"), st.just(0), st.just(0))


@settings(max_examples=120)
@given(capacity=st.integers(1, 9), moves=st.lists(st.one_of(Adding, Expiring, Restoring), max_size=12))
def test_it_is_a_list(capacity: int, moves: list[tuple[str, int, int]]) -> None:
    replay, model = replay_of(capacity), Listed(capacity)
    named = version = 0
    for kind, number, step in moves:
        if kind == "add":
            version += step
            replay.add(numbered(named, named + number), version)
            model.add(range(named, named + number), version)
            named += number
        elif kind == "expire":
            assert replay.expire(version + number) == model.expire(version + number)
        else:
            before, replay = replay, replay_of(capacity, seed=9)
            replay.add(numbered(50, 53), 7)
            restore(replay, before)
            assert before.added or replay._span.tolist() == [0, 0], "there is something to draw"
        assert (replay.added, replay.count) == (named, len(model.names))
        assert names(replay.newest(replay.count)) == model.names
        if model.names:
            assert names(replay.newest(1)) == model.names[-1:]
            assert {*names(replay.sample(40))} <= {*model.names}


def test_a_buffer_that_does_not_fit_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(available=30_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert replay_of(1_000).bytes == 24_000 == int(module.SHARE * free.available)
    free.available, made = 29_999, list[Any]()
    monkeypatch.setattr(torch, "zeros", made.append)
    with pytest.raises(
        SetupError, match=r"^a replay buffer of 1,000 rows takes 0\.0 GB of memory and 0\.0 GB are free;"
    ):
        replay_of(1_000)
    assert not made, "memory was taken before the refusal"
    free.available = 3 * 2**30
    with pytest.raises(
        SetupError, match=r"^a thing takes 2\.5 GB of memory and 3\.0 GB are free; set a smaller buffer$"
    ):
        module.require_room(5 * 2**29, "cpu", "a thing")


def test_before_rows_are_overwritten_somebody_is_told() -> None:
    replay, told = replay_of(10), list[tuple[int, list[int]]]()

    def look(below: int) -> None:
        told.append((below, names(torch.as_tensor(replay.read(replay.added - replay.count, replay.added)))))

    replay.before_overwriting = look
    for rows in (8, 3, 25):
        replay.add(numbered(replay.added, replay.added + rows))
    assert told == [(-2, []), (1, list(range(8))), (26, list(range(1, 11)))]


def packed(data: Any, *, has_final_obs: bool = True) -> Tensor:
    return Columns(4, 2).pack(data, "cpu", has_final_obs=has_final_obs)


def transitions(dtype: str = "float32") -> Transitions:
    rng = np.random.default_rng(0)
    terminated, truncated = np.zeros((2, *SHAPE), np.bool_)
    terminated[1, 0] = truncated[2, 2] = truncated[4, 1] = terminated[4, 2] = True
    return Transitions(
        obs=rng.integers(0, 200, (*SHAPE, 4)).astype(dtype),
        action=rng.normal(size=(*SHAPE, 2)).astype(np.float32),
        log_prob=rng.normal(size=SHAPE).astype(np.float32),
        reward=rng.normal(size=SHAPE).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        next_obs=rng.integers(0, 200, (*SHAPE, 4)).astype(dtype),
        valid=np.ones(SHAPE, np.bool_),
    )


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_what_is_packed_comes_apart_again_without_its_gaps(dtype: str) -> None:
    valid = np.ones(SHAPE, np.bool_)
    valid[0, 1] = valid[2, 0] = valid[4] = False
    data = replace(transitions(dtype), valid=valid)
    rows = packed(data)
    assert rows.shape == (10, Columns(4, 2).width)
    assert rows.dtype == torch.float32
    batch = Columns(4, 2).split(rows)
    for name in ("obs", "action", "reward", "terminated", "next_obs"):
        np.testing.assert_array_equal(getattr(batch, name).numpy(), getattr(data, name)[valid], name)
    assert torch.equal(batch.has_successor, torch.ones(10))


def test_rows_that_are_packed_share_no_memory_with_the_chunk() -> None:
    data = transitions()
    rows = packed(data)
    before = rows.clone()
    data.obs[...] = data.action[...] = data.reward[...] = -1
    assert torch.equal(rows, before)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("has_final_obs", [False, True])
def test_successors_are_unknown_exactly_where_an_end_hides_them(tensors: bool, has_final_obs: bool) -> None:
    data = transitions()
    over = data.terminated | data.truncated
    given = to_tensors(sign(data)).data if tensors else data
    batch = Columns(4, 2).split(packed(given, has_final_obs=has_final_obs))
    np.testing.assert_array_equal(
        batch.has_successor.numpy().reshape(SHAPE), np.ones(SHAPE) if has_final_obs else ~over
    )
    np.testing.assert_array_equal(batch.terminated.numpy().reshape(SHAPE), data.terminated)
    np.testing.assert_array_equal(batch.obs.numpy().reshape(*SHAPE, 4), data.obs)
    np.testing.assert_array_equal(batch.next_obs.numpy().reshape(*SHAPE, 4), data.next_obs)


@pytest.mark.parametrize("steps", [False, True])
def test_the_future_is_discounted_and_ends_with_the_world(steps: bool) -> None:
    columns, generator = Columns(4, 2), torch.Generator().manual_seed(0)
    obs, next_obs = torch.randn(2, 6, 4, generator=generator)
    action, reward = torch.randn(6, 2, generator=generator), torch.randn(6, generator=generator)
    rows = pack(obs, action, reward, torch.tensor([0, 1, 0, 1, 0, 0]), torch.ones(6), next_obs)
    drawn = Drawn(rows[:4], torch.tensor([0.5, 0.25, 0.75, 0.5]) if steps else None)
    batch = drawn.and_also(rows[4:], 0.97).minibatch(columns, 0.97)
    one = float(np.float32(0.97))
    assert batch.discount.tolist() == [0.5 if steps else one, 0, 0.75 if steps else one, 0, one, one]
    for name, part in {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs}.items():
        assert torch.equal(getattr(batch, name), part)
    assert batch.weight is None
    assert batch.places is None


def test_rows_beside_those_of_the_buffer_weigh_1() -> None:
    rows, index = numbered(0, 5), torch.tensor([7, 8])
    batch = Drawn(rows[:2], None, torch.tensor([0.5, 1.5]), index).and_also(rows[2:], 0.9).minibatch(COLUMNS, 0.9)
    assert batch.weight is not None
    assert batch.weight.tolist() == [0.5, 1.5, 1, 1, 1]
    assert batch.places is index
