"""Data for all trackers (TensorBoard, wandb): metrics by the names of charts, and the settings of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freewheel.files.read import newest_row
from freewheel.metrics.names import chart

STEPS = chart("env_steps")  # the axis of all charts
#: Keys of a run's summary with the results of the final evaluation.
FINDINGS = ("best_eval", "final_eval", "best_eval_std", "final_eval_std")


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row of metrics by the names of charts (metrics/names.py), without unknown values."""
    found: dict[str, float] = {}
    for name, value in row.items():
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        for part, number in parts:
            if isinstance(number, int | float) and not isinstance(number, bool):
                found[f"{chart(name)}/{part}" if part else chart(name)] = float(number)
    return found


def findings(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that the end of a run adds to its charts."""
    return scalars({f"eval/{name}": summary.get(name) for name in FINDINGS})


def settings(config: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Return every option of a run by its name (ppo.lr), without the sources of the values."""
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
    """Return the env steps of the last row of metrics.jsonl; 0 if there is none."""
    return int(newest_row(metrics).get("env_steps", 0))


def table(rows: Mapping[str, Any], heads: tuple[str, str]) -> str:
    """Format names and values as a Markdown table."""
    lines = [f"| `{name}` | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join([f"| {heads[0]} | {heads[1]} |", "|---|---|", *lines])
