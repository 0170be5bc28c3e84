"""What trackers (TensorBoard, wandb) are given: metrics in groups, and a run's settings, the same for all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freewheel.files.read import newest_row
from freewheel.metrics.names import chart

STEPS = chart("env_steps")  # the axis of all charts
#: Of the summary of a run: what the closing evaluation found.
FINDINGS = ("best_eval", "final_eval", "best_eval_std", "final_eval_std")


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """A row of metrics by the names of charts (metrics/names.py); what is unknown is left out."""
    found: dict[str, float] = {}
    for name, value in row.items():
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        for part, number in parts:
            if isinstance(number, int | float) and not isinstance(number, bool):
                found[f"{chart(name)}/{part}" if part else chart(name)] = float(number)
    return found


def findings(summary: Mapping[str, Any]) -> dict[str, float]:
    """What the end of a run adds to its charts."""
    return scalars({f"eval/{name}": summary.get(name) for name in FINDINGS})


def settings(config: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Every option of a run by its name (ppo.lr), without where its value came from."""
    flat: dict[str, bool | float | str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and name != "sources":
            flat |= {f"{name}.{key}": inner for key, inner in settings(value).items()}
        elif isinstance(value, bool | int | float | str):
            flat[name] = value
        elif value is not None and name != "sources":
            flat[name] = json.dumps(value, default=str)
    return flat


def last_step(metrics: Path) -> int:
    """Env steps of the last row of metrics.jsonl; 0 if there is none."""
    return int(newest_row(metrics).get("env_steps", 0))


def table(rows: Mapping[str, Any], heads: tuple[str, str]) -> str:
    """Names and values as a table of Markdown."""
    lines = [f"| `{name}` | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join([f"| {heads[0]} | {heads[1]} |", "|---|---|", *lines])
