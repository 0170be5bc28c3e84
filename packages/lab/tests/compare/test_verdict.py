"""The recommendation and the pairs, on made-up numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freewheel_lab.compare.results import Results
from freewheel_lab.compare.summary import summarised
from freewheel_lab.compare.verdict import judged, margin
from packages.lab.tests.support.comparison import RATES, case, measured


def verdict(results: Results) -> Results:
    return judged(summarised(results))


def test_the_fastest_is_recommended_with_its_margin_and_its_reason() -> None:
    found = verdict(measured()).recommendation
    assert found is not None
    assert (found.mode, found.within_noise) == ("continuous", False)
    assert found.margin == pytest.approx(3100 / 2750 - 1)
    assert found.command == "freewheel train CartPole-v1 --mode continuous --num-envs 8"
    assert found.sentence.startswith(
        "continuous: 3.1x sequential, 13 % above batch (±0 %), because the slowest of 8 steps"
    )
    assert "takes 2.5 times the mean and nobody waits for it" in found.sentence
    assert "envs go on during updates, which take 30% of the time of lockstep" in found.sentence


def test_within_noise_the_least_lag_is_preferred() -> None:
    rates = {**RATES, "batch": (3000.0, 3200.0, 3050.0), "continuous": (3100.0, 3120.0, 3060.0)}
    results = verdict(measured(rates))
    assert margin(summarised(results), "continuous", "batch").within_noise
    found = results.recommendation
    assert found is not None
    assert (found.mode, found.within_noise) == ("batch", True)
    assert "within noise of continuous (±" in found.sentence
    assert "and has the least lag of them" in found.sentence


def test_a_difference_beyond_the_spread_is_none_of_noise() -> None:
    rates = {"sequential": (1000.0, 1000.0, 1000.0), "batch": (1100.0, 1140.0, 1120.0)}
    found = margin(summarised(measured(rates)), "batch", "sequential")
    assert [found.share, found.noise] == pytest.approx([0.12, 0.02])
    assert not found.within_noise
    noisy = {"sequential": (1000.0, 1000.0, 1000.0), "batch": (1000.0, 1300.0, 1120.0)}
    assert margin(summarised(measured(noisy)), "batch", "sequential").within_noise


def test_one_repeat_has_no_spread_and_a_usual_one_is_assumed() -> None:
    for rate, mode, noise, said in (
        (1040.0, "sequential", True, "within noise of batch"),
        (1100.0, "batch", False, "10 % above sequential (one repeat: the spread is not known)"),
    ):
        found = verdict(measured({"sequential": (1000.0,), "batch": (rate,)})).recommendation
        assert found is not None
        assert (found.mode, found.within_noise) == (mode, noise)
        assert said in found.sentence


def test_cheap_steps_are_the_reason_where_a_process_of_its_own_does_not_pay() -> None:
    results = measured({"lockstep": (3000.0,) * 3, "batch": (2000.0,) * 3})
    cheap = replace(results, ideal=replace(results.ideal, row_s=12e-6, slowest_s=20e-6, cpu_s=12e-6))
    found = verdict(cheap).recommendation
    assert found is not None
    assert "because a step takes 12 µs, less than handing its row to another process" in found.sentence


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
    assert "do not apply" in graphs.sentence


def test_more_than_overlap_is_told_apart() -> None:
    results = measured({**RATES, "continuous": (5000.0,) * 3})
    apart = tuple(replace(one, dependencies=("a process for each env",)) for one in results.modes)
    for modes, said in ((results.modes, "envs step side by side"), (apart, "no env waits for another")):
        overlap = verdict(replace(results, modes=modes)).pairs[1]
        assert f"; the other 1.40x of continuous is that {said}" in overlap.sentence


def test_overlap_and_graphs_are_told_apart_on_a_gpu() -> None:
    off = {"lockstep, compile off": (1000.0,) * 3, "continuous, compile off": (1300.0,) * 3}
    rates = {"lockstep": (2000.0,) * 3, "continuous": (2400.0,) * 3}
    results = measured({**rates, **off})
    free = {"synchronous": False, "of": "continuous"}
    modes = (
        case("lockstep"), case("continuous"), case("lockstep, compile off", of="lockstep"),
        case("continuous, compile off", **free),
    )  # fmt: skip
    found = verdict(replace(results, modes=modes))
    assert found.recommendation is not None
    assert found.recommendation.mode == "continuous"
    assert [(pair.what, pair.before, pair.after) for pair in found.pairs] == [
        ("sync against async", "lockstep", "continuous"),
        ("overlap", "lockstep, compile off", "continuous, compile off"),
        ("CUDA graphs", "lockstep, compile off", "lockstep"),
        ("CUDA graphs", "continuous, compile off", "continuous"),
    ]
    assert [pair.gain.median for pair in found.pairs if pair.gain] == pytest.approx([1.2, 1.3, 2.0, 2400 / 1300])
