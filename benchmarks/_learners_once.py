"""One training with these options in this process, perhaps by several learners: its curve over environment steps, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import freewheel
from freewheel.run.checkpoints.checkpoint import fingerprint, load

POINTS = 50  # of a curve


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    options = dict(order["options"])
    result = freewheel.train(options.pop("env"), quiet=True, runs_dir="runs", **options)
    summary, rows = result.summary, _rows(result.path)
    found = summary["trained"] + summary["queued"] + summary["open"] + sum(summary["dropped"].values())
    learners = [one["trained"] for one in summary.get("learners", [{"trained": summary["trained"]}])]
    folders = [result.path, *sorted((result.path / "learners").glob("*"))]
    same = {fingerprint(load(folder / "checkpoints").params) for folder in folders}
    known = [[row["env_steps"], row["return_mean"]] for row in rows if row["return_mean"] is not None]
    kept = {
        name: summary[name] for name in ("wall_s", "updates", "env_steps", "trained", "final_eval", "weights_sha256")
    }
    print(
        json.dumps(
            {
                "order": order,
                **kept,
                "steps_per_s": summary["steps_per_s"],
                "learners": learners,
                "waited": [one["wait_share"] for one in summary.get("learners", [])],
                "same_weights": len(same) == 1,
                "ledger": "exact" if found == summary["produced"] else f"{found} of {summary['produced']}",
                "mean_return": sum(value for _, value in known) / max(1, len(known)),
                "curve": known[:: max(1, len(known) // POINTS)],
            }
        )
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
