"""The Runner: every field of every row, episodes, origins, time, and invalid values of environments."""

from __future__ import annotations

import math
from contextlib import closing

import numpy as np
import pytest

from freewheel.core import WORKER_TIME, Chunk, Episode, Origin, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.errors import EnvError
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import FlatParams, PolicyConfig, actor_layout
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.runner import Author, Runner, empty_transitions
from freewheel.seeding import generator, training_episodes
from tests.rollout.conftest import FakeSetup
from tests.support.worlds import Conditioned

LANES = range(4, 6)  # global numbers; the env counts its own from 0


def time_of(chunk: Chunk) -> dict[str, int]:
    return {kind: ns for kind, ns in zip(WORKER_TIME, chunk.time.tolist(), strict=True) if ns}


def test_every_field_of_every_row(fake: FakeSetup) -> None:
    """Lane 0 plays episodes of two steps, lane 1 of three; even ones are terminated, odd ones truncated."""
    runner = Runner(fake.factory, LANES)
    runner.load(Snapshot(3, {}))
    first, second = runner.unroll(4), runner.unroll(2)
    data = first.data
    assert data.obs[:, 0].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
    assert data.obs[:, 1].tolist() == [[1, 0, 0], [1, 0, 1], [1, 0, 2], [1, 1, 0]]
    assert data.next_obs[:, 0].tolist() == [[0, 0, 1], [0, 0, 2], [0, 1, 1], [0, 1, 2]]
    assert data.next_obs[:, 1].tolist() == [[1, 0, 1], [1, 0, 2], [1, 0, 3], [1, 1, 1]]
    assert data.action.tolist() == [[0, 0], [1, 1], [0, 2], [1, 0]] == fake.env.actions[:4]
    assert data.reward.tolist() == [[0, 100], [1, 101], [10, 102], [11, 110]]
    assert data.terminated.tolist() == [[False, False], [True, False], [False, True], [False, False]]
    assert data.truncated.tolist() == [[False, False], [False, False], [False, False], [True, False]]
    assert (data.log_prob == -3).all()
    assert data.valid.all()
    assert second.data.obs.tolist() == [[[0, 2, 0], [1, 1, 1]], [[0, 2, 1], [1, 1, 2]]]
    assert second.data.next_obs.tolist() == [[[0, 2, 1], [1, 1, 2]], [[0, 2, 2], [1, 1, 3]]]
    assert first.data.obs[0, 0].tolist() == [0, 0, 0]  # not overwritten
    assert (first.rows, second.rows) == (8, 4)
    assert first.state.shape == (2, 0)


def test_empty_rows_have_the_shapes_of_the_spec(fake: FakeSetup) -> None:
    data = empty_transitions(5, fake.factory.make(range(2)).spec)
    assert {name: (getattr(data, name).shape, getattr(data, name).dtype.name) for name in data.__slots__} == {
        "obs": ((5, 2, 3), "float32"),
        "action": ((5, 2), "int64"),
        "log_prob": ((5, 2), "float32"),
        "reward": ((5, 2), "float32"),
        "terminated": ((5, 2), "bool"),
        "truncated": ((5, 2), "bool"),
        "next_obs": ((5, 2, 3), "float32"),
        "valid": ((5, 2), "bool"),
    }


def test_episodes_come_with_the_chunk_they_end_in(fake: FakeSetup) -> None:
    runner = Runner(fake.factory, LANES)
    ended = [runner.unroll(steps).episodes for steps in (1, 4, 1)]
    assert ended[0] == ()
    assert [(e.lane, e.number, e.ret, e.length, e.measures) for e in ended[1]] == [
        (4, 0, 0 + 1, 2, (0.0,)),
        (5, 0, 100 + 101 + 102, 3, (0.0,)),
        (4, 1, 10 + 11, 2, (1.0,)),
    ]
    assert [(e.lane, e.number, e.ret, e.length) for e in ended[2]] == [(4, 2, 20 + 21, 2), (5, 1, 110 + 111 + 112, 3)]
    for episode in (*ended[1], *ended[2]):
        assert episode.seed == training_episodes(11, episode.lane).seed(episode.number)
        assert episode.seed == fake.env.seeds[episode.lane - 4][episode.number]
    spent, looks = 2 * (700 + 50) + 90, 20  # two steps and the reset after them
    assert ended[1][0].seconds == pytest.approx(spent * 1e-9, abs=looks * 1e-9)


def test_chunks_have_an_origin_and_a_version(fake: FakeSetup) -> None:
    runner = Runner(fake.factory, LANES, author=Author(11, LANES, worker=7))
    runner.load(Snapshot(2, {}))
    chunks = [runner.unroll(1), runner.unroll(2)]
    runner.load(Snapshot(5, {}))
    chunks.append(runner.unroll(1))
    assert [chunk.origin for chunk in chunks] == [Origin(7, 0, sequence, 4) for sequence in range(3)]
    assert [chunk.version for chunk in chunks] == [2, 2, 5]
    assert chunks[2].data.log_prob.tolist() == [[-5, -5]]


def test_each_worker_has_its_own_generator(fake: FakeSetup) -> None:
    for number, (author, path) in enumerate(
        [
            (Author(11, LANES), (11, "actor", 0)),
            (Author(11, LANES, worker=1), (11, "actor", 1)),
            (Author(11, LANES, worker=1, incarnation=2), (11, "actor", 1, 2)),
        ]
    ):
        Runner(fake.factory, LANES, author=author).unroll(3)
        assert fake.actors[number].draws == generator(*path).random(3).tolist()


def test_a_given_env_is_driven_and_closed(fake: FakeSetup) -> None:
    runner = Runner(fake.factory, range(1), env=fake.factory.make(range(1)))
    assert runner.env is fake.env
    runner.close()
    assert fake.env.closed == 1


def test_time_adds_up(fake: FakeSetup) -> None:
    runner = Runner(fake.factory, LANES)
    began = fake.clock.now
    runner.load(Snapshot(1, {}))
    runner.spend(WORKER_TIME.index("wait-credit"), 5_000)
    chunk = runner.unroll(6)
    spent = time_of(chunk)
    assert int(chunk.time.sum()) - 5_000 == pytest.approx(fake.clock.now - began, abs=4)
    # three ends in lane 0, two in lane 1, and the first reset; a look at the clock takes a nanosecond
    assert spent["step"] == pytest.approx(6 * 700, abs=6)
    assert spent["reset"] == pytest.approx(90 + 5 * 90, abs=6)
    assert spent["infer"] == pytest.approx(6 * 50, abs=6)
    assert spent["load"] == pytest.approx(30, abs=1)
    assert spent["wait-credit"] == 5_000
    assert spent["write"] + spent["other"] < 30


def test_time_is_counted_once(fake: FakeSetup) -> None:
    runner = Runner(fake.factory, LANES)
    runner.load(Snapshot(1, {}))
    first = runner.unroll(6)
    second = runner.unroll(2)
    assert "load" not in time_of(second)
    assert time_of(second)["step"] == pytest.approx(2 * 700, abs=2)
    assert time_of(first)["step"] == pytest.approx(6 * 700, abs=6)  # the first chunk's time is unchanged


def test_time_of_the_runner_itself_is_other(fake: FakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(steps: int, spec: object) -> object:
        fake.clock.now += 333
        return empty_transitions(steps, spec)  # type: ignore[arg-type]

    monkeypatch.setattr("freewheel.rollout.runner.empty_transitions", slowly)
    assert time_of(Runner(fake.factory, LANES).unroll(1))["other"] == pytest.approx(333, abs=6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("at", "field", "chunk", "row", "episode", "step"),
    [
        (2, "reward", 1, 0, 0, 3), (3, "reward", 1, 1, 1, 1), (3, "next_obs", 1, 1, 1, 1),
        (2, "obs", 1, 1, 1, 1), (-1, "obs", 0, 0, 0, 1),
    ],
    ids=["reward", "reward of a later episode", "successor", "to act on", "first of all"],
)  # fmt: skip
def test_values_that_are_not_finite_are_errors_of_the_env(
    fake: FakeSetup, at: int, field: str, chunk: int, row: int, episode: int, step: int, value: float
) -> None:
    """Lane 1 plays episodes of three steps. A first observation is found in the row that acts on it."""
    fake.faults[(at, 1)] = {field: value}
    runner = Runner(fake.factory, LANES)
    with pytest.raises(EnvError) as caught:
        _ = [runner.unroll(steps) for steps in (2, 3)]
    first_line = str(caught.value).splitlines()[0]
    what = "reward" if field == "reward" else "observation"
    seed = training_episodes(11, 5).seed(episode)
    assert f"lane 5 of Counting-v0 returned a {what} that is not finite" in first_line
    assert f"row {row} of chunk {chunk} (episode {episode}, seed {seed}, step {step}, last action" in first_line


def test_opposite_infinities_are_found(fake: FakeSetup) -> None:
    fake.faults |= {(0, 0): {"reward": math.inf}, (1, 1): {"reward": -math.inf}}
    with pytest.raises(EnvError, match=r"lane 4 .* at row 0 of chunk 0"):
        Runner(fake.factory, LANES).unroll(2)


def test_large_values_are_valid(fake: FakeSetup) -> None:
    fake.faults |= {(step, lane): {"reward": 3e38} for step in range(4) for lane in range(2)}
    assert Runner(fake.factory, LANES).unroll(4).rows == 8


def test_rows_of_an_env_that_raised_are_still_open(fake: FakeSetup) -> None:
    fake.faults[(5, 0)] = {"raise": 1}
    runner = Runner(fake.factory, LANES)
    assert runner.unroll(3).rows == 6
    assert (runner.produced, runner.open) == (6, 0)
    with pytest.raises(RuntimeError, match="broken in step"):
        runner.unroll(4)
    assert (runner.produced, runner.open) == (10, 4)


def test_rows_that_are_not_valid_do_not_count(fake: FakeSetup) -> None:
    """The second row of lane 1 is not valid: it does not count as a row, a step or a reward."""
    fake.faults[(1, 1)] = {"valid": False}
    runner = Runner(fake.factory, LANES)
    chunk = runner.unroll(3)
    assert chunk.data.valid.tolist() == [[True, True], [True, False], [True, True]]
    assert (chunk.rows, runner.produced) == (5, 5)
    (episode,) = (episode for episode in chunk.episodes if episode.lane == 5)
    assert (episode.ret, episode.length) == (100 + 102, 2)


def test_values_of_rows_that_are_not_valid_are_ignored(fake: FakeSetup) -> None:
    ignored = {"valid": False, "reward": math.nan}
    fake.faults |= {(step, 0): ignored for step in (0, 2, 4)}
    chunk = Runner(fake.factory, LANES).unroll(6)
    assert chunk.rows == 9
    assert [episode.ret for episode in chunk.episodes if episode.lane == 4] == [1, 11, 21]
    assert np.isfinite(chunk.data.reward[chunk.data.valid]).all()


def test_a_lane_that_failed_begins_its_next_episode(fake: FakeSetup) -> None:
    """Lane 1 fails at its second step: the row is not valid, the episode is dropped, the next one has the next seed."""
    fake.faults[(1, 1)] = {"fail": 1}
    runner = Runner(fake.factory, LANES)
    data = empty_transitions(5, runner.env.spec)
    runner.begin()
    ended: list[Episode] = []
    failed, over = [], []
    for t in range(5):
        ended += runner.step(data, t)
        failed.append([failure.lane for failure in runner.failures])
        over.append(runner.over)
        if runner.over:
            runner.autoreset()
    assert failed == [[], [1], [], [], []]
    assert over == [False, True, False, True, True]
    assert data.valid[:, 1].tolist() == [True, False, True, True, True]
    assert data.obs[:, 1].tolist() == [[1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1], [1, 1, 2]]
    (episode,) = (episode for episode in ended if episode.lane == 5)
    assert (episode.number, episode.ret, episode.length) == (1, 110 + 111 + 112, 3)
    assert episode.seed == training_episodes(11, 5).seed(1)


def test_an_episode_has_the_context_of_its_beginning() -> None:
    """Episodes of three steps; a new table of one context every two steps; the reset directly follows the last step."""
    with closing(GymConfig("tests.support.worlds:Conditioned").make(range(1))) as env:
        policy = PolicyConfig(hidden=(4,)).resolve(env.spec)
    params = FlatParams(actor_layout(policy)).views
    runner = Runner(RunnerFactory(GymConfig("tests.support.worlds:Conditioned").make, make_actor(policy), 7), range(1))
    episodes: list[Episode] = []
    for version in range(9):
        runner.load(Snapshot(version, params, np.array([[version, version / 2]], np.float32)))
        episodes += runner.unroll(2).episodes
    assert [episode.context for episode in episodes] == [(first, first / 2) for first in (0, 1, 2, 4, 5, 7)]
    for episode in episodes:
        assert episode.ret == Conditioned.worth(episode.seed, episode.context)
    runner.load(Snapshot(9, params))
    assert [episode.context for episode in runner.unroll(6).episodes] == [(8.0, 4.0), ()]
    runner.close()
