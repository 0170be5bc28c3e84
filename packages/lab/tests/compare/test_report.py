"""Tests of the report: its numbers are those of the rows, it needs no network, and data may be missing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from freewheel.cli.main import main
from freewheel_lab.compare import charts, report
from freewheel_lab.compare.results import CaseInfo, ResultRow, Results
from freewheel_lab.plots.numbers import duration, megabytes, number, percent, times
from packages.lab.tests.support.comparison import FIVE, full, measured, reported, rows
from tests.support.browser import browser, complaints, eventually
from tests.support.timelines import made

VOID = ("meta", "rect", "path", "circle", "wbr")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


class Page(HTMLParser):
    """Collects the elements of a page: cells of the main table, cells of the raw rows, and all texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: dict[tuple[str, str], str] = {}
        self.raw: dict[tuple[int, str], str] = {}
        self.texts: list[str] = []
        self._mode = self._row = self._key = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self._mode, self._row = given.get("data-mode") or "", given.get("data-row") or ""
        if tag == "td":
            self._key = given.get("data-key") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag, f"{tag} is closed out of order"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.texts.append(data)
        if self._open and self._open[-1] == "td" and self._key:
            if self._mode:
                self.cells.setdefault((self._mode, self._key), data)
            elif self._row:
                self.raw[int(self._row), self._key] = data

    @property
    def shown(self) -> str:
        return " ".join(self.texts)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [given for name, given in self.tags if name == tag]


def page(results: Results) -> Page:
    found = Page(report.html(results))
    assert found._open == [], "every element is closed"
    return found


def middle(rows: list[ResultRow], name: str) -> float:
    return float(median(getattr(row, name) for row in rows))


def test_numbers_of_the_table_are_those_of_the_rows() -> None:
    results = full()
    found = page(results)
    base = {row.repeat: row.steps_per_s for row in results.rows if row.mode == "sequential"}
    for mode in FIVE:
        rows = [row for row in results.rows if row.mode == mode]
        expected = {
            "episodes_per_s": number(middle(rows, "episodes_per_s")),
            "steps_per_s": number(middle(rows, "steps_per_s")),
            "time_100k_episodes_s": duration(1e5 / middle(rows, "episodes_per_s")),
            "speedup": times(median(row.steps_per_s / base[row.repeat] for row in rows)),
            "efficiency": percent(middle(rows, "steps_per_s") / 5200),
            "lag_max": number(max(row.lag_max or 0 for row in rows)),
            "memory_mb": megabytes(middle(rows, "memory_mb")),
            "cpu_util": percent(middle(rows, "cpu_util")),
            "dropped": number(sum(row.dropped.get("late", 0) for row in rows)),
            "return_final": number(middle(rows, "return_final")),
            "startup_s": duration(middle(rows, "startup_s")),
        }
        assert {key: found.cells[mode, key] for key in expected} == expected
    assert len(found.cells) == len(FIVE) * len(expected)
    for at, row in enumerate(results.rows):
        for name, value in vars(row).items():
            if isinstance(value, int | float):
                assert float(found.raw[at, name]) == pytest.approx(value, rel=1e-5)
        assert (found.raw[at, "mode"], found.raw[at, "path"]) == (row.mode, row.path)


def test_bars_are_as_long_as_their_values() -> None:
    results = full()
    card = report.html(results).partition("Env steps per second</h3>")[2].partition("</svg>")[0]
    widths = [float(width) for width in re.findall(r'class="bar c\d" x="0" y="\d+" width="([\d.]+)"', card)]
    rates = sorted((one.steps_per_s.median for one in results.summary), reverse=True)
    most = max(one.steps_per_s.high for one in results.summary)
    assert widths == pytest.approx([380 * rate / most for rate in rates], abs=0.06)


def test_the_fastest_comes_first_the_recommended_is_marked_and_a_variant_follows_its_mode() -> None:
    results = reported()
    case = CaseInfo(mode="batch, no overlap", title="one option changed", of="batch")
    slower = [replace(row, mode=case.mode) for row in results.rows if row.mode == "sequential"]
    found = page(reported(modes=(*results.modes, case), rows=(*results.rows, *slower)))
    shown = [given for given in found.of("tr") if given.get("data-mode")]
    names = ["continuous", "episodes", "batch", "batch, no overlap", "lockstep", "sequential"]
    assert [row["data-mode"] for row in shown] == names
    assert [row["data-mode"] for row in shown if row.get("class") == "chosen"] == ["continuous"]
    assert "Continuous: 3.1x sequential, 7\N{NO-BREAK SPACE}% above episodes" in found.shown
    assert "freewheel train CartPole-v1 --mode continuous" in found.shown


def test_nothing_is_fetched_and_only_our_script_runs() -> None:
    text = report.html(full())
    found = Page(text)
    assert not [given for _, given in found.tags if {"src", "href", "srcset", "action", "data", "style"} & set(given)]
    assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttpRequest|import\(|WebSocket", text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(str(given["content"]) for given in found.of("meta") if given.get("http-equiv"))
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"


def test_everything_of_the_user_is_escaped() -> None:
    plain = full()
    case = replace(
        plain.modes[1], mode=HOSTILE, title=HOSTILE, failed=HOSTILE, options={HOSTILE: HOSTILE}, command=HOSTILE,
        dependencies=(HOSTILE,),
    )  # fmt: skip
    rows = [replace(row, mode=HOSTILE) if row.mode == "lockstep" else row for row in plain.rows]
    summary = [replace(one, mode=HOSTILE) if one.mode == "lockstep" else one for one in plain.summary]
    assert plain.recommendation is not None
    assert plain.scale is not None
    hostile = replace(
        plain, env=HOSTILE, algo=HOSTILE, command=HOSTILE, created=HOSTILE, equal_work=HOSTILE, hardware={HOSTILE: HOSTILE},
        modes=(plain.modes[0], case, *plain.modes[2:]), rows=tuple(rows), summary=tuple(summary),
        recommendation=replace(plain.recommendation, sentence=HOSTILE, command=HOSTILE),
        pairs=(replace(plain.pairs[0], what=HOSTILE, sentence=HOSTILE, before=HOSTILE),),
        scale=replace(plain.scale, law=HOSTILE, verdict=(HOSTILE,), assumptions=(HOSTILE,)),
        timelines={HOSTILE: json.loads(json.dumps(made().to_json()).replace("worker 0", "</script><b>"))},
    )  # fmt: skip
    found = page(hostile)
    assert not found.of("img")
    assert [given.get("type") for given in found.of("script")] == ["application/json", None]
    assert not [given for _, given in found.tags if any(name.startswith("on") for name in given)]
    assert found.shown.count(HOSTILE) >= 18


@pytest.mark.parametrize("count", [7, 0])
def test_an_interrupted_comparison_says_so(count: int) -> None:
    assert "interrupted" not in page(reported()).shown
    found = page(reported(rows=rows(FIVE)[:count], ended="interrupted"))
    assert f"This comparison was interrupted. It has {count} of at least 15 trainings" in found.shown
    assert {mode for mode, _ in found.cells} == (set(FIVE) if count else set())
    assert found.shown.count("not measured") == (1 if count else 6), "CUDA graphs never are"


def test_a_failed_mode_is_explained_and_the_others_are_shown() -> None:
    reason = "worker 2 died in step: Segmentation fault"
    whole = reported()
    refused = {"refused": "not installed: pip install it", "envs": 0}
    changed: dict[str, dict[str, Any]] = {"episodes": {"failed": reason}, "lockstep": refused}
    modes = tuple(replace(case, **changed.get(case.mode, {})) for case in whole.modes)
    found = page(reported(modes=modes, rows=tuple(row for row in whole.rows if row.mode not in changed)))
    assert f"episodes failed.  {reason}" in found.shown
    assert "failed: see above" in found.shown
    assert found.shown.count("not installed: pip install it") == 1, "in its row, and nowhere as a failure"
    assert "0 envs" not in found.shown
    assert ("episodes", "steps_per_s") not in found.cells
    assert found.cells["continuous", "speedup"] != "–"


def test_one_mode_and_one_repeat_have_no_speed_up_and_no_spread() -> None:
    results = reported({"continuous": (3100.0,)})
    assert page(results).cells["continuous", "steps_per_s"] == "3,100"
    assert page(results).cells["continuous", "speedup"] == "–"
    assert not re.search('class="(whisker|band)', report.html(results))
    assert "900 – 1,300" in page(reported({"batch": (900.0, 1000.0, 1300.0)})).shown


def test_values_that_are_not_known_are_dashes() -> None:
    names = ("startup_s", "episodes_per_s", "return_final", "lag_mean", "lag_max", "memory_mb", "cpu_util", "gpu_util")
    unknown: dict[str, Any] = dict.fromkeys(names)
    bare = tuple(replace(row, **unknown, curve=(), shares={}, dropped={}) for row in rows(FIVE))
    cases = tuple(CaseInfo(mode=mode, title="") for mode in FIVE)
    results = reported(rows=bare, modes=cases, hardware={}, ideal=replace(measured().ideal, steps_per_s=None))
    summary = tuple(replace(one, speedup=None, shares={}) for one in results.summary)
    found = page(replace(results, summary=summary, equal_wall_s=None, recommendation=None, equal_work="", pairs=()))
    assert found.cells["batch", "steps_per_s"] != "–"
    missing = {*names, "time_100k_episodes_s", "speedup", "efficiency"} - {"lag_mean", "gpu_util"}
    assert {found.cells["batch", key] for key in missing} == {"–"}
    assert "None" not in found.shown
    assert "nan" not in found.shown.lower().replace("nanoseconds", "")
    assert "No recommendation" in found.shown
    assert "measured apart" not in found.shown


def test_noise_and_a_gpu_are_told_where_they_are() -> None:
    results = reported()
    assert results.recommendation is not None
    near = replace(results, recommendation=replace(results.recommendation, within_noise=True))
    with_gpu = page(reported(rows=tuple(replace(row, gpu_util=0.62) for row in results.rows)))
    assert "within noise" in page(near).shown
    assert "GPU use" in with_gpu.shown
    assert "GPU 62 %" in with_gpu.shown
    assert not re.search("within noise|GPU use", page(results).shown)


def test_what_rates_leave_out_is_told_as_it_is() -> None:
    results = reported()
    whole = "the first 1 update (warm-up) of every rate, and start-up"
    assert whole in page(results).texts
    part = page(replace(results, work=replace(results.work, parts={"sequential": 4096})))
    assert whole.replace(",", " in modes that do the whole work, and proportionally less in the others,") in part.texts
    replay = page(replace(results, work=replace(results.work, updates=None, warm_up=0)))
    assert [text for text in replay.texts if text.startswith("the rows before the first update, and")]
    assert "the first 0 updates" not in replay.shown


def test_long_timelines_are_cut_and_the_page_stays_small() -> None:
    spans = [[round(at * 1e-4, 5), round((at + 1) * 1e-4, 5), at % 2] for at in range(25_000)]
    lanes = [{"name": f"worker {number}", "group": "envs", "spans": spans} for number in range(2)]
    long = {"kinds": ["step", "infer"], "about": ["", ""], "rows": lanes, "begin": 0.0, "seconds": 2.5}
    text = report.html(reported(timelines={"batch": long, "continuous": long}))
    assert len(text) < 2_000_000
    assert "1 s of 2.5 s" in Page(text).shown
    packed = [json.loads(data) for data in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    assert [sum(len(row["spans"]) for row in one["rows"]) for one in packed] == [20_000, 20_000]


def test_a_damaged_timeline_costs_only_itself() -> None:
    found = page(reported(timelines={"batch": {"rows": 3}, "continuous": made().to_json()}))
    assert "the timeline of batch is not a timeline" in found.shown
    assert len([given for given in found.of("div") if given.get("class") == "timeline"]) == 1


def test_files_are_written_beside_each_other(tmp_path: Path) -> None:
    said: list[str] = []
    written = report.write(full(), tmp_path, said.append)
    names = ["cost", "learning", "scaling", "speed", "time", "timelines"]
    assert sorted(written) == [*(tmp_path / "plots" / f"{name}.png" for name in names), tmp_path / "report.html"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written[1:])
    assert said == []


def test_the_command_makes_the_report_of_a_folder_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = replace(full(), created="2026-11-16T17:06:02+01:00", scale=None, timelines={})
    written = results.write(tmp_path).read_bytes()
    assert main(["compare", "--report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == report.html(results)
    assert "2026-11-16 16:06 UTC" in page(results).shown
    assert (tmp_path / "table.md").exists()
    assert (tmp_path / "plots" / "speed.png").exists()
    assert written == (tmp_path / "compare.json").read_bytes()
    assert "report.html" in capsys.readouterr().out
    assert main(["compare", "--report", str(tmp_path / "plots")]) == 1
    assert capsys.readouterr().err == f"freewheel: {tmp_path}/plots/compare.json is missing\n"


def test_without_matplotlib_the_page_is_written_and_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report.write(full(), tmp_path) == [tmp_path / "report.html"]
    assert capfd.readouterr().err == "freewheel: pictures need matplotlib: pip install 'freewheel-lab[plot]'\n"


def test_the_law_is_drawn_as_measured_predicted_and_extrapolated() -> None:
    results = full()
    here, elsewhere = charts.scaling(results)
    law, far, dots = (line for line in here.lines if line.label == "continuous")
    assert (law.style, far.style, dots.style) == ("line", "dashed", "dots")
    assert [x for x, _ in dots.points] == [1, 2, 4, 8]
    assert [x for x, _ in far.points] == [
        8,
        10,
        20,
        50,
        100,
        200,
    ]  # the extrapolation begins where the measurements end
    assert results.scale is not None
    known = {one.workers: one.measured for one in results.scale.points if one.mode == "continuous"}
    assert [rate for _, rate in dots.points] == [one.median for one in known.values() if one is not None]
    assert [x for x, _ in elsewhere.lines[0].points] == [10, 20, 50, 100, 200]
    assert {"memory suffices", "continuous: up to 60 workers pay"} <= set(page(results).texts)


@pytest.mark.system
def test_a_browser_draws_the_timelines_under_the_policy_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(report.html(full()), encoding="utf-8")
    with browser(tmp_path / "profile") as window:
        window.get(f"file://{tmp_path / 'report.html'}")
        eventually(lambda: len(window.find_elements("css selector", "canvas")) == 2)
        assert complaints(window) == []
