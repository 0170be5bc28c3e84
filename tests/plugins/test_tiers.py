"""Tiers: where a test belongs, and what it is told when it outgrows its tier."""

from __future__ import annotations

import pytest

from tests.plugins import tiers
from tests.support.places import ROOT

TESTS = """
import pytest

def test_plain():
    pass

@pytest.mark.system
def test_marked():
    pass

@pytest.mark.long
class TestLearning:
    def test_inside(self):
        pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(tiers, "busy", lambda: 1.0)
    pytester.makepyfile(test_tiers=TESTS)
    return pytester


@pytest.mark.parametrize(("tier", "count"), [("unit", 1), ("system", 1), ("long", 1), ("unit or system", 2)])
def test_a_test_has_the_mark_of_its_tier(suite: pytest.Pytester, tier: str, count: int) -> None:
    result = suite.runpytest_inprocess("-p", "tests.plugins.tiers", "-m", tier)
    result.assert_outcomes(passed=count, deselected=3 - count)


def test_what_a_folder_needs_decides_too(pytester: pytest.Pytester) -> None:
    folder = pytester.mkdir("packages") / "ray" / "tests" / "actors"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text("def test_cluster(): pass")
    pytester.runpytest_inprocess("-p", "tests.plugins.tiers", "-m", "system", "packages").assert_outcomes(passed=1)


def test_places_that_need_more_exist_and_are_in_order() -> None:
    assert [place for place in tiers.NEEDS if not (ROOT / place).exists()] == []
    assert [*tiers.NEEDS] == sorted(tiers.NEEDS)


def test_outgrowing_a_tier_fails_with_time_and_remedy(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # it holds for this test as well
        patch.setitem(tiers.LIMITS, "unit", 0.0)
        result = suite.runpytest_inprocess("-p", "tests.plugins.tiers")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["*test took 0.0 s, where tier unit allows 0.0 s: make it faster, or mark it *.system *"]
    )


def test_a_busy_machine_is_given_more_time(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiers.LIMITS, "unit", 1e-9)
    monkeypatch.setattr(tiers, "busy", lambda: 1e9)
    suite.runpytest_inprocess("-p", "tests.plugins.tiers").assert_outcomes(passed=3)
