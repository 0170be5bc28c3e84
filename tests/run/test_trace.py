"""Runs with --trace: a row for every party, spans that add up to the shares of the run, and files that others can open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.core import WORKER_TIME
from freewheel.metrics.names import kinds_of_time
from freewheel.seeding import training_episodes
from freewheel.timeline.chrome import RECENT, TRACE, read
from freewheel.timeline.model import KINDS, Row, Timeline
from tests.support.runs import train

OTHERS = ("sequential", "batch", "episodes")
#: Steps of 3 ms, and resets of 3 ms after each 16 of them.
SLOW, SLOWLY = "tests.support.worlds:Crawls", {"seconds": 0.003, "at": 0, "length": 16}


def rows_of(timeline: Timeline) -> dict[str, Row]:
    return {row.name: row for row in timeline.rows}


def check_row(row: Row, end_s: float) -> None:
    for one, other in zip(row.spans, row.spans[1:], strict=False):
        assert one.t1_s <= other.t0_s + 1e-6, (row.name, one, other)
    assert all(span.seconds >= 0 and span.kind in KINDS for span in row.spans)
    assert row.spans[0].t0_s >= 0
    assert row.spans[-1].t1_s <= end_s + 1e-6


def check_learner(row: Row, shares: Mapping[str, float], wall_s: float) -> None:
    """It is covered from the beginning to the summary, adds up to the shares there, and what comes later is `other`."""
    spent = row.seconds()
    assert sum(spent.values()) > wall_s - 0.2
    for kind, share in shares.items():
        if kind != "other":
            assert spent.get(kind, 0.0) == pytest.approx(share * wall_s, abs=0.1), kind


@pytest.mark.parametrize(
    "mode", ["lockstep", "continuous", *(pytest.param(mode, marks=pytest.mark.system) for mode in OTHERS)]
)
def test_every_party_has_a_row_that_adds_up(tmp_path: Path, mode: str) -> None:
    workers: dict[str, Any] = {} if mode in ("sequential", "lockstep") else {"workers": 2}
    lanes: dict[str, Any] = {"num_envs": 1} if mode == "sequential" else {"num_envs": 2}
    small = {"steps": 192, "evals": 1, "eval_episodes": 1, **workers, **lanes}
    result = train(tmp_path, SLOW, mode=mode, env_args=SLOWLY, trace=True, **small)
    timeline, summary = read(result.path), result.summary
    rows = rows_of(timeline)
    acting = ["worker 0", "worker 1"] if workers else ["envs"]
    assert {*acting, "learner", "checkpoints", "evaluator"} | ({"collector"} if workers else set()) == set(rows)
    for row in timeline.rows:
        check_row(row, timeline.end_s)
    assert timeline.about == kinds_of_time()
    check_learner(rows["learner"], summary["shares"]["learner"], summary["wall_s"])
    for name in acting:
        spent, first, last = rows[name].seconds(), rows[name].spans[0], rows[name].spans[-1]
        assert sum(spent.values()) == pytest.approx(last.t1_s - first.t0_s, rel=0.05, abs=0.1), "no gaps"
        assert set(spent) <= set(WORKER_TIME)
        assert spent["step"] > 0
        assert spent["reset"] > 0
    waits = [span.waits_for for span in rows["learner"].spans if span.kind == "wait-data"]
    assert set(waits) <= {*acting, ""}
    assert waits[-1] in acting, "only before the first rows it is not known"


def test_a_workers_spans_are_the_time_that_it_reports(tmp_path: Path) -> None:
    """Of every step and reset, as its heartbeat counted them."""
    small = {"workers": 1, "num_envs": 1, "num_steps_per_env": 32, "steps": 128, "evals": 0}
    result = train(tmp_path, SLOW, mode="batch", env_args=SLOWLY, trace=True, **small)
    row = rows_of(read(result.path))["worker 0"]
    (worker,) = result.summary["workers"]
    spent = row.seconds()
    assert spent["step"] == pytest.approx(worker["steps"] * worker["step_s"], rel=0.05)
    assert spent["infer"] / sum(spent.values()) == pytest.approx(result.summary["shares"]["worker"]["infer"], abs=0.15)
    steps = [span for span in row.spans if span.kind == "step"]
    assert len(steps) >= worker["steps"] / 5, "steps of 3 ms share blocks of 10 ms"


def test_the_files_are_a_chrome_trace_and_the_last_minute(tmp_path: Path) -> None:
    result = train(tmp_path, mode="lockstep", trace=True, evals=0)
    trace = json.loads((result.path / TRACE).read_text())
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in trace["traceEvents"] if event["ph"] == "X")
    recent = json.loads((result.path / RECENT).read_text())
    assert {row["name"] for row in recent["rows"]} >= {"envs", "learner"}
    assert len(recent["kinds"]) == len(recent["about"]) == len(recent["colors"]) == len(recent["waits_for"])


def test_without_the_flag_nothing_is_recorded_and_weights_are_the_same(tmp_path: Path) -> None:
    plain = train(tmp_path, mode="lockstep", evals=0)
    traced = train(tmp_path, mode="lockstep", evals=0, trace=True)
    assert not (plain.path / TRACE).exists()
    assert not (plain.path / RECENT).exists()
    assert plain.summary["weights_sha256"] == traced.summary["weights_sha256"]


def test_a_killed_worker_leaves_its_spans_and_its_absence_is_shown(tmp_path: Path) -> None:
    """In the 11th episode of lane 0, which another process then passes over."""
    dies = {"at": 3, "length": 8, "only_seed": training_episodes(0, 0).seed(10)}
    small = {"workers": 2, "num_envs": 2, "steps": 640, "evals": 0, "seed": 0}
    result = train(tmp_path, "tests.support.worlds:Dies", mode="batch", env_args=dies, trace=True, **small)
    assert result.summary["worker_restarts"] == 1
    row = rows_of(read(result.path))["worker 0"]
    check_row(row, result.summary["wall_s"] + 1)
    kinds = [span.kind for span in row.spans]
    death = next(place for place, kind in enumerate(kinds) if kind == "down" and place > 0)
    assert "step" in kinds[:death]
    assert "step" in kinds[death + 1 :]


def test_a_resumed_run_goes_on_in_the_same_timeline(tmp_path: Path) -> None:
    first = train(tmp_path, mode="lockstep", evals=0, trace=True, steps=640)
    again = freewheel.resume(first.path, steps=1280, quiet=True)
    timeline = read(again.path)
    learner = rows_of(timeline)["learner"]
    check_row(learner, timeline.end_s)
    check_learner(learner, again.summary["shares"]["learner"], again.summary["wall_s"])
    assert timeline.end_s > first.summary["wall_s"]
