"""Environments in the run's own process that do not return, end the process or leave others behind; and signals meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from freewheel.rollout.kernel import compiled
from freewheel.run.saved import open_run
from tests.support.places import LONG
from tests.support.trainers import LIMIT, SMALL_ARGV, summary_of, wait_until
from tests.support.warm import Command, Server

pytestmark = pytest.mark.system

INLINE = ["--placement", "inline", "--num-envs", "2"]
ENDLESS = ["--steps", "1000000000"]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
in_c = pytest.mark.skipif(compiled("watch", None) is None, reason="the part in C is not built")
HANGS = [*["sleeps", "stubborn"] * LONG, "in C", pytest.param("in C with the lock", marks=in_c)]
EVALUATION = ["--eval-episodes", "2", "--env.only", "2", "--env.at", "3"]
PHASES = {
    "evaluating": [*EVALUATION, "--evals", "50", "--steps", "20000"],
    "closing": [*EVALUATION, "--evals", "1", "--steps", "64"],
    "constructing": ["--env.call", "construct", "--env.only", "1"],
    "resetting": ["--env.call", "reset", "--env.at", "1"],
}


def argv(how: str, *more: str) -> list[str]:
    where = ["--runs-dir", "runs", "--run", "it", "--log-every", "0.05"]
    return ["train", "tests.support.stuck:Stuck", "--env.how", how, *INLINE, *ENDLESS, *SMALL_ARGV, *where, *more]


def stuck(command: Command) -> None:
    """Wait until its first thread does not return from a call."""
    wait_until((command.folder / "stuck").exists)
    seen = ""

    def still() -> bool:
        nonlocal seen
        before, seen = seen, switches(command)
        return "S (sleeping)" in seen and seen == before

    wait_until(still, every=0.1)


def switches(command: Command) -> str:
    """What its first thread does, and how often it has begun and ceased to."""
    lines = Path(f"/proc/{command.pid}/status").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith(("State", "voluntary", "nonvoluntary")))


@pytest.mark.parametrize("how", HANGS)
def test_a_step_that_does_not_return_ends_the_run_in_time_and_is_named(
    server: Server, tmp_path: Path, how: str
) -> None:
    with server.command(tmp_path, *argv(how, "--step-timeout", "0.7")) as command:
        assert command.wait(LIMIT) == 1
    summary = summary_of(tmp_path)
    first, *stack = summary["error"].splitlines()
    assert (summary["exit_code"], summary["ended"]) == (1, "failed")
    assert first.startswith("lane 0 of tests.support.stuck:Stuck did not return")
    assert "within 0.7 s" in first
    assert "step 3" in first
    assert command.err.startswith(f"freewheel: {first}")
    if how != "in C with the lock":  # no Python runs that could tell
        assert "episode 1, seed" in first
        assert "in act" in "".join(stack)
        assert "--step-timeout" in first
        assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values()) > 0
        _, warnings = open_run("it", str(tmp_path / "runs")).actor("latest")
        assert warnings == []


@pytest.mark.parametrize(
    ("call", "seconds", "where"), [("reset", "0.7", "in reset"), *[("construct", "4", "in its constructor")] * LONG]
)
def test_reset_and_constructor_have_limits(server: Server, tmp_path: Path, call: str, seconds: str, where: str) -> None:
    limit = f"--{call}-timeout"
    with server.command(tmp_path, *argv("stubborn", "--env.call", call, "--env.at", "3", limit, seconds)) as command:
        assert command.wait(LIMIT) == 1
    error = summary_of(tmp_path)["error"].splitlines()[0]
    assert f"did not return within {seconds} s" in error
    assert f"{where})" in error
    assert limit in error


def test_an_evaluation_in_the_runs_own_process_has_the_same_limits(server: Server, tmp_path: Path) -> None:
    with server.command(tmp_path, *argv("in C", *PHASES["evaluating"], "--step-timeout", "0.7")) as command:
        assert command.wait(LIMIT) == 1
    assert "did not return within 0.7 s" in summary_of(tmp_path)["error"]


@pytest.mark.parametrize("how", HANGS)
@pytest.mark.parametrize("number", SIGNALS if LONG else [signal.SIGTERM])
def test_a_signal_ends_a_run_whose_env_hangs(server: Server, tmp_path: Path, how: str, number: signal.Signals) -> None:
    with server.command(tmp_path, *argv(how)) as command:
        stuck(command)
        os.kill(command.pid, number)
        assert command.wait(LIMIT) == 128 + number
    summary = summary_of(tmp_path)
    assert (summary["exit_code"], summary["ended"]) == (128 + number, f"interrupted ({number.name})")
    if how in ("stubborn", "in C"):
        assert "lane 0 of tests.support.stuck:Stuck did not return within 3 s after SIGTERM" in command.err or LONG
    if how != "in C with the lock":
        assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values()) > 0


@pytest.mark.parametrize("how", HANGS if LONG else HANGS[-1:])
def test_a_second_signal_ends_it_at_once(server: Server, tmp_path: Path, how: str) -> None:
    with server.command(tmp_path, *argv(how)) as command:
        stuck(command)
        time.sleep(1.2)  # so long the lock has to be held before it is known to be
        os.kill(command.pid, signal.SIGINT)
        time.sleep(0.2)
        os.kill(command.pid, signal.SIGINT)
        sent = time.monotonic()
        assert command.wait(LIMIT) == 130
        assert time.monotonic() - sent < 2.5  # it has 3 s after the first
    assert summary_of(tmp_path)["exit_code"] == 130


@pytest.mark.parametrize("phase", PHASES if LONG else ["evaluating", "closing"])
def test_a_signal_ends_the_run_in_every_phase(server: Server, tmp_path: Path, phase: str) -> None:
    with server.command(tmp_path, *argv("sleeps", *PHASES[phase])) as command:
        stuck(command)
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait(LIMIT) == 143
    assert command.err == ""
    summary = summary_of(tmp_path)
    assert (summary["exit_code"], summary["ended"]) == (143, "interrupted (SIGTERM)")
    assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values())


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("os._exit", "called os._exit(0)"),
        ("sys.exit", "called sys.exit(0)"),
        *[("raises", "raised KeyboardInterrupt")] * LONG,
    ],
)
@pytest.mark.parametrize("call", ["step", *["construct", "reset"] * LONG])
def test_an_env_cannot_end_a_run_without_a_word(server: Server, tmp_path: Path, how: str, told: str, call: str) -> None:
    with server.command(tmp_path, *argv(how, "--env.call", call, "--env.at", "3")) as command:
        assert command.wait(LIMIT) == 1
    summary = summary_of(tmp_path)
    assert (summary["exit_code"], summary["ended"]) == (1, "failed")
    assert told in summary["error"].splitlines()[0]
    if call == "step":
        assert f"lane 0 of tests.support.stuck:Stuck {told}, which would have ended the run (episode 0" in command.err
        assert summary["produced"] == sum(summary["dropped"].values()) == 4
    assert "stuck.py" in command.err


def test_an_env_that_does_not_return_from_close_has_done_its_work(server: Server, tmp_path: Path) -> None:
    limit = ["--env.call", "close", "--env.at", "1", "--steps", "64"]
    with server.command(tmp_path, *argv("sleeps", *limit)) as command:
        assert command.wait(LIMIT) == 0
    summary = summary_of(tmp_path)
    assert (summary["exit_code"], summary["ended"], summary["updates"] > 0) == (0, "steps", True)
    assert "did not return from close() within 5 s" in command.err


def test_a_crash_shows_where_it_happened(server: Server, tmp_path: Path) -> None:
    with server.command(tmp_path, *argv("segv")) as command:
        assert command.wait(LIMIT) == -signal.SIGSEGV
    assert "Segmentation fault" in command.err
    assert "in act" in command.err


def test_a_change_of_directory_sends_nothing_elsewhere(server: Server, tmp_path: Path) -> None:
    with server.command(tmp_path, *argv("chdir", "--steps", "64", "--env.at", "3")) as command:
        assert command.wait(LIMIT) == 0
    run = tmp_path / "runs" / "it"
    assert summary_of(tmp_path)["exit_code"] == 0
    assert list((run / "checkpoints").iterdir())
    assert (run / "metrics.jsonl").stat().st_size > 0


@pytest.mark.parametrize("more", [*[["--steps", "64"]] * LONG, ENDLESS])
def test_a_process_that_an_env_has_started_ends_with_the_run(server: Server, tmp_path: Path, more: list[str]) -> None:
    """At the end of its steps, or after a signal."""
    with server.command(tmp_path, *argv("starts", "--env.at", "3", *more)) as command:
        wait_until(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text() != "")
        started = int((tmp_path / "started").read_text())
        if more == ENDLESS:
            os.kill(command.pid, signal.SIGINT)
        assert command.wait(LIMIT) == (130 if more == ENDLESS else 0)
    assert not psutil.pid_exists(started)
