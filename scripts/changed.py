"""Runs the unit tests nearest to what has changed, as many as fit into a minute: `make test-changed`.

Tests mirror the source tree: those of freewheel/ are in tests/, those of packages/X/src/freewheel_X/ in packages/X/tests/. So the
distance of a test file from a changed file is the number of folders between them. tests/durations.json says how long each file
takes; `make test-durations` writes it.
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
    "docs/durability.md": ("tests/test_durability_page.py",),
    "docs/hooks.md": ("tests/test_hooks_page.py",),
    "docs/migrating.md": ("tests/test_migrate.py",),
    "docs/start.md": ("tests/test_start_page.py",),
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
    """A name that a source file shares with the tests that mirror it: the path inside `freewheel` or `tests`, without `test_`
    and suffix. In a package it begins with the package's module. None: no tests mirror this file."""
    match PurePosixPath(path).with_suffix("").parts:
        case ("packages", package, "src", module, *rest) if module == f"freewheel_{package}":
            pass
        case ("packages", package, "tests", *rest):
            module = f"freewheel_{package}"
        case ("freewheel" | "tests", *rest):
            module = ""
        case _:
            return None
    return PurePosixPath(module, *rest[:-1], *(name.removeprefix("test_") for name in rest[-1:]))


def distance(test: str, change: PurePosixPath) -> int | None:
    """Folders between a test file and a changed one; None: they have none in common, except the root."""
    own = place(test)
    assert own is not None, "it is a test"
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


def tests_of(root: Path) -> list[str]:
    """All test files, those of the packages too."""
    found = [*root.glob("tests/**/test_*.py"), *root.glob("packages/*/tests/**/test_*.py")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--since", default="HEAD", help="the commit to compare with")
    parser.add_argument("--seconds", type=float, default=55.0, help="how long it may take, by the recorded times")
    parser.add_argument("--show", action="store_true", help="name the test files, and run nothing")
    given = parser.parse_args()
    changes = changed(given.since)
    recorded = json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.is_file() else {}
    seconds = {path: tiers.get("unit", 0.0) for path, tiers in recorded.items()}
    taken, left = within(nearest(changes, tests_of(ROOT)), seconds, (given.seconds - START) * 2)  # two processes
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
