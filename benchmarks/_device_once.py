"""One training run on a GPU in this process, and its rates while it trained: one JSON object on standard output.

Run as a file, with the package that is to be measured on PYTHONPATH: it imports nothing else of the project, so that one script
measures any commit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import freewheel
from freewheel.errors import UsageError

KEYS = {"updates": "updates", "steps": "env_steps"}


def rates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Over the second half of the training, by rows of metrics; those with the last update are of the closing save."""
    learning = [row for row in rows if 0 < row["updates"] < rows[-1]["updates"]]
    if len(learning) < 2:
        raise SystemExit("too short to learn anything: give it more seconds")
    first, last = learning[(len(learning) - 1) // 2], learning[-1]
    wall = last["wall_s"] - first["wall_s"]
    return {f"{what}_per_s": (last[key] - first[key]) / wall for what, key in KEYS.items()}


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])  # env, and options as freewheel.train takes them
    with TemporaryDirectory() as folder:
        options = {"evals": 0, "seed": 1, "runs_dir": folder, **order["options"]}
        try:
            result = freewheel.train(order["env"], quiet=True, **options)
        except UsageError as error:  # the first release has no such option, and begins its temperature at 1
            if "sac.first_temperature" not in str(error) or options["sac"].pop("first_temperature") != 1.0:
                raise
            result = freewheel.train(order["env"], quiet=True, **options)
        rows = [json.loads(line) for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines()]
    if why := result.summary["graphs_fallback"]:
        raise SystemExit(f"no CUDA graph: {why}")
    saving = result.summary["shares"]["learner"].get("save", 0.0) * result.summary["wall_s"]
    print(json.dumps({"order": order, **rates(rows), "save_s": saving}))


if __name__ == "__main__":
    main()
