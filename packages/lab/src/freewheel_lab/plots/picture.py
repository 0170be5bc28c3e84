"""This module draws charts into PNG and SVG files. It uses matplotlib without a screen and one
style for all charts."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from freewheel.errors import SetupError
from freewheel.files import disk
from freewheel_lab.plots.chart import PALETTE, BarChart, Chart, ChartLine, LineChart, SpanChart, StackedBarChart
from freewheel_lab.plots.numbers import Show, duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
INK = "#1f2937"
FAINT = "#6b7280"
PAPER = "#ffffff"
UNDER: Any = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}  # background that keeps text readable over a line
STYLE: Any = {  # matplotlib types every key
    "font.family": "DejaVu Sans",  # included in matplotlib
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": FAINT,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e5e7eb",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "freewheel",  # the same chart always gives the same file
    "svg.fonttype": "none",
}


def require() -> None:
    """Raise SetupError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401 (is it there?)
    except ImportError:
        raise SetupError("pictures need matplotlib: pip install 'freewheel-lab[plot]'") from None


def write(charts: Sequence[Chart | SpanChart], path: Path, columns: int = 1, title: str = "") -> None:
    """Write these charts into one file, in `columns` columns. The ending of `path` selects PNG or
    SVG."""
    require()
    with _styled():
        figure = _figure(charts, columns, title)
        encoded = io.BytesIO()
        about = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(encoded, format=path.suffix[1:], dpi=160, facecolor=PAPER, metadata=about)
    disk.replace(path, encoded.getvalue())


@contextmanager
def _styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a box replaces the glyph
        yield


def _figure(charts: Sequence[Chart | SpanChart], columns: int, title: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = -(-len(charts) // columns)
    heights = [max(_height(chart) for chart in charts[at * columns : (at + 1) * columns]) for at in range(rows)]
    lead = 0.45 if title else 0.0
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, hspace=0.06, wspace=0.04)
    wide = 10.0 if any(isinstance(chart, SpanChart) for chart in charts) else 5.6
    figure = Figure(figsize=(wide * columns, sum(heights) + lead), layout=layout)
    if title:
        figure.suptitle(_plain(title), x=0.012, ha="left", fontsize=13, fontweight="bold")
    grid = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
    for at, axes in enumerate(grid.flat):
        if at >= len(charts):
            axes.set_axis_off()
        elif isinstance(chart := charts[at], BarChart):
            _bars(axes, chart)
        elif isinstance(chart, StackedBarChart):
            _stacks(axes, chart)
        elif isinstance(chart, SpanChart):
            _tracks(axes, chart)
        else:
            _lines(axes, chart)
    return figure


def _height(chart: Chart | SpanChart) -> float:
    if isinstance(chart, StackedBarChart):
        return 1.5 + 0.36 * len(chart.stacks)
    if isinstance(chart, SpanChart):
        return max(1.3 + 0.24 * len(chart.tracks), 0.8 + 0.23 * len(chart.colours))
    return 1.15 + 0.36 * len(chart.bars) if isinstance(chart, BarChart) else 3.5


def _bars(axes: Axes, chart: BarChart) -> None:
    places = range(len(chart.bars))
    values = [bar.value or 0.0 for bar in chart.bars]
    colours = [PALETTE[bar.colour % len(PALETTE)] for bar in chart.bars]
    axes.barh(places, values, height=0.62, color=colours)
    top = chart.top
    for at, bar in enumerate(chart.bars):
        if bar.value is not None and bar.low is not None and bar.high is not None and bar.low < bar.high:
            axes.plot([bar.low, bar.high], [at, at], color=INK, linewidth=1.4, marker="|", markersize=7)
        end = max(bar.value or 0.0, bar.high or 0.0)
        axes.text(end + 0.02 * top, at, _plain(bar.note or chart.show(bar.value)), va="center", fontsize=9, bbox=UNDER)
    if chart.ideal is not None:
        axes.axvline(chart.ideal, color=FAINT, linestyle="--", linewidth=1)
        axes.text(chart.ideal, -0.75, _plain(chart.ideal_label), ha="right", va="center", fontsize=8, color=FAINT)
    axes.set_yticks(places, [_plain(_cut(bar.label)) for bar in chart.bars])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlim(0, 1.24 * top)
    axes.set_ylim(len(chart.bars) - 0.4, -0.95 if chart.ideal is not None else -0.6)
    axes.xaxis.set_visible(False)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    _head(axes, chart)


def _head(axes: Axes, chart: BarChart | StackedBarChart | SpanChart) -> None:
    """Set the title and the subtitle."""
    axes.set_title(_plain(chart.title), pad=20)
    axes.text(0, 1.02, _plain(chart.about), transform=axes.transAxes, fontsize=8, color=FAINT, va="bottom")


def _stacks(axes: Axes, chart: StackedBarChart) -> None:
    places = range(len(chart.stacks))
    kinds = chart.kinds()
    left = [0.0] * len(chart.stacks)
    for kind in chart.colours:
        widths = [max(dict(stack.shares).get(kind, 0.0), 0.0) for stack in chart.stacks]
        label = kind if kind in kinds else None
        axes.barh(places, widths, height=0.62, left=left, color=chart.colours[kind], label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, [_plain(_cut(stack.label)) for stack in chart.stacks])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(chart.stacks) - 0.4, -0.6)
    axes.xaxis.set_visible(False)
    axes.grid(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_visible(False)
    if kinds:
        axes.legend(loc="upper left", bbox_to_anchor=(0, 0), ncols=5, handlelength=1, handleheight=1, columnspacing=1.2)
    _head(axes, chart)


def _tracks(axes: Axes, chart: SpanChart) -> None:
    for kind, colour in chart.colours.items():
        height = 0.42 if kind in chart.thin else 0.84
        for at, track in enumerate(chart.tracks):
            spans = [(start, stop - start) for start, stop, own in track.spans if own == kind]
            axes.broken_barh(spans, (at - height / 2, height), facecolors=colour, linewidth=0)
        axes.barh(0, 0, color=colour, label=kind)  # an empty bar adds the kind to the legend
    axes.set_yticks(range(len(chart.tracks)), [_plain(_cut(track.label)) for track in chart.tracks])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlim(chart.begin, chart.end)
    axes.set_ylim(len(chart.tracks) - 0.4, -0.6)
    axes.grid(False)
    axes.set_xlabel("seconds since the start of the run")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1, handleheight=1)
    _head(axes, chart)


def _lines(axes: Axes, chart: LineChart) -> None:
    for line in chart.lines:
        if line.points:
            _line(axes, line)
    if chart.log_x:
        axes.set_xscale("log")
        axes.minorticks_off()
    if chart.log_x or (chart.show_x is duration and not chart.empty):
        axes.set_xticks(chart.x_ticks(), minor=False)
    if not chart.empty:
        axes.update_datalim([(chart.xs()[0], end) for end in chart.y_span()])
        axes.autoscale_view(scalex=False)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if chart.mark is not None:
        axes.axvline(chart.mark, color=FAINT, linestyle="--", linewidth=1)
        place = {"xytext": (-5, -4), "textcoords": "offset points", "ha": "right", "va": "top"}
        look: dict[str, Any] = {**place, "fontsize": 8, "color": FAINT}
        axes.annotate(_plain(chart.mark_label), (chart.mark, 1), xycoords=("data", "axes fraction"), **look)
    axes.xaxis.set_major_formatter(_formatter(chart.show_x))
    axes.yaxis.set_major_formatter(_formatter(chart.show_y))
    axes.set_title(_plain(chart.title))
    axes.set_xlabel(_plain(chart.x_label))
    axes.set_ylabel(_plain(chart.y_label))
    if not chart.empty:
        _legend(axes, chart)


def _legend(axes: Axes, chart: LineChart) -> None:
    if not chart.styles:
        axes.legend(loc="best")
        return
    from matplotlib.lines import Line2D

    looks = {"dots": {"marker": "o", "linestyle": ""}, "dashed": {"linestyle": "--"}}
    keys = [
        Line2D([], [], color=PALETTE[line.colour % len(PALETTE)], label=_plain(line.label)) for line in chart.labelled()
    ]
    for style, text in chart.styles.items():
        look: dict[str, Any] = dict(looks.get(style, {}))
        keys.append(Line2D([], [], color=FAINT, label=_plain(text), **look))
    axes.legend(handles=keys, loc="best")


def _line(axes: Axes, line: ChartLine) -> None:
    xs, ys = zip(*line.points, strict=True)
    colour = PALETTE[line.colour % len(PALETTE)]
    named = _plain(line.label) not in axes.get_legend_handles_labels()[1]
    look: dict[str, Any] = {"color": colour, "label": _plain(line.label) if named else None, "linewidth": 1.8}
    if line.style == "dots":
        look |= {"linestyle": "", "marker": "o", "markersize": 6}
        if line.low and line.high:
            axes.vlines(xs, line.low, line.high, color=colour, linewidth=1.2)
    elif len(xs) <= 12:
        look |= {"marker": "o", "markersize": 3.5}
    if line.style == "dashed":
        look["linestyle"] = "--"
    if line.style == "steps":
        look["drawstyle"] = "steps-post"
    axes.plot(xs, ys, **look)
    if line.style != "dots" and line.low and line.high:
        step: Literal["post"] | None = "post" if line.style == "steps" else None
        axes.fill_between(xs, line.low, line.high, color=colour, alpha=0.18, linewidth=0, step=step)


def _formatter(show: Show) -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: show(float(f"{value:.12g}")))


def _cut(label: str) -> str:
    return label if len(label) <= 30 else f"{label[:29]}…"


def _plain(text: str) -> str:
    """Escape dollar signs, so that foreign text does not become a formula."""
    return text.replace("$", r"\$")
