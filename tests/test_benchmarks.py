"""The commands behind published figures still run; what they measure is not looked at here."""

from __future__ import annotations

import pytest

from tests.support.places import ROOT
from tests.support.runs import python


@pytest.mark.parametrize(
    "words", [["beside", "--only", "burn", "start-up", "CartPole", "SAC", "training"], ["cage2_rates"]]
)
def test_the_quick_form_of_a_benchmark_runs(words: list[str]) -> None:
    module, *options = words
    done = python("-m", f"benchmarks.{module}", "--quick", *options, cwd=ROOT)
    assert "PASS" in done.stdout or "target" in done.stdout
