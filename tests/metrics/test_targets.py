"""Targets of the key figures: green, red where something is wrong, or out of reach with a reason."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.config.resolve import from_options
from freewheel.metrics import targets
from freewheel.metrics.targets import Indicator, Setup, judge
from freewheel.run.planning import plan

FREE = Setup(
    mode="continuous", algo="ppo", workers=4, in_turn=False, cores=4, device="cpu", worker_cores=1.0, rows_per_update=2048
)  # fmt: skip
IN_TURN = replace(FREE, mode="sequential", workers=1, in_turn=True)
REPLAY = replace(FREE, algo="sac", rows_per_update=1.0, learning_starts=1_000, replay_rows=10_000)
ROW: dict[str, Any] = {
    "steps_per_s": 20_480.0, "updates_per_s": 10.0, "queue_util": 0.6, "buffer_util": 0.8, "gpu_util": None, "cpu_util": 0.95,
    "learner_busy": 0.95, "env_steps": 50_000, "time/worker_step": 0.98, "time/worker_wait_credit": 0.02,
}  # fmt: skip
BOTH_WAIT = {"learner_busy": 0.1, "time/learner_wait_data": 0.8}
LIMITED = ROW | {"time/worker_step": 0.4, "time/worker_wait_credit": 0.6}


def one(name: str, row: dict[str, Any], setup: Setup) -> Indicator:
    return next(indicator for indicator in judge(row, setup) if indicator.name == name)


def test_a_run_where_nobody_waits_is_green_but_for_what_it_cannot_have() -> None:
    found = {one.label: (one.state, one.reason) for one in judge(ROW, FREE)}
    assert found == {
        "collection rate": ("good", ""),
        "update rate": ("good", ""),
        "queue": ("good", ""),
        "buffer": ("unreachable", "PPO empties its rollout buffer at every update: it swings between 0 and 100 %"),
        "GPU": ("unreachable", "no GPU here: the learner computes on the CPU"),
        "CPU": ("good", ""),
    }


def test_the_collection_rate_stands_beside_that_of_workers_that_never_wait() -> None:
    found = one("steps_per_s", LIMITED, FREE)
    assert found.low == pytest.approx(0.9 * 20_480 / 0.4)
    assert found.reason == "the learner is the limit: it is busy 95 % of the time, workers wait for it 60 %"
    assert found.state == "unreachable"
    idle = one("steps_per_s", LIMITED | BOTH_WAIT, FREE)
    why = "workers wait 60 % of the time, and so does the learner: the limit of rows under way is too low"
    assert (idle.state, idle.reason) == ("bad", why)
    down = one("steps_per_s", ROW | {"time/worker_down": 0.5}, FREE)
    assert (down.state, down.reason) == ("bad", "workers are down 50 % of the time: they die and are replaced")
    playing = LIMITED | {"learner_busy": 0.1, "time/learner_wait_data": 0.2, "time/learner_eval": 0.7}
    assert "bad" not in [found.state for found in judge(playing, FREE)], "an evaluation that the learner plays"
    start = one("steps_per_s", ROW | {"time/worker_down": 0.5, "wall_s": 2.0}, FREE)
    assert (start.state, start.reason) == ("unreachable", "workers are down 50 % of the time: they start")
    assert "sequential takes turns" in one("steps_per_s", LIMITED, IN_TURN).reason


def test_waiting_for_ones_turn_is_not_waiting_for_the_learner() -> None:
    many = replace(FREE, workers=20)
    crowd = ROW | BOTH_WAIT | {"time/worker_wait_credit": 0.0, "time/worker_wait_gate": 0.9}
    assert one("steps_per_s", crowd, many).state == "bad"
    assert one("steps_per_s", crowd | {"workers/turns": 2.0}, many).state == "good"
    slow = one("steps_per_s", crowd | {"workers/turns": 4.0}, many)
    assert slow.low == pytest.approx(0.9 * 20_480 / 0.5), "half of what four could do"


def test_updates_follow_the_rows_and_one_may_be_missing_in_what_rates_are_over() -> None:
    assert one("updates_per_s", ROW | {"updates_per_s": 9.1}, FREE).state == "good"  # 0.9 x 20480 / 0.98 / 2048 - 0.1
    for every, wall, low in ((1, 500, 9.084), (20, 500, 9.134), (1, 2, 8.684), (0.01, 500, 8.184)):
        found = one("updates_per_s", ROW | {"wall_s": float(wall)}, replace(FREE, log_every=every))
        assert found.low == pytest.approx(low, abs=1e-3), "over ten seconds, an interval, all of the run, or 100 rows"
    behind = one("updates_per_s", ROW | {"updates_per_s": 8.0}, FREE)
    assert behind.reason == "rows come faster than updates: the learner is busy 95 % of the time"
    stuck = one("updates_per_s", LIMITED | BOTH_WAIT | {"updates_per_s": 8.0}, FREE)
    assert (behind.state, stuck.state) == ("unreachable", "bad")
    early = one("updates_per_s", ROW | {"updates_per_s": 0.0, "env_steps": 10}, REPLAY)
    assert (early.state, early.reason) == ("unreachable", "learning begins after 1,000 rows")
    assert one("updates_per_s", ROW, replace(FREE, rows_per_update=None)).state == "unknown"


@pytest.mark.parametrize(
    ("util", "waits", "state", "reason"),
    [
        (0.5, 0.0, "good", ""),
        (0.8, 0.9, "good", ""),
        (0.3, 0.0, "unreachable", "the learner keeps up: a shorter queue would be enough"),
        (0.0, 0.7, "unreachable", "the learner takes each fragment when it arrives: it waits 70 % of the time"),
    ],
)
def test_the_queue(util: float, waits: float, state: str, reason: str) -> None:
    found = one("queue_util", ROW | {"queue_util": util, "time/learner_wait_data": waits}, FREE)
    assert (found.state, found.reason) == (state, reason)


def test_a_queue_that_is_full_tells_who_is_slow_and_serial_modes_have_none() -> None:
    full = one("queue_util", LIMITED | {"queue_util": 0.99}, FREE)
    assert full.state == "unreachable"
    assert full.reason.startswith("the learner is the limit")
    assert one("queue_util", LIMITED | BOTH_WAIT | {"queue_util": 0.99}, FREE).state == "bad"
    none = one("queue_util", ROW | {"queue_util": None}, IN_TURN)
    assert (none.state, none.reason) == ("unreachable", "sequential takes turns: there is no queue")


@pytest.mark.parametrize(
    ("util", "filled", "state", "word"),
    [
        (0.8, None, "good", ""),
        (1.0, None, "unreachable", "stays full"),
        (0.1, None, "unreachable", "still fills"),
        (0.1, 5_000, "unreachable", "fill 50 % of 10,000 at most"),
    ],
)
def test_a_replay_buffer(util: float, filled: int | None, state: str, word: str) -> None:
    found = one("buffer_util", ROW | {"buffer_util": util}, replace(REPLAY, replay_filled=filled))
    assert found.state == state
    assert word in found.reason


def test_sleeping_workers_cannot_fill_the_cores_and_computing_ones_can() -> None:
    idle = ROW | {"cpu_util": 0.3, "learner_busy": 0.1}
    sleepers = replace(FREE, workers=100, worker_cores=0.011)
    assert one("cpu_util", idle, sleepers).reason == "workers sleep: 100 of them use 30 % of the CPU at most"
    few = one("cpu_util", idle, replace(FREE, workers=2))
    assert (few.state, few.reason) == ("unreachable", "2 workers use 52 % of the CPU at most: more would use the rest")
    assert one("cpu_util", LIMITED | {"cpu_util": 0.3}, FREE).state == "unreachable"
    assert one("cpu_util", idle, IN_TURN).reason == "sequential uses 1 of 4 cores at a time"


def test_a_gpu_that_waits_for_rows_says_so() -> None:
    there = replace(FREE, device="cuda:0")
    assert one("gpu_util", ROW, there).state == "unknown"
    assert one("gpu_util", ROW | {"gpu_util": 0.95}, there).state == "good"
    waits = one("gpu_util", ROW | {"gpu_util": 0.2, "time/learner_wait_data": 0.6}, there)
    assert waits.reason == "the environments are the limit: the learner waits for rows 60 % of the time"
    found = one("gpu_util", ROW | {"gpu_util": 0.2}, there)
    assert found.reason.startswith("the GPU is faster than this work needs: larger")


@given(
    st.dictionaries(st.sampled_from([*ROW, "time/learner_wait_data", "time/worker_down"]), st.none() | st.floats(0, 1)),
    st.sampled_from([FREE, IN_TURN, REPLAY, None]),
)
def test_any_row_is_judged_and_only_what_is_good_has_no_reason(row: dict[str, Any], setup: Setup | None) -> None:
    judged = judge(row, setup)
    assert [one.name for one in judged] == list(targets.LABELS)
    for found in judged:
        assert bool(found.reason) == (found.state != "good")
        if found.state in ("good", "bad"):
            assert found.value is not None
            low, high = -math.inf if found.low is None else found.low, math.inf if found.high is None else found.high
            assert (low <= found.value <= high) == (found.state == "good")


def test_the_set_up_of_a_plan_is_read_back_from_a_run_directory(tmp_path: Path) -> None:
    options = {"algo": "sac", "steps": 500, "mode": "continuous", "workers": 2, "sac": {"updates_per_row": 0.5}}
    setup = plan(from_options("Pendulum-v1", options)).setup
    assert (setup.rows_per_update, setup.replay_filled, setup.in_turn, setup.workers) == (2.0, 500, False, 2)
    assert targets.read(tmp_path) is None
    (tmp_path / targets.FILE).write_text(json.dumps(setup.to_json() | {"newer": 1}))
    assert targets.read(tmp_path) == setup
    (tmp_path / targets.FILE).write_text('{"mode": 3}')
    assert targets.read(tmp_path) is None
