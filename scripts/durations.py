"""Sums up what `pytest --record-durations` has written: a table by folder and by cause, and the seconds of every test file."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CAUSES = ("survey", "training", "process start", "command", "sleep")
PHASES = ("setup", "call", "teardown")


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    rows = []
    for path in paths:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            rows += [json.loads(line) for line in file]
    return rows


def seconds(row: Mapping[str, Any], what: str = "wall") -> float:
    return float(sum(row.get(phase, {}).get(what, 0.0) for phase in PHASES))


def folder(test: str) -> str:
    """tests/run/test_x.py::y → run, packages/lab/tests/test_x.py::y → packages/lab; files directly in tests/ are one folder."""
    parts = test.partition("::")[0].split("/")
    if parts[0] == "packages":
        return "/".join(parts[:2])
    return parts[1] if len(parts) > 2 else "(top level)"


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: seconds by folder and by cause, the longest folder first."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for name in (folder(row["test"]), "all"):
            sums[name].update({"tests": 1, "wall": seconds(row), "cpu": row["cpu"]})
            sums[name].update({cause: seconds(row, cause) for cause in CAUSES})
            sums[name].update({"set-up": row.get("setup", {}).get("wall", 0.0)})
    columns = ("tests", "wall", "cpu", "set-up", *CAUSES)
    lines = ["| folder | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    lines += [
        f"| {name} | " + " | ".join(f"{sums[name][column]:,.0f}" for column in columns) + " |"
        for name in sorted(sums, key=lambda name: -sums[name]["wall"])
    ]
    return "\n".join(lines)


def by_file(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds of every test file, by tier."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        sums[row["test"].partition("::")[0]].update({row["tier"]: seconds(row)})
    return {path: {tier: round(total, 2) for tier, total in sums[path].items()} for path in sorted(sums)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--by-file", type=Path, help="write the seconds of every test file to this file")
    parser.add_argument("--longest", type=int, default=0, help="also show so many tests")
    given = parser.parse_args()
    rows = read(given.records)
    print(table(rows))
    for row in sorted(rows, key=seconds, reverse=True)[: given.longest]:
        print(f"{seconds(row):6.1f} s  {row['test']}")
    if given.by_file:
        given.by_file.write_text(json.dumps(by_file(rows), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
