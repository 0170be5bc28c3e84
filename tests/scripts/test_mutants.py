"""scripts/mutants.py: every planted defect still finds its line, and its nearest tests are those that mirror the file."""

from __future__ import annotations

from scripts.mutants import DEFECTS, FAILED
from tests.support.places import ROOT
from tests.support.runs import python


def test_every_defect_can_be_planted() -> None:
    python("scripts/mutants.py", "--check")


def test_the_nearest_tests_are_those_of_the_same_place() -> None:
    places = {defect.path: defect.places() for defect in DEFECTS}
    assert places["freewheel/learn/replay/priority.py"] == [
        "tests/learn/replay/test_priority.py",
        "tests/learn/replay",
        "tests/learn",
    ]
    assert places["packages/lab/src/freewheel_lab/seeds/group.py"][0].startswith("packages/lab/tests")
    assert [path for path, tests in places.items() if not tests] == []
    assert {test for tests in places.values() for test in tests if not (ROOT / test).exists()} == set()


def test_a_failed_test_is_found_in_the_output_wherever_it_is() -> None:
    lines = "FAILED tests/test_a.py::test_b - assert 1\nERROR packages/lab/tests/test_c.py::test_d\nFAILED other"
    assert FAILED.findall(lines) == ["tests/test_a.py::test_b", "packages/lab/tests/test_c.py::test_d"]
