"""Tests of the page in a real browser with a real training."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from freewheel.files.lock import FileLock
from freewheel.timeline.model import Row, Span, Timeline
from tests.support.browser import browser, complaints, eventually, resize
from tests.support.warm import Command, Server
from tests.support.watching import Page, row, rows_in, watch, worker, write_run, write_status

pytestmark = pytest.mark.system
TRAINING = (  # noqa: SIM905 - as it would be typed
    "freewheel/Straggler-v0 --env.mean 0.002 --mode continuous --workers 3 --envs-per-worker 1 --num-steps-per-env 64 "
    "--policy.hidden 8 --evals 0 --steps 100000000 --log-every 0.25"
).split()
TILES = "return [...document.querySelectorAll('.tile')].map((tile) => [tile.dataset.name, tile.dataset.value, tile.className])"
LEDGER = "return [...document.querySelectorAll('#ledger-list .entry')].map((entry) => [entry.dataset.key, entry.dataset.value])"
PICTURE = "return document.querySelector(arguments[0] + ' canvas')?.toDataURL() ?? ''"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched") / "runs"
    for number, name in enumerate(("sweep-s1", "sweep-s2", "sweep-s3")):
        rows = [row(k, return_mean=float(k + number), eval_return=0.5 * k) for k in range(1, 40)]
        write_run(folder / name, rows, seed=number)
    (folder / "sweep-seeds.json").write_text("{}")
    write_run(folder / "many", [row(k) for k in range(1, 90)], mode="continuous", workers=100)
    return folder


@pytest.fixture(scope="module")
def page(runs: Path) -> Iterator[Page]:
    with watch(runs, quick=False) as page:
        yield page


@pytest.fixture(scope="module")
def window(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a browser that has opened the printed address."""
    with browser(tmp_path_factory.mktemp("browser")) as window:
        window.get(page.address)
        eventually(lambda: text(window, "#name") not in ("", "waiting for a run"))
        yield window


def text(window: Any, selector: str) -> str:
    return str(window.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))


def texts(window: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    return list(window.execute_script(script, selector))


def shown(window: Any, selector: str) -> bool:
    return bool(window.execute_script("return Boolean(document.querySelector(arguments[0])?.offsetParent)", selector))


def tiles(window: Any) -> dict[str, float | None]:
    return {name: float(value) if value else None for name, value, _ in window.execute_script(TILES)}


def picture(window: Any, chart: str = "#chart-return") -> str:
    """Return the pixels of a chart."""
    return str(window.execute_script(PICTURE, chart))


def visit(window: Any, page: Page, query: str, name: str) -> None:
    window.get(f"http://127.0.0.1:{page.port}/?{query}")
    eventually(lambda: text(window, "#name") == name, what=f"{name} is not shown")
    eventually(lambda: picture(window), what="nothing is drawn")


@pytest.mark.timeout(120)
def test_a_training_is_seen_as_it_goes(window: Any, page: Page, runs: Path, server: Server) -> None:
    name = f"live-{len(list(runs.iterdir()))}"
    with ExitStack() as stack:
        words = ("train", *TRAINING, "--run", name, "--runs-dir", str(runs))
        training = stack.enter_context(server.command(runs.parent, *words))
        eventually(lambda: name in texts(window, "#run-list td.name"), what="the new run is not listed")
        visit(window, page, f"run={name}", name)
        window.execute_script("window.kept = 'the page was never loaded again'")
        curves_move(window)
        numbers_are_those_of_the_rows(window, runs / name)
        a_killed_worker_turns_red(window, runs / name)
        end(training)
        eventually(lambda: text(window, "#state") == "interrupted", what="the end is not seen")
        words = ("resume", name, "--runs-dir", str(runs))
        resumed = stack.enter_context(server.command(runs.parent, *words, prefix="resume-"))
        the_resumed_run_is_seen(window)
        end(resumed)
        assert window.execute_script("return window.kept")
    assert complaints(window) == []


def curves_move(window: Any) -> None:
    eventually(lambda: (tiles(window).get("return_mean") or 0) > 0, what="no episode has ended")
    before, steps = picture(window), tiles(window)["env_steps"]
    eventually(lambda: picture(window) != before, what="the curve does not move")
    eventually(lambda: (tiles(window)["env_steps"] or 0) > (steps or 0))


def numbers_are_those_of_the_rows(window: Any, run: Path) -> None:
    """Every number on the page is that of a row of metrics.jsonl."""
    shown = tiles(window)
    ledger = {key: int(value) for key, value in window.execute_script(LEDGER)}
    rows = {one["env_steps"]: one for one in rows_in(run)}
    written = rows[shown["env_steps"]]
    names = ("return_mean", "steps_per_s", "updates_per_s", "queue_util", "buffer_util", "cpu_util", "updates")
    assert {name: shown[name] for name in names} == pytest.approx({name: written[name] for name in names})
    by_produced = {one["produced"]: one for one in rows_in(run)}[ledger["produced"]]
    assert all(ledger[key] == by_produced[key] for key in ("trained", "queued", "open")), ledger
    assert ledger["dropped"] == sum(by_produced["dropped"].values())
    assert text(window, "#ledger-check") == "✓ every row is accounted for"


def a_killed_worker_turns_red(window: Any, run: Path) -> None:
    os.kill(json.loads((run / "status.json").read_text())["workers"][1]["pid"], signal.SIGKILL)
    eventually(lambda: shown(window, "[data-worker='1'].alert"), what="it is not red")
    color = "return getComputedStyle(document.querySelector('.worker.alert')).color"
    assert window.execute_script(color) == "rgb(192, 39, 29)"
    eventually(lambda: "1 restart" in " ".join(texts(window, ".worker .restarts")))


def end(training: Command) -> None:
    os.kill(training.pid, signal.SIGINT)
    assert training.wait(20.0) == 130


def the_resumed_run_is_seen(window: Any) -> None:
    steps = tiles(window)["env_steps"] or 0
    eventually(lambda: text(window, "#state") == "running", what="the resumed run is not seen")
    eventually(lambda: (tiles(window)["env_steps"] or 0) > steps, what="its rows are not seen")
    eventually(lambda: len(texts(window, ".worker")) == 3, what="its workers are not seen")


def test_runs_are_compared_and_the_axis_is_switched(window: Any, page: Page) -> None:
    resize(window, 1400, 1000)
    visit(window, page, "run=many", "many")
    alone = picture(window)
    window.execute_script("document.querySelector(\"[data-run='sweep-s1'] input\").click()")
    eventually(lambda: texts(window, "#legend span") == ["many", "sweep-s1"])
    eventually(lambda: picture(window) != alone, what="the second curve is not drawn")
    beside = picture(window)
    window.execute_script("document.querySelector(\"[data-x='wall_s']\").click()")
    eventually(lambda: picture(window) != beside, what="the axis has not changed")
    assert "with=sweep-s1" in window.current_url
    assert "x=wall_s" in window.current_url
    window.refresh()
    eventually(lambda: texts(window, "#legend span") == ["many", "sweep-s1"], what="the choice is forgotten")
    assert complaints(window) == []


def test_seeds_of_a_group_are_one_curve_with_a_band(window: Any, page: Page) -> None:
    resize(window, 1400, 1000)
    visit(window, page, "run=many", "many")
    window.execute_script("document.querySelector('tr.group button').click()")
    eventually(lambda: texts(window, "#legend span") == ["sweep (3 seeds: mean, minimum to maximum)"])
    eventually(lambda: picture(window))
    place = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return [box.left, box.top, box.width]"
    x, y, width = window.execute_script(place, "#chart-return .u-over")
    window.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x + width / 2, "y": y + 50})
    eventually(lambda: "seeds" in text(window, "#tip"), what="there is no tip")
    steps, curve = text(window, "#tip").split("\n")
    values = [float(number) for number in re.findall(r"[\d.]+", curve.partition("): ")[2])]
    # the return of seed k is steps / 10 + k
    assert values == pytest.approx([float(steps) / 10 + k for k in (1, 0, 2)], abs=0.1)
    assert complaints(window) == []


def test_a_hundred_workers_are_readable_and_nothing_is_wider_than_a_window(window: Any, page: Page, runs: Path) -> None:
    dead = 42
    with FileLock(runs / "many" / ".lock"):
        workers = [worker(k, ("step", "step", "wait-credit", "reset")[k % 4]) for k in range(100)]
        workers[dead] = worker(dead, "down", restarts=3, waits_for="its replacement: it was killed")
        write_status(runs / "many", workers)
        for width, height, dark in ((1400, 1000, False), (390, 844, True)):
            resize(window, width, height, dark=dark)
            visit(window, page, "run=many", "many")
            eventually(lambda: len(texts(window, ".worker")) == 100, what="not every worker has a row")
            assert window.execute_script("return document.documentElement.scrollWidth") <= width
        assert texts(window, ".worker.alert .number") == [str(dead)]
        cut = "return [...document.querySelectorAll('.worker .doing')].filter((e) => e.scrollWidth > e.clientWidth).length"
        assert window.execute_script(cut) == 0
        counts = " ".join(texts(window, "#worker-counts span"))
        assert "1 down" in counts
        assert "25 resets" in counts
    resize(window, 1400, 1000)
    assert complaints(window) == []


def test_a_run_with_a_trace_has_a_timeline_in_place_of_shares(window: Any, page: Page, runs: Path) -> None:
    (runs / "many" / "timeline.json").unlink(missing_ok=True)
    visit(window, page, "run=many", "many")
    eventually(lambda: not shown(window, "#gantt"))
    complaints(window)  # of a timeline that is gone if this test is repeated
    eventually(lambda: shown(window, "#shares canvas"), what="no shares are drawn")
    rows = [Row(f"worker {k}", "envs", [Span("step", 60.0 + k, 60.8 + k) for k in range(29)]) for k in range(4)]
    part = runs / "many" / ".part-timeline.json"
    part.write_text(json.dumps(Timeline(rows, begin_s=60.0, end_s=90.0).to_json()))
    part.rename(runs / "many" / "timeline.json")
    eventually(lambda: shown(window, "#gantt canvas"), what="no timeline is drawn")
    eventually(lambda: not shown(window, "#shares"))
    assert text(window, "#time-title") == "the time from 1:00 to 1:30"
    assert complaints(window) == []


def test_without_its_server_the_page_says_so(runs: Path, window: Any) -> None:
    with watch(runs) as other:
        window.get(other.address)
        eventually(lambda: text(window, "#name") not in ("", "waiting for a run"))
        assert not shown(window, "#banner")
    eventually(lambda: shown(window, "#banner"), what="the page does not say that it has no server")
    assert "freewheel watch" in text(window, "#banner")


EVIL = (
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran=2'>",
    "javascript:window.ran=3",
    "\"'><svg onload=window.ran=4>",
    "\u202egnp.exe\u202c \u2066x\u2069",
    "W" * 10_000,
    "a\u2400b\x7f\x01\x1b[31m",
    "<a href='http://198.51.100.1/x'>go</a>",
    "\U0001f600" * 300,
)
LISTENER = (
    "window.blocked = []; document.addEventListener('securitypolicyviolation', (one) => blocked.push(one.blockedURI))"
)
ELSEWHERE = "return performance.getEntriesByType('resource').filter((e) => !e.name.startsWith(location.origin)).length"


@pytest.fixture
def evil(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Create runs whose texts are hostile, and one normal run."""
    folder = tmp_path_factory.mktemp("evil") / "runs"
    write_run(folder / "ours", [row(k) for k in range(1, 40)])
    for number, word in enumerate(EVIL):
        rows = [row(k, dropped={word: k}, **{f"hook/{word}": 1.0, word: word}) for k in range(1, 20)]
        name = f"{number}{word[:60]}".replace("/", "\u2215")
        run = write_run(folder / name, rows, env=word, algo=word, mode=word)
        told = {**dict.fromkeys(("error", "ended", "advice"), word), "problems": [word]}
        summary = {**told, "exit_code": 1, "produced": 10, "dropped": {word: 9}}
        (run / "summary.json").write_text(json.dumps(summary))
        (run / "messages.jsonl").write_text(json.dumps({"text": word, "wall_s": 1.0}) + "\n")
    parts = {"worker": 0, "state": EVIL[1], "waits_for": EVIL[0]}
    write_status(folder / "ours", [worker(0), {**worker(1), **parts}, worker(2, "down", waits_for=EVIL[5])])
    with watch(folder) as page:
        yield page


def test_words_of_others_do_nothing_and_harm_no_page(evil: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    with browser(tmp_path_factory.mktemp("browser")) as window:
        window.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": LISTENER})
        window.get(evil.address)
        eventually(lambda: len(texts(window, "#run-list td.name")) == len(EVIL) + 1, what="not every run is listed")
        names = window.execute_script(
            "return [...document.querySelectorAll('#run-list tr[data-run]')].map((e) => e.dataset.run)"
        )
        for width, height in ((1400, 1000), (390, 844)):
            resize(window, width, height)
            for name in names:
                window.get(f"http://127.0.0.1:{evil.port}/?{urlencode({'run': name, 'with': names[0]})}")
                shown = re.sub("[\x01\x1b\x7f\u202c\u202e\u2066\u2069]", lambda one: f"\\u{ord(one[0]):04x}", name)
                eventually(lambda shown=shown: text(window, "#name") == shown, what=f"{shown} is not shown")  # type: ignore[misc]
                eventually(lambda: picture(window), what="nothing is drawn")
                assert window.execute_script("return [window.ran ?? null, window.blocked]") == [None, []], name
                assert window.execute_script(ELSEWHERE) == 0
                assert window.execute_script("return document.documentElement.scrollWidth") <= width, name
                assert "ours" in texts(window, "#run-list td.name")
                assert window.execute_script("return document.querySelector('main').scrollHeight") < 6 * height, name
                turning = "[\u202a-\u202e\u2066-\u2069]"  # such a sign would turn other words round
                assert not re.search(turning, text(window, "body")), name
                if shots := os.environ.get("SHOTS"):
                    window.save_screenshot(f"{shots}/{width}-{names.index(name)}.png")
        assert complaints(window) == []
