"""R1 to R30, the promises of docs/durability.md: each is tried many times, and the table there is made from the rows."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from benchmarks._common import ONE_THREAD, RESULTS, ROOT, Notebook, table

NAME = "reliability"
PAGE = ROOT / "docs" / "durability.md"
BEGIN, END = "<!-- made by python -m benchmarks.reliability -->", "<!-- end -->"
LIMIT_S = 1800.0  # of the trials of one promise

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """Trials that a benchmark keeps: its rows with these labels, and what holds in a row that counts as kept."""

    benchmark: str
    held: Callable[[Row], bool]
    labels: Mapping[str, Any]
    words: str = ""

    @property
    def command(self) -> str:
        return f"python -m benchmarks.{self.benchmark}{' ' * bool(self.words)}{self.words}"


def path_of(test: str) -> str:
    """A test of the core is named by its path below tests/, one of a package by its whole path."""
    return test if test.startswith("packages/") else f"tests/{test}"


@dataclass(frozen=True)
class Promise:
    """What is promised, the tests that try it (each so many times), and perhaps a benchmark whose rows are trials too."""

    text: str
    tests: tuple[str, ...]
    times: int = 3
    rows: Rows | None = None

    @property
    def command(self) -> str:
        return shlex.join(["pytest", *map(path_of, self.tests), "--times", str(self.times)])


def survived(row: Row) -> bool:
    return bool(row["survived"])


def chaos(fault: str) -> Rows:
    return Rows("chaos", survived, {"fault": fault}, f"--only {fault}")


PROMISES: Mapping[str, Promise] = {
    "R1": Promise(
        "8 workers are killed at random: no row is lost or doubled, the learner never waits for 2 s, every kill is a restart",
        ("faults/test_kills.py::test_many_kills_lose_and_repeat_no_row",),
        rows=Rows(
            "storm", lambda row: row["ledger"] == "exact" and row["restarts"] == row["kills"], {"weather": "storm"}
        ),
    ),
    "R2": Promise(
        "all workers are killed at once: all act again",
        ("faults/test_kills.py::test_all_workers_act_again_after_all_were_killed",),
        times=10,
    ),
    "R3": Promise(
        "a killed worker is noticed and replaced at once",
        ("transport/shm/test_supervisor.py::test_a_killed_worker_is_detected_and_replaced_at_once",),
        times=10,
        rows=chaos("worker-killed"),
    ),
    "R4": Promise(
        "an environment that raises in 1 % of its steps ends nothing; failures are counted, and told with worker, seed and step",
        ("faults/test_envs_that_fail.py::test_an_env_that_raises_sometimes_does_not_stop_training",),
        times=5,
    ),
    "R5": Promise(
        "an environment that hangs, or a worker that was stopped, is replaced in time; no late row is taken",
        ("faults/test_hangs.py",),
    ),
    "R6": Promise(
        "an environment that is 100 times slower delays nobody else, and is named",
        (
            "faults/test_slow_envs.py::test_other_workers_do_not_wait_for_a_slow_one",
            "faults/test_slow_envs.py::test_only_the_slow_worker_is_reported",
        ),
        times=5,
    ),
    "R7": Promise(
        "NaN, wrong shapes and answers outside of the space reach no update; they are counted, and the environment is given up",
        (
            "faults/test_envs_that_fail.py::test_invalid_answers_are_dropped_and_reported",
            "faults/test_envs_that_fail.py::test_a_lane_that_fails_too_often_is_given_up",
        ),
        times=5,
    ),
    "R8": Promise(
        "an update that is not finite is undone; a run that learns nothing ends with the number that was not finite",
        ("learn/test_finite.py",),
        times=5,
    ),
    "R9": Promise(
        "an answer of a wrong shape or type is refused with what was expected; an observation may be overwritten later",
        (
            "faults/test_envs_that_fail.py::test_invalid_answers_are_dropped_and_reported",
            "faults/test_envs_that_fail.py::test_an_env_may_overwrite_its_last_observation",
            "envs/test_lane.py",
        ),
        times=3,
    ),
    "R10": Promise(
        "an environment that can never start ends the run soon, with its own error, and leaves nothing",
        ("faults/test_never_starts.py",),
    ),
    "R11": Promise(
        "a signal at any time ends a run in order: saved, summarised, the right exit code, nothing left; a second one at once",
        ("faults/test_shutdown.py", "faults/test_start.py"),
        times=1,
        rows=chaos("signal"),
    ),
    "R12": Promise(
        "nothing outlives a trainer that is killed with SIGKILL, also inside a step that hangs",
        (
            "faults/test_signals.py::test_nothing_outlives_a_trainer_that_is_killed_at_any_time",
            "transport/shm/test_supervisor.py::test_all_processes_die_with_a_killed_trainer",
        ),
        times=5,
    ),
    "R13": Promise(
        "a trainer that is killed at a random moment, often within a save, resumes; at most one interval is lost",
        (
            "run/test_checkpoint_crash.py",
            "run/test_resume.py::test_a_run_that_was_saved_on_the_way_goes_on_after_a_kill",
        ),
        times=2,
        rows=chaos("killed"),
    ),
    "R14": Promise(
        "a full, read-only or broken disk ends nothing, is told once and made good; no temporary file is left",
        ("faults/test_disk.py",),
        times=2,
        rows=chaos("disk-full"),
    ),
    "R15": Promise(
        "a worker that ran out of memory is replaced, and this is its reason",
        (
            "faults/test_kills.py::test_a_worker_that_ran_out_of_memory_is_reported_and_replaced",
            "faults/test_kills.py::test_a_worker_that_was_killed_may_have_been_out_of_memory",
        ),
        times=3,
    ),
    "R16": Promise(
        "a damaged checkpoint is passed over and named, and no damage is silent",
        ("faults/test_damaged_runs.py",),
        times=1,
        rows=chaos("damaged"),
    ),
    "R17": Promise(
        "a hostile run directory is refused in one line, runs no code and changes nothing outside of itself",
        (
            "faults/test_hostile_files.py",
            "faults/test_hostile_links.py",
            "faults/test_hostile_text.py",
            "faults/test_current_folder.py",
            "files/test_read.py",
        ),
        times=1,
        rows=chaos("hostile"),
    ),
    "R18": Promise(
        "any configuration is planned, or refused in one line that names an option; no foreign traceback",
        ("config/test_fuzz.py",),
        times=5,
        rows=Rows("random_configs", lambda row: not row["foreign"], {}),
    ),
    "R19": Promise(
        "memory, descriptors, threads and shared memory do not grow, nor does the speed drift",
        ("faults/test_shutdown.py::test_the_memory_of_rows_is_freed_at_the_end",),
        rows=Rows(
            "soak",
            lambda row: row["memory_mb_growth"] < 2.0 and not row["descriptors_growth"] and not row["threads_growth"],
            {},
        ),
    ),
    "R20": Promise(
        "the same seed gives the same bits in sequential, lockstep and batch; a stopped and resumed run too; schedules replay",
        (
            "test_matrix.py::test_every_synchronous_mode_is_the_same_program",
            "test_matrix.py::test_another_process_with_other_hashes_gives_the_same_weights",
            "collect/test_exact.py",
            "run/schedule/test_replay.py",
        ),
        times=1,
    ),
    "R21": Promise(
        "when the learner stops, workers stop at the configured capacity, or the oldest rows are dropped and counted",
        ("faults/test_backpressure.py",),
        times=5,
    ),
    "R22": Promise(
        "no row older than --max-lag is learned from, in any order of events",
        (
            "faults/test_slow_envs.py::test_no_row_is_trained_on_that_is_older_than_max_lag",
            "pacing/test_any_order.py",
        ),
        times=2,
    ),
    "R23": Promise(
        "a sink that raises or blocks slows nothing down, and what it missed is counted",
        ("sinks/test_sink_set.py",),
        times=5,
    ),
    "R24": Promise(
        "the live page listens on this machine only, wants its token, changes nothing, and drops clients that stall",
        ("packages/watch/tests/test_gate.py", "packages/watch/tests/test_server.py"),
        times=2,
    ),
    "R25": Promise(
        "Ray actors that are killed are replaced with an exact ledger; nothing is left of a killed driver; loopback sockets only",
        ("packages/ray/tests/mode/test_faults.py", "faults/test_ray_daemons.py"),
        times=1,
        rows=Rows("ray_chaos", lambda row: row["ledger"] and not row.get("beyond"), {"ledger": True}),
    ),
    "R26": Promise(
        "a second trainer on a run, a taken port, too few open files and too few processes are refused in one line",
        (
            "run/test_resume.py::test_a_second_trainer_is_refused",
            "files/test_lock.py",
            "packages/watch/tests/test_command.py::test_a_port_that_is_taken_is_named",
            "run/advice/test_limits.py",
        ),
        times=5,
    ),
    "R27": Promise(
        "full queues and unread results do not delay the end",
        (
            "faults/test_shutdown.py::test_full_queues_do_not_delay_the_end",
            "faults/test_shutdown.py::test_workers_that_hang_or_are_stopped_or_dead_do_not_delay_the_end",
        ),
        times=10,
    ),
    "R28": Promise(
        "the time of day jumps by hours, or the whole run is stopped: no time-out fires, and times stay true",
        ("faults/test_sleep.py",),
        times=2,
        rows=chaos("stopped"),
    ),
    "R29": Promise(
        "a caller that has threads can train; workers inherit none of them", ("faults/test_fork_safety.py",), times=5
    ),
    "R30": Promise(
        "a resume that is killed leaves the run as it was: the next resume equals the first",
        ("collect/test_exact.py::test_any_number_of_stops_changes_nothing",),
        times=2,
        rows=chaos("killed-resuming"),
    ),
}


def trials(name: str, promise: Promise, times: int) -> dict[str, Any]:
    """Run the tests of one promise so many times: how many trials there were, and which of them failed."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = [*map(path_of, promise.tests)]
        words = ["-q", "-p", "no:cacheprovider", "--times", str(times), f"--junitxml={report}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *tests, *words],
            cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if not report.exists():
            raise SystemExit(f"{name}: pytest exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
        return counted(name, promise, list(ElementTree.parse(report).iter("testcase")))


def of_whole_run(name: str, promise: Promise, cases: Sequence[ElementTree.Element]) -> dict[str, Any]:
    """The same, from the report of a run of more tests (pytest --junitxml)."""
    return counted(name, promise, [case for case in cases if any(_belongs(case, test) for test in promise.tests)])


def _belongs(case: ElementTree.Element, test: str) -> bool:
    path, _, function = path_of(test).partition("::")
    name = str(case.get("name")).partition("[")[0]
    return case.get("classname") == path.removesuffix(".py").replace("/", ".") and function in ("", name)


def counted(name: str, promise: Promise, cases: Sequence[ElementTree.Element]) -> dict[str, Any]:
    skipped = [case for case in cases if case.find("skipped") is not None]
    failed = [str(case.get("name")) for case in cases if {part.tag for part in case} & {"failure", "error"}]
    tried = len(cases) - len(skipped)
    return {"promise": name, "trials": tried, "kept": tried - len(failed), "failed": failed, "tests": promise.command}


def kept_rows(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def newest(rows: Sequence[Row]) -> list[Row]:
    """The rows of the newest commit: several calls may have shared its trials."""
    if not rows:
        return []
    commit = str(rows[-1]["commit"]).removesuffix("-dirty")
    return [row for row in rows if str(row["commit"]).removesuffix("-dirty") == commit]


def cells(name: str, promise: Promise, rows: Sequence[Row]) -> Iterator[list[str]]:
    """A line for the tests of a promise, and one for the rows of its benchmark."""
    tried = [row for row in rows if row["promise"] == name]
    last = tried[-1] if tried else None
    result = f"{last['kept']:,} of {last['trials']:,}, {last['date'][:10]}" if last else "not tried"
    yield [name, promise.text, f"`{promise.command}`", result]
    if promise.rows:
        labels = promise.rows.labels
        own = newest([row for row in kept_rows(promise.rows.benchmark) if labels.items() <= row.items()])
        held = sum(map(promise.rows.held, own))
        result = f"{held:,} of {len(own):,}, {own[-1]['date'][:10]}" if own else "not tried"
        yield ["", "", f"`{promise.rows.command}`", result]


def page_table() -> str:
    """The table of docs/durability.md."""
    rows = kept_rows(NAME)
    lines = [line for name, promise in PROMISES.items() for line in cells(name, promise, rows)]
    return table(("", "promise", "tried by", "kept"), lines)


def write_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    made = re.sub(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", f"\n\n{page_table()}\n\n", page, flags=re.DOTALL)
    PAGE.write_text(made, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PROMISES), default=list(PROMISES), metavar="R1")
    parser.add_argument("--times", type=int, help="how often each test is run, instead of its own number")
    parser.add_argument("--junit", nargs="+", help="no trials: count those of runs of all tests (pytest --junitxml)")
    parser.add_argument("--quick", action="store_true", help="see that it works: two promises, once; nothing is kept")
    parser.add_argument("--report", action="store_true", help="no trials: write the table of docs/durability.md again")
    given = parser.parse_args()
    if given.report:
        write_page()
        return 0
    reported = [case for file in given.junit or () for case in ElementTree.parse(file).iter("testcase")]
    notebook = Notebook(NAME, "Promises, tried", quick=given.quick)
    for name in ("R8", "R21") if given.quick else given.only:
        promise = PROMISES[name]
        if given.junit:
            row = notebook.keep(of_whole_run(name, promise, reported))
        else:
            row = notebook.keep(trials(name, promise, 1 if given.quick else given.times or promise.times))
        failed = f"; failed: {', '.join(row['failed'])}" if row["failed"] else ""
        notebook.judge(f"{name}: {row['kept']} of {row['trials']} trials{failed}", not failed, exact=True)
        print(name, row["kept"], row["trials"], *row["failed"], flush=True)
    if not given.quick:
        write_page()
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
