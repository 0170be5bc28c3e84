"""Mode episodes: chunks are whole episodes under one version, each played once; waves are the baseline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.collect.episodes import EpisodesConfig
from freewheel.collect.whole_episodes import SLOTS
from freewheel.config.resolve import from_argv
from freewheel.core import BatchSpec, Chunk
from freewheel.errors import SetupError, UsageError
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.spec import LearnerSpec
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.pacing.episode_queue import EpisodeQueue
from freewheel.pacing.pacing import NO_TICKET
from freewheel.policies.spec import PolicySpec
from freewheel.rollout.factory import RunnerFactory
from freewheel.run.naming import name_run
from freewheel.run.planning import arrange
from freewheel.seeding import training_episodes
from freewheel.transport.workers.heartbeats import WAIT
from tests.support.collectors import Spec, Weights
from tests.support.costs import cost
from tests.support.pools import wire_of
from tests.support.trainers import wait_until


@pytest.mark.parametrize("fragment", [2, 128])
def test_a_chunk_is_one_whole_episode_and_none_is_played_twice(
    factory: RunnerFactory, snapshot: Weights, spec: Spec, fragment: int
) -> None:
    config = EpisodesConfig(workers=3, num_envs=3, collection_batch_size=fragment)
    chunks: list[Chunk[Any]] = []
    with config.build(factory, spec(7, lanes=3)) as collector:
        done = 0
        for version in range(8):
            collector.publish(snapshot(version), done)
            while done < 21 * (version + 1):
                got = collector.collect(wait=True)
                done += sum(chunk.rows for chunk in got)
                chunks += got
    tickets = set()
    for chunk in chunks:
        (episode,) = chunk.episodes
        assert (chunk.rows, episode.length) == (5, 5)
        assert chunk.data.truncated[:, 0].tolist() == [False] * 4 + [True]
        assert chunk.data.obs[0, 0, 4] == 0, "the first row is the first step"
        assert episode.seed == training_episodes(3, episode.lane).seed(episode.number)
        assert chunk.data.obs[0, 0, :4].argmax() == episode.seed % 4
        tickets.add(episode.number * 3 + episode.lane)
    assert len(tickets) == len(chunks)
    assert max(tickets) < len(chunks) + 6, "tickets are played in order, except those under way"


def test_an_episode_of_several_fragments_has_one_version(factory: RunnerFactory, snapshot: Weights, spec: Spec) -> None:
    config = EpisodesConfig(workers=3, num_envs=3, collection_batch_size=1)
    with config.build(factory, spec(700, lanes=3)) as collector:
        versions = []
        for version in range(30):
            collector.publish(snapshot(version), 0)
            versions += [chunk.version for chunk in collector.collect(wait=True)]
    assert len(set(versions)) > 3
    assert versions[-1] > 3


def test_a_worker_that_waits_for_a_slot_keeps_its_ticket(factory: RunnerFactory, snapshot: Weights, spec: Spec) -> None:
    """Four episodes wait and the fifth has begun: if its worker dies now, another worker must play it."""
    with EpisodesConfig(workers=3, num_envs=3).build(factory, spec(7000, lanes=3)) as collector:
        collector.publish(snapshot(0), 0)
        phases = wire_of(collector).heartbeats.memory["phase"]
        wait_until(lambda: collector.rows().produced >= 3 * SLOTS * 5 and bool((phases == WAIT).all()))
        tickets = list(wire_of(collector).permits.pacing.cells["ticket"])
        assert (NO_TICKET not in tickets, len(set(tickets)), max(tickets)) == (True, 3, 3 * SLOTS + 2)


def test_a_wave_begins_when_the_last_one_has_ended(factory: RunnerFactory, snapshot: Weights, spec: Spec) -> None:
    with EpisodesConfig(workers=3, num_envs=3, wave=True).build(factory, spec(7, lanes=3)) as collector:
        collector.publish(snapshot(0), 0)
        for wave in range(4):
            numbers: list[int] = []
            while len(numbers) < 3:
                numbers += [chunk.episodes[0].number for chunk in collector.collect(wait=True)]
            assert numbers == [wave] * 3
            assert collector.rows().produced == 15 * (wave + 1), "no worker has begun the next one"


def test_a_wave_begins_only_when_all_of_the_last_one_was_taken(
    factory: RunnerFactory, snapshot: Weights, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All episodes may end just after the collector has looked for them."""
    with EpisodesConfig(workers=3, num_envs=3, wave=True).build(factory, spec(7, lanes=3)) as collector:
        permits = wire_of(collector).permits
        queue, take = permits.pacing, collector._take  # type: ignore[attr-defined]
        assert isinstance(queue, EpisodeQueue)

        def in_vain() -> list[Chunk]:
            monkeypatch.setattr(collector, "_take", take)
            wait_until(lambda: permits.locked(queue.wave_is_over))
            return []

        monkeypatch.setattr(collector, "_take", in_vain)
        collector.publish(snapshot(0), 0)
        assert len(collector.collect(wait=True)) == 3
        assert int(queue.cells["released"][0]) == 3


@pytest.mark.parametrize(("workers", "ahead"), [(3, 3 * 4), (1, 2 * 4 + 3 + 2)], ids=["one each", "side by side"])
def test_an_update_takes_episodes(
    factory: RunnerFactory, policy: PolicySpec, spec: Spec, workers: int, ahead: int
) -> None:
    config = EpisodesConfig(workers=workers, envs_per_worker=3 // workers, num_envs=3, episodes_per_update=4)
    learner = PPOConfig(epochs=1).build(LearnerSpec(policy=policy, batch=BatchSpec(7, 3, episodes=4), seed=0))
    with config.build(factory, spec(7, lanes=3)) as collector:
        for tick in loop(collector, learner, Meter(workers=workers)):
            assert learner.rows().trained == 20 * learner.version
            if tick.version == 8:
                break
        assert sum(wire_of(collector).permits.pacing.cells["reserved"]) <= 8 * 4 + ahead, "credits are episodes"


@pytest.mark.parametrize("fragment", [2, 128])
def test_the_envs_of_a_worker_play_their_episodes_side_by_side(
    factory: RunnerFactory, snapshot: Weights, spec: Spec, fragment: int
) -> None:
    config = EpisodesConfig(workers=2, envs_per_worker=2, num_envs=4, collection_batch_size=fragment)
    played = []
    with config.build(factory, spec(7, lanes=4)) as collector:
        done = 0
        for version in range(4):
            collector.publish(snapshot(version), done)
            while done < 28 * (version + 1):
                for chunk in collector.collect(wait=True):
                    done += chunk.rows
                    assert chunk.data.valid.shape == (5, 2)
                    assert chunk.data.truncated.tolist() == [[False] * 2] * 4 + [[True] * 2]
                    for lane, episode in enumerate(chunk.episodes):
                        assert episode.seed == training_episodes(3, episode.lane).seed(episode.number)
                        assert chunk.data.obs[0, lane, :4].argmax() == episode.seed % 4
                        played.append((episode.lane, episode.number))
    assert len(set(played)) == len(played)
    assert {lane for lane, _ in played} == {0, 1, 2, 3}


def test_episodes_that_end_apart_cannot_be_played_side_by_side(tmp_path: Path) -> None:
    options = {"workers": 1, "envs_per_worker": 2, "num_envs": 2, "steps": 2000, "evals": 0, "policy.hidden": [4]}
    with pytest.raises(
        SetupError, match=r"^episodes of CartPole-v1 do not all end together, .*; use envs_per_worker=1"
    ):
        freewheel.train("CartPole-v1", mode="episodes", quiet=True, runs_dir=tmp_path, options=options)


def test_an_episode_that_never_ends_is_not_kept_for_ever(factory: RunnerFactory, snapshot: Weights, spec: Spec) -> None:
    """Its rows wait in memory for its end."""
    config = EpisodesConfig(workers=2, num_envs=2, collection_batch_size=2)
    with config.build(factory, replace(spec(7, lanes=2), longest=3)) as collector:
        collector.publish(snapshot(0), 0)
        with pytest.raises(
            SetupError, match=r"^an episode of .* has not ended after 3 steps; add --max-episode-steps,"
        ):
            wait_until(lambda: not collector.collect(wait=True))


@pytest.mark.parametrize(
    ("words", "longest"),
    [("--steps 500", 10_000), ("--steps 30000", 30_000), ("--minutes 1", 100_000), ("--max-episode-steps 20", None)],
)
def test_an_episode_may_be_as_long_as_the_run(words: str, longest: int | None, tmp_path: Path) -> None:
    config = from_argv(["tests.support.worlds:Identity", *words.split(), "--runs-dir", str(tmp_path)])
    planned = arrange(config, cost(1e-4, 1e-4), name_run(config), "cpu")
    weights = planned.config.learner.build(planned.learner_spec).snapshot()
    assert planned.collect_spec(weights, lambda: None).longest == longest


BATCHED = replace(cost(1e-4, 1e-4), batched=True)


@pytest.mark.parametrize(
    ("asked", "workers", "each"),
    [
        ({"workers": 100}, 1, 100), ({"workers": 2, "num_envs": 100}, 2, 50), ({"num_envs": 100}, 1, 100),
        ({"workers": 1, "num_envs": 256}, 1, 256), ({"episodes_per_update": 50}, 1, 50), ({}, 1, 8),
    ],
)  # fmt: skip
def test_cheap_lanes_share_a_worker(
    asked: dict[str, Any], workers: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freewheel.collect.episodes.usable_cores", lambda: 2)
    planned = EpisodesConfig(**asked).planned(BATCHED)
    assert (planned.workers, planned.envs_per_worker, planned.num_envs) == (workers, each, workers * each)
    other = EpisodesConfig(workers=3).planned(cost(1e-4, 1e-4))
    assert (other.workers, other.envs_per_worker) == (3, 1)
    with pytest.raises(UsageError, match="so 256 envs need as many workers; leave out --workers or --num-envs"):
        EpisodesConfig(workers=1, num_envs=256).planned(cost(1e-4, 1e-4))


def test_invalid_options_are_refused() -> None:
    with pytest.raises(UsageError, match="--episodes-per-update must be positive"):
        EpisodesConfig(episodes_per_update=0)
