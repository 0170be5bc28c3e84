"""Runs the unit tests nearest to what has changed, as many as fit into a minute: `make test-changed`.

Tests mirror the source tree, so the distance of a test file from a changed file is the number of folders between them. What
each file takes stands in tests/durations.json, which `make test-durations` writes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = ROOT / "tests" / "durations.json"
#: Rules about the tree as a whole: after every change.
ALWAYS = ("tests/test_architecture.py",)
#: Files whose name says which tests read them.
READ_BY = {
    "README.md": ("tests/test_readme.py",),
    "packages/ray/docs/cluster.md": ("packages/ray/tests/test_cluster_page.py",),
    "docs/hooks.md": ("tests/test_hooks_page.py",),
    "docs/migrate.md": ("tests/test_migrate.py",),
    "docs/using.md": ("tests/test_using_page.py",),
    "docs/extending.md": ("tests/test_extending.py",),
}
UNKNOWN = 2.0  # seconds of a file that was never measured
START = 12.0  # seconds that the tests' own start takes


def git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def changed(since: str) -> set[str]:
    """Paths that differ from a commit, new files among them."""
    return {*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")}


def place(path: str) -> PurePosixPath | None:
    """Where the tests of a source file would be, without `test_` and suffix; None: no tests mirror it."""
    parts = PurePosixPath(path).with_suffix("").parts
    if parts[0] == "freewheel":
        return PurePosixPath(*parts[1:])
    if parts[0] == "tests":
        return PurePosixPath(*parts[1:-1], parts[-1].removeprefix("test_"))
    return None


def distance(test: str, change: PurePosixPath) -> int | None:
    """Folders between a test file and a changed one; None: they have none in common, except the root."""
    own = PurePosixPath(test).relative_to("tests").with_suffix("")
    own = own.with_name(own.name.removeprefix("test_"))
    common = 0
    for ours, theirs in zip(own.parts, change.parts, strict=False):
        if ours != theirs:
            break
        common += 1
    return len(own.parts) + len(change.parts) - 2 * common if common else None


def nearest(changes: Iterable[str], tests: Iterable[str]) -> list[str]:
    """Test files that belong to the changes, the nearest first."""
    places = [found for path in changes if (found := place(path)) is not None]
    read = {test for path in changes for test in READ_BY.get(path, ())}
    ranked = {}
    for test in tests:
        apart = [steps for change in places if (steps := distance(test, change)) is not None]
        if test in ALWAYS or test in read or apart:
            ranked[test] = 0 if test in ALWAYS or test in read else min(apart)
    return sorted(ranked, key=lambda test: (ranked[test], test))


def within(files: Iterable[str], seconds: dict[str, float], budget: float) -> tuple[list[str], list[str]]:
    """The first files that fit into the budget, and those that do not."""
    taken, left, spent = list[str](), list[str](), 0.0
    for test in files:
        takes = seconds.get(test, UNKNOWN)
        fits = not taken or spent + takes <= budget
        (taken if fits else left).append(test)
        spent += takes * fits
    return taken, left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--since", default="HEAD", help="the commit to compare with")
    parser.add_argument("--seconds", type=float, default=55.0, help="how long it may take, by the recorded times")
    parser.add_argument("--show", action="store_true", help="name the test files, and run nothing")
    given = parser.parse_args()
    changes = changed(given.since)
    tests = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    recorded = json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.is_file() else {}
    seconds = {path: tiers.get("unit", 0.0) for path, tiers in recorded.items()}
    taken, left = within(nearest(changes, tests), seconds, (given.seconds - START) * 2)  # two processes
    print(
        f"{len(changes)} changed files: {len(taken)} test files, {len(left)} left out", *taken, sep="\n  ", flush=True
    )
    if left:
        print("left out, because they take too long together (make test):", *left, sep="\n  ", flush=True)
    if not taken or given.show:
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "unit", *taken]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
