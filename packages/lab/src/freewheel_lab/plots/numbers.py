"""This module formats numbers for people, such as 1,234; 3.1×; 12 %; 2 h 13 min. An unknown value
becomes a dash."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

UNKNOWN = "–"

#: A function that formats a quantity.
Show: TypeAlias = Callable[[float | None], str]


def known(value: float | None) -> bool:
    """Return whether there is a number to show."""
    return value is not None and math.isfinite(value)


def number(value: float | None) -> str:
    """Return three digits, or all digits before the point: 0.123, 12.3, 12,345."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    text = f"{round(value, digits):,.{max(digits, 0)}f}" if digits < 7 else f"{value:.2e}"
    return f"{value:,.0f}" if digits <= 0 else text.rstrip("0").rstrip(".") if "e" not in text else text


def times(value: float | None) -> str:
    """Format a factor, as in 3.1×."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}×" if value >= 99.5 else f"{value:.1f}×" if value >= 9.95 else f"{value:.2f}×"


def percent(share: float | None) -> str:
    """Format a share of 1, as in 12 %."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    small = 0 < abs(share) < 0.0995
    return f"{100 * share:.1f} %" if small else f"{100 * share:,.0f} %"


def megabytes(value: float | None) -> str:
    """Format megabytes, as in 412 MB or 1.2 GB."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value / 1024:,.1f} GB" if value >= 1024 else f"{value:,.0f} MB"


def duration(seconds: float | None) -> str:
    """Format seconds with at most two units: 0.84 s, 12.3 s, 3 min 20 s, 2 h 13 min, 4 d 3 h."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 59.95:
        return f"{number(seconds)} s"
    units = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    large = next(at for at, (size, _) in enumerate(units) if round(seconds) >= size or size == 60)
    size, name = units[large]
    small, other = units[large + 1]
    whole, rest = divmod(round(seconds / small), size // small)
    if large and whole * size >= units[large - 1][0]:  # 59 min 59.9 s become an hour
        return f"1 {units[large - 1][1]}"
    return f"{whole:,} {name} {rest} {other}" if rest else f"{whole:,} {name}"


def short(value: float | None) -> str:
    """Format a number for the ticks of an axis: 250, 1.5k, 20k, 3M."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{name}"
    return f"{value:g}"
