"""The end of a run: with full queues, with workers that hang or are stopped, after signals, and if the trainer is killed."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from freewheel.cli import main as cli
from freewheel.collect.sequential import SequentialConfig
from freewheel.core import BatchSpec, Chunk, Learner, RowCounts, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.ledger import balance
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import FlatParams, PolicyConfig, full_layout
from freewheel.rollout.call_state import CALL, RESET
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.run.checkpoints.checkpoint import LEARNER
from freewheel.run.saved import open_run
from freewheel.run.stopping.stop import Interrupted, Stop
from freewheel.run.stopping.watched import wrapped
from tests.support.chaos import MODES, Trial, every, hang_a_worker_of_each, idle, kill, modes, tokens, trial, world
from tests.support.places import LONG
from tests.support.pools import wire_of
from tests.support.trainers import (
    LIMIT,
    SMALL_ARGV,
    alive,
    command,
    commands,
    family,
    has_logged,
    summary_of,
    wait_until,
    workers_of,
)
from tests.support.warm import Server

TIMES = 333 if LONG else 2
COMMANDS = MODES if LONG else MODES[1:2]  # a command needs seconds to start


def open_memory() -> list[str]:
    """Shared memory that this process holds open."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [link for link in links if "memfd" in link]


def test_the_memory_of_rows_is_freed_at_the_end() -> None:
    """At once, and not when garbage is collected: a queue may be large."""
    gc.collect()
    gc.disable()
    try:
        before = open_memory()
        with trial(world("Certified"), "continuous", workers=2, num_envs=2) as on:
            on.learn(1)
            assert len(open_memory()) > len(before)
        assert open_memory() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", modes("continuous"))
def test_full_queues_do_not_delay_the_end(mode: str) -> None:
    """Workers that wait for a free slot, and alternately workers that act."""
    for number in range(TIMES):
        with trial(world("Certified"), mode, workers=4, num_envs=4, env_args={"seconds": 0.0}) as on:
            on.publish()
            wait_until(partial(idle if number % 2 else has_begun, on))
            children = on.processes()
        assert len(children) == 4
        assert not any(child.is_running() for child in children)
        rows = on.balance()
        assert (rows.produced > 0, rows.open, rows.trained, rows.dropped) == (True, 0, 0, {})


def has_begun(on: Trial) -> bool:
    return on.balance().queued > 0


@pytest.mark.parametrize("mode", modes("continuous") if LONG else ["continuous"])
def test_workers_that_hang_or_are_stopped_or_dead_do_not_delay_the_end(mode: str, tmp_path: Path) -> None:
    args = {"how": "hangs", "only": 1, "folder": tokens(tmp_path, 1)}
    with trial(world("Faulty"), mode, workers=4, num_envs=4, env_args=args) as on:
        on.publish()
        steps = wire_of(on.collector).heartbeats.memory["steps"]
        wait_until(lambda: (tmp_path / "used-token-0").exists() and bool((steps > 0).all()))
        on.processes()[2].suspend()
        assert kill(on.supervisor.slots[3], [])


@pytest.mark.system
@pytest.mark.parametrize(
    ("number", "hung"),
    [(signal.SIGINT, True), *[(signal.SIGTERM, True), (signal.SIGINT, False), (signal.SIGTERM, False)] * LONG],
)
def test_a_signal_ends_a_command_in_order(server: Server, number: signal.Signals, hung: bool, tmp_path: Path) -> None:
    """SIGINT goes to the whole group, as from a terminal; SIGTERM to the trainer alone, as from a job queue."""
    argv = [world("Faulty"), "--env.how", "hangs", "--env.only", "1", "--env.folder", tokens(tmp_path / "faults", 0)]
    with commands(server, tmp_path, COMMANDS, *argv) as processes:
        if hung:
            hang_a_worker_of_each(tmp_path / "faults", len(COMMANDS))
        children = {mode: family(process.pid) for mode, process in processes.items()}
        for process in processes.values():
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        for mode, process in processes.items():
            process.wait(LIMIT)
            assert (process.code, process.err) == (128 + number, "")
            wait_until(lambda mode=mode: not any(map(alive, children[mode])))  # type: ignore[misc]
            assert_in_order(tmp_path / mode, number)


@pytest.mark.parametrize(("mode", "number"), every((signal.SIGINT,), (signal.SIGTERM,)))
def test_a_signal_ends_a_training_in_order(mode: str, number: signal.Signals, tmp_path: Path) -> None:
    """The same in this process, which saves the time of imports."""

    def send() -> None:
        wait_until(lambda: has_logged(tmp_path))
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    argv = [world("Certified"), "--mode", mode, "--workers", "3", "--num-envs", "3", "--steps", "1000000000"]
    code = cli.main(["train", *argv, *SMALL_ARGV, "--log-every", "0.05", "--runs-dir", str(tmp_path), "--run", "cut"])
    sender.join()
    assert code == 128 + number
    assert_in_order(tmp_path, number)


def assert_in_order(runs: Path, number: signal.Signals) -> dict[str, int]:
    """The summary is complete and the weights are saved; the rows dropped by cause."""
    summary = json.loads((runs / "cut" / "summary.json").read_text())
    assert (summary["exit_code"], summary["ended"]) == (128 + number, f"interrupted ({number.name})")
    assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values()) > 0
    assert (summary["queued"], summary["open"]) == (0, 0)
    _, warnings = open_run("cut", str(runs)).actor("latest")
    assert warnings == []
    dropped: dict[str, int] = summary["dropped"]
    return dropped


@pytest.mark.system
@pytest.mark.parametrize(("placement", "number"), [("inline", signal.SIGTERM), ("processes", signal.SIGINT)])
def test_a_signal_ends_the_run_in_order(server: Server, tmp_path: Path, number: signal.Signals, placement: str) -> None:
    """SIGINT goes to the whole group, as from a terminal; SIGTERM to the trainer alone, as from a job queue."""
    runs = tmp_path / "runs"
    argv = ["CartPole-v1", "--placement", placement, "--num-envs", "2", "--steps", "1000000000", "--log-every", "0.01"]
    argv += ["--num-steps-per-env", "64", "--evals", "5", "--eval-episodes", "2"]
    with command(server, runs, *argv) as process:
        wait_until(lambda: has_logged(runs))
        children = family(process.pid)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        process.wait(LIMIT)
    assert (process.code, process.err) == (128 + number, "")
    lanes = len(children) - 2  # besides the forkserver and its resource tracker
    assert lanes >= 2 if placement == "processes" else lanes == 0
    assert not psutil.wait_procs(children, timeout=LIMIT)[1]
    assert assert_in_order(runs, number).keys() <= {"shutdown"}


@pytest.mark.system
@pytest.mark.parametrize("mode", ["lockstep", "continuous"])
def test_an_interrupt_while_the_env_is_measured_ends_at_once(server: Server, tmp_path: Path, mode: str) -> None:
    """The env hangs in its first step; nothing of it is left."""
    with command(server, tmp_path / "runs", "tests.support.worlds:Hangs", "--env.at", "1", "--mode", mode) as process:
        wait_until(lambda: len(family(process.pid)) == 3)  # forkserver, resource tracker, survey
        children = family(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(LIMIT)
    assert (process.code, process.err) == (130, "")
    assert not psutil.wait_procs(children, timeout=LIMIT)[1]
    assert not (tmp_path / "runs").exists()


SLOW = """
import multiprocessing
import pathlib
from tests.support.worlds import Counter

class Env(Counter):
    taken = 0

    def judge(self, action):
        Env.taken += 1
        if Env.taken == 8 and multiprocessing.parent_process() is None:  # not while it is measured
            pathlib.Path("collected").touch()
        return 0.0
"""


@pytest.mark.system
def test_a_second_interrupt_ends_the_run_at_once(server: Server, tmp_path: Path) -> None:
    """The first one waits for the end of an update that takes very long."""
    (tmp_path / "slow_env.py").write_text(SLOW)
    argv = ["slow_env:Env", "--mode", "sequential", "--num-steps-per-env", "8", "--ppo.epochs", "10000"]
    argv += ["--policy.hidden", "512", "512"]
    with command(server, tmp_path / "runs", *argv) as process:
        wait_until((tmp_path / "collected").exists)
        time.sleep(0.3)  # not a synchronisation: the update has begun or is about to, and takes very long
        os.kill(process.pid, signal.SIGINT)
        assert not process.ended(0.7)
        os.kill(process.pid, signal.SIGINT)
        process.wait(LIMIT)
    assert (process.code, process.err) == (130, "")
    summary = summary_of(tmp_path, "cut")
    assert (summary["exit_code"], summary["updates"]) == (130, 0)
    assert summary["produced"] == sum(summary["dropped"].values()) == 8
    saved = [path.name for path in (tmp_path / "runs" / "cut" / "checkpoints").rglob("*")]
    assert saved
    assert LEARNER not in saved  # a learner in the middle of an update is nothing to go on from


@pytest.mark.system
def test_a_crawling_env_does_not_delay_the_end(server: Server, tmp_path: Path) -> None:
    """Hundreds of steps of half a second are left."""
    runs = tmp_path / "runs"
    argv = ["tests.support.worlds:Crawls", "--env.seconds", "0.5", "--env.at", "0", "--env.length", "4"]
    argv += ["--placement", "inline", "--num-envs", "1", "--num-steps-per-env", "640"]
    with command(server, runs, *argv) as process:
        wait_until((runs / "cut" / "config.json").exists)
        time.sleep(0.7)  # not a synchronisation: the run must end soon after a signal at any moment
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(LIMIT) == 143
    assert summary_of(tmp_path, "cut")["ended"] == "interrupted (SIGTERM)"


class Counting(Learner):
    def __init__(self, snapshot: Snapshot) -> None:
        self.version, self._snapshot = 0, snapshot
        self.queued = self.trained = 0

    @property
    def ready(self) -> bool:
        return self.queued > 0

    @property
    def hungry(self) -> bool:
        return True

    @property
    def buffer_util(self) -> float:
        return 0.0

    def observe(self, chunk: Chunk[Any]) -> None:
        self.queued += chunk.rows

    def update(self) -> Mapping[str, float]:
        self.trained, self.queued, self.version = self.trained + self.queued, 0, self.version + 1
        return {}

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def rows(self) -> RowCounts:
        return RowCounts(trained=self.trained, queued=self.queued)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@contextmanager
def interrupted_at(line: int, where: Sequence[str]) -> Iterator[list[int]]:
    """Raise SIGINT as the n-th line of these files is about to run; yields the number of lines seen so far."""
    seen = [0]

    def tracer(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(tuple(where)):
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == line:
                signal.raise_signal(signal.SIGINT)
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield seen
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.system)])
def test_a_signal_at_any_line_loses_no_row(step: int) -> None:
    """From the first reset to the second update, at every line, or some, of the modules that count rows."""
    world = GymConfig(id="tests.support.worlds:Counter")
    policy = PolicyConfig(hidden=(2,)).resolve(world.make(range(2)).spec)
    snapshot = Snapshot(0, FlatParams(full_layout(policy)).views)

    def run_until(line: int) -> tuple[bool, int, RowCounts]:
        stop = Stop()
        stop.begin()
        env = wrapped(world.make(range(2)), stop.guard(CALL), stop.guard(RESET), stop)
        factory = RunnerFactory(lambda lanes, processes=False, fault_tolerant=False: env, make_actor(policy), 0)
        spec = CollectSpec(env=env.spec, batch=BatchSpec(2, env.spec.lanes))
        collector, learner = SequentialConfig(2).build(factory, spec), Counting(snapshot)
        counting = ["rollout/runner.py", "collect/serial.py", "freewheel/loop.py"]
        with stop.listening(), interrupted_at(line, counting) as seen:
            try:
                for tick in loop(collector, learner, Meter(1)):
                    if tick.version == 2:
                        break
                cut = False
            except Interrupted:
                cut = True
        with collector:  # which ends it
            pass
        return cut, seen[0], balance(collector.rows(), learner.rows())

    _, lines, whole = run_until(0)
    assert whole == RowCounts(produced=8, trained=8)
    assert lines > 100
    outcomes = [run_until(line) for line in range(1, lines + 1, step)]
    assert all(cut for cut, _, _ in outcomes[: len(outcomes) // 2])
    assert {rows.produced for _, _, rows in outcomes} == {0, 2, 4, 6, 8}


@pytest.mark.system
def test_every_child_dies_with_the_trainer(server: Server, tmp_path: Path) -> None:
    """One worker hangs in a step and ignores SIGTERM, one is stopped, and one acts."""
    argv = [world("Faulty"), "--env.how", "hangs", "--env.only", "1", "--env.folder", tokens(tmp_path / "faults", 0)]
    with commands(server, tmp_path, MODES, *argv) as processes:
        hang_a_worker_of_each(tmp_path / "faults", len(MODES))
        for process in processes.values():
            workers = workers_of(process.pid)
            assert len(workers) == 3
            workers[2].suspend()
            children = family(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            wait_until(lambda left=children: not any(map(alive, left)), what="children outlive their trainer")  # type: ignore[misc]
