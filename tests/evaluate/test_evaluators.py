"""Who evaluates where only one simulation can live: reserved lanes that act greedily and are not learned from."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.core import Episode, Snapshot
from freewheel.envs.batched import BatchedConfig
from freewheel.envs.device import DeviceEnv
from freewheel.evaluate.episodes import Score
from freewheel.evaluate.evaluators import Reserved

LANES, STEPS = 16, 24


def episode(ret: float, length: int, success: float) -> Episode:
    return Episode(0, 0, 0, (), ret, length, 0.0, (success,))


def test_the_latest_episodes_of_reserved_lanes_are_the_score() -> None:
    played = [[episode(1.0, 10, 0.0)], [episode(3.0, 20, 1.0), episode(5.0, 30, 1.0)], []]
    evaluator = Reserved(lambda: played.pop(0), episodes=2, measures=("success",))
    snapshot = Snapshot(4, {})
    evaluator.ask(100, snapshot)
    assert list(evaluator.results(wait=False)) == [(100, snapshot, Score((1.0,), (10,), 0, {"success": 0.0}))]
    evaluator.ask(200, snapshot)
    ((step, _, score),) = evaluator.results(wait=True)
    assert (step, score) == (200, Score((3.0, 5.0), (20, 30), 0, {"success": 1.0}))
    assert list(evaluator.results(wait=True)) == []


def test_without_an_episode_a_question_stays_open() -> None:
    played: list[list[Episode]] = [[], [episode(2.0, 5, 0.0)]]
    evaluator = Reserved(lambda: played.pop(0), episodes=4, measures=("success",))
    evaluator.ask(7, Snapshot(0, {}))
    assert list(evaluator.results(wait=True)) == []
    assert [step for step, *_ in evaluator.results(wait=False)] == [7]


@pytest.fixture
def only_one_drone_world(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Drones of which one simulation may live, in the main thread; lanes and thread of every step."""
    make, seen = BatchedConfig.make, list[tuple[int, str]]()

    def single(self: BatchedConfig, lanes: range, **options: Any) -> DeviceEnv:
        env = make(self, lanes, **options)
        monkeypatch.setattr(env, "_spec", replace(env.spec, one_per_process=True))
        step = env.step

        def watched(action: Any) -> Any:
            seen.append((len(action), threading.current_thread().name))
            return step(action)

        monkeypatch.setattr(env, "step", watched)
        return env

    monkeypatch.setattr(BatchedConfig, "make", single)
    monkeypatch.setattr(BatchedConfig, "main_thread", property(lambda _: True), raising=False)
    return seen


@pytest.mark.parametrize("mode", ["lockstep", "continuous", "batch"])
def test_one_simulation_trains_and_is_evaluated_in_the_main_thread(
    mode: str, tmp_path: Path, only_one_drone_world: list[tuple[int, str]]
) -> None:
    result = freewheel.train(
        "freewheel/RoughDrone-v0", mode=mode, num_envs=LANES, num_steps_per_env=STEPS, steps=10 * LANES * STEPS, seed=1,
        evals=1, eval_episodes=2, env_args={"lidar": False, "episode_seconds": 2.0}, device="cpu", runs_dir=str(tmp_path),
        quiet=True, ppo={"epochs": 1},
    )  # fmt: skip
    summary = result.summary
    assert summary["final_eval"] is not None
    assert summary["eval/success"] is not None
    assert {lanes for lanes, _ in only_one_drone_world} == {LANES + 2}, "no lanes were reserved, or too many"
    assert {thread for _, thread in only_one_drone_world} == {"MainThread"}
    assert summary["produced"] % LANES == 0
    assert summary["trained"] == 10 * LANES * STEPS, "rows of reserved lanes were learned from"
