"""SingleEnvRunner writes the same rows as a Runner, also if the env fails."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import fields
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from freewheel.core import Episode, Failure, NDArray, Snapshot, Transitions
from freewheel.envs.gym import GymConfig, GymLoop
from freewheel.policies.numpy_actor import NumpyActor, make_actor
from freewheel.policies.spec import FlatParams, PolicyConfig, PolicySpec, full_layout, initialise
from freewheel.rollout import single_env_runner
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.kernel import PythonRowWriter, RowWriter
from freewheel.rollout.runner import Author, Runner, empty_transitions
from freewheel.rollout.single_env_runner import SingleEnv, SingleEnvRunner, make_runner
from freewheel.seeding import generator, training_episodes
from freewheel.testing.conformance import check_runner
from tests.support.worlds import Drifting, Toy

LANES, SEED = range(5, 6), 3
STREAM = training_episodes(SEED, LANES[0])
FAULTS: Mapping[tuple[int, int], str] = {
    (3, 2): "raise",
    (6, 0): "raise",  # in reset
    (9, 1): "nan",
    (12, 3): "inf reward",
    (15, 2): "huge reward",
    (18, 1): "shape",
}


class Ill(Toy):
    """Observations are noise from the seed; fails at the steps in FAULTS."""

    def __init__(self, space: gymnasium.Space[Any], dtype: Any = np.float32) -> None:
        super().__init__(5, "terminated")
        self.observation_space: Any = Box(0, 200, (3,), dtype)
        self.action_space = space
        self.faults = {(STREAM.seed(k), step): fault for (k, step), fault in FAULTS.items()}

    def observe(self) -> NDArray:
        return (100 * self.np_random.random(3)).astype(self.observation_space.dtype)

    def judge(self, action: Any) -> float:
        return 0.1 + float(np.sum(action))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.with_fault(super().reset(seed=seed, options=options))

    def step(self, action: Any) -> Any:
        return self.with_fault(super().step(action))

    def with_fault(self, answer: tuple[Any, ...]) -> Any:
        fault = self.faults.get((self.seed, self.count))
        observation, *rest = answer
        if fault == "raise":
            raise ValueError("boom")
        if fault == "nan" and observation.dtype == np.float32:
            observation = observation * np.float32(np.nan)
        if fault == "shape":
            observation = observation[:1]
        if fault in ("inf reward", "huge reward"):
            rest[0] = float("inf") if fault == "inf reward" else 1e300
        return observation, *rest


def setup(make_env: Callable[[], Any], **policy: Any) -> tuple[RunnerFactory, PolicySpec, Snapshot]:
    env = GymConfig(id="Ill", factory=make_env, measures=("count",))
    spec = PolicyConfig(**policy).resolve(env.make(LANES).spec)
    params = FlatParams(full_layout(spec))
    initialise(spec, params, generator(SEED))
    return RunnerFactory(env.make, make_actor(spec), SEED), spec, Snapshot(7, params.views)


def play(runner: Runner, snapshot: Snapshot) -> tuple[list[Any], list[Episode], list[Failure]]:
    """Every row, episode and failure of 120 steps, in slots of 8 rows that are reused."""
    runner.load(snapshot)
    runner.begin()
    slots = [empty_transitions(8, runner.env.spec) for _ in range(3)]
    rows: list[Any] = []
    episodes: list[Episode] = []
    failures: list[Failure] = []
    for step in range(120):
        data, t = slots[step // 8 % 3], step % 8
        episodes += runner.step(data, t)
        failures += runner.failures
        written = {f.name: getattr(data, f.name)[t].copy() for f in fields(Transitions)}
        rows.append((runner.rows, bool(runner.over), written))
        if runner.over:
            runner.autoreset()
    assert runner.produced == sum(count for count, _, _ in rows)
    return rows, episodes, failures


@pytest.mark.parametrize("writer", [PythonRowWriter, RowWriter], ids=["plain", "compiled"])
@pytest.mark.parametrize(
    "make_env",
    [
        lambda: Ill(Discrete(4)),
        lambda: Ill(Discrete(4, start=2)),
        lambda: Ill(Box(-2.0, 3.0, (2,), np.float32)),
        lambda: Ill(Discrete(4), np.uint8),
    ],
    ids=["discrete", "from 2 on", "box", "bytes"],
)
def test_the_rows_are_the_same_as_with_arrays(
    make_env: Callable[[], Any], writer: type[PythonRowWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_env_runner, "RowWriter", writer)
    factory, _, snapshot = setup(make_env)
    env = factory.make(LANES, fault_tolerant=True)
    assert isinstance(env, SingleEnv)
    ours = play(make_runner(factory, LANES, env, Author(SEED, LANES)), snapshot)
    with np.errstate(over="ignore"):  # a reward beyond float32
        with_arrays = GymLoop([make_env()], "Ill", LANES, ("count",), fault_tolerant=True)
        theirs = play(Runner(factory, LANES, env=with_arrays), snapshot)
    for (count, over, row), (other_count, other_over, other) in zip(ours[0], theirs[0], strict=True):
        assert (count, over) == (other_count, other_over)
        for name in row if count else ("valid",):
            np.testing.assert_array_equal(row[name], other[name], err_msg=name)
    assert [(e.number, e.seed, e.ret, e.length, e.measures) for e in ours[1]] == [
        (e.number, e.seed, e.ret, e.length, e.measures) for e in theirs[1]
    ]
    assert [(f.cause, f.in_reset) for f in ours[2]] == [(f.cause, f.in_reset) for f in theirs[2]]
    assert {f.cause for f in ours[2]} >= {"env_error", "shape", "nan"}
    assert len(ours[1]) > 5


def test_it_satisfies_the_contract_of_a_runner() -> None:
    factory, _, snapshot = setup(lambda: Drifting(n=4, length=5))

    def make() -> Runner:
        return make_runner(factory, LANES, factory.make(LANES, fault_tolerant=True), Author(SEED, LANES))

    check_runner(make, snapshot)


def test_it_keeps_a_limited_number_of_row_writers() -> None:
    factory, _, snapshot = setup(lambda: Drifting(n=4, length=5))
    env = factory.make(LANES, fault_tolerant=True)
    assert isinstance(env, SingleEnv)
    runner = make_runner(factory, LANES, env, Author(SEED, LANES))
    assert isinstance(runner, SingleEnvRunner)
    runner.load(snapshot)
    arrays = [weakref.ref(runner.unroll(2).data.obs) for _ in range(3 * single_env_runner.WRITERS)]
    gc.collect()
    assert sum(array() is not None for array in arrays) <= single_env_runner.WRITERS


def test_a_policy_that_cannot_act_for_one_lane_gets_the_plain_runner() -> None:
    factory, _, snapshot = setup(lambda: Ill(Discrete(4)))

    class ArraysOnly:
        state_size = 0

        def __init__(self) -> None:
            self._inner = factory.actor()
            self.act, self.load = self._inner.act, self._inner.load

    class Recurrent(NumpyActor):
        state_size = 2

    both = []
    for actor, kind in ((factory.actor, SingleEnvRunner), (ArraysOnly, Runner)):
        env = factory.make(LANES, fault_tolerant=True)
        runner = make_runner(RunnerFactory(factory.make, actor, SEED), LANES, env, Author(SEED, LANES))
        assert type(runner) is kind
        with np.errstate(over="ignore"):  # a reward beyond float32
            both.append(play(runner, snapshot))
    assert [row["action"].tolist() for _, _, row in both[0][0]] == [row["action"].tolist() for _, _, row in both[1][0]]
    spec = factory.actor().spec  # type: ignore[attr-defined]
    with closing(factory.make(LANES, fault_tolerant=True)) as env:
        recurrent = RunnerFactory(factory.make, lambda: Recurrent(spec), SEED)
        assert type(make_runner(recurrent, LANES, env, Author(SEED, LANES))) is Runner, "it has a memory"
