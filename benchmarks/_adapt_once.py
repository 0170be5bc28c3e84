"""One training run with these options in this process: rows a second in its last third, and what was changed; one JSON object."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import freewheel


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])  # options as freewheel.train takes them, env included
    options = {name: value for name, value in order["options"].items() if name != "env"}
    result = freewheel.train(order["options"]["env"], quiet=True, runs_dir="runs", evals=0, **options)
    rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows.insert(0, {"env_steps": 0, "wall_s": 0.0})
    first, last = rows[min(2 * len(rows) // 3, len(rows) - 2)], rows[-1]
    changed = Path(result.path / "adapt.jsonl")
    changes = (
        [json.loads(line) for line in changed.read_text(encoding="utf-8").splitlines()] if changed.exists() else []
    )
    summary = result.summary
    balanced = summary["produced"] == summary["trained"] + sum(summary["dropped"].values())
    row = {
        "rows_per_s": (last["env_steps"] - first["env_steps"]) / (last["wall_s"] - first["wall_s"]),
        "turns": last["workers/turns"],
        "fragment": last["fragment/steps"],
        "slots": last["queue/slots"],
        "changes": changes,
        "lag_max": summary["lag_max"],
        "ledger": "exact" if balanced and not summary["queued"] and not summary["open"] else "does not balance",
    }
    print(json.dumps({"order": order, **row}))


if __name__ == "__main__":
    main()
