"""Updates with which the learner keeps up with its workers, where nobody has asked for a number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freewheel.config.auto import MEASURED
from freewheel.config.resolve import from_argv, from_file
from freewheel.rollout.probe import EnvCost
from freewheel.run.advice import keeping_up as pace
from freewheel.run.advice.policy_times import update_cost
from freewheel.run.naming import name_run
from freewheel.run.plan import Plan
from freewheel.run.planning import arrange
from tests.support.costs import cost

SLEEPS = cost(0.010, 0.0001)
WORKERS = "--mode continuous --workers 100"
FAST, USUAL, SLOW = (
    (1e-5, 1e-7),
    (1e-4, 1e-6),
    (1e-4, 1e-4),
)  # seconds of a gradient step whatever its rows, and of a row


def planned(words: str, tmp_path: Path, env: EnvCost = SLEEPS) -> Plan:
    config = from_argv(["Toy-v0", *words.split(), "--runs-dir", str(tmp_path)])
    return arrange(config, env, name_run(config), "cpu")


@pytest.fixture
def _a_gradient_step_costs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    call, row = request.param

    def estimate(plan: Plan) -> float:
        steps = plan.config.learner.gradient_steps(plan.learner_spec)
        return float(steps * call / plan.batch.rows + 10 * row)

    monkeypatch.setattr(pace, "update_cost", estimate)


@pytest.mark.usefixtures("_a_gradient_step_costs")
@pytest.mark.parametrize(
    ("_a_gradient_step_costs", "words", "minibatch", "lr"),
    [
        (FAST, WORKERS, 64, 3e-4),  # it keeps up as it is
        (USUAL, WORKERS, 256, 1.2e-3),
        (USUAL, "--mode episodes --workers 100", 256, 1.2e-3),
        (USUAL, "--mode continuous --workers 64", 128, 6e-4),
        (USUAL, "--mode continuous --workers 4", 64, 3e-4),
        (SLOW, WORKERS, 64, 3e-4),  # larger minibatches would hardly cost less
        (USUAL, f"{WORKERS} --ppo.minibatch 32", 32, 3e-4),
        (USUAL, f"{WORKERS} --ppo.lr 1e-4", 64, 1e-4),
        (USUAL, f"{WORKERS} --num-envs 100 --preset pendulum", 64, 1e-3),
        (USUAL, "--mode batch --workers 100", 64, 3e-4),
        (USUAL, "--mode lockstep --num-envs 100", 64, 3e-4),
    ],
    indirect=["_a_gradient_step_costs"],
)
def test_the_learner_keeps_up_with_workers_that_run_free(words: str, minibatch: int, lr: float, tmp_path: Path) -> None:
    plan = planned(words, tmp_path)
    ppo = plan.config.to_json()["ppo"]
    assert (ppo["minibatch"], ppo["lr"]) == (minibatch, lr)
    changed = [name for name, source in plan.config.sources.items() if source == MEASURED]
    assert changed == (["ppo.minibatch", "ppo.lr"] if minibatch > 64 else [])


@pytest.mark.usefixtures("_a_gradient_step_costs")
@pytest.mark.parametrize("_a_gradient_step_costs", [USUAL], indirect=True)
def test_an_environment_that_computes_is_kept_up_with_as_well(tmp_path: Path) -> None:
    found = [planned("--mode continuous", tmp_path, cost(wall, wall)).config.to_json() for wall in (0.0001, 0.01)]
    assert [one["ppo"]["minibatch"] for one in found] == [256, 64], "of the second one few rows come"


@pytest.mark.usefixtures("_a_gradient_step_costs")
@pytest.mark.parametrize("_a_gradient_step_costs", [USUAL], indirect=True)
def test_a_run_goes_on_with_what_was_measured_when_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned(WORKERS, tmp_path)
    monkeypatch.setattr(pace, "update_cost", lambda plan: 0.0)
    (tmp_path / "config.json").write_text(json.dumps(first.config.to_json()))
    again = from_file(tmp_path / "config.json", trust=True)
    assert arrange(again, SLEEPS, first.name, "cpu").config.learner == first.config.learner


@pytest.mark.parametrize("max_lag", [0, 2])
def test_an_update_is_measured_by_a_few_steps_of_it(max_lag: int, tmp_path: Path) -> None:
    one = planned(f"--mode continuous --workers 2 --max-lag {max_lag}", tmp_path)
    assert 0 < update_cost(one) == update_cost(one), "it is known the second time"
