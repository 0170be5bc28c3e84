"""Recorded games of the official simulator, replayed through our own network and red agents: how many steps come out exactly."""

from __future__ import annotations

import argparse
from pathlib import Path

from packages.cage2.tests.support.cage2_games import DATA
from packages.cage2.tests.support.cage2_replay import replay


def main() -> int:
    """A line a recording; the exit code is 1 if a single step differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = DATA / "official"
    parser.add_argument(
        "folder", type=Path, nargs="?", default=default, help="of .npz recordings (default: the repository's)"
    )
    parser.add_argument("--quick", action="store_true", help="the first recording alone")
    given = parser.parse_args()
    recordings = sorted(given.folder.glob("*.npz"))[: 1 if given.quick else None]
    differs = not recordings
    for path in recordings:
        result = replay(path)
        print(
            f"{path.name}: {result.exact} of {result.steps} steps exact, red foreseen in {result.foreseen}",
            result.difference,
        )
        differs |= (result.exact, result.foreseen) != (result.steps, result.steps)
    print("missed: not all steps are exact" if differs else "all targets that count are met")
    return int(differs)


if __name__ == "__main__":
    raise SystemExit(main())
