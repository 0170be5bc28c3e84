"""DeviceRunner over a world whose every row can be written down: its rows, its accounts, its memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import WORKER_TIME, Chunk, Compile, NDArray, Transitions
from freewheel.errors import EnvError
from freewheel.policies.nets import TensorActor
from freewheel.rollout.device_runner import DeviceRunner, as_numpy
from freewheel.seeding import training_episodes
from freewheel.testing.conformance import AnyRunner, check_runner
from tests.support.device_story import SEED, Stage, retold
from tests.support.isaac_like import Traps

FIELDS = [field.name for field in fields(Transitions) if field.name != "log_prob"]
ROOM = 8


def runner_of(stage: Stage, compile: Compile = "off") -> DeviceRunner:  # noqa: A002
    runner = DeviceRunner(stage.recipe, range(stage.lanes), ROOM, compile)
    runner.load(stage.snapshot(3))
    return runner


def joined(chunks: Sequence[Chunk[Tensor]], name: str) -> NDArray:
    return np.concatenate([getattr(chunk.data, name).numpy() for chunk in chunks])


def played(stage: Stage, lengths: Sequence[int]) -> list[Chunk[Tensor]]:
    with closing(runner_of(stage)) as runner:
        return [runner.unroll(steps) for steps in lengths]


def assert_rows(chunks: Sequence[Chunk[Tensor]], *, has_final_obs: bool = True) -> None:
    wanted = retold(joined(chunks, "action"), has_final_obs=has_final_obs).data
    for name in FIELDS:
        got = joined(chunks, name)
        np.testing.assert_array_equal(got, getattr(wanted, name), name)
        assert got.dtype == getattr(wanted, name).dtype


@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_it_keeps_the_promises_of_a_runner(compile: Compile) -> None:  # noqa: A002
    stage = Stage()

    def make() -> AnyRunner:
        return runner_of(stage, compile)  # type: ignore[return-value] # tensors on a CPU are arrays to the kit

    check_runner(make, stage.snapshot(3))
    assert stage.closed == [1, 1]


@pytest.mark.parametrize("lengths", [(8, 8, 8, 8), (1,) * 30, (5, 1, 8, 3, 7, 6)], ids=str)
def test_rows_are_what_happened_however_they_are_cut(lengths: Sequence[int]) -> None:
    stage = Stage()
    chunks = played(stage, lengths)
    assert [len(chunk.data.reward) for chunk in chunks] == list(lengths)
    assert_rows(chunks)
    assert len(set(joined(chunks, "action").ravel().tolist())) == 4 * sum(lengths)  # nobody repeats itself


@pytest.mark.parametrize("has_final_obs", [True, False])
@pytest.mark.parametrize("views", [True, False])
def test_rows_are_what_happened_whatever_the_world_does_to_its_buffers(has_final_obs: bool, views: bool) -> None:
    stage = Stage(Traps(has_final_obs=has_final_obs, views=views))
    assert_rows(played(stage, (8, 3, 8, 8)), has_final_obs=has_final_obs)
    assert stage.spec.has_final_obs is has_final_obs


def test_the_world_is_given_the_actions_that_are_written_down() -> None:
    stage = Stage()
    chunks = played(stage, (8, 8))
    given = torch.stack(stage.worlds[0].journal.actions).numpy()
    np.testing.assert_array_equal(given, joined(chunks, "action"))


def test_log_probs_are_those_of_the_weights_that_were_loaded() -> None:
    stage = Stage()
    with closing(runner_of(stage)) as runner:
        chunks = []
        for version in (3, 4):
            runner.load(stage.snapshot(version))
            chunks.append(runner.unroll(6))
    actor = stage.recipe.actor()
    assert isinstance(actor, TensorActor)
    for chunk in chunks:
        actor.load(stage.snapshot(chunk.version))
        obs = chunk.data.obs.flatten(0, 1)
        wanted = actor.policy.distribution(obs).log_prob(chunk.data.action.flatten(0, 1)).detach()
        torch.testing.assert_close(chunk.data.log_prob.flatten(), wanted)
    assert [chunk.version for chunk in chunks] == [3, 4]


def test_a_chunk_owns_its_memory() -> None:
    """Whatever is launched later."""
    with closing(runner_of(Stage())) as runner:
        chunks: list[Chunk[Tensor]] = []
        copies: list[dict[str, Tensor]] = []
        for _ in range(4):
            chunks.append(runner.unroll(ROOM))
            copies.append({name: getattr(chunks[-1].data, name).clone() for name in FIELDS})
        written = runner.launch(ROOM)
        kept = written.endings.ret.clone(), written.data.obs.clone()
        runner.launch(ROOM)
        assert torch.equal(written.endings.ret, kept[0])
        assert torch.equal(written.data.obs, kept[1])
    for chunk, copy in zip(chunks, copies, strict=True):
        assert all(torch.equal(getattr(chunk.data, name), value) for name, value in copy.items())
    places = [{getattr(chunk.data, name).untyped_storage().data_ptr() for name in FIELDS} for chunk in chunks]
    assert all(here.isdisjoint(there) for here, there in itertools.combinations(places, 2))


@pytest.mark.parametrize("lengths", [(8, 8, 8, 8), (1,) * 32, (3, 8, 2, 8, 8, 3)], ids=str)
def test_episodes_are_told_with_the_chunk_they_end_in(lengths: Sequence[int]) -> None:
    chunks = played(Stage(), lengths)
    wanted, row = retold(joined(chunks, "action")).episodes, 0
    for chunk in chunks:
        steps = len(chunk.data.reward)
        assert chunk.episodes == tuple(itertools.chain.from_iterable(wanted[row : row + steps]))
        row += steps
    assert len({(episode.lane, episode.number) for told in wanted for episode in told}) == sum(map(len, wanted)) > 20


def test_episodes_are_told_even_if_they_are_signed_later() -> None:
    """A launch may be under way while the one before it is signed."""
    with closing(runner_of(Stage())) as runner:
        launched = [runner.launch(ROOM) for _ in range(3)]
        chunks = [runner.sign(written) for written in launched]
    wanted = retold(joined(chunks, "action")).episodes
    assert [chunk.episodes for chunk in chunks] == [
        tuple(itertools.chain.from_iterable(wanted[begin : begin + ROOM])) for begin in (0, 8, 16)
    ]


def test_it_counts_signs_and_numbers_what_it_writes() -> None:
    stage = Stage(lanes=3)
    with closing(runner_of(stage)) as runner:
        for number, steps in enumerate((4, 1, 8)):
            before = runner.produced
            chunk = runner.unroll(steps)
            assert (runner.produced - before, runner.open, chunk.rows) == (3 * steps, 0, 3 * steps)
            assert (chunk.version, chunk.origin.sequence, chunk.origin.worker, chunk.origin.lane0) == (3, number, 0, 0)
            assert (tuple(chunk.state.shape), chunk.time.shape) == ((3, 0), (len(WORKER_TIME),))
            assert (chunk.time >= 0).all()
            assert chunk.time[WORKER_TIME.index("step")] > 0
        begun = training_episodes(SEED, 0).seed(0)
        assert stage.worlds[0].journal.seeds == [0, begun]  # one reset of ours; the others are its own


def test_time_is_told_once() -> None:
    with closing(runner_of(Stage())) as runner:
        waiting = WORKER_TIME.index("wait-credit")
        runner.spend(waiting, 7)
        assert [int(runner.unroll(1).time[waiting]) for _ in range(2)] == [7, 0]


def test_without_a_gpu_graphs_fall_back_and_nothing_else_changes() -> None:
    told = []
    for compile in ("off", "graphs"):  # noqa: A001
        with closing(runner_of(Stage(), compile)) as runner:
            told.append((runner.unroll(ROOM).data.action, runner.fallbacks))
    assert torch.equal(told[0][0], told[1][0])
    assert [fallbacks for _, fallbacks in told] == [[], ["its tensors are not on a GPU"]]


def test_a_world_that_cannot_be_captured_is_stepped_apart() -> None:
    stage, apart = Stage(), Stage()
    make: Any = apart.make

    def uncapturable(lanes: range, **_: bool) -> Any:
        env = make(lanes)
        apart.worlds[-1].metadata = {"render_modes": []}
        return env

    object.__setattr__(apart.recipe, "make", uncapturable)
    chunks, others = played(stage, (8, 8)), played(apart, (8, 8))
    for name in FIELDS:
        np.testing.assert_array_equal(joined(chunks, name), joined(others, name))


def test_ashore_plays_the_same_numbers_in_numpy() -> None:
    stage = Stage()
    env = as_numpy(stage.make(range(4)))
    obs = env.reset([training_episodes(SEED, lane) for lane in range(4)])
    rng = np.random.default_rng(0)
    actions = rng.normal(size=(20, 4, 1)).astype(np.float32)
    wanted = retold(actions).data
    kept = []
    for row, action in enumerate(actions):
        assert isinstance(obs, np.ndarray)
        np.testing.assert_array_equal(obs, wanted.obs[row])
        step = env.step(action.copy())
        for name in ("reward", "terminated", "truncated", "next_obs", "valid"):
            assert isinstance(getattr(step, name), np.ndarray)
            np.testing.assert_array_equal(getattr(step, name), getattr(wanted, name)[row])
        kept.append(step)
        obs = env.autoreset()
    np.testing.assert_array_equal(np.stack([step.next_obs for step in kept]), wanted.next_obs)  # each its own memory
    over = wanted.terminated | wanted.truncated
    measured = np.stack([step.measures for step in kept])
    np.testing.assert_array_equal(measured[over][:, 0], wanted.next_obs[over][:, 0])
    env.close()
    assert stage.closed == [1]


def test_a_number_that_is_not_finite_is_an_error_and_its_rows_stay_in_the_books() -> None:
    stage = Stage()
    with closing(DeviceRunner(stage.recipe, range(stage.spec.lanes), 4)) as runner:
        runner.load(stage.snapshot(0))
        first = runner.launch(4)
        first.data.reward[2, 1] = torch.nan
        with pytest.raises(EnvError, match=r"lane 1 of .*, row 2 of chunk 0"):
            runner.sign(first)
        assert runner.open == runner.produced == first.data.reward.numel()
