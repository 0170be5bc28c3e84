"""Learners whose numbers stop being finite: what they name, what they keep, and when the run has to end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from freewheel.core import Array, Transitions
from freewheel.errors import DivergedError
from freewheel.learn import finite
from freewheel.learn.finite import LATEST, MOST_SKIPPED, LastGood, SkippedUpdates
from freewheel.learn.ppo.config import PPOConfig
from freewheel.learn.sac.config import SACConfig
from tests.learn.ppo.test_engines import GAUSSIAN, LANES, ROWS, STEPS, WHOLE, Kind, learner_for
from tests.learn.sac.test_learner import SMALL, SPEC, sac_for, settle
from tests.support.learning import play, sign, to_tensors


def taken(skips: str) -> SkippedUpdates:
    """An update for each character; x: it was skipped."""
    watch = SkippedUpdates("ppo", "lower the lr")
    for one in skips:
        watch.take("advantage" if one == "x" else "")
    return watch


@pytest.mark.parametrize(
    ("skips", "message"),
    [
        ("x" * 10, "10 of the last 10 updates were skipped, since update 1"),
        ("." * 50 + "x" * 10, "10 of the last 20 updates were skipped, since update 51"),
        ("x." * 10, "10 of the last 19 updates were skipped, since update 1"),
        ("." * 5 + ".x" * 10, "10 of the last 20 updates were skipped, since update 7"),
    ],
)
def test_ten_skipped_updates_in_a_row_or_half_of_them_end_the_run(skips: str, message: str) -> None:
    with pytest.raises(DivergedError) as caught:
        taken(skips)
    why = "because a number in the advantage was not finite; lower the lr"
    assert str(caught.value) == f"ppo learns nothing: {message}, {why}"
    taken(skips.rstrip(".")[:-1])  # not before


def test_fewer_skipped_updates_do_not() -> None:
    taken("." * 100 + "x" * (MOST_SKIPPED - 1) + "." * LATEST + "x").end()
    taken("..x" * 200).end()
    taken("").end()


@pytest.mark.parametrize(("skips", "ends"), [("x", True), ("x.x", True), ("x.", False), (".", False)])
def test_a_short_run_that_skipped_most_of_its_updates_has_learned_nothing(skips: str, ends: bool) -> None:
    watch = taken(skips)
    if ends:
        with pytest.raises(DivergedError, match="ppo learns nothing"):
            watch.end()
    else:
        watch.end()


def test_a_state_is_remembered_only_if_it_is_finite() -> None:
    first: dict[str, Array] = {"a": np.zeros(2), "noise": np.zeros(3, np.uint8)}
    good = LastGood(first)
    assert good.renew({"a": np.ones(2), "b": np.array([1.0, np.inf])}, 600) == "b"
    assert (good.state, good.is_old(499), good.is_old(500)) == (first, False, True)
    later: dict[str, Array] = {"a": np.ones(2), "b": np.ones(2)}
    assert good.renew(later, 600) == ""
    assert (good.state, good.is_old(1099), good.is_old(1100)) == (later, False, True)


@pytest.mark.parametrize("kind", ["numpy", "torch", "simulator"])
@pytest.mark.parametrize(
    ("field", "value", "config", "term"),
    [
        ("reward", 3e38, {}, "value target"),
        ("log_prob", np.nan, {"surrogate": "plain"}, "log-probability"),
        ("obs", np.nan, {}, "observation statistics"),
        (None, 0.0, {"lr": np.inf, "epochs": 2}, "loss/policy"),
        (None, 0.0, {"lr": np.inf}, "weights"),  # assigned by a hook; after the only step
    ],
)
def test_ppo_names_the_term_and_keeps_its_weights(
    kind: Kind, field: str | None, value: float, config: dict[str, Any], term: str
) -> None:
    step_size = config.get("lr", WHOLE.lr)
    own = replace(WHOLE, **{"epochs": 1, "minibatch": ROWS} | config | {"lr": min(step_size, 1.0)})
    learner = learner_for(kind, GAUSSIAN, own)
    learner.learning_rate = step_size
    before = {name: np.array(part) for name, part in learner.snapshot().params.items()}
    data: Transitions[Any] = play(GAUSSIAN, learner.snapshot(), (STEPS, LANES))
    if field is not None:
        getattr(data, field)[:] = value
    chunk = sign(data)
    learner.observe(to_tensors(chunk) if kind == "simulator" else chunk)
    assert learner.update()["update/skipped"] == 1.0
    assert learner.not_finite == term
    assert learner.rows().dropped == {"nan": ROWS}
    for name, part in learner.snapshot().params.items():
        np.testing.assert_array_equal(np.asarray(part), before[name], name)


def test_ppo_keeps_the_statistics_that_it_can_read_with(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(GAUSSIAN, normalised=((0, GAUSSIAN.obs_size),))
    learner = learner_for("numpy", spec, PPOConfig())
    learner.observe(sign(play(spec, learner.snapshot(), (STEPS, LANES))))
    assert learner._moments is not None
    learner._moments.mean[0] = np.inf
    before = np.array(learner.snapshot().params["norm.mean"])
    learner.update()
    assert learner.not_finite == "observation statistics"
    np.testing.assert_array_equal(np.asarray(learner.snapshot().params["norm.mean"]), before)


def test_sac_at_a_huge_step_size_publishes_and_keeps_finite_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """SAC at lr 1e10 published and saved NaN weights, and the environment was blamed."""
    monkeypatch.setattr(finite, "REMEMBER", 1)
    learner = sac_for(replace(SMALL, lr=1e10, batch=16))
    watch = SkippedUpdates("sac", learner.remedy)

    def learn() -> None:
        for _ in range(LATEST):
            learner.observe(sign(play(SPEC, learner.snapshot(), (4, 2)), version=learner.version))
            while learner.ready:
                version = learner.version
                learner.update()
                for name, value in learner.snapshot().params.items():  # also between two publications
                    assert np.isfinite(np.asarray(value)).all(), name
                assert all(np.isfinite(value).all() for value in learner.state_dict().values())
                if learner.version != version:
                    watch.take(learner.not_finite)

    with pytest.raises(DivergedError, match=r"^sac learns nothing: .* in the (loss|value|policy|weights)"):
        learn()


def test_sac_goes_on_from_its_last_good_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "REMEMBER", 1)
    learner = sac_for(SACConfig(batch=8, buffer=1_000, learning_starts=8))
    for _ in range(3):
        learner.observe(sign(play(SPEC, learner.snapshot(), (4, 2)), version=learner.version))
        settle(learner)
    good = {name: np.array(value) for name, value in learner.updater.state_dict().items()}
    rows = play(SPEC, learner.snapshot(), (4, 2))
    learner.updater.net.vector[3] = np.nan
    learner.learning_rate = 1e-5  # by a hook
    learner.observe(sign(rows, version=learner.version))
    while learner.ready:
        learner.update()
    assert learner.not_finite
    assert learner.learning_rate == 1e-5
    for name in ("critics", "targets", "adam.0.0"):
        np.testing.assert_array_equal(np.asarray(learner.updater.state_dict()[name]), good[name], name)
    learner.observe(sign(play(SPEC, learner.snapshot(), (4, 2)), version=learner.version))
    while learner.ready:
        learner.update()
    assert learner.not_finite == ""
