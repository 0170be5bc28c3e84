"""MBPO: what it asks its model to be fitted to and when, what it imagines, what its agent learns from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.core import BatchSpec
from freewheel.errors import DivergedError, EnvError
from freewheel.learn.mbpo.fitting import Fit, Fitter
from freewheel.learn.mbpo.learner import MBPO
from freewheel.learn.spec import WorldFacts
from freewheel.testing.conformance import check_learner, copy_state
from freewheel.transport.executors import Executors
from tests.support.learning import play, sign
from tests.support.model_story import (
    BOX_LANES,
    CHUNK,
    DELTA,
    EVERY,
    SMALL,
    SPEC,
    STARTS,
    Planted,
    S,
    box_world,
    mbpo_for,
)
from tests.support.peers import ThreadPeers, in_threads


def feed(learner: MBPO, steps: int, after: Callable[[], None] = lambda: None) -> list[Mapping[str, float]]:
    """Give a learner so many more steps of two lanes, one publication's rows at a time, and let it work each off."""
    data, reported = play(SPEC, learner.snapshot(), (steps, 2), seed=learner.pace.rows), []
    for at in range(0, steps, 2):
        learner.observe(sign(data, slice(at, at + 2), sequence=at))
        while learner.ready:
            reported.append(learner.update())
            after()
    return reported


KIT = replace(SMALL, learning_starts=CHUNK, model_every=1_000, rollouts_per_row=0.03)
KIT_BATCH = BatchSpec(CHUNK // BOX_LANES, BOX_LANES)


@pytest.mark.parametrize(
    ("options", "normalised"),
    [
        ({}, False), ({"termination": "learned"}, True), ({"priority": "td"}, False),
        ({"priority": "recent"}, True), ({"n_step": 3}, False),
    ],
    ids=str,
)  # fmt: skip
def test_mbpo_keeps_the_promises_of_a_learner(options: dict[str, Any], normalised: bool) -> None:
    """With one fit only: a fitter's own state is not part of a learner's."""
    collect, spec = box_world(normalize_obs=normalised)
    check_learner(lambda: mbpo_for(replace(KIT, **options), policy=spec, batch=KIT_BATCH), collect)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_priorities_and_several_steps_are_for_real_rows(ratio: float) -> None:
    learner = mbpo_for(replace(SMALL, batch=32, real_ratio=ratio, priority="td", n_step=3, gamma=0.5))
    learner.observe(sign(play(SPEC, learner.snapshot(), (6, 2))))
    rows = learner.replay.newest(12).clone()
    rows[:, -4] = 1.0  # of the model: nothing ends
    learner.replay.columns.split(rows).terminated.zero_()
    learner.model_buffer.add(rows)
    batch, real = learner.draw(), round(32 * ratio)
    assert batch.places is not None
    assert batch.weight is not None
    assert len(batch.places) == real
    assert (batch.weight[real:] == 1).all()
    assert (batch.discount[real:] == 0.5).all()
    assert not real or (batch.discount[:real] < 0.5).any()
    before = learner.replay.priority.tensors[0].clone()
    learner.updater.step()
    assert torch.equal(before, learner.replay.priority.tensors[0]) == (real == 0)


def test_it_keeps_them_with_discrete_actions_and_rolls_out_only_what_is_allowed() -> None:
    collect, spec = box_world("tests.support.worlds:Wandering", {"discrete": 5})  # with a mask
    config = replace(KIT, rollout_schedule=(0, 0, 4, 4))
    check_learner(lambda: mbpo_for(config, policy=spec, batch=KIT_BATCH), collect)
    learner = mbpo_for(config, policy=spec, batch=KIT_BATCH)
    while not learner.model_buffer.count:
        learner.observe(collect(learner.snapshot()))
        while learner.ready:
            learner.update()
    rows = learner.replay.columns.split(learner.model_buffer.newest(learner.model_buffer.count))
    assert spec.mask is not None
    allowed = rows.obs[:, slice(*spec.mask)]
    assert allowed.unique().tolist() == [0, 1]
    assert rows.next_obs[:, slice(*spec.mask)].unique().tolist() == [0, 1]
    assert allowed.gather(-1, rows.action.long()).eq(1).all()
    assert len(rows.action.unique()) > 2


@pytest.mark.parametrize(
    ("batch", "ratio", "real"), [(256, 0.05, 12), (256, 1.0, 256), (64, 0.0, 0), (10, 0.5, 5), (20, 0.99, 19)]
)
def test_so_many_real_rows_are_in_every_minibatch(batch: int, ratio: float, real: int) -> None:
    learner = mbpo_for(replace(SMALL, batch=batch, real_ratio=ratio))
    width = learner.replay.columns.width
    learner.replay.add(torch.full((7, width), 1.0))
    learner.model_buffer.add(torch.full((5, width), -1.0))
    for _ in range(5):
        mixed = learner.updater.draw()
        assert mixed.obs.shape == (batch, 3)
        assert int((mixed.obs[:, 0] == 1).sum()) == real
        assert int((mixed.next_obs[:, 2] == -1).sum()) == batch - real


def test_all_generators_of_an_update_are_known() -> None:
    learner = mbpo_for()
    known = learner.updater.generators
    policy, critics = learner.updater.policy.generator, learner.updater.critics.generator
    for generator in (learner.replay.generator, learner.model_buffer.generator, policy, critics):
        assert sum(one is generator for one in known) == 1
    assert len(known) == 4


def model_rows(learner: MBPO) -> Any:
    return learner.model_buffer.columns.split(learner.model_buffer.newest(learner.model_buffer.count))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_model_rows_are_those_of_the_newest_models(keep: int) -> None:
    executor = Planted()
    config = replace(SMALL, keep_models=keep, rollout_schedule=(1_000, 2_000, 1, 3))  # there is room for longer ones
    learner = mbpo_for(config, executors=executor)
    starts = EVERY // 2
    for fits in range(1, 6):
        feed(learner, STARTS // 2 if fits == 1 else EVERY // 2)
        assert learner._fits == fits == len(executor.asked)
        rows = model_rows(learner)
        newest = [float(version) for version in range(max(1, fits - keep + 1), fits + 1)]
        assert rows.reward.tolist() == [version for version in newest for _ in range(starts)]
        assert learner.model_buffer.added == fits * starts
        assert learner.model_buffer.capacity == keep * starts * 3
        assert {*learner.model_buffer.sample(200)[:, 5].tolist()} == {*newest}


def test_rollouts_begin_in_real_states_and_go_on_from_there() -> None:
    learner = mbpo_for(replace(SMALL, rollout_schedule=(0, 1, 1, 3)), executors=Planted())
    feed(learner, STARTS // 2)
    starts = EVERY // 2
    rows = model_rows(learner)
    assert len(rows.obs) == 3 * starts
    real = {tuple(row) for row in learner.replay.newest(STARTS)[:, :3].tolist()}
    assert {tuple(row) for row in rows.obs[:starts].tolist()} <= real
    torch.testing.assert_close(rows.next_obs, rows.obs + DELTA)
    assert torch.equal(rows.obs[starts:], rows.next_obs[:-starts])
    assert torch.equal(rows.has_successor, torch.ones(3 * starts))
    assert not rows.terminated.any()
    assert (rows.action.abs() < 1).all()
    assert len({tuple(row) for row in rows.action.tolist()}) == 3 * starts


def stop_above_zero(_obs: Tensor, _action: Tensor, next_obs: Tensor) -> Tensor:
    return next_obs[:, 0] > 0


def test_a_rollout_that_ends_is_not_gone_on_with() -> None:
    here = f"{__name__}:stop_above_zero"
    config = replace(SMALL, rollout_schedule=(0, 1, 1, 6), termination=here, rollouts_per_row=4.0)
    learner = mbpo_for(config, executors=Planted())
    feed(learner, STARTS // 2)
    rows = model_rows(learner)
    assert rows.terminated.any()
    assert torch.equal(rows.terminated, (rows.next_obs[:, 0] > 0).float())
    begun = 4 * EVERY
    assert 0 < int(rows.terminated[:begun].sum()) < begun
    assert float(rows.obs[begun:, 0].max()) <= 0
    assert len(rows.obs) == sum(int((rows.obs[:begun, 0] + 0.5 * k <= 0).sum()) for k in range(1, 6)) + begun


@pytest.mark.parametrize(
    ("schedule", "lengths"),
    [
        ((20, 100, 1, 5), {0: 1, 20: 1, 39: 1, 40: 2, 60: 3, 99: 4, 100: 5, 10_000: 5}),
        ((0, 0, 1, 1), {0: 1, 7: 1}),
        ((50, 50, 2, 9), {0: 2, 50: 2, 51: 9}),
        ((0, 1_000, 3, 3), {0: 3, 500: 3, 2_000: 3}),
    ],
)
def test_rollouts_grow_by_the_schedule(schedule: tuple[int, int, int, int], lengths: dict[int, int]) -> None:
    learner = mbpo_for(replace(SMALL, rollout_schedule=schedule))
    for rows, length in lengths.items():
        learner.pace.rows = rows
        assert learner.length == length


def test_a_fit_is_asked_for_every_so_many_rows_with_what_is_new() -> None:
    executor = Planted()
    learner = mbpo_for(executors=executor)
    at = list[int]()
    feed(learner, 40, lambda: at.append(learner.pace.rows) if len(executor.asked) > len(at) else None)
    assert at == [16, 28, 40, 52, 64, 76]
    assert [len(rows) for rows in executor.asked] == [16, 12, 12, 12, 12, 12]
    np.testing.assert_array_equal(np.concatenate(executor.asked), learner.replay.newest(80)[:76].numpy())


def test_the_model_is_never_more_than_two_fits_worth_behind() -> None:
    learner = mbpo_for(executors=Planted(slow=True))
    lags, fresh = list[int](), list[bool]()

    def look() -> None:
        if learner.pace.rows >= STARTS:
            lags.append(learner.pace.rows - learner._model_rows)
            fresh.append(bool(learner._requested_at))

    feed(learner, 120, look)
    assert learner._fits >= 8
    assert max(lags) < 2 * EVERY + S
    assert max(lags) >= 2 * EVERY - S, "a slow fit was waited for at once"
    assert True in fresh, "updates went on while a fit was under way"
    assert lags[0] == 0, "an update came before there was a model"


def test_a_wait_for_a_model_can_be_interrupted() -> None:
    class Never(Planted):
        def result(self, wait: float = 0.0) -> Fit | None:
            return None

    class StopNowError(Exception): ...

    calls = list[int]()

    def waiting() -> None:
        calls.append(0)
        if len(calls) == 3:
            raise StopNowError

    with pytest.raises(StopNowError):
        feed(mbpo_for(executors=Never(), while_waiting=waiting), 20)


def test_it_says_what_it_is_doing() -> None:
    """With every fit waited for: each is asked for, waited for and rolled out, one inside of none."""
    told, depth, deepest = list[str](), 0, 0

    @contextmanager
    def span(kind: str) -> Iterator[None]:
        nonlocal depth, deepest
        told.append(kind)
        depth += 1
        deepest = max(deepest, depth)
        yield
        depth -= 1

    steps, built = list[int](), list[MBPO]()
    learner = mbpo_for(
        replace(SMALL, rollout_schedule=(0, 0, 3, 3)), executors=Planted(slow=True), span=span,
        between_steps=lambda: steps.append(built[0].pace.updates),
    )  # fmt: skip
    built.append(learner)
    feed(learner, STARTS // 2)
    assert told == ["fit", "wait-model", "rollout"]
    assert steps == [0, 0, 0], "one call a step of a rollout"
    feed(learner, EVERY)
    assert learner._fits >= 2
    assert told == ["fit", "wait-model", "rollout"] * learner._fits
    assert deepest == 1
    assert set(steps) == {*range(learner.pace.updates + 1)}, "and one an update"


def test_counters_and_what_publications_say() -> None:
    reported = feed(mbpo_for(executors=Planted()), 16)
    last = reported[-1]
    assert (last["real_data"], last["agent_updates"]) == (32, 8)
    assert (last["model_data"], last["dynamics_updates"]) == (2 * EVERY // 2, 10 + 20)
    first = next(row for row in reported if row["real_data"] == STARTS)
    assert (first["model_data"], first["dynamics_updates"], first["agent_updates"]) == (6, 10, 0)
    assert (first["model/version"], first["model/lag_rows"], first["model/holdout"]) == (1, 0, 0.125)
    later = next(row for row in reported if row["real_data"] == STARTS + S and "model/lag_rows" in row)
    assert later["model/lag_rows"] == S
    assert "model/holdout" not in later, "the metrics of a fit are reported once"
    counters = {"real_data", "model_data", "agent_updates", "dynamics_updates"}
    assert all(counters <= row.keys() for row in reported), "counters belong in every row"


def test_after_a_restart_the_fitter_is_given_all_real_rows() -> None:
    learner, executor = mbpo_for(executors=Planted()), Planted()
    feed(learner, 16)
    twin = mbpo_for(executors=executor, seed=5)
    copy_state(learner, twin)
    assert twin._model_env.elites.tolist() == [2, 0]
    assert torch.equal(twin._model_env.generator.get_state(), learner._model_env.generator.get_state())
    assert torch.equal(twin.model.statistics["out_mean"], learner.model.statistics["out_mean"])
    assert torch.equal(model_rows(twin).obs, model_rows(learner).obs)
    feed(twin, 6)
    assert len(executor.asked) == 1
    np.testing.assert_array_equal(executor.asked[0], twin.replay.newest(twin.pace.rows)[:40].numpy())
    twin.update()
    assert (twin._fits, twin._model_rows) == (3, 40)


@pytest.fixture(scope="module")
def serial_model() -> dict[str, Tensor]:
    return {}


def fits(good: int, after: Callable[[Fit], Fit]) -> Callable[..., Callable[[Any], Fit]]:
    """A fitter whose first so many fits are real, and of all others what `after` makes of them."""

    def make(*args: Any) -> Callable[[Any], Fit]:
        real, made = Fitter(*args), list[int]()

        def fit(rows: Any) -> Fit:
            made.append(len(rows))
            found = real(rows)
            return found if len(made) <= good else after(found)

        return fit

    return make


def not_finite(fit: Fit) -> Fit:
    return replace(fit, not_finite="error on held-out rows")


def failing(fit: Fit) -> Fit:
    raise EnvError("no fit today")


@pytest.mark.parametrize("kind", ["serial", "thread", pytest.param("process", marks=pytest.mark.system)])
def test_with_every_executor_it_works_and_what_the_fitter_raises_is_raised_here(
    kind: Literal["serial", "thread", "process"], serial_model: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freewheel.learn.mbpo.learner._fitter", fits(3, failing))
    with ExitStack() as stack:
        executors = {} if kind == "serial" else {"executors": stack.enter_context(Executors(kind, "cpu"))}
        learner = mbpo_for(replace(SMALL, termination="learned"), **executors)
        reported = feed(learner, STARTS // 2)
        first = learner.model.state()
        reported += feed(learner, 8)
        with pytest.raises(EnvError, match=r"^no fit today$"):
            feed(learner, 60)
    assert learner._fits == 3
    assert all(math.isfinite(value) for row in reported for value in row.values())
    assert learner.pace.updates > 10
    assert learner.model_buffer.count > 0
    expected = serial_model or serial_model.update(first) or first
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, msg=f"{name}: the first model is not the serial executor's")


@pytest.mark.parametrize("has_final_obs", [False, True])
@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_multi_step_errors_are_those_of_rows_that_happened(has_final_obs: bool, bias: float) -> None:
    """A world that moves by DELTA and a bias, with a gap, and ends whose successor may be hidden: the row repeats itself."""
    learner = mbpo_for(
        replace(SMALL, learning_starts=20), executors=Planted(), batch=BatchSpec(10, 2),
        world=WorldFacts(has_final_obs=has_final_obs),
    )  # fmt: skip
    data = play(SPEC, learner.snapshot(), (12, 2))
    data.valid[4, 0] = False
    data.terminated[...] = data.truncated[...] = False
    data.truncated[3, 0] = data.terminated[6, 1] = True
    over, move = data.terminated | data.truncated, DELTA.numpy() + np.array([bias, 0, 0], np.float32)
    for t in range(12):
        if t:
            data.obs[t] = np.where((data.valid & ~over)[t - 1][:, None], data.next_obs[t - 1], np.round(data.obs[t]))
        data.next_obs[t] = data.obs[t] + move
    data.next_obs[4, 0] = 77.0
    if not has_final_obs:
        data.next_obs[over] = data.obs[over]
    learner.observe(sign(data))
    reported = learner.update()
    for horizon in (1, 5):
        assert reported[f"model/error_{horizon}"] == pytest.approx(horizon * bias / math.sqrt(3), abs=1e-5)


@pytest.mark.parametrize(
    ("good", "line"),
    [
        (0, r"^mbpo: the error on held-out rows of the first model is not finite; lower"),
        (2, r"^the model of mbpo learns nothing: 10 of the last 12 fits were skipped, since fit 3,"),
    ],
)
def test_fits_that_are_not_finite_are_skipped_after_the_first_until_there_are_too_many(
    good: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freewheel.learn.mbpo.learner._fitter", fits(good, not_finite))
    learner = mbpo_for(SMALL)
    with pytest.raises(DivergedError, match=line):
        feed(learner, 200)
    assert learner._fits == good
    if good:
        assert learner.pace.rows >= 11 * EVERY  # a fit that failed is not repeated at once


def test_each_fits_a_model_to_its_rows_and_all_have_the_same_agent() -> None:
    config = replace(SMALL, batch=11, learning_starts=32, model_every=24, rollout_schedule=(40, 80, 1, 3))

    def body(peers: ThreadPeers) -> MBPO:
        learner = mbpo_for(config, peers=peers)
        sequence = 0
        while learner.version < 15:
            if learner.hungry or not learner.ready:
                data = play(SPEC, learner.snapshot(), (1 + sequence % (2 + peers.rank), 2), 100 * peers.rank + sequence)
                learner.observe(sign(data, sequence=sequence))
                sequence += 1
            if learner.ready:
                learner.update()
        return learner

    one, other = in_threads(2, body)
    assert one.pace.updates == other.pace.updates > 20
    for name, value in one.updater.state_dict().items():
        if name != "noise":
            assert np.array_equal(value, other.updater.state_dict()[name]), name
    assert not np.array_equal(one.model.vector, other.model.vector)
    assert (one.batch, other.batch) == (5, 6)
    assert (one._real, other._real) == (2, 3)
    for learner in (one, other):
        assert learner.config.model_every == 12
        assert learner._fits >= 3
        assert learner._starts == 6  # rollouts of a model: half of those of one learner
        assert learner.length == (3 if 2 * learner.pace.rows >= 80 else 2)


def test_the_first_rollouts_read_observations_as_the_first_updates_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a model comes before the first publication."""
    collect, spec = box_world(normalize_obs=True)
    learner = mbpo_for(
        replace(KIT, updates_per_row=0.5), policy=spec, batch=BatchSpec(10 * CHUNK // BOX_LANES, BOX_LANES)
    )
    read, roll_out = list[list[float]](), learner._rollouts.__class__.__call__

    def seen(self: Any, states: Tensor, length: int) -> None:
        read.append(learner.updater.policy.statistics["norm.mean"].tolist())
        roll_out(self, states, length)

    monkeypatch.setattr(learner._rollouts.__class__, "__call__", seen)
    for _ in range(2):
        learner.observe(collect(learner.snapshot()))
    while learner.ready:
        learner.update()
    assert learner.version == 0
    assert learner._moments is not None
    assert read[0] == pytest.approx(learner._moments.mean, rel=1e-4, abs=1e-5)
