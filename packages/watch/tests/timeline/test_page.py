"""Tests of the page in a real browser. It draws, says who waits for whom, and can be zoomed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from freewheel.timeline.model import Row, Span, Timeline
from freewheel_watch.timeline.page import page
from tests.support.browser import browser, complaints, eventually
from tests.support.timelines import made

#: Pixels in the canvas: rows of 20 with gaps of 4, below an axis of 22 and titles of 18. The learner is above the workers.
LEARNER_Y = 22 + 18 + 10
COLOR = """
const pixel = document.querySelector("canvas").getContext("2d").getImageData(arguments[0], arguments[1], 1, 1).data;
return "#" + [...pixel].slice(0, 3).map((part) => part.toString(16).padStart(2, "0")).join("");
"""
EVENT = """
const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect();
const at = {clientX: box.left + arguments[1], clientY: box.top + arguments[2], bubbles: true, cancelable: true};
Object.assign(at, {deltaY: -100, ctrlKey: true});
canvas.dispatchEvent(new (arguments[0] === "wheel" ? WheelEvent : PointerEvent)(arguments[0], at));
"""


@pytest.mark.system
def test_a_timeline_in_a_browser(tmp_path: Path) -> None:
    source = page(made(), "made")
    assert "AXIS = 22, TITLE = 18, MARGIN = 118, PAD = 6" in source, "pixels are counted by these"
    (tmp_path / "page.html").write_text(source, encoding="utf-8")
    with browser(tmp_path / "profile", 1400, 700) as window:
        window.get(f"file://{tmp_path / 'page.html'}")

        def color(x: float, y: float) -> str:
            return str(window.execute_script(COLOR, x, y))

        def happens(what: str, x: float, y: float) -> None:
            window.execute_script(EVENT, what, x, y)

        def x_of(time: float) -> float:
            wide = float(window.execute_script("return document.querySelector('canvas').clientWidth"))
            return 118 + (wide - 118 - 6) * time / 10.0

        eventually(lambda: color(x_of(0.9), LEARNER_Y) == "#3d5a98", what="an update in its colour")
        assert color(x_of(0.4), LEARNER_Y) == "#f0a35e", "a wait"

        happens("pointermove", x_of(1.4), LEARNER_Y)
        told = window.find_element("css selector", ".fw-tip").text
        assert "learner: wait-data" in told
        assert "waits for: worker 3" in told
        assert "meanwhile: step" in told
        assert "Waits for rows" in told

        for _ in range(8):
            happens("wheel", x_of(0.9), LEARNER_Y)  # into the update from 0.8 s to 1 s
        eventually(lambda: color(x_of(1.6), LEARNER_Y) == "#3d5a98", what="the update has grown")
        happens("dblclick", x_of(5.0), LEARNER_Y)
        eventually(lambda: color(x_of(1.6), LEARNER_Y) == "#f0a35e", what="all is shown again")
        assert [one for one in complaints(window) if "getImageData" not in one] == []


def test_the_page_holds_all_it_needs_and_no_text_can_leave_its_script() -> None:
    rows = [Row("</script><b>worker", "envs", [Span("step", 0.0, 1.0)])]
    text = page(Timeline(rows, {"step": "<i>"}, 0.0, 1.0), "a <run>")
    assert all(part in text for part in ("function freewheelGantt", ".fw-gantt", "a &lt;run&gt;"))
    assert not re.search(r"</script><b>|(src|href)=", text), "nothing is fetched"
