"""Formats figures, times and shares of a run as text and bars, for the console and the terminal view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from freewheel.metrics.meter import Budget

SMALL = 0.02  # kinds of time with a smaller share are shown together as the rest
SHADES, ASCII_SHADES = "█▓▒░·", "#=+-."  # from the greatest share to the smallest


def progress_and_left(budget: Budget, row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return the progress of the run, 0 to 1, and the seconds left; both are None for a run without a limit."""
    if budget == Budget():
        return None, None
    wall, ran = row["wall_s"], row["wall_s"] - row.get("slept_s", 0.0)
    spent = ((row["env_steps"], budget.steps), (row["episodes"], budget.episodes))
    left = [ran * max(limit - used, 0) / used for used, limit in spent if limit is not None and used > 0]
    left += [] if budget.minutes is None else [max(60 * budget.minutes - wall, 0.0)]
    return budget.progress(row["env_steps"], wall, row["episodes"]), min(left, default=None)


def evaluating(row: Mapping[str, Any]) -> str:
    """Describe the progress of the current evaluation; empty if there is none."""
    return f"evaluating {row['evaluating/ended']}/{row['evaluating/episodes']}" if "evaluating/episodes" in row else ""


def lag_of(row: Mapping[str, Any], which: str) -> float | None:
    """Return the policy lag of rows when an update uses them or, with a replay buffer, when they are stored."""
    lag: float | None = row[f"lag_{which}"]
    return lag if lag is not None else row.get(f"replay/lag_{which}")


def shares_bar(shares: Mapping[str, float], shades: str, length: int) -> tuple[Text, list[Text]]:
    """Return a bar of `length` cells, the greatest share first, and its legend, whose percentages add up to 100."""
    ranked = sorted(((kind, share) for kind, share in shares.items() if share >= SMALL), key=lambda pair: -pair[1])
    ranked.append(("rest", 1.0 - sum(share for _, share in ranked)))
    cells, percents = (apportion([share for _, share in ranked], whole) for whole in (length, 100))
    bar, legend = Text(), []
    for rank, (kind, _) in enumerate(ranked):
        shade = shades[-1 if kind == "rest" else min(rank, len(shades) - 2)]
        waiting = kind.startswith("wait") or kind == "down"
        colour = "yellow" if waiting else "dim" if kind in ("other", "rest") else "green"
        bar.append(shade * cells[rank], colour)
        if percents[rank]:
            legend.append(Text.assemble((shade, colour), f" {kind} {percents[rank]}%"))
    return bar, legend


def filled(parts: list[Text], width: int | None) -> list[Text]:
    """Arrange the parts side by side, in as many lines as they need."""
    lines: list[list[Text]] = [[]]
    for part in parts:
        if width is not None and lines[-1] and sum(len(one) + 2 for one in lines[-1]) + len(part) > width:
            lines.append([])
        lines[-1].append(part)
    return [Text("  ").join(line) for line in lines]


def apportion(shares: list[float], whole: int) -> list[int]:
    """Split `whole` into integers in proportion to shares that add up to 1; the largest fractions round up."""
    exact = [share * whole for share in shares]
    parts = [int(value) for value in exact]
    by_fraction = sorted(range(len(exact)), key=lambda index: parts[index] - exact[index])
    for index in by_fraction[: whole - sum(parts)]:
        parts[index] += 1
    return parts


def ledger(rows: Mapping[str, Any]) -> list[Text]:
    """Describe the balance of rows, the causes of dropped rows, and rows outside the observation space."""
    dropped = sum(rows["dropped"].values())
    terms = " + ".join(f"{rows[term]:,} {term}" for term in ("trained", "queued", "open"))
    balance = Text(f"{rows['produced']:,} produced = {terms} + {dropped:,} dropped")
    lines = [balance, Text(f"dropped: {causes(rows)}", "yellow")] if dropped else [balance]
    if outside := rows.get("out_of_space"):
        lines.append(Text(f"{outside:,} with an observation outside its space", "yellow"))
    return lines


def causes(rows: Mapping[str, Any]) -> str:
    return ", ".join(f"{cause} {count:,}" for cause, count in rows["dropped"].items())


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def rate(value: float | None) -> str:
    """Format with three significant figures: 0.25, 24.1, 980, 12.4k, 1.25M."""
    if value is None:
        return "-"
    units = ((1e6, "M"), (1e3, "k"))
    unit, name = next((unit for unit in units if value >= 0.9995 * unit[0]), (1.0, ""))  # 999.6 rounds to 1k
    return f"{value / unit:.3g}{name}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def duration(seconds: float) -> str:
    """Format a duration with its unit: 350 ms, 2.5 s, 1:05 min, 2:03:00 h."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
    return f"{clock(seconds)} {'h' if seconds >= 3600 else 'min'}"
