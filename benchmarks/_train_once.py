"""One whole training run with these options in this process, and its learning curve by wall time: one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks._ppo_once import Watch, train

KEPT = (
    "wall_s", "updates", "lag_max", "return_mean", "best_eval", "final_eval", "worker_restarts", "weights_sha256",
    "produced", "trained", "dropped",
)  # fmt: skip


def main() -> None:
    order: dict[str, Any] = json.loads(
        sys.argv[1]
    )  # options as freewheel.train takes them, env included; curve, returns: bool
    watch = Watch(goal=None)
    options = {name: value for name, value in order["options"].items() if name != "env"}
    summary = train(order["options"]["env"], options, watch).summary
    row = watch.result() | {name: summary[name] for name in KEPT}
    row["update_s"] = summary["shares"]["learner"]["update"] * summary["wall_s"] / max(1, summary["updates"])
    if order.get("curve"):
        row["curve"] = watch.curve
    if order.get("returns"):
        row["returns"] = [round(value, 2) for value in watch.returns]
    print(json.dumps({"order": order, **row}))


if __name__ == "__main__":
    main()
