"""Tests of the recommendation and the pairs, with made-up numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freewheel_lab.compare.results import Results
from freewheel_lab.compare.summary import summarised
from freewheel_lab.compare.verdict import judged, margin
from packages.lab.tests.support.comparison import RATES, case, measured
from tests.support.golden import assert_golden

NEAR = {"batch": (3000.0, 3200.0, 3050.0), "continuous": (3100.0, 3120.0, 3060.0)}


def verdict(results: Results) -> Results:
    return judged(summarised(results))


def test_the_fastest_is_recommended_with_its_margin_and_its_reason() -> None:
    found = verdict(measured()).recommendation
    assert found is not None
    assert (found.mode, found.within_noise) == ("continuous", False)
    assert found.margin == pytest.approx(3100 / 2750 - 1)
    assert found.command == "freewheel train CartPole-v1 --mode continuous --num-envs 8"


def test_within_noise_the_least_lag_is_preferred() -> None:
    results = verdict(measured({**RATES, **NEAR}))
    assert margin(summarised(results), "continuous", "batch").within_noise
    found = results.recommendation
    assert found is not None
    assert (found.mode, found.within_noise) == ("batch", True)


def test_a_difference_beyond_the_spread_is_none_of_noise() -> None:
    rates = {"sequential": (1000.0, 1000.0, 1000.0), "batch": (1100.0, 1140.0, 1120.0)}
    found = margin(summarised(measured(rates)), "batch", "sequential")
    assert [found.share, found.noise] == pytest.approx([0.12, 0.02])
    assert not found.within_noise
    noisy = {"sequential": (1000.0, 1000.0, 1000.0), "batch": (1000.0, 1300.0, 1120.0)}
    assert margin(summarised(measured(noisy)), "batch", "sequential").within_noise


def test_one_repeat_has_no_spread_and_a_usual_one_is_assumed() -> None:
    for rate, mode, noise in ((1040.0, "sequential", True), (1100.0, "batch", False)):
        found = verdict(measured({"sequential": (1000.0,), "batch": (rate,)})).recommendation
        assert found is not None
        assert (found.mode, found.within_noise) == (mode, noise)


def test_every_recommendation_has_its_reasons_and_every_pair_its_sentence() -> None:
    """The golden file has the sentences of recommendations and pairs for typical results."""
    usual = measured({**RATES, "continuous": (5000.0,) * 3})
    serial = measured({"lockstep": (3000.0,) * 3, "batch": (2000.0,) * 3})
    apart = tuple(replace(one, dependencies=("a process for each env",)) for one in usual.modes)
    cases = {
        "usual": measured(),
        "within noise": measured({**RATES, **NEAR}),
        "one repeat, within noise": measured({"sequential": (1000.0,), "batch": (1040.0,)}),
        "one repeat": measured({"sequential": (1000.0,), "batch": (1100.0,)}),
        "cheap steps": replace(serial, ideal=replace(serial.ideal, row_s=12e-6, slowest_s=20e-6, cpu_s=12e-6)),
        "a single mode": measured({"batch": (2000.0,) * 3}),
        "more than overlap, envs in turn": usual,
        "more than overlap, a process for each env": replace(usual, modes=apart),
        "on a GPU": on_gpu(),
    }
    lines = list[str]()
    for name, results in cases.items():
        found = verdict(results)
        assert found.recommendation is not None
        lines += [f"# {name}", found.recommendation.sentence, *(pair.sentence for pair in found.pairs), ""]
    assert_golden(__file__, "verdict", "\n".join(lines))


def test_a_single_mode_is_recommended_without_a_margin() -> None:
    found = verdict(measured({"batch": (2000.0,) * 3})).recommendation
    assert found is not None
    assert (found.mode, found.margin, found.within_noise) == ("batch", None, False)
    assert verdict(measured({})).recommendation is None


def test_sync_beside_async_and_what_overlap_can_bring() -> None:
    both, overlap, graphs = verdict(measured()).pairs
    assert (both.what, both.before, both.after) == ("sync against async", "lockstep", "continuous")
    assert both.gain is not None
    assert both.gain.median == pytest.approx(1.24)
    assert overlap.gain is not None
    assert overlap.gain.median == pytest.approx(1 / 0.7)  # the learner works 30 % of the time of lockstep
    assert (graphs.what, graphs.gain) == ("CUDA graphs", None)


def on_gpu() -> Results:
    """Return a synchronous and an asynchronous mode, each with and without CUDA graphs."""
    off = {"lockstep, compile off": (1000.0,) * 3, "continuous, compile off": (1300.0,) * 3}
    rates = {"lockstep": (2000.0,) * 3, "continuous": (2400.0,) * 3}
    results = measured({**rates, **off})
    free = {"synchronous": False, "of": "continuous"}
    modes = (
        case("lockstep"), case("continuous"), case("lockstep, compile off", of="lockstep"),
        case("continuous, compile off", **free),
    )  # fmt: skip
    return replace(results, modes=modes)


def test_overlap_and_graphs_have_separate_gains_on_a_gpu() -> None:
    found = verdict(on_gpu())
    assert found.recommendation is not None
    assert found.recommendation.mode == "continuous"
    assert [(pair.what, pair.before, pair.after) for pair in found.pairs] == [
        ("sync against async", "lockstep", "continuous"),
        ("overlap", "lockstep, compile off", "continuous, compile off"),
        ("CUDA graphs", "lockstep, compile off", "lockstep"),
        ("CUDA graphs", "continuous, compile off", "continuous"),
    ]
    assert [pair.gain.median for pair in found.pairs if pair.gain] == pytest.approx([1.2, 1.3, 2.0, 2400 / 1300])
