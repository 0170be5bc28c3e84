"""What a run says about itself when it ends, and which mode is advised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freewheel.config.resolve import from_argv
from freewheel.core import LEARNER_TIME, WORKER_TIME
from freewheel.rollout.probe import EnvCost, usable_cores
from freewheel.run.advice import predictions
from freewheel.run.advice.keeping_up import way_of
from freewheel.run.advice.predictions import ModeRate, best_of, closing
from freewheel.run.advice.throughput import Forecast, PolicyTimes, StepTimes, forecast
from freewheel.run.naming import name_run
from freewheel.run.plan import Plan
from freewheel.run.planning import arrange
from tests.support.costs import SPEC

UNEVEN = EnvCost(spec=SPEC, wall=0.005, row=0.005, cpu=0.0001, times=(0.002,) * 8 + (0.017,) * 2, steps=100)
BURNING = EnvCost(spec=SPEC, wall=0.002, row=0.002, cpu=0.002, steps=100)
QUICK = EnvCost(spec=SPEC, wall=1e-6, row=1e-6, cpu=1e-6, steps=100)
POLICY = PolicyTimes(act=1e-5, learn=5e-5)


def planned(words: str, cost: EnvCost, tmp_path: Path) -> Plan:
    config = from_argv(["Toy-v0", *words.split(), "--runs-dir", str(tmp_path)])
    return arrange(config, cost, name_run(config), "cpu")


def shares(kinds: tuple[str, ...], **known: float) -> dict[str, float]:
    """The rest is `other`."""
    named = {name.replace("_", "-"): share for name, share in known.items()}
    return dict.fromkeys(kinds, 0.0) | named | {"other": 1 - sum(named.values())}


def summary(learner: Mapping[str, float], worker: Mapping[str, float], **changes: Any) -> dict[str, Any]:
    """A run of 100 s."""
    plain = {"exit_code": 0, "wall_s": 100.0, "updates": 100, "env_steps": 50_000, "produced": 50_000, "dropped": {}}
    of_both = {"learner": shares(LEARNER_TIME, **learner), "worker": shares(WORKER_TIME, **worker)}
    return {**plain, "shares": of_both, **changes}


def as_predicted(plan: Plan, cost: EnvCost, **changes: Any) -> dict[str, Any]:
    """The summary of a serial run for which the model is exactly right."""
    way = way_of(plan)
    assert way is not None
    rate = forecast(way, StepTimes.of(cost), POLICY, usable_cores()).rate
    learning, acting = rate * POLICY.learn, rate * POLICY.act
    learner, worker = {"update": learning}, {"infer": acting, "step": 1 - learning - acting, "wait_credit": learning}
    worker["step"] -= 0.001
    return summary(learner, worker, env_steps=round(100 * rate), **changes)


def test_a_run_behind_a_barrier_is_told_what_workers_would_make(tmp_path: Path) -> None:
    plan = planned("--placement processes --ppo.lr 1e-3", UNEVEN, tmp_path)
    text = closing(plan, as_predicted(plan, UNEVEN))
    assert text is not None
    told = r"envs were 9\d% of the time: --mode (\w+) would make about (\S+)x; try: freewheel train (.*)"
    match = re.fullmatch(told, text)
    assert match, text
    mode, gain, words = match.groups()
    assert words.startswith(f"Toy-v0 --mode {mode} --ppo.lr 0.001 ")
    ways = [way_of(one) for one in (plan, arrange(from_argv(words.split()), UNEVEN, plan.name, "cpu"))]
    slow, fast = (forecast(way, StepTimes.of(UNEVEN), POLICY, usable_cores()).rate for way in ways if way is not None)
    assert float(gain) == pytest.approx(fast / slow, rel=0.1)
    assert fast > 5 * slow


def test_a_run_without_an_update_is_told_why(tmp_path: Path) -> None:
    plan = planned("--minutes 0.5", UNEVEN, tmp_path)
    text = closing(plan, as_predicted(plan, UNEVEN, updates=0, produced=1024))
    assert text is not None
    told = "nothing was learned: an update takes 2,048 rows, and 1,024 came; --num-steps-per-env 16 makes"
    assert text.startswith(told)
    plan = planned("--mode episodes --workers 2 --episodes-per-update 50", UNEVEN, tmp_path)
    text = closing(plan, summary({}, {}, updates=0, produced=1024))
    assert text == "nothing was learned: an update takes 50 episodes; --episodes-per-update makes it smaller"


def test_the_advice_follows_what_the_run_has_measured_not_the_first_look(tmp_path: Path) -> None:
    plan = planned("--placement processes", UNEVEN, tmp_path)
    slower = as_predicted(plan, UNEVEN)
    slower |= {"env_steps": slower["env_steps"] // 2}
    texts = [closing(plan, one) or "" for one in (as_predicted(plan, UNEVEN), slower)]
    gains = [float(re.findall(r"about (\S+)x", text)[0]) for text in texts]
    assert gains[1] == pytest.approx(gains[0], rel=0.35)  # twice as slow steps are twice as slow in every mode


@pytest.mark.parametrize(("part", "advised"), [(1.0, True), (0.5, False)])
def test_a_run_that_the_model_does_not_explain_gets_no_advice(part: float, advised: bool, tmp_path: Path) -> None:
    """It would say of any other way, and of the same one, that it makes more."""
    plan = planned("--mode continuous --workers 4", UNEVEN, tmp_path)
    rate = part * 4 / UNEVEN.row
    run = summary({"update": rate * POLICY.learn}, {"step": part, "infer": 4e-6}, env_steps=round(100 * rate))
    assert ("would make" in (closing(plan, run) or "")) is advised


def test_the_command_that_has_just_run_is_no_advice(tmp_path: Path) -> None:
    """Its environment was quick when it was measured, and slow in the run: today the same command would choose more workers."""
    plan = planned("--mode continuous", BURNING, tmp_path)
    waiting = replace(UNEVEN, spec=SPEC)
    plan = replace(plan, cost=waiting)
    rate = plan.workers / waiting.row
    run = summary({"update": rate * POLICY.learn}, {"step": 0.99, "infer": 4e-6}, env_steps=round(100 * rate))
    assert closing(plan, run) is None


def test_start_and_closing_evaluation_do_not_count_as_training(tmp_path: Path) -> None:
    plan = planned("--placement processes", UNEVEN, tmp_path)
    exact = as_predicted(plan, UNEVEN)
    late = {name: {kind: part / 2 for kind, part in one.items()} for name, one in exact["shares"].items()}
    for shares in late.values():
        shares["other"] += 0.5
    assert closing(plan, exact | {"wall_s": 200.0, "training_s": 100.0, "shares": late}) is not None


@pytest.mark.parametrize("changes", [{"wall_s": 5.0}, {"updates": 2}, {"exit_code": 1}, {"exit_code": 130}])
def test_runs_that_were_short_or_failed_are_left_alone(tmp_path: Path, changes: dict[str, Any]) -> None:
    plan = planned("--placement processes", UNEVEN, tmp_path)
    assert closing(plan, as_predicted(plan, UNEVEN, **changes)) is None


@pytest.mark.parametrize(("words", "cost"), [("--placement inline", QUICK), ("--placement processes", BURNING)])
def test_nothing_is_said_where_nothing_is_to_be_gained(tmp_path: Path, words: str, cost: EnvCost) -> None:
    plan = planned(words, cost, tmp_path)
    if usable_cores() == 2:
        assert closing(plan, as_predicted(plan, cost)) is None


WORKING = {"step": 0.9}


@pytest.mark.parametrize(
    ("workers", "cost", "learner", "worker", "changes", "said"),
    [
        ("", UNEVEN, {"update": 0.96}, {"step": 0.4, "wait_credit": 0.6},
         {}, r"the learner was busy 96% of the time: more workers would not help, --workers \d+ is enough"),
        ("", UNEVEN, {"update": 0.96}, WORKING,
         {}, "the learner was busy 96% of the time and sets the speed: more workers would not help"),
        ("--workers 8", BURNING, {"update": 0.1}, WORKING, {"env_steps": 85_000},
         f"8 workers that compute share {usable_cores()} cores with the learner: --workers {usable_cores()} would be as fast"),
        ("--workers 4", UNEVEN, {"update": 0.01}, WORKING,
         {}, r"envs were 90% of the time: --mode continuous with the default numbers of envs would make about \S+x; try: fr"),
        ("", UNEVEN, {"update": 0.1, "eval": 0.5}, WORKING,
         {}, r"evaluations were 50% of the time: fewer of them \(--evals, --eval-episodes\) leave up to 2.0x"),
        ("", UNEVEN, {"update": 0.1}, WORKING, {"dropped": {"stale": 20_000}}, "20% of the rows came too late"),
        ("", UNEVEN, {"update": 0.1}, WORKING,
         {"dropped": {"overflow": 20_000}}, "20% of the rows were dropped because the queue was full: --overflow block"),
        ("", UNEVEN, {"update": 0.1}, WORKING, {"dropped": {"shutdown": 20_000}}, None),
    ],
)  # fmt: skip
def test_other_remarks(
    tmp_path: Path, workers: str, cost: EnvCost, learner: Any, worker: Any, changes: Any, said: str | None
) -> None:
    plan = planned(f"--mode continuous {workers}", cost, tmp_path)
    rows = round(plan.workers * 100 * worker["step"] / cost.wall)  # as many as fit into these steps
    text = closing(plan, summary(learner, worker, **{"env_steps": rows, "produced": 100_000, **changes}))
    assert (text is None) if said is None else re.match(said, text or ""), text


def test_a_slow_learner_is_the_same_in_every_mode(tmp_path: Path) -> None:
    plan = planned("--algo sac --placement processes", replace(UNEVEN, spec=_box()), tmp_path)
    assert closing(plan, summary({"update": 0.9}, {"step": 0.09, "wait_credit": 0.9})) is None


def test_a_learner_that_waits_for_its_model_is_told_what_makes_fits_shorter(tmp_path: Path) -> None:
    plan = planned("--algo mbpo --mode continuous", replace(UNEVEN, spec=_box()), tmp_path)
    waiting = summary({"update": 0.3, "wait_model": 0.52}, {"step": 0.1, "wait_credit": 0.85})
    said = "the learner waited for the model 52% of the time: --mbpo.model-every, --mbpo.max-epochs, --mbpo.model-hidden make"
    assert (closing(plan, waiting) or "").startswith(said), "and no other mode is advised, as fits take as long there"


def _box() -> Any:
    return replace(SPEC, action=replace(SPEC.action, kind="box", size=1, low=(-1.0,), high=(1.0,)))


def test_one_keeps_ones_own_mode_where_it_is_as_good() -> None:
    found = [ModeRate(mode, None, Forecast(95.0, "envs")) for mode in ("batch", "continuous")]
    assert [(best_of(found, own) or found[0]).mode for own in ("continuous", "lockstep")] == ["continuous", "batch"]


def test_of_modes_that_are_as_fast_the_one_with_the_least_lag_is_best() -> None:
    found = [ModeRate(mode, None, Forecast(rate, "envs")) for mode, rate in
             (("sequential", 1.0), ("lockstep", 50.0), ("batch", 95.0), ("continuous", 100.0))]  # fmt: skip
    best = best_of(found)
    assert best is not None
    assert best.mode == "batch"
    assert best_of([ModeRate("batch")]) is None


def test_a_gain_is_written_with_the_digits_it_has() -> None:
    assert [predictions.times(gain) for gain in (1.32, 9.49, 12.4)] == ["1.3x", "9.5x", "12x"]
