"""scripts/mutants.py: every planted defect still finds its line."""

from __future__ import annotations

from tests.support.runs import python


def test_every_defect_can_be_planted() -> None:
    python("scripts/mutants.py", "--check")
