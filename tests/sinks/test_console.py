"""The console, line by line: plain, live, and at the end of a run."""

from __future__ import annotations

import io
import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from freewheel.metrics.meter import Budget
from freewheel.metrics.targets import Setup
from freewheel.sinks import console
from freewheel.sinks.classic import ClassicLines, ClassicSink
from freewheel.sinks.console import ConsoleSink
from freewheel.sinks.sink import RunInfo, Sink
from tests.support.golden import assert_golden

TITLE = "CartPole-v1  ppo  lockstep"
ROW: dict[str, Any] = {
    "wall_s": 4.0, "env_steps": 51200, "episodes": 220, "updates": 100,
    "steps_per_s": 12412.3, "episodes_per_s": 53.25, "updates_per_s": 24.1,
    "return_mean": 231.512, "return_episodes": 22, "length_mean": 231.4, "lag_mean": 0.0, "lag_max": 0.0,
    "queue_util": None, "buffer_util": 0.5, "cpu_util": 0.834, "gpu_util": None, "env_busy": 0.21, "learner_busy": 0.62,
    "produced": 51300, "trained": 51200, "queued": 64, "open": 36, "dropped": {},
}  # fmt: skip
UNKNOWN = ("return_mean", "length_mean", "lag_mean", "lag_max", "env_busy", "steps_per_s")
EMPTY = ROW | {"return_episodes": 0} | dict.fromkeys(UNKNOWN)
WORKER = {"step": 0.6204, "reset": 0.012, "infer": 0.2, "write": 0.008, "wait-gate": 0.1, "down": 0.0, "other": 0.0596}
LEARNER = {"observe": 0.04, "update": 0.6, "publish": 0.01, "wait-data": 0.35, "eval": 0.0, "save": 0.0, "other": 0.0}
SUMMARY: dict[str, Any] = {
    "ended": "steps", "exit_code": 0, "wall_s": 3725.4, "env_steps": 100000, "episodes": 500, "updates": 195,
    "steps_per_s": 26.84, "episodes_per_s": 0.1342, "updates_per_s": 0.05234,
    "return_mean": 487.36, "return_episodes": 50, "lag_max": 0.0, "best_eval": 481.25, "best_eval_std": 20.04, "best_step": 61440,
    "final_eval": 197.0, "final_eval_std": 33.5, "eval_episodes": 20, "eval_fresh": True, "eval_note": None,
    "produced": 100100, "trained": 100000, "queued": 0, "open": 0, "dropped": {"nan": 36, "shutdown": 64},
    "shares": {"worker": WORKER, "learner": LEARNER}, "worker_restarts": 0, "path": "runs/cartpole",
}  # fmt: skip


EVALUATED = ("best_eval", "best_eval_std", "best_step", "final_eval", "final_eval_std", "eval_note")


def info(**options: Any) -> RunInfo:
    given: dict[str, Any] = {"title": TITLE, "budget": Budget(steps=100), "algorithm": "mbpo", "mode": "batch"}
    return RunInfo(path=Path("runs/x"), **given | options)


def plain(budget: Budget) -> tuple[ConsoleSink, io.StringIO]:
    file = io.StringIO()
    return ConsoleSink(TITLE, budget, Console(file=file, force_terminal=False, width=40)), file


def terminal(budget: Budget, width: int = 80, setup: Setup | None = None) -> tuple[ConsoleSink, io.StringIO]:
    file = io.StringIO()
    out = Console(file=file, force_terminal=True, width=width, color_system="standard", no_color=False, _environ={})
    return ConsoleSink(TITLE, budget, out, setup=setup), file


def frame(file: io.StringIO) -> list[str]:
    """The panel that was drawn last, without colours."""
    text = Text.from_ansi(file.getvalue()).plain
    return text[text.rindex("╭") :].splitlines()


SLEPT = ROW | {"wall_s": ROW["wall_s"] + 3600.0, "slept_s": 3600.0}


LINES: list[tuple[Budget, dict[str, Any]]] = [
    (Budget(steps=100000), ROW),
    (Budget(minutes=1.0), EMPTY | {"env_steps": 0, "wall_s": 0.0, "updates": 0}),
    (Budget(), ROW | {"eval_return": 450.25, "dropped": {"stale": 12, "worker_death": 1201}}),
    (Budget(steps=100000), SLEPT),  # as fast as while it ran
    (Budget(minutes=120.0), SLEPT),  # by the clock, in which it slept
    (Budget(steps=100000, minutes=61.0), SLEPT),
]


def test_a_plain_line_is_complete_and_never_folded() -> None:
    shown = []
    for budget, row in LINES:
        sink, file = plain(budget)
        sink.write(row)
        shown.append(file.getvalue())
    assert_golden(__file__, "plain_lines", "".join(shown))


UNDER_WAY = {"evaluating/ended": 7, "evaluating/episodes": 20}


def test_an_evaluation_under_way_is_shown_and_at_the_end_there_is_no_eta() -> None:
    sink, file = plain(Budget(steps=100000))
    sink.write(ROW | UNDER_WAY)
    sink.write(ROW | UNDER_WAY | {"env_steps": 100000})
    first, last = file.getvalue().splitlines()
    assert first.endswith("env  21%  eta  0:04  evaluating 7/20")
    assert last.endswith("env  21%  evaluating 7/20")
    sink, file = terminal(Budget(steps=100000))
    sink.write(ROW | UNDER_WAY)
    assert frame(file)[1].endswith(" 51%  51,200 / 100,000 steps  evaluating 7/20 │")
    sink.close(SUMMARY)


MODEL = {"env_steps": 5000, "updates": 1000, "real_data": 5000, "model_data": 2000}
MODEL |= {"agent_updates": 1000, "dynamics_updates": 500}


@pytest.mark.parametrize("on_terminal", [False, True])
def test_the_classic_line(on_terminal: bool) -> None:
    file = io.StringIO()
    out = Console(file=file, force_terminal=on_terminal, width=40, _environ={})
    sink: Sink = ConsoleSink(TITLE, Budget(steps=100000), out, ClassicLines("AsyncMBPO"))
    sink.write(ROW | MODEL)
    sink.write(ROW | MODEL | {"updates": 1001, "agent_updates": 1001, "eval_return": 3.0})
    assert file.getvalue().splitlines() == [
        "[AsyncMBPO] step=1000 real_data=5000 model_data=2000 agent_updates=1000 dynamics_updates=500",
        "[AsyncMBPO] step=1001 real_data=5000 model_data=2000 agent_updates=1001 dynamics_updates=500",
    ]
    sink.close(SUMMARY)
    assert file.getvalue().endswith("runs/cartpole\n")


@pytest.mark.parametrize("mode", ["sequential", "lockstep", "batch", "continuous", "episodes"])
def test_the_classic_name_says_whether_acting_waits_for_learning(mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    sink = console.SINK.open(info(mode=mode, console="classic"))
    assert sink is not None
    sink.write({"env_steps": 7, "updates": 3})  # there is no model, or not yet
    name = "AsyncMBPO" if mode in ("continuous", "episodes") else "MBPO"
    assert capfd.readouterr().out == f"[{name}] step=3 real_data=7 model_data=0 agent_updates=3 dynamics_updates=0\n"


def test_classic_progress_counts_episodes_and_tells_what_an_update_takes(capfd: pytest.CaptureFixture[str]) -> None:
    sink: Sink = ClassicSink(ClassicLines(episodes=100))
    row = {"env_steps": 7, "updates": 0, "episodes": 10, "episodes_per_s": 15.23, "wall_s": 1.0}
    sink.write(row)
    sink.write(row | {"episodes": 30, "updates": 1, "wall_s": 2.0, "time/learner_update": 0.3})
    sink.write(row | {"episodes": 90, "updates": 3, "wall_s": 3.0, "time/learner_update": 0.5, "episodes_per_s": None})
    sink.close({})
    assert capfd.readouterr().out.splitlines() == [
        "10/100 episodes (15.2 eps/sec)",
        "30/100 episodes (15.2 eps/sec)",
        "update 1 complete (0.3 s)",
        "90/100 episodes (0.0 eps/sec)",
        "updates 2 to 3 complete (0.25 s each)",
    ]


def test_a_quiet_run_has_no_console() -> None:
    assert console.SINK.open(info(quiet=True)) is None
    assert type(console.SINK.open(info())) is ConsoleSink


def test_the_panel() -> None:
    sink, file = terminal(Budget(steps=100000))
    sink.write(ROW | {"eval_return": 480.0})
    sink.write(ROW | {"eval_return": 450.0, "lag_mean": 1.25, "lag_max": 2.0, "dropped": {"stale": 12}})
    assert_golden(__file__, "panel", "\n".join(frame(file)) + "\n")
    sink.close(SUMMARY)


def test_figures_are_green_or_red_and_say_once_why_they_cannot_be() -> None:
    setup = Setup(mode="continuous", algo="ppo", workers=2, in_turn=False, cores=2, device="cpu", worker_cores=1.0)
    sink, file = terminal(Budget(), setup=setup)
    for _ in range(20):
        waits = {"time/worker_wait_credit": 0.5, "time/learner_wait_data": 0.5, "learner_busy": 0.2}
        sink.write(ROW | waits | {"queue_util": 0.6, "cpu_util": 0.3})
    drawn = file.getvalue()
    sink.close(SUMMARY)
    assert "\x1b[1;32m  60%\x1b[0m" in drawn
    assert "\x1b[1;31m12.4k\x1b[0m" in drawn
    assert drawn.count("GPU: no GPU here") == 1
    assert drawn.count("buffer: PPO empties") == 1
    assert drawn.count("CPU: ") == 1
    assert "collection rate:" not in drawn


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_panel_fits_any_terminal_and_has_no_bar_without_a_limit(width: int) -> None:
    sink, file = terminal(Budget(episodes=300), width)
    sink.write(EMPTY)
    assert {len(line) for line in frame(file)} == {min(width, console.WIDTH)}
    sink.close(SUMMARY)
    sink, file = terminal(Budget(), width)
    sink.write(ROW)
    assert frame(file)[1].strip("│ ") == "51,200 steps"
    sink.close(SUMMARY)


def test_notes_stand_above_the_panel_and_leave_it_whole() -> None:
    sink, file = terminal(Budget(steps=100000))
    sink.note("before")
    sink.write(ROW)
    before = frame(file)
    sink.note("worker 3 died [SIGKILL]")
    text = Text.from_ansi(file.getvalue()).plain
    assert "worker 3 died [SIGKILL]\n╭" in text
    assert frame(file) == before
    sink.close(SUMMARY)


def test_the_panel_needs_no_thread_gives_the_cursor_back_and_is_replaced_by_the_summary() -> None:
    threads = threading.enumerate()
    sink, file = terminal(Budget(steps=100000))
    for step in range(10):
        sink.write(ROW | {"env_steps": step})
    assert threading.enumerate() == threads
    assert any(" 9 / 100,000 steps" in line for line in frame(file))
    height = len(frame(file))
    sink.close(SUMMARY)
    assert threading.enumerate() == threads
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1  # the cursor is back
    rest = file.getvalue()[file.getvalue().rindex("╯") :]
    assert rest[: rest.index("all steps taken")].count("\x1b[1A\x1b[2K") == height  # up and erase, line by line


@pytest.mark.parametrize(
    ("environment", "begins"), [({"TERM": "dumb"}, "step 51200  12.4k"), ({"NO_COLOR": "1", "TERM": "xterm"}, "\x1b")]
)
def test_simple_terminals_get_lines_or_no_colours(environment: dict[str, str], begins: str) -> None:
    file = io.StringIO()
    sink = ConsoleSink(TITLE, Budget(), Console(file=file, force_terminal=True, _environ=environment))
    sink.write(ROW | {"dropped": {"nan": 1}})
    assert file.getvalue().startswith(begins)
    sink.close(SUMMARY)
    assert not re.search(r"\x1b\[[\d;]*3[0-7][;m]", file.getvalue()) or "NO_COLOR" not in environment


NOTHING = {
    **dict.fromkeys(("steps_per_s", "updates_per_s", "episodes_per_s", "return_mean", *EVALUATED)),
    "return_episodes": 0, "eval_episodes": 0, "eval_fresh": False, "worker_restarts": 1204,
    "shares": {"worker": {"step": 0.0, "other": 1.0}, "learner": {"update": 0.0, "other": 1.0}},
    "produced": 0, "trained": 0, "queued": 0, "open": 0, "dropped": {},
}  # fmt: skip
#: What differs from the usual one, by what it is.
SUMMARIES: dict[str, dict[str, Any]] = {
    "usual": {},
    "the last weights are the best": {"best_step": 100000},
    "the last weights are not scored": {"eval_fresh": False, "eval_note": "no time\ntraceback", "final_eval": None},
    "failed early, with restarts": NOTHING,
    "advice, and rows outside their space": {"advice": "envs were 97% of the time: do this", "out_of_space": 1204},
}


def test_notes_and_summaries_are_plain_text() -> None:
    shown = ""
    for name, change in SUMMARIES.items():
        sink, file = plain(Budget(steps=100000))
        sink.note(f"[bold]{name}[/bold]: see [/tmp/x]")
        sink.close(SUMMARY | change)
        shown += file.getvalue()
    assert_golden(__file__, "summaries", shown)


@pytest.mark.parametrize(
    ("summary", "first", "colour"),
    [
        ({"ended": "minutes"}, "time is up", "32"),
        ({"ended": "episodes"}, "all episodes played", "32"),
        ({"ended": "steps", "exit_code": 3}, "all steps taken", "33"),
        ({"ended": "interrupted (SIGINT)", "exit_code": 130}, "interrupted (SIGINT)", "31"),
        ({"ended": "failed", "exit_code": 1}, "failed", "31"),
    ],
)
def test_why_it_ended(summary: dict[str, Any], first: str, colour: str) -> None:
    sink, file = terminal(Budget())
    sink.close(SUMMARY | summary)
    assert file.getvalue().splitlines()[0].endswith(f"\x1b[{colour}m{first}\x1b[0m")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_bars_and_legends_fit_the_terminal(width: int) -> None:
    sink, file = terminal(Budget(), width)
    sink.close(SUMMARY)
    bars = [line for line in re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()).splitlines() if re.search("[█▓▒░·]", line)]
    assert len(bars) >= 4
    assert max(map(len, bars)) <= width
    assert len(bars[0]) == min(width, 71)
    assert "".join(bars).count("%") == 9


def test_a_terminal_without_unicode_gets_other_shades() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    sink = ConsoleSink(TITLE, Budget(steps=10), Console(file=file, force_terminal=True, _environ={}))
    sink.write(ROW)
    sink.close(SUMMARY)
    file.flush()
    text = re.sub(rb"\x1b\[\d+m", b"", raw.getvalue())
    assert b"# step 62%  = infer 20%  + wait-gate 10%  - other 6%  . rest 2%" in text


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6).filter(lambda parts: sum(parts) > 0))
def test_the_cells_of_a_bar_and_its_percentages_add_up(parts: list[float]) -> None:
    sink, file = plain(Budget())
    shares = {f"kind{number}": part / math.fsum(parts) for number, part in enumerate(parts)}
    sink.close(SUMMARY | {"shares": {"worker": shares}})
    bar, legend = file.getvalue().splitlines()[5:7]
    assert len(bar.removeprefix("  worker   ")) == console.BAR
    shown = dict(re.findall(r"(\w+) (\d+)%", legend))
    assert sum(map(int, shown.values())) == 100
    assert all(abs(int(percent) - 100 * shares[kind]) < 1 for kind, percent in shown.items() if kind != "rest")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        *(("wall_s", seconds, f" in {clock}\n") for seconds, clock in (
            (0.4, "0:00"), (59.6, "1:00"), (3599.4, "59:59"), (3599.6, "1:00:00"), (360000.0, "100:00:00"))),
        *(("steps_per_s", rate, f"  speed    {text} steps/s, ") for rate, text in (
            (None, "-"), (0.0, "0"), (0.0523, "0.0523"), (24.14, "24.1"), (980.4, "980"), (999.4, "999"), (999.6, "1k"),
            (999700.0, "1M"), (12437.0, "12.4k"), (1.25e6, "1.25M"))),
        ("training_s", 74.52, " episodes/s in the 74.5 s of training\n"),
    ],
)  # fmt: skip
def test_times_and_rates(key: str, value: float | None, text: str) -> None:
    sink, file = plain(Budget())
    sink.close(SUMMARY | {key: value})
    assert text in file.getvalue()
