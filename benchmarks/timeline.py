"""The picture of the README: who works when, in lockstep and in continuous, measured on the same uneven environments."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._common import ROOT, Notebook, Row, number, run_python, table

NAME, PICTURE = "timeline", ROOT / "packages" / "watch" / "docs" / "timeline.svg"
LANES = 8
WORLD = {"law": "lognormal", "mean": 0.030, "sigma": 0.9, "kind": "sleep", "length": 100}
PPO = {"epochs": 10, "minibatch": 32}
OPTIONS = {"num_envs": LANES, "num_steps_per_env": 16, "seed": 1, "ppo": PPO, "policy": {"hidden": [256, 256]}}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "lockstep": {"mode": "lockstep", "placement": "processes"},
    "continuous": {"mode": "continuous", "workers": LANES},
}
WINDOW = 1.5  # seconds that are drawn
Span = Sequence[float]


def cut(spans: Sequence[Span], begin: float) -> list[list[float]]:
    """The parts of the spans that lie in the window, in seconds from its beginning."""
    inside = ((max(0.0, first - begin), min(WINDOW, last - begin)) for first, last in spans)
    return [[round(first, 5), round(last, 5)] for first, last in inside if first < last]


def measured(notebook: Notebook, way: str, seconds: float) -> Row:
    """The window in the middle of a run, which begins with an update."""
    order = {"world": WORLD, "options": {**OPTIONS, **WAYS[way], "minutes": seconds / 60}}
    with TemporaryDirectory() as folder:
        row = json.loads(run_python("-m", "benchmarks._timeline_once", json.dumps(order), cwd=folder))
    updates = row["learner"]
    begin = updates[len(updates) // 2][0] - 0.05 * WINDOW
    lanes = [cut(spans, begin) for spans in row["lanes"]]
    work = sum(last - first for spans in lanes for first, last in spans) / (len(lanes) * WINDOW)
    steps = sum(len(spans) for spans in lanes) / WINDOW
    kept = {"way": way, "env_busy": work, "steps_per_s": steps, "lanes": lanes, "learner": cut(updates, begin)}
    return notebook.keep(kept)


# ---------------------------------------------------------------------------------------------------------- the picture

LEFT, RIGHT, ROW, GAP, WIDTH = 96, 24, 13, 4, 960
INK, MUTED, ENV, LEARN, IDLE = "#24292f", "#57606a", "#2da44e", "#0969da", "#eaeef2"
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


def text(x: float, y: float, words: str, size: int = 12, colour: str = INK, more: str = "") -> str:
    return f"<text x='{x:.0f}' y='{y:.0f}' font-size='{size}' fill='{colour}' {FONT} {more}>{words}</text>"


def bars(y: float, spans: Sequence[Span], colour: str) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / WINDOW
    back = f"<rect x='{LEFT}' y='{y:.0f}' width='{WIDTH - LEFT - RIGHT}' height='{ROW}' fill='{IDLE}'/>"
    parts = (
        f"<rect x='{LEFT + first * scale:.1f}' y='{y:.0f}' width='{max(0.8, (last - first) * scale - 0.6):.1f}' "
        f"height='{ROW}' fill='{colour}'/>"
        for first, last in spans
    )
    return [back, *parts]


def panel(row: Row, y: float, headline: str) -> tuple[list[str], float]:
    """One mode: a row for each environment and one for the learner; returns where the next panel may begin."""
    parts = [text(LEFT, y + 14, headline, 15, INK, "font-weight='600'")]
    y += 24
    for number_, spans in enumerate(row["lanes"], 1):
        parts += [text(LEFT - 8, y + 11, f"env {number_}", 11, MUTED, "text-anchor='end'"), *bars(y, spans, ENV)]
        y += ROW + GAP
    y += 3
    parts += [text(LEFT - 8, y + 11, "learner", 11, MUTED, "text-anchor='end'"), *bars(y, row["learner"], LEARN)]
    return parts, y + ROW + 22


def draw(rows: Sequence[Row]) -> str:
    """An SVG without scripts or fonts of its own; grey is waiting."""
    parts: list[str] = []
    y = 14.0
    for row, what in zip(rows, ("all wait for the slowest, then for the learner", "nobody waits"), strict=True):
        figures = f"{100 * row['env_busy']:.0f} % of the time in steps, {row['steps_per_s']:.0f} steps/s"
        added, y = panel(row, y, f"{row['way']}: {what} ({figures})")
        parts += added
    scale = (WIDTH - LEFT - RIGHT) / WINDOW
    for tenth in range(0, round(WINDOW * 10) + 1, 3):
        x = LEFT + tenth / 10 * scale
        parts.append(text(x, y, f"{tenth / 10:g} s", 11, MUTED, "text-anchor='middle'"))
    legend = ((ENV, "an environment steps"), (LEARN, "the network learns"), (IDLE, "waits"))
    x = float(LEFT)
    y += 24
    for colour, words in legend:
        parts += [
            f"<rect x='{x:.0f}' y='{y - 10:.0f}' width='12' height='12' fill='{colour}'/>",
            text(x + 18, y, words),
        ]
        x += 40 + 7 * len(words)
    height = y + 14
    start = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:.0f}' role='img'>"
    title = "<title>Who works when: eight uneven environments and a learner, measured</title>"
    return "\n".join([start, title, f"<rect width='{WIDTH}' height='{height:.0f}' fill='white'/>", *parts, "</svg>\n"])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter runs; nothing is kept")
    parser.add_argument(
        "--picture", type=Path, default=None, help="where to draw (default: packages/watch/docs/timeline.svg)"
    )
    given = parser.parse_args(argv)
    notebook = Notebook(NAME, "Who works when", quick=given.quick)
    rows = [measured(notebook, way, 4 if given.quick else 20) for way in WAYS]
    header = ("way", "env busy", "env steps/s")
    notebook.write(table(header, [[row["way"], number(row["env_busy"]), number(row["steps_per_s"])] for row in rows]))
    lockstep, continuous = (row["env_busy"] for row in rows)
    notebook.judge(
        f"envs step {continuous:.2f} of the time in continuous, {lockstep:.2f} in lockstep", continuous > lockstep
    )
    picture = given.picture or (None if given.quick else PICTURE)
    if picture is not None:
        picture.write_text(draw(rows), encoding="utf-8")
    return notebook.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
