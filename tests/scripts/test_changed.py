"""scripts/changed.py: which tests belong to a change, and how many of them fit into the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import changed

TESTS = [
    "tests/learn/ppo/test_learner.py", "tests/learn/ppo/test_targets.py", "tests/learn/sac/test_learner.py",
    "tests/learn/test_replay.py", "tests/run/test_resume.py", "tests/test_architecture.py",
    "tests/test_readme.py", "packages/lab/tests/compare/test_report.py", "packages/lab/tests/tune/test_search.py",
    "packages/watch/tests/test_hub.py",
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "nearest"),
    [
        ("freewheel/learn/ppo/targets.py", ["ppo/test_targets", "test_architecture", "ppo/test_learner"]),
        ("tests/learn/sac/test_learner.py", ["sac/test_learner", "test_architecture", "test_replay"]),
        ("packages/lab/src/freewheel_lab/compare/report.py", ["test_report", "test_architecture", "test_search"]),
        ("packages/lab/tests/tune/test_search.py", ["test_search", "test_architecture", "test_report"]),
        ("packages/watch/src/freewheel_watch/hub.py", ["test_hub", "test_architecture"]),
        ("README.md", ["test_architecture", "test_readme"]),
        ("benchmarks/lag.py", ["test_architecture"]),
        ("packages/lab/docs/tune.md", ["test_architecture"]),
    ],
)
def test_the_tests_of_the_same_place_come_first(change: str, nearest: list[str]) -> None:
    found = changed.nearest([change], TESTS)
    assert [path.removesuffix(".py") for path in found[: len(nearest)]] == [
        next(test.removesuffix(".py") for test in TESTS if test.endswith(f"/{name}.py")) for name in nearest
    ]
    assert "tests/run/test_resume.py" not in found
    package = "/".join(change.split("/")[:2])
    assert all(test.startswith(f"{package}/") for test in found if test.startswith("packages/"))


def test_tests_of_packages_are_found_too(tmp_path: Path) -> None:
    for test in TESTS:
        (tmp_path / test).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / test).touch()
    assert changed.tests_of(tmp_path) == sorted(TESTS)


def test_files_are_taken_while_they_fit() -> None:
    taken, left = changed.within(["a", "b", "c", "d"], {"a": 30.0, "b": 40.0, "c": 20.0}, 53.0)
    assert (taken, left) == (["a", "c", "d"], ["b"])
    assert changed.within(["a"], {"a": 99.0}, 1.0) == (["a"], [])
