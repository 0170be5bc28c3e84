"""RolloutBuffer: batches of exactly S rows, oldest version first, none lost, none doubled, joined where they belong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freewheel.core import TRANSITION_FIELDS, Chunk, NDArray, Transitions
from freewheel.learn.ppo.rollout_buffer import RolloutBatch, RolloutBuffer, cut, join
from tests.support.learning import sign, to_tensors


def numbered(first: int, steps: int, lanes: int, valid: NDArray | None = None) -> Transitions:
    """Rows with numbers first, first + 1, ...; every field follows from the number, gaps hold rubbish."""
    number = np.arange(first, first + steps * lanes).reshape(steps, lanes)
    valid = np.ones((steps, lanes), np.bool_) if valid is None else valid
    number = np.where(valid, number, -999)
    return Transitions(
        obs=np.stack([number, -number], axis=-1).astype(np.float32),
        action=number + 1,
        log_prob=number.astype(np.float32) / 2,
        reward=number.astype(np.float32) / 4,
        terminated=number % 3 == 0,
        truncated=number % 5 == 0,
        next_obs=np.stack([number + 1, number], axis=-1).astype(np.float32),
        valid=valid,
    )


def check_fields(data: Transitions) -> list[int]:
    """The numbers of the valid rows, after a look whether every field is still aligned."""
    number = data.obs[data.valid][:, 0].astype(int)
    one = numbered(0, 1, 1)
    expected = [numbered(int(n), 1, 1) for n in number]
    for name in (slot for slot in one.__slots__ if slot != "valid"):
        found = getattr(data, name)
        assert found.dtype == getattr(one, name).dtype
        for row, model in zip(found[data.valid], expected, strict=True):
            assert np.array_equal(row, getattr(model, name)[0, 0])
    return [int(n) for n in number]


def columns(batch: RolloutBatch) -> list[list[int]]:
    """The numbers in every lane of a batch, -1 in gaps."""
    return [[int(n) for n in column] for column in np.where(batch.data.valid, batch.data.obs[..., 0], -1).T]


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, NDArray]]:
    """(worker, valid [T, B]) in order of arrival; worker w has w + 1 lanes."""
    found = []
    for worker in draw(st.lists(st.integers(0, 2), min_size=1, max_size=8)):
        steps = draw(st.integers(1, 5))
        bits = draw(st.lists(st.booleans(), min_size=steps * (worker + 1), max_size=steps * (worker + 1)))
        found.append((worker, np.array(bits).reshape(steps, worker + 1) | draw(st.booleans())))
    return found


def deliveries(found: list[tuple[int, NDArray]]) -> Iterator[Chunk]:
    number, sequence = 0, Counter[int]()
    for turn, (worker, valid) in enumerate(found):
        data = numbered(number, len(valid), worker + 1, valid)
        yield sign(data, version=turn // 3, worker=worker, sequence=sequence[worker], lane0=10 * worker)
        sequence[worker] += 1
        number += valid.size


@given(found=arrivals(), size=st.integers(1, 12))
def test_every_row_is_taken_once_in_batches_of_exactly_s(found: list[tuple[int, NDArray]], size: int) -> None:
    buffer, came, taken = RolloutBuffer[NDArray](), Counter[int](), Counter[int]()
    for chunk in deliveries(found):
        buffer.add(chunk)
        came.update(check_fields(chunk.data))
        while buffer.rows >= size:
            numbers = check_fields(buffer.take(size).data)
            assert len(numbers) == size
            taken.update(numbers)
            assert buffer.rows == came.total() - taken.total()
    if buffer.rows:
        taken.update(check_fields(buffer.take(buffer.rows).data))
    assert buffer.rows == 0
    assert taken == came
    assert not taken or max(taken.values()) == 1


@given(found=arrivals(), size=st.integers(1, 12))
def test_older_versions_go_first(found: list[tuple[int, NDArray]], size: int) -> None:
    buffer: RolloutBuffer = RolloutBuffer()
    chunks = list(deliveries(found))
    for chunk in reversed(chunks):
        buffer.add(chunk)
    version = {number: chunk.version for chunk in chunks for number in check_fields(chunk.data)}
    order: list[int] = []
    while buffer.rows >= size:
        batch = buffer.take(size)
        stamps = batch.flatten(batch.version).tolist()
        assert stamps == [version[number] for number in check_fields(batch.data)]
        order.extend(sorted(stamps))
    assert order == sorted(version.values())[: len(order)]


def test_within_a_version_the_first_to_come_goes_first() -> None:
    buffer: RolloutBuffer = RolloutBuffer()
    for worker, version in ((5, 1), (3, 0), (4, 1), (1, 0)):
        buffer.add(sign(numbered(worker, 1, 1), worker=worker, version=version))
    assert [columns(buffer.take(1)) for _ in range(4)] == [[[3]], [[1]], [[5]], [[4]]]


@given(found=arrivals())
def test_flatten_and_spread_are_inverse(found: list[tuple[int, NDArray]]) -> None:
    chunks = list(deliveries(found))
    batch = join(chunks)
    flat = batch.flatten(batch.data.reward)
    assert len(flat) == sum(chunk.rows for chunk in chunks)
    spread = batch.spread(flat)
    assert np.array_equal(spread, np.where(batch.data.valid, batch.data.reward, 0))
    assert np.array_equal(batch.flatten(spread), flat)
    assert batch.flatten(batch.data.obs).shape == (len(flat), 2)


def test_a_batch_without_gaps_is_flattened_without_a_copy() -> None:
    chunk = sign(numbered(0, 3, 2))
    batch = join([chunk])
    assert np.shares_memory(batch.flatten(batch.data.obs), chunk.data.obs)


GAPS = np.array([[0, 0], [1, 0], [0, 1], [1, 1], [0, 0]], np.bool_)


@pytest.mark.parametrize(
    ("data", "at", "first", "rest"),
    [
        (numbered(0, 3, 3), 4, [[0, 3], [1, -1], [2, -1]], [[-1, 6], [4, 7], [5, 8]]),
        (numbered(0, 3, 3), 6, [[0, 3], [1, 4], [2, 5]], [[6], [7], [8]]),
        (numbered(0, 5, 2, GAPS), 2, [[-1, 2, -1], [-1, -1, 5]], [[6, -1], [7, -1]]),
    ],
    ids=["through a step", "between steps", "gaps are not counted"],
)
def test_a_chunk_is_cut_in_two(data: Transitions, at: int, first: list[list[int]], rest: list[list[int]]) -> None:
    chunk = sign(data, sequence=7, version=4)
    parts = cut(chunk, at)
    assert [columns(join([part])) for part in parts] == [first, rest]
    assert [part.rows for part in parts] == [at, chunk.rows - at]
    assert all((part.origin, part.version) == (chunk.origin, 4) for part in parts)


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        ([(10, 1, 2, {"sequence": 3, "version": 1}), (0, 2, 2, {"sequence": 2})], [[0, 2, 10], [1, 3, 11]]),
        ([(0, 2, 1, {}), (10, 3, 1, {"sequence": 2})], [[0, 1, -1], [10, 11, 12]]),
        ([(0, 2, 1, {}), (10, 3, 1, {"sequence": 1, "worker": 1})], [[0, 1, -1], [10, 11, 12]]),
        ([(0, 2, 1, {}), (10, 3, 1, {"sequence": 1, "incarnation": 1})], [[0, 1, -1], [10, 11, 12]]),
        ([(0, 2, 1, {}), (10, 3, 1, {"sequence": 1, "lane0": 8})], [[0, 1, -1], [10, 11, 12]]),
        ([(10 * k, 1, 1, {"sequence": k}) for k in (0, 1, 3, 4)], [[0, 10], [30, 40]]),
        ([(0, 1, 2, {}), (10, 3, 1, {"worker": 1}), (20, 1, 2, {"sequence": 1})],
         [[0, 20, -1], [1, 21, -1], [10, 11, 12]]),
    ],
    ids=["one author", "a missing chunk", "another worker", "another incarnation", "other lanes", "again", "widths"],
)  # fmt: skip
def test_consecutive_chunks_of_one_author_share_columns_and_others_stand_apart(
    parts: list[tuple[int, int, int, dict[str, int]]], joined: list[list[int]]
) -> None:
    batch = join([sign(numbered(first, steps, lanes), slice(None), **author) for first, steps, lanes, author in parts])
    assert columns(batch) == joined
    check_fields(batch.data)
    for first, _, _, author in parts:
        at = batch.data.valid & (batch.data.obs[..., 0] == first)
        assert batch.version[at].tolist() == [author.get("version", 0)]


def test_the_rest_of_a_cut_chunk_is_joined_to_what_follows() -> None:
    buffer: RolloutBuffer = RolloutBuffer()
    buffer.add(sign(numbered(0, 3, 2), sequence=0))
    buffer.add(sign(numbered(10, 2, 2), sequence=1))
    assert columns(buffer.take(3)) == [[0, 2], [1, -1]]
    assert columns(buffer.take(7)) == [[-1, 4, 10, 12], [3, 5, 11, 13]]


def test_the_rest_of_a_cut_chunk_is_next() -> None:
    buffer: RolloutBuffer = RolloutBuffer()
    for worker in (0, 1):
        buffer.add(sign(numbered(10 * worker, 3, 2), worker=worker))
    assert [columns(buffer.take(3)) for _ in range(3)] == [[[0, 2], [1, -1]], [[-1, 4], [3, 5]], [[10, 12], [11, -1]]]


def test_what_is_too_old_is_given_up_and_counted() -> None:
    buffer: RolloutBuffer = RolloutBuffer()
    for version, first in ((3, 0), (1, 10), (2, 20)):
        buffer.add(sign(numbered(first, 2, 2), version=version))
    assert buffer.expire(1) == 0
    assert buffer.expire(2) == 4
    assert buffer.rows == 8
    assert sorted(check_fields(buffer.take(8).data)) == [0, 1, 2, 3, 20, 21, 22, 23]


def test_whole_chunks_are_taken_oldest_version_first() -> None:
    buffer: RolloutBuffer = RolloutBuffer()
    for sequence, (version, steps) in enumerate([(2, 3), (1, 5), (1, 2)]):
        buffer.add(sign(numbered(100 * sequence, steps, 1), version=version, worker=sequence))
    assert buffer.episodes == 3
    assert columns(buffer.take_episodes(2)) == [[100, 101, 102, 103, 104], [200, 201, -1, -1, -1]]
    assert (buffer.episodes, buffer.rows) == (1, 3)


def test_episodes_that_stood_side_by_side_are_taken_by_lanes() -> None:
    """Two chunks of three episodes of two steps: four are taken, the two others are left for the next update."""
    buffer: RolloutBuffer = RolloutBuffer()
    for sequence in range(2):
        buffer.add(sign(numbered(100 * sequence, 2, 3), sequence=sequence))
    batch = buffer.take_episodes(4)
    assert columns(batch) == [[0, 3], [1, 4], [2, 5], [100, 103]]
    check_fields(batch.data)
    assert (buffer.episodes, buffer.rows, buffer.available) == (2, 4, 4)
    assert columns(buffer.take_episodes(2)) == [[101, 104], [102, 105]]


def test_tensors_are_cut_and_joined_like_arrays() -> None:
    """Three fragments of ten steps are one batch of 24 steps and six steps of the next."""
    numpy: RolloutBuffer = RolloutBuffer()
    tensors: RolloutBuffer[Any] = RolloutBuffer(3)
    for sequence in range(5):
        chunk = sign(numbered(100 * sequence, 10, 3), sequence=sequence, version=sequence // 2)
        numpy.add(chunk)
        tensors.add(to_tensors(chunk))
    for _ in range(2):
        ours, theirs = numpy.take(72), tensors.take(72)
        assert theirs.data.obs.shape == (24, 3, 2)
        assert np.array_equal(ours.version, theirs.version)
        for name in TRANSITION_FIELDS:
            assert np.array_equal(getattr(ours.data, name), getattr(theirs.data, name).numpy())
    assert (tensors.rows, tensors.available) == (numpy.rows, numpy.available) == (6, 6)


def split(chunk: Chunk[Any], parts: int) -> list[Chunk[Any]]:
    """By lanes, each part by an author of its own."""
    width = chunk.data.reward.shape[1] // parts
    found = []
    for part in range(parts):
        lanes = slice(part * width, (part + 1) * width)
        data = Transitions(**{name: getattr(chunk.data, name)[:, lanes] for name in TRANSITION_FIELDS})
        origin = replace(chunk.origin, worker=part, lane0=part * width)
        found.append(replace(chunk, data=data, origin=origin, rows=data.reward.numel()))
    return found


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_by_lanes_wait_for_each_other(parts: int) -> None:
    chunk = to_tensors(sign(numbered(0, 4, 3), version=2))
    buffer: RolloutBuffer[Any] = RolloutBuffer(3)
    for part in split(chunk, parts):
        assert buffer.available == 0
        buffer.add(part)
        assert buffer.rows == 4 * (3 * (part.origin.worker + 1) // parts)
    batch = buffer.take(12)
    assert all(torch.equal(getattr(batch.data, name), getattr(chunk.data, name)) for name in TRANSITION_FIELDS)
