"""The plan: rows of an update whatever the number of workers; defaults, told and kept; who yields to whom; what is said."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.config.flags import values
from freewheel.config.resolve import Config, from_argv, from_options
from freewheel.errors import EnvError, SetupError, UsageError
from freewheel.rollout.probe import BRIEF, BUDGET, EnvCost, usable_cores
from freewheel.run import plan, planning, process
from freewheel.run.advice.auto_mode import plan_run
from freewheel.run.plan import Plan
from tests.support.costs import cost as cost_of
from tests.support.worlds import Counter

DISCRETE = "tests.support.worlds:Identity"
BOX = f"{DISCRETE}Box"
COUNTER = "tests.support.worlds:Counter"
COMPUTING, WAITING = cost_of(1e-3, 1e-3), cost_of(0.05, 1e-5)


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the measurement: the env's spec is that of `costs`."""

    def have(cost: EnvCost, cores: int = 2) -> None:
        monkeypatch.setattr(planning, "survey_env", lambda *_, **__: cost)
        for place in ("run.plan", "run.planning", "collect.workers", "collect.batch"):
            monkeypatch.setattr(f"freewheel.{place}.usable_cores", lambda: cores)

    return have


def planned(tmp_path: Path, **options: Any) -> Plan:
    return planning.plan(from_options(COUNTER, {"runs_dir": tmp_path, **options}))


@pytest.mark.parametrize("mode", ["sequential", "lockstep", "batch", "continuous", "episodes"])
def test_a_plan_leaves_no_number_of_a_mode_to_be_chosen(tmp_path: Path, costs: Any, mode: str) -> None:
    """A number that is missing would count as one."""
    costs(COMPUTING)
    config = planned(tmp_path, mode=mode).config
    assert "auto" not in [*values(config.collector).values(), config.run.num_steps_per_env]


@pytest.mark.parametrize(
    ("options", "lanes", "steps"),
    [
        ({"mode": "sequential"}, 1, 2048),
        ({}, 8, 256),
        ({"num_envs": 4}, 4, 512),
        ({"mode": "continuous", "workers": 2}, 8, 256),
        ({"mode": "continuous", "workers": 20}, 20, 102),
        ({"mode": "continuous", "workers": 64}, 64, 32),
        ({"mode": "continuous", "workers": 500}, 500, 8),  # not fewer: then an update has more rows
        ({"mode": "episodes", "workers": 16}, 16, 128),
        ({"mode": "batch", "workers": 3, "num_steps_per_env": 5}, 6, 5),  # given: as it is
    ],
)
def test_an_update_has_the_same_rows_however_many_lanes_there_are(
    tmp_path: Path, costs: Any, options: dict[str, Any], lanes: int, steps: int
) -> None:
    costs(COMPUTING)
    found = planned(tmp_path, **options)
    assert (found.batch.lanes, found.batch.steps, found.config.to_json()["num_steps_per_env"]) == (lanes, steps, steps)


@pytest.mark.parametrize(
    ("options", "measured", "hurried"),
    [
        ({"mode": "sequential", "num_envs": 4}, False, True),
        ({"mode": "lockstep"}, True, False),  # where its lanes run depends on the time of a step
        ({"mode": "lockstep", "placement": "inline"}, False, True),
        ({"mode": "continuous"}, True, False),
        ({"mode": "batch", "num_envs": 8}, True, False),  # by how many workers is not said
        ({"mode": "episodes", "workers": 2}, False, True),
        ({"mode": "continuous", "workers": 3}, True, True),  # more than cores act in turn if they compute
    ],
)
def test_an_environment_is_measured_only_where_a_number_depends_on_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], *, measured: bool, hurried: bool
) -> None:
    asked: dict[str, Any] = {}

    def survey(*args: Any, **how: Any) -> None:
        asked.update(how)
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "Survey", survey)
    monkeypatch.setattr("freewheel.collect.workers.usable_cores", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        planning.survey_env(from_options(COUNTER, options))
    assert (asked["budget"], asked["hurried"]) == (BUDGET if measured else BRIEF, hurried)


def test_it_is_measured_where_modes_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    budgets = list[float | None]()

    def survey(config: Config, meanwhile: Any, budget: float | None = None, **_: Any) -> EnvCost:
        budgets.append(budget)
        return COMPUTING

    monkeypatch.setattr(planning, "survey_env", survey)
    for mode in ("sequential", "auto"):
        plan_run(from_options(COUNTER, {"runs_dir": tmp_path, "mode": mode}))
    assert budgets == [None, BUDGET]


@pytest.mark.parametrize("mode", ["batch", "continuous", "episodes"])
def test_auto_changes_workers_and_not_the_rows(tmp_path: Path, costs: Any, mode: str) -> None:
    found = []
    for cost in (COMPUTING, WAITING, cost_of(0.05, 1e-3)):
        costs(cost)
        found.append(planned(tmp_path, mode=mode))
    assert {one.batch.rows for one in found} == {2048}
    assert len({one.workers for one in found}) > 1


@pytest.mark.parametrize(
    ("options", "processes", "setup"),
    [
        ({"mode": "sequential"}, 0, 1),
        ({"mode": "lockstep", "placement": "inline"}, 0, 1),
        ({"mode": "lockstep", "placement": "processes", "num_envs": 6}, 6, 6),
        ({"mode": "continuous", "workers": 3}, 3, 3),
    ],
)
def test_it_counts_processes(tmp_path: Path, costs: Any, options: dict[str, Any], processes: int, setup: int) -> None:
    costs(COMPUTING)
    found = planned(tmp_path, **options)
    assert (found.env_processes, found.setup.workers) == (processes, setup)
    assert replace(found, spec=replace(found.spec, batched_on_device=True)).env_processes == 0


@pytest.mark.parametrize(
    ("options", "lanes", "every"),
    [
        ({"mode": "continuous", "workers": 64}, 64, 8),
        ({"mode": "continuous", "workers": 4, "num_envs": 4}, 4, 4),
        ({"mode": "continuous", "workers": 64, "sac.publish_every": 16}, 64, 16),
        ({"mode": "continuous", "workers": 16, "num_steps_per_env": 2}, 16, None),  # all rows
        ({"mode": "batch", "workers": 16}, 16, None),
        ({"mode": "lockstep"}, 8, None),
    ],
)
def test_how_often_replay_publishes(tmp_path: Path, options: dict[str, Any], lanes: int, every: int | None) -> None:
    found = planning.plan(from_options("Pendulum-v1", {"runs_dir": tmp_path, "algo": "sac", **options}))
    assert (found.batch.lanes, found.config.learner.publish_every) == (lanes, every)


@pytest.mark.parametrize(
    ("cost", "workers", "yields", "nice", "text"),
    [
        (COMPUTING, 1, None, 0, "the learner has a core"),
        (COMPUTING, 2, None, 0, "the learner shares them"),
        (COMPUTING, 20, "workers", plan.NICE, "the learner shares them at higher priority"),
        (WAITING, 20, "learner", 0, "the learner shares them at lower priority"),
    ],
)
def test_who_yields_depends_on_what_workers_do(
    tmp_path: Path, costs: Any, cost: EnvCost, workers: int, yields: str | None, nice: int, text: str
) -> None:
    costs(cost)
    found = planned(tmp_path, mode="continuous", workers=workers)
    assert (found.yields, found.actors.partition("; ")[2]) == (yields, text)
    assert found.worker_spec.nice == nice
    assert len([line for line in found.lines() if line.startswith("note ")]) == (yields == "workers")


def test_no_more_workers_that_compute_act_at_a_time_than_there_are_cores(tmp_path: Path, costs: Any) -> None:
    cores = usable_cores()
    for mode, cost, workers, turns in (
        ("continuous", COMPUTING, cores, 0),
        ("continuous", COMPUTING, 10 * cores, cores),
        ("episodes", COMPUTING, 10 * cores, cores),
        ("episodes", WAITING, 10 * cores, 0),
        ("batch", COMPUTING, 10 * cores, 0),
    ):
        costs(cost)
        found = planned(tmp_path, mode=mode, workers=workers)
        assert found.worker_spec.turns == turns
        assert (f", {cores} at a time;" in found.actors) is bool(turns)


def test_a_learner_with_time_to_spare_gives_way_further(tmp_path: Path, costs: Any) -> None:
    costs(WAITING)
    found = planned(tmp_path, mode="continuous", workers=20)
    seen = []

    def learner() -> None:
        with process.lower_priority(found.yields == "learner"):
            spec = found.collect_spec(found.config.learner.build(found.learner_spec).snapshot(), lambda: None)
            for _ in range(2):
                seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
                spec.time_to_spare()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(learner).result()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert seen == [min(19, before + more) for more in (5, 10)]


def test_what_does_not_fit_into_memory_is_refused(tmp_path: Path, costs: Any) -> None:
    costs(cost_of(1.0, 0.0, memory=1 << 40))
    with pytest.raises(SetupError, match=r"8 envs of 1\.0 TB each, as measured, need 8192\.0 GB of memory, but"):
        planned(tmp_path)
    with pytest.raises(SetupError, match=r"3 envs of .* need 3072"):
        planned(tmp_path, mode="continuous", workers=3, num_envs=3)


def test_it_says_what_it_does_and_calls_what_can_be_done_meanwhile(tmp_path: Path) -> None:
    said: list[str] = []
    planning.plan(from_options(COUNTER, {"runs_dir": tmp_path}), said.append, lambda: said.append("meanwhile"))
    assert said == [f"measuring {COUNTER} ...", "meanwhile"]


def test_an_env_that_cannot_be_sent_elsewhere_is_measured_here(tmp_path: Path) -> None:
    lock = threading.Lock()
    made = lambda: (lock, Counter())[1]  # noqa: E731
    found = planning.plan(from_options(made, {"runs_dir": tmp_path}))
    assert found.cost is not None
    assert not found.cost.portable
    assert found.config.to_json()["placement"] == "inline"
    with pytest.raises(SetupError, match="cannot be pickled for another process"):
        planning.plan(from_options(made, {"runs_dir": tmp_path, "mode": "batch"}))


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (Counter(),
         r"an instance of Counter, which is already made, but every lane needs its own: pass the class or a fun"),
        (3, r"train\(\) was given an instance of int, which makes no environment: pass the class or a function"),
    ],
)  # fmt: skip
def test_an_instance_is_answered_with_what_to_pass(given: Any, answer: str) -> None:
    with pytest.raises(UsageError, match=answer):
        freewheel.train(given)


def test_the_env_of_a_plan_that_hangs_is_named(tmp_path: Path) -> None:
    options = {"runs_dir": tmp_path, "env_args": {"at": 1}, "step_timeout": 0.3}
    with pytest.raises(EnvError, match=r"Hangs did not return within 0.3 s from step 1"):
        planning.plan(from_options("tests.support.worlds:Hangs", options))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (DISCRETE, "Discrete actions: 2,048 rows an update in 10 epochs of minibatches of 64"),
        (BOX,
         "Box actions: observations and rewards normalised, 2,048 rows an update in 10 epochs of minibatches of 64"),
        (f"{BOX} --ppo.reward-scale none --num-steps-per-env 512",
         "Box actions: observations normalised, 4,096 rows an update in 10 epochs of minibatches of 128"),
        (f"{BOX} --algo sac --steps 92",
         "Box actions: observations normalised, 1 updates a row, batches of 256, replay of 108 rows (0 MB)"),
        (f"{BOX} --preset pendulum", ""),
    ],
)  # fmt: skip
def test_defaults_of_the_kind_of_world_are_told_in_one_line(words: str, line: str, tmp_path: Path) -> None:
    found = planning.plan(from_argv([*words.split(), "--mode", "lockstep", "--runs-dir", str(tmp_path)]))
    assert found.defaults_line == line


def test_they_are_kept_with_their_source(tmp_path: Path) -> None:
    done = freewheel.train(BOX, steps=64, num_envs=2, evals=0, quiet=True, runs_dir=str(tmp_path), ppo={"epochs": 1})
    kept = json.loads((done.path / "config.json").read_text())
    assert (kept["num_steps_per_env"], kept["ppo"]["minibatch"], kept["ppo"]["reward_scale"]) == (32, 64, "returns")
    assert kept["policy"]["normalize_obs"] is True
    names = {"num_steps_per_env", "ppo.minibatch", "ppo.reward_scale", "policy.normalize_obs"}
    assert {name for name, source in kept["sources"].items() if source == "default for Box actions"} == names
