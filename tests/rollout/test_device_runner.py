"""DeviceRunner over a simulator with known rows: its rows, its counts, its memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import WORKER_TIME, Chunk, Compile
from freewheel.errors import EnvError
from freewheel.policies.nets import TensorActor
from freewheel.rollout.device_runner import DeviceRunner, as_numpy
from freewheel.seeding import training_episodes
from freewheel.testing.conformance import AnyRunner, check_runner
from tests.support.device_story import FIELDS, SEED, DeviceSetup, assert_rows, expected_rows, joined
from tests.support.isaac_like import Traps

STEPS = 8


def runner_of(setup: DeviceSetup, compile: Compile = "off") -> DeviceRunner:  # noqa: A002
    runner = DeviceRunner(setup.factory, range(setup.lanes), STEPS, compile)
    runner.load(setup.snapshot(3))
    return runner


def played(setup: DeviceSetup, lengths: Sequence[int]) -> list[Chunk[Tensor]]:
    with closing(runner_of(setup)) as runner:
        return [runner.unroll(steps) for steps in lengths]


@pytest.mark.parametrize("compile", ["off", "graphs"])
def test_it_satisfies_the_contract_of_a_runner(compile: Compile) -> None:  # noqa: A002
    setup = DeviceSetup()

    def make() -> AnyRunner:
        return runner_of(setup, compile)  # type: ignore[return-value] # the kit accepts CPU tensors as arrays

    check_runner(make, setup.snapshot(3))
    assert setup.closed == [1, 1]


@pytest.mark.parametrize("lengths", [(8, 8, 8, 8), (1,) * 32, (5, 1, 8, 3, 8, 8, 3)], ids=str)
def test_rows_and_episodes_are_correct_for_any_lengths_of_chunks(lengths: Sequence[int]) -> None:
    """Episodes come with the chunk they end in."""
    chunks = played(DeviceSetup(), lengths)
    assert [len(chunk.data.reward) for chunk in chunks] == list(lengths)
    assert_rows(chunks)
    assert len(set(joined(chunks, "action").ravel().tolist())) == 4 * sum(lengths)  # all different
    wanted, row = expected_rows(joined(chunks, "action")).episodes, 0
    for chunk, steps in zip(chunks, lengths, strict=True):
        assert chunk.episodes == tuple(itertools.chain.from_iterable(wanted[row : row + steps]))
        row += steps
    assert len({(episode.lane, episode.number) for ended in wanted for episode in ended}) == sum(map(len, wanted)) > 20


@pytest.mark.parametrize("has_final_obs", [True, False])
@pytest.mark.parametrize("views", [True, False])
def test_rows_are_correct_even_if_the_simulator_reuses_its_buffers(has_final_obs: bool, views: bool) -> None:
    setup = DeviceSetup(Traps(has_final_obs=has_final_obs, views=views))
    assert_rows(played(setup, (8, 3, 8, 8)), has_final_obs=has_final_obs)
    assert setup.spec.has_final_obs is has_final_obs


def test_log_probs_belong_to_the_loaded_weights() -> None:
    setup = DeviceSetup()
    with closing(runner_of(setup)) as runner:
        chunks = []
        for version in (3, 4):
            runner.load(setup.snapshot(version))
            chunks.append(runner.unroll(6))
    actor = setup.factory.actor()
    assert isinstance(actor, TensorActor)
    for chunk in chunks:
        actor.load(setup.snapshot(chunk.version))
        obs = chunk.data.obs.flatten(0, 1)
        wanted = actor.policy.distribution(obs).log_prob(chunk.data.action.flatten(0, 1)).detach()
        torch.testing.assert_close(chunk.data.log_prob.flatten(), wanted)
    assert [chunk.version for chunk in chunks] == [3, 4]


def test_a_chunk_owns_its_memory() -> None:
    """Later launches do not change it."""
    with closing(runner_of(DeviceSetup())) as runner:
        chunks: list[Chunk[Tensor]] = []
        copies: list[dict[str, Tensor]] = []
        for _ in range(4):
            chunks.append(runner.unroll(STEPS))
            copies.append({name: getattr(chunks[-1].data, name).clone() for name in FIELDS})
        written = runner.launch(STEPS)
        kept = written.endings.ret.clone(), written.data.obs.clone()
        runner.launch(STEPS)
        assert torch.equal(written.endings.ret, kept[0])
        assert torch.equal(written.data.obs, kept[1])
    for chunk, copy in zip(chunks, copies, strict=True):
        assert all(torch.equal(getattr(chunk.data, name), value) for name, value in copy.items())
    places = [{getattr(chunk.data, name).untyped_storage().data_ptr() for name in FIELDS} for chunk in chunks]
    assert all(here.isdisjoint(there) for here, there in itertools.combinations(places, 2))


def test_episodes_are_complete_if_chunks_are_signed_later() -> None:
    """A launch may be under way while the one before it is signed."""
    with closing(runner_of(DeviceSetup())) as runner:
        launched = [runner.launch(STEPS) for _ in range(3)]
        chunks = [runner.sign(written) for written in launched]
    wanted = expected_rows(joined(chunks, "action")).episodes
    assert [chunk.episodes for chunk in chunks] == [
        tuple(itertools.chain.from_iterable(wanted[begin : begin + STEPS])) for begin in (0, 8, 16)
    ]


def test_chunks_are_counted_and_have_versions_and_origins() -> None:
    setup = DeviceSetup(lanes=3)
    with closing(runner_of(setup)) as runner:
        for number, steps in enumerate((4, 1, 8)):
            before = runner.produced
            chunk = runner.unroll(steps)
            assert (runner.produced - before, runner.open, chunk.rows) == (3 * steps, 0, 3 * steps)
            assert (chunk.version, chunk.origin.sequence, chunk.origin.worker, chunk.origin.lane0) == (3, number, 0, 0)
            assert (tuple(chunk.state.shape), chunk.time.shape) == ((3, 0), (len(WORKER_TIME),))
            assert (chunk.time >= 0).all()
            assert chunk.time[WORKER_TIME.index("step")] > 0
        begun = training_episodes(SEED, 0).seed(0)
        assert setup.worlds[0].journal.seeds == [0, begun]  # one reset of ours; the simulator does the others


def test_time_is_counted_once() -> None:
    with closing(runner_of(DeviceSetup())) as runner:
        waiting = WORKER_TIME.index("wait-credit")
        runner.spend(waiting, 7)
        assert [int(runner.unroll(1).time[waiting]) for _ in range(2)] == [7, 0]


def test_without_a_gpu_graphs_fall_back_and_nothing_else_changes() -> None:
    found = []
    for compile in ("off", "graphs"):  # noqa: A001
        with closing(runner_of(DeviceSetup(), compile)) as runner:
            found.append((runner.unroll(STEPS).data.action, runner.fallbacks))
    assert torch.equal(found[0][0], found[1][0])
    assert [fallbacks for _, fallbacks in found] == [[], ["its tensors are not on a GPU"]]


def test_a_simulator_that_cannot_be_captured_is_stepped_outside_the_graph() -> None:
    setup, apart = DeviceSetup(), DeviceSetup()
    make: Any = apart.make

    def uncapturable(lanes: range, **_: bool) -> Any:
        env = make(lanes)
        apart.worlds[-1].metadata = {"render_modes": []}
        return env

    object.__setattr__(apart.factory, "make", uncapturable)
    chunks, others = played(setup, (8, 8)), played(apart, (8, 8))
    for name in FIELDS:
        np.testing.assert_array_equal(joined(chunks, name), joined(others, name))


def test_as_numpy_gives_the_same_rows() -> None:
    setup = DeviceSetup()
    env = as_numpy(setup.make(range(4)))
    obs = env.reset([training_episodes(SEED, lane) for lane in range(4)])
    actions = np.random.default_rng(0).normal(size=(20, 4, 1)).astype(np.float32)
    wanted = expected_rows(actions).data
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
    np.testing.assert_array_equal(np.stack([step.next_obs for step in kept]), wanted.next_obs)  # not overwritten
    over = wanted.terminated | wanted.truncated
    np.testing.assert_array_equal(np.stack([step.measures for step in kept])[over][:, 0], wanted.next_obs[over][:, 0])
    env.close()
    assert setup.closed == [1]


def test_a_value_that_is_not_finite_is_an_error_and_its_rows_stay_counted() -> None:
    setup = DeviceSetup()
    with closing(DeviceRunner(setup.factory, range(setup.spec.lanes), 4)) as runner:
        runner.load(setup.snapshot(0))
        first = runner.launch(4)
        first.data.reward[2, 1] = torch.nan
        with pytest.raises(EnvError, match=r"lane 1 of .*, row 2 of chunk 0"):
            runner.sign(first)
        assert runner.open == runner.produced == first.data.reward.numel()
