"""Tests of charts in a page. Their elements match the data, and no label can break them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from freewheel_lab.plots import svg
from freewheel_lab.plots.chart import PALETTE, Bar, BarChart, Chart, ChartLine, LineChart, StackedBar, StackedBarChart
from freewheel_lab.plots.numbers import percent

HOSTILE = "<script>alert(1)</script>&\"'"
THREE = (Bar("a", 50.0, 40.0, 80.0), Bar("b", 100.0), Bar("c", None, note="failed"))
BARS = BarChart("x", "Speed", "more is better", THREE)
LINE = ChartLine("a", ((0.0, 0.0), (5.0, 50.0), (10.0, 100.0)))
LINES = LineChart("x", "Return", "steps", "return", (LINE,))
STACKS = StackedBarChart(
    "x",
    "Time",
    "of a worker",
    (StackedBar("a", (("step", 0.75), ("wait", 0.25))),),
    {"step": "#00f", "wait": "#f00"},
    {},
)


def drawn(chart: Chart) -> ET.Element:
    """Return the chart as XML, which is well-formed for any content."""
    return ET.fromstring(f"<div>{svg.draw(chart)}</div>")


def all_of(chart: Chart, kind: str) -> list[ET.Element]:
    """Return the drawn elements of a kind, without the legend."""
    return [node for node in drawn(chart).iter() if kind in node.get("class", "").split() and node.tag != "li"]


def corners(path: ET.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path.get("d", ""))]


def test_bars_are_as_long_as_their_values_and_whiskers_as_their_spread() -> None:
    widths = [float(bar.get("width", "")) for bar in all_of(BARS, "bar")]
    assert widths == pytest.approx([190, 380])  # the third has no value
    (whisker,) = all_of(BARS, "whisker")
    assert whisker.get("d", "").startswith("M152.0 26H304.0")
    assert [node.text for node in all_of(BARS, "strong")] == ["50", "100"]
    assert [node.text for node in all_of(BARS, "faint")] == ["failed"]


@pytest.mark.parametrize(
    ("chart", "widths"),
    [
        (replace(BARS, bars=(Bar("a", 0.5),), whole=1.0, show=percent), [190]),
        (replace(BARS, ideal=200.0, ideal_label="ideal"), [95, 190]),
        (BarChart("x", "x", "x", (Bar("a", 0.0), Bar("b", None))), [0]),
    ],
)
def test_bars_are_parts_of_the_whole_or_of_the_ideal(chart: BarChart, widths: list[float]) -> None:
    assert [float(bar.get("width", "")) for bar in all_of(chart, "bar")] == pytest.approx(widths)
    assert [{x for x, _ in corners(ideal)} for ideal in all_of(chart, "ideal")] == ([{379.0}] if chart.ideal else [])


def test_lines_are_where_their_points_are() -> None:
    (path,) = all_of(LINES, "line")
    left, middle, right = corners(path)
    assert left == (svg.LEFT, svg.HEIGHT - svg.BOTTOM)
    assert right == (svg.LINES_WIDTH - svg.RIGHT, svg.TOP)
    assert middle == pytest.approx(((left[0] + right[0]) / 2, (left[1] + right[1]) / 2), abs=0.06)


def test_steps_hold_a_value_until_the_next() -> None:
    (path,) = all_of(replace(LINES, lines=(replace(LINE, style="steps"),)), "line")
    found = corners(path)
    assert len(found) == 5
    assert found[0][1] == found[1][1]
    assert found[1][0] == found[2][0]


def test_a_band_lies_around_its_line() -> None:
    chart = replace(LINES, lines=(replace(LINE, low=(0.0, 40.0, 90.0), high=(10.0, 60.0, 100.0)),))
    (band,), (path,) = all_of(chart, "band"), all_of(chart, "line")
    upper, lower = corners(band)[:3], corners(band)[:2:-1]
    for (_, above), (_, y), (_, below) in zip(upper, corners(path), lower, strict=True):
        assert above <= y <= below  # the y axis points down


def test_a_logarithmic_axis_has_equal_steps_for_equal_ratios() -> None:
    line = ChartLine("a", ((1.0, 0.0), (10.0, 1.0), (100.0, 2.0)))
    (path,) = all_of(replace(LINES, lines=(line,), log_x=True), "line")
    first, second, third = (x for x, _ in corners(path))
    assert second - first == pytest.approx(third - second, abs=0.2)


def test_long_lines_are_thinned_and_single_points_are_dots() -> None:
    points = tuple((float(n), float(n)) for n in range(10_000))
    (path,) = all_of(replace(LINES, lines=(ChartLine("a", points),)), "line")
    assert len(corners(path)) == svg.MOST_POINTS
    for few in (((3.0, 7.0),), ((3.0, 7.0), (4.0, 7.0))):
        assert len(all_of(replace(LINES, lines=(ChartLine("a", few),)), "dot")) == len(few)


def test_a_legend_has_each_label_once_and_what_styles_mean() -> None:
    lines = (LINE, replace(LINE, style="dots"), replace(LINE, label="b", colour=1))
    chart = replace(LINES, lines=lines, styles={"dots": "measured", "line": "law", "dashed": "extrapolated"})
    assert ["".join(node.itertext()) for node in drawn(chart).iter("li")] == ["a", "b", "measured", "law"]
    assert svg.colour(len(PALETTE) + 1) == svg.colour(1) == "c1", "colours repeat when they run out"


def test_stacks_are_cut_by_their_shares() -> None:
    parts = [node for node in drawn(STACKS).iter("rect") if node.get("fill") and node.get("x") is not None]
    assert [float(part.get("width", "")) for part in parts] == pytest.approx([420, 140])
    assert float(parts[1].get("x", "")) == pytest.approx(420)


@pytest.mark.parametrize(
    "chart",
    [
        replace(BARS, title=HOSTILE, bars=(Bar(HOSTILE, 1.0, note=HOSTILE),), ideal=1.0, ideal_label=HOSTILE),
        replace(LINES, title=HOSTILE, x_label=HOSTILE, lines=(replace(LINE, label=HOSTILE),), mark=3.0, mark_label=HOSTILE),
        StackedBarChart("x", HOSTILE, HOSTILE, (StackedBar(HOSTILE, ((HOSTILE, 1.0),)),), {HOSTILE: "red"}, {HOSTILE: HOSTILE}),
    ],
    ids=["bars", "lines", "stacks"],
)  # fmt: skip
def test_labels_are_escaped(chart: Chart) -> None:
    assert not list(drawn(chart).iter("script"))
    assert "<script" not in svg.draw(chart)
