"""Signals at any time in every mode, and a trainer that is killed: exit codes, summaries, nothing left behind (R11, R12)."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.support.chaos import world
from tests.support.places import LONG
from tests.support.trainers import LIMIT, SMALL_ARGV, alive, family, has_logged, summary_of, wait_until, workers_of
from tests.support.warm import Command, Server

pytestmark = pytest.mark.system

MODES = {
    "sequential": ["--mode", "sequential"],
    "inline": ["--mode", "lockstep", "--placement", "inline", "--num-envs", "2"],
    "processes": ["--mode", "lockstep", "--placement", "processes", "--num-envs", "2"],
    **{mode: ["--mode", mode, "--workers", "2", "--num-envs", "2"] for mode in ("continuous", "batch", "episodes")},
}
TRIALS = 100 if LONG else 1  # of each mode
LATEST = 4.0 if LONG else 1.0  # seconds after the start at which a signal comes
EVALS = ["--evals", "1000", "--eval-episodes", "2"]
ENDLESS = ["--steps", "1000000000", "--log-every", "0.05"]


def argv(env: str, mode: str, *more: str) -> list[str]:
    return ["train", env, *MODES[mode], *ENDLESS, *SMALL_ARGV, "--runs-dir", "runs", "--run", "it", *more]


def started(server: Server, stack: ExitStack, folder: Path, *words: str) -> Command:
    folder.mkdir(parents=True)
    return stack.enter_context(server.command(folder, *words))


def relatives(pid: int) -> list[psutil.Process]:
    try:
        return family(pid)
    except psutil.NoSuchProcess:
        return []


def ended_in_order(command: Command, number: signal.Signals, before: list[psutil.Process]) -> None:
    assert command.wait(LIMIT) == 128 + number, command.err
    wait_until(lambda: not any(map(alive, before)), what="children outlive the run")
    assert command.err == ""
    if (command.folder / "runs" / "it").exists():
        summary = summary_of(command.folder)
        assert (summary["exit_code"], summary["ended"]) == (128 + number, f"interrupted ({number.name})")
        assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values())


@pytest.mark.parametrize("trial", range(TRIALS))
@pytest.mark.timeout(180)
def test_a_signal_at_any_time_ends_a_run_of_any_mode_in_order(server: Server, tmp_path: Path, trial: int) -> None:
    """From the first import to the evaluations."""
    rng = random.Random(trial)
    for mode in MODES:  # one after the other, or they would wait for the processor
        with ExitStack() as stack:
            command = started(server, stack, tmp_path / mode, *argv(world("Certified"), mode, *EVALS))
            time.sleep(rng.uniform(0.0, LATEST))
            number = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
            before = relatives(command.pid)
            (os.kill if number == signal.SIGTERM else os.killpg)(command.pid, number)
            ended_in_order(command, number, before)


@pytest.mark.parametrize("trial", range(TRIALS))
@pytest.mark.timeout(180)
def test_nothing_outlives_a_trainer_that_is_killed_at_any_time(server: Server, tmp_path: Path, trial: int) -> None:
    """All modes at once; where envs have processes they have started others, one of them in a session of its own."""
    rng = random.Random(trial)
    with ExitStack() as stack:
        words = {mode: argv("tests.support.stuck:Parent", mode, *EVALS) for mode in MODES}
        commands = {mode: started(server, stack, tmp_path / mode, *words[mode]) for mode in MODES}
        if LONG:
            time.sleep(rng.uniform(0.0, 2 * LATEST))
        else:
            wait_until(lambda: all(has_logged(tmp_path / mode / "runs", "it") for mode in MODES))
        for mode, command in commands.items():
            before = relatives(command.pid)
            pids = [int(path.name) for path in (tmp_path / mode).glob("started/*")]
            apart = [psutil.Process(pid) for pid in pids if "--workers" in MODES[mode] and psutil.pid_exists(pid)]
            os.kill(command.pid, signal.SIGKILL)
            assert command.wait(LIMIT) == -signal.SIGKILL
            inline = [child for child in before if child in apart or child.pid not in pids]
            wait_until(lambda own=inline: not any(map(alive, own)), what=f"{mode} leaves children")  # type: ignore[misc]
        for path in tmp_path.glob("*/started/*"):  # of inline envs, which nobody is left to end
            if psutil.pid_exists(int(path.name)):
                psutil.Process(int(path.name)).kill()


@pytest.mark.parametrize("mode", ["continuous", *["processes", "batch", "episodes"] * LONG])
def test_what_workers_envs_have_started_ends_with_the_run(server: Server, tmp_path: Path, mode: str) -> None:
    with ExitStack() as stack:
        command = started(server, stack, tmp_path / mode, *argv("tests.support.stuck:Parent", mode))
        wait_until(lambda: has_logged(tmp_path / mode / "runs", "it"))
        pids = [int(path.name) for path in (tmp_path / mode).glob("started/*")]
        assert len(pids) >= 4
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait(LIMIT) == 143
        assert not any(map(psutil.pid_exists, pids))


def test_a_stopped_forkserver_and_a_dead_worker_do_not_delay_the_end(server: Server, tmp_path: Path) -> None:
    with ExitStack() as stack:
        command = started(server, stack, tmp_path / "it", *argv(world("Certified"), "continuous"))
        wait_until(lambda: has_logged(tmp_path / "it" / "runs", "it"))
        worker = workers_of(command.pid)[0]
        before = relatives(command.pid)
        psutil.Process(worker.ppid()).suspend()
        worker.kill()
        os.killpg(command.pid, signal.SIGINT)
        ended_in_order(command, signal.SIGINT, before)


SLOW_FIT = ["--algo", "mbpo", "--mbpo.learning-starts", "64", "--mbpo.model-batch", "1"]
SLOW_FIT += ["--mbpo.members", "2", "--mbpo.elites", "1"]


@pytest.mark.parametrize(
    ("mode", "clock"), [("sequential", "serial"), *[("continuous", "async"), ("sequential", "async")] * LONG]
)
def test_a_signal_ends_a_run_that_fits_a_model(server: Server, tmp_path: Path, mode: str, clock: str) -> None:
    """Which takes much longer than a signal may."""
    with ExitStack() as stack:
        folder = tmp_path / "it"
        more = [*SLOW_FIT, "--mbpo.clock", clock]
        command = started(server, stack, folder, *argv("tests.support.worlds:IdentityBox", mode, *more))
        wait_until((folder / "runs" / "it" / "config.json").exists)
        time.sleep(1.5)  # not a synchronisation: the fit has begun or is about to
        before = relatives(command.pid)
        os.kill(command.pid, signal.SIGTERM)
        ended_in_order(command, signal.SIGTERM, before)
