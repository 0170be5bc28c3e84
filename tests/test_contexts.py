"""In every mode an episode gets the context that its seed draws, plays by it and reports it, and a policy its memory."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freewheel
from freewheel import Hook, Run
from freewheel.cli import main as cli
from freewheel.collect.batch import BatchConfig
from freewheel.collect.continuous import ContinuousConfig
from freewheel.collect.episodes import EpisodesConfig
from freewheel.collect.lockstep import LockstepConfig
from freewheel.collect.mode import ModeConfig
from freewheel.collect.quota import Quota
from freewheel.collect.sequential import SequentialConfig
from freewheel.config.resolve import from_file, from_options
from freewheel.core import BatchSpec, Chunk, Collector, Episode, NDArray, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.errors import EnvError, SetupError
from freewheel.policies.spec import FlatParams, full_layout, initialise
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.run.naming import Result, RunName
from freewheel.run.plan import Plan
from freewheel.run.planning import plan
from freewheel.run.saved import open_run
from freewheel.seeding import closing_seed, drawn, evaluation_episodes, generator, training_episodes
from tests.support.contexts import Counting
from tests.support.pools import wire_of
from tests.support.worlds import Conditioned

WORLD, MANY = "tests.support.worlds:Conditioned", "tests.support.contexts:Told-v0"
DRONE = "freewheel/RoughDrone-v0"
TABLE = [[1.0, 0.0], [2.0, 3.0], [-4.0, 1.0]]
CONTEXTS = np.array(TABLE, np.float32)
SEED, EPISODES = 5, 40
EVAL_SEEDS = [evaluation_episodes(closing_seed(1000), number, 1).seed(0) for number in range(12)]
#: The contexts and the returns of the closing evaluation's episodes.
EVALUATED = (
    tuple(tuple(drawn(CONTEXTS, seed).tolist()) for seed in EVAL_SEEDS),
    tuple(Conditioned.worth(seed, drawn(CONTEXTS, seed).tolist()) for seed in EVAL_SEEDS),
)
MODES: Mapping[str, dict[str, Any]] = {
    "sequential": {"mode": "sequential", "num_envs": 2},
    "lockstep": {"mode": "lockstep", "num_envs": 2, "placement": "inline"},
    "processes": {"mode": "lockstep", "num_envs": 2, "placement": "processes"},
    "batch": {"mode": "batch", "workers": 2, "num_envs": 2},
    "continuous": {"mode": "continuous", "workers": 2, "num_envs": 4},
    "one env a worker": {"mode": "continuous", "workers": 1, "num_envs": 1},
    "episodes": {"mode": "episodes", "workers": 2},
}


def train(tmp_path: Path, env: str = WORLD, **options: Any) -> tuple[Result, list[Episode]]:
    """A run of so many episodes, and all that ended in it."""
    seen: list[Episode] = []

    class Watch(Hook):
        def on_episode(self, run: Run, episode: Episode) -> None:
            seen.append(episode)
            if len(seen) >= EPISODES:
                run.stop("enough")

    small: dict[str, Any] = {"num_steps_per_env": 8, "eval_episodes": 12, "evals": 1, "ppo.epochs": 1}
    options = small | {"seed": SEED, "context": TABLE} | options
    return freewheel.train(env, quiet=True, hooks=[Watch()], runs_dir=tmp_path, **options), seen


def assert_told(episodes: Sequence[Episode], table: NDArray = CONTEXTS) -> None:
    for episode in episodes:
        assert episode.seed == training_episodes(SEED, episode.lane).seed(episode.number)
        assert episode.context == tuple(drawn(table, episode.seed).tolist())
        assert episode.ret == Conditioned.worth(episode.seed, episode.context), episode


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
def test_every_return_is_that_of_its_context_and_seed(tmp_path: Path, options: dict[str, Any]) -> None:
    result, episodes = train(tmp_path, **options)
    assert result.summary["ended"] == "enough"
    assert_told(episodes)
    assert {episode.context for episode in episodes} == set(map(tuple, TABLE))
    run = open_run(str(result.path))
    score = run.score(open_run(str(result.path)).actor()[0], 12, result.summary["eval_fresh_seed"])
    assert score.mean == result.summary["final_eval"]
    assert (score.contexts, score.returns) == EVALUATED


@pytest.mark.parametrize("mode", ["sequential", "continuous"])
def test_a_vector_env_is_told_the_table(tmp_path: Path, mode: str) -> None:
    result, episodes = train(tmp_path, MANY, **MODES[mode])
    assert_told(episodes)
    assert result.summary["final_eval"] == np.mean(EVALUATED[1])


def test_a_world_that_plays_by_the_context_before_is_found_out(tmp_path: Path) -> None:
    _, episodes = train(tmp_path, "tests.support.contexts:Plays", mode="sequential")
    with pytest.raises(AssertionError, match="context="):
        assert_told(episodes)


@pytest.mark.parametrize("mode", ["sequential", "processes"])
def test_a_world_that_shows_the_context_before_ends_the_run(tmp_path: Path, mode: str) -> None:
    with pytest.raises(EnvError) as caught:
        train(tmp_path, "tests.support.contexts:Shows", **MODES[mode])
    assert "gave a wrong observation in reset(): context: reset() was given [" in str(caught.value)
    assert "] but the observation has [0. 0.] (episode 2, seed " in str(caught.value)
    assert caught.value.cause == "quarantine", "it failed in three resets in a row"


def test_without_contexts_a_reset_is_told_nothing(tmp_path: Path) -> None:
    """An env need not even know that there are options."""

    class Plain(Conditioned):
        def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
            return super().reset(seed=seed)

    result = freewheel.train(Plain, quiet=True, runs_dir=tmp_path, mode="sequential", steps=64, evals=1)
    assert (result.exit_code, result.summary["final_eval"]) == (0, 0.0)


COLLECTORS: Mapping[str, ModeConfig] = {
    "sequential": SequentialConfig(num_envs=2),
    "processes": LockstepConfig(num_envs=2, placement="processes"),
    "batch": BatchConfig(workers=2, envs_per_worker=1, num_envs=2),
    "continuous": ContinuousConfig(workers=2, envs_per_worker=2, num_envs=4),
    "one env a worker": ContinuousConfig(workers=1, envs_per_worker=1, num_envs=1),
    "episodes": EpisodesConfig(workers=2, num_envs=2),
}


def table_of(version: int) -> NDArray:
    """Whoever draws from it knows by the first number which version's it was."""
    return np.array([[version, -1.0], [version, 1.0], [version, 2.0]], np.float32)


def opened(tmp_path: Path, collector: ModeConfig, world: str = WORLD) -> tuple[Collector, Callable[[int], Snapshot]]:
    """A collector that begins with the table of version 0, and the weights and table of any version."""
    config = from_options(world, {"context": table_of(0), "seed": SEED, "num_steps_per_env": 7, "runs_dir": tmp_path})
    with closing(config.env.make(range(1))) as env:
        spec = replace(env.spec, lanes=collector.lanes)
    planned = Plan(config, spec, config.policy.resolve(spec), RunName(tmp_path, "it"), "cpu")

    def weights(version: int) -> Snapshot:
        params = FlatParams(full_layout(planned.policy))
        initialise(planned.policy, params, generator(version))
        return Snapshot(version, params.views, table_of(version))

    return collector.build(planned.runner_factory, planned.collect_spec(weights(0), lambda: None)), weights


def collected(collector: Collector) -> Sequence[Chunk]:
    while not (chunks := collector.collect(wait=True)):
        pass
    return chunks


@pytest.mark.parametrize(
    ("mode", "world"), [*((mode, WORLD) for mode in COLLECTORS), ("sequential", MANY), ("continuous", MANY)]
)
def test_a_new_table_is_for_episodes_that_begin_after_it(tmp_path: Path, mode: str, world: str) -> None:
    collector, weights = opened(tmp_path, COLLECTORS[mode], world)
    delivered, tables, seen = 0, dict[tuple[int, int], int](), set[int]()
    with collector:
        for version in range(25):
            collector.publish(weights(version), delivered)
            for chunk in collected(collector):
                delivered += chunk.rows
                for episode in chunk.episodes:
                    drawn_from, whose = int(episode.context[0]), (chunk.origin.worker, episode.lane)
                    assert_told([episode], table_of(drawn_from))
                    assert tables.get(whose, 0) <= drawn_from <= chunk.version, "a table came back, or too early"
                    tables[whose] = drawn_from
                    seen.add(drawn_from)
                    assert_shown(chunk, episode)
    assert len(seen) > 5, "new tables never arrive"


def assert_shown(chunk: Chunk, episode: Episode) -> None:
    """The last row of the episode shows what it was told, although other weights may have been loaded since it began."""
    over = (chunk.data.terminated | chunk.data.truncated)[..., None]
    shown = np.where(over, chunk.data.next_obs, 0).reshape(-1, chunk.data.obs.shape[-1])
    assert episode.context in {tuple(row[1:].tolist()) for row in shown}


def test_an_episode_keeps_its_context_while_tables_come_and_go(tmp_path: Path) -> None:
    """Episodes of three steps, a new table after each: the k-th begins under the table of version 3 k."""
    collector, weights = opened(tmp_path, SequentialConfig(num_envs=1))
    told: list[float] = []
    with collector:
        collector._quota = Quota(1, 1)  # type: ignore[attr-defined]
        for version in range(12):
            collector.publish(weights(version), 0)
            for chunk in collector.collect(wait=True):
                told += [episode.context[0] for episode in chunk.episodes]
    assert told == [0, 2, 5, 8], "the first begins with version 0; others right after the step that ended one"


def test_who_takes_a_dead_workers_place_begins_with_the_newest_table(tmp_path: Path) -> None:
    collector, weights = opened(tmp_path, COLLECTORS["one env a worker"])
    with collector:
        collector.publish(weights(0), 0)
        delivered = sum(chunk.rows for chunk in collected(collector))
        collector.publish(weights(1), delivered)
        process = wire_of(collector).supervisor.slots[0].process
        assert process is not None
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        for _ in itertools.count():
            chunks = collected(collector)
            delivered += sum(chunk.rows for chunk in chunks)
            collector.publish(weights(1), delivered)
            episodes = [one for chunk in chunks if chunk.origin.incarnation for one in chunk.episodes]
            if episodes:
                break
    assert episodes[0].context[0] == 1
    assert_told(episodes, table_of(1))


@pytest.mark.parametrize(
    ("env", "options", "text"),
    [
        ("CartPole-v1", {}, "CartPole-v1 does not take contexts: it has to take options['context']"),
        (WORLD, {"context": [[1, 2, 3]]}, f"{WORLD} takes contexts of 2 numbers, not 3"),
        (DRONE, {}, f"{DRONE} does not take contexts: all its lanes are one simulation"),
    ],
)
@pytest.mark.parametrize("mode", ["sequential", "continuous"])
def test_other_worlds_are_refused(tmp_path: Path, env: str, options: dict[str, Any], text: str, mode: str) -> None:
    config = from_options(env, {"context": TABLE, "runs_dir": tmp_path / "runs", "mode": mode, **options})
    with pytest.raises(SetupError) as caught:
        plan(config)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_contexts_are_typed_as_json_and_kept_in_the_config(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = f"train {WORLD} --context [[1,0],[2,3],[-4,1]] --mode sequential --steps 64 --evals 1".split()
    assert cli.main([*argv, "--runs-dir", str(tmp_path), "--run", "one"]) == 0
    assert json.loads((tmp_path / "one" / "config.json").read_text())["context"] == TABLE
    assert from_file(tmp_path / "one" / "config.json").run.contexts.tolist() == TABLE
    seed = ["--seed", str(closing_seed(1000))]
    assert cli.main(["eval", str(tmp_path / "one"), "--episodes", "12", *seed]) == 0
    assert f"mean {np.mean(EVALUATED[1]):.1f} " in capfd.readouterr().out


@pytest.mark.parametrize("text", ["1", "[1,0]", "[[1],[2,3]]", "[[]]", "[[NaN]]", "[[1,", '[["a"]]', '{"a":1}'])
def test_what_is_no_table_is_refused_in_one_line(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", WORLD, "--context", text]) == 2
    wanted = "--context must be rows of equal length as JSON, e.g. [[1,0],[0,1]]"
    assert capfd.readouterr().err == f"freewheel: {wanted}, not {text}\n"


def test_arrays_are_tables_too() -> None:
    by_array = from_options(WORLD, {"context": CONTEXTS}).run.context
    by_rows = from_options(WORLD, {"context": [np.array([0.5, 1], np.float32), (2, np.float64(3))]}).run.context
    assert by_array == tuple(map(tuple, TABLE))
    assert by_rows == ((0.5, 1.0), (2.0, 3.0))
    assert from_options(WORLD, {"context": "[[1, 2]]"}).run.context == ((1.0, 2.0),)
    assert from_options(WORLD, {}).run.contexts.shape == (0, 0)


LENGTH, LANES, STEPS = 5, 2, 7  # episodes end inside chunks and between them
DRIFTING = GymConfig(id="tests.support.worlds:Drifting", args={"n": 4, "length": LENGTH})
REMEMBERING: Mapping[str, ModeConfig] = {
    "sequential": SequentialConfig(LANES),
    "lockstep": LockstepConfig(LANES, "inline"),
    "batch": BatchConfig(workers=1, envs_per_worker=LANES, num_envs=LANES, collection_batch_size=3),
    "continuous": ContinuousConfig(workers=2, envs_per_worker=1, num_envs=LANES, collection_batch_size=3),
    "episodes": EpisodesConfig(workers=2, num_envs=LANES, collection_batch_size=3),
}


def check_memory(chunk: Chunk) -> int:
    """Row by row, what the memory was; the rows that were checked."""
    ends = chunk.data.terminated | chunk.data.truncated
    for lane in range(chunk.data.valid.shape[1]):
        count = chunk.state[lane, 0]
        assert chunk.state[lane].tolist() == [count, -count]
        for t in range(len(ends)):
            assert chunk.data.log_prob[t, lane] == count
            count = 0 if ends[t, lane] else count + 1
    return chunk.rows


@pytest.mark.parametrize("mode", REMEMBERING)
def test_a_memory_is_carried_in_every_mode(mode: str) -> None:
    env = DRIFTING.make(range(LANES))
    env.close()
    spec = CollectSpec(env=env.spec, batch=BatchSpec(STEPS, LANES))
    checked, version = 0, 0
    with REMEMBERING[mode].build(RunnerFactory(DRIFTING.make, Counting, seed=3), spec) as collector:
        while checked < 6 * STEPS * LANES:
            collector.publish(Snapshot(version, {}), checked)
            for chunk in collector.collect(wait=True):
                assert chunk.state.shape == (chunk.data.valid.shape[1], 2)
                checked += check_memory(chunk)
            version += 1
