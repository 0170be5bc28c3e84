"""The commands behind published figures still run; their figures are not checked here."""

from __future__ import annotations

import pytest

from tests.support.runs import python

QUICK = (
    "beside --only start-up CartPole",
    "beside --only training",
    "cage2_rates",
    "checkpoint --only replay",
    "device_ablation --device cpu",
    "first_day",
    "hopper --device cpu",
    "inverted_pendulum",
    "timeline",
    "chaos --only killed damaged",
    "soak",
    "defaults --only freewheel/CartPole-v1/ppo",
    "drone_mbpo --arms mbpo",
    "replay_switches --arms uniform td",
    "discrete --only cartpole-sac",
    "watch_cost",
    "trace_cost",
    "compare_ranks --only straggler",
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("words", QUICK)
def test_the_quick_form_of_a_benchmark_runs(words: str) -> None:
    module, *options = words.split()
    assert "targets that count are met" in python("-m", f"benchmarks.{module}", "--quick", *options).stdout
