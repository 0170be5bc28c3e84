"""Runs that end badly: an env that fails is named and the books are closed; a signal is obeyed and nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

import freewheel
from freewheel.cli import main as cli
from freewheel.collect.sequential import SequentialConfig
from freewheel.core import BatchSpec, Chunk, RowCounts, Snapshot
from freewheel.envs.gym import GymConfig
from freewheel.errors import EnvError
from freewheel.ledger import balance
from freewheel.loop import loop
from freewheel.metrics.meter import Meter
from freewheel.policies.numpy_actor import make_actor
from freewheel.policies.spec import FlatParams, PolicyConfig, full_layout
from freewheel.rollout.factory import CollectSpec, RunnerFactory
from freewheel.run import checkpoint
from freewheel.run.process import Interrupted, Stop, WrappedEnv
from freewheel.run.saved import open_run
from freewheel.seeding import tree

ROOT = Path(freewheel.__file__).parents[1]
SEED = 9
CULPRIT = tree(SEED, "env", 2, 1)  # lane 2, episode 1

#: Lanes of 8-step episodes and chunks of 8 steps: episode 1 is chunk 1. One update of 4 × 8 rows comes before the fault.
SMALL = ["--num-envs", "4", "--num-steps-per-env", "8", "--steps", "320", "--seed", str(SEED), "--evals", "0"]
FAULT = ["--env.only_seed", str(CULPRIT), "--env.at", "3", "--log-every", "1e-9", "--run", "faulty"]


def failed_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[str, dict[str, Any]]:
    """What a faulty training says on stderr, and the summary it leaves."""
    code = cli.main(["train", *argv, *SMALL, *FAULT, "--runs-dir", str(tmp_path)])
    summary = json.loads((tmp_path / "faulty" / "summary.json").read_text())
    assert (code, summary["exit_code"], summary["ended"]) == (1, 1, "failed")
    said = capfd.readouterr().err
    assert said == f"freewheel: {summary['error']}\n"
    return said, summary


def assert_accounted(tmp_path: Path, summary: dict[str, Any], produced: int) -> None:
    """One update was made and saved; what came after it was dropped, row by row."""
    assert (summary["produced"], summary["trained"], summary["updates"]) == (produced, 32, 1)
    assert (summary["queued"], summary["open"], summary["dropped"]) == (0, 0, {"shutdown": produced - 32})
    latest = checkpoint.load(tmp_path / "faulty" / "checkpoints", "latest")
    assert (latest.step, latest.warnings, latest.about["version"]) == (32, (), 1)
    assert checkpoint.fingerprint(latest.params) == summary["weights_sha256"]


PLACES = pytest.mark.parametrize(
    "place", [["--placement", "inline"], ["--placement", "processes"]], ids=["inline", "processes"]
)


@PLACES
def test_an_env_that_raises_ends_the_run_with_its_own_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], place: list[str]
) -> None:
    said, summary = failed_run(tmp_path, capfd, "freewheel.testing.worlds:Raises", *place)
    first, second, *_, last = said.splitlines()
    assert first.startswith("freewheel: lane 2 of freewheel.testing.worlds:Raises raised ValueError: boom (")
    assert f"episode 1, seed {CULPRIT}, step 3, last action" in first
    assert second == "Traceback (most recent call last):"
    assert last == "ValueError: boom"
    assert 'raise ValueError("boom")' in said
    assert "freewheel/envs" not in said
    assert_accounted(tmp_path, summary, produced=32 + 2 * 4)


def test_an_env_that_raises_in_sequential(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said, summary = failed_run(tmp_path, capfd, "freewheel.testing.worlds:Raises", "--mode", "sequential")
    assert (
        f"lane 2 of freewheel.testing.worlds:Raises raised ValueError: boom (episode 1, seed {CULPRIT}, step 3" in said
    )
    assert_accounted(tmp_path, summary, produced=32 + 2 * 4)


@PLACES
def test_an_env_that_answers_with_a_wrong_shape_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], place: list[str]
) -> None:
    said, summary = failed_run(tmp_path, capfd, "freewheel.testing.worlds:WrongShape", *place)
    assert said.startswith(
        "freewheel: lane 2 of freewheel.testing.worlds:WrongShape gave a wrong observation in step(): "
    )
    assert f"episode 1, seed {CULPRIT}, step 3" in said
    assert_accounted(tmp_path, summary, produced=32 + 2 * 4)


@PLACES
def test_an_env_that_answers_with_nan_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], place: list[str]
) -> None:
    """Found at the end of its chunk, before anyone learns from it."""
    said, summary = failed_run(tmp_path, capfd, "freewheel.testing.worlds:ReturnsNaN", *place)
    assert "lane 2 of freewheel.testing.worlds:ReturnsNaN" in said
    assert "not finite" in said
    assert f"episode 1, seed {CULPRIT}, step 3" in said
    assert len(said.splitlines()) == 1
    assert_accounted(tmp_path, summary, produced=32 + 32)


@pytest.mark.parametrize(
    ("world", "what"),
    [
        (["freewheel.testing.worlds:Hangs"], "did not answer within 1 s"),
        (["freewheel.testing.worlds:Hangs", "--env.deaf", "true"], "did not answer within 1 s"),
        (["freewheel.testing.worlds:Dies"], "died (exit code -9)"),
    ],
    ids=["hangs", "hangs deaf", "dies"],
)
def test_a_process_that_hangs_or_dies_ends_the_run_in_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], world: list[str], what: str
) -> None:
    said, summary = failed_run(tmp_path, capfd, *world, "--placement", "processes", "--step-timeout", "1")
    assert f"lane 2 of {world[0]} {what} (episode 1, seed {CULPRIT}, step 3, last action" in said
    assert_accounted(tmp_path, summary, produced=32 + 2 * 4)
    (row,) = map(json.loads, (tmp_path / "faulty" / "metrics.jsonl").read_text().splitlines())
    assert summary["wall_s"] - row["wall_s"] < 1 + 1  # time-out + 1 s after the first chunk was learned


def test_an_env_that_cannot_even_start_leaves_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for world in ("Raises", "Dies", "Hangs"):
        faulty = [
            f"freewheel.testing.worlds:{world}",
            "--env.at",
            "0",
            "--placement",
            "processes",
            "--construct-timeout",
            "1",
        ]
        assert cli.main(["train", *faulty, "--runs-dir", str(tmp_path)]) == 1
        assert f"freewheel: lane 0 of freewheel.testing.worlds:{world} " in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_python_gets_the_error_after_the_books_are_closed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_envs": 1, "steps": 64, "evals": 0, "run": "x", "placement": "inline"}
    with pytest.raises(EnvError, match=r"lane 0 of freewheel\.testing\.worlds:Raises raised ValueError: boom"):
        freewheel.train("freewheel.testing.worlds:Raises", quiet=True, runs_dir=tmp_path, **options)
    assert json.loads((tmp_path / "x" / "summary.json").read_text())["ended"] == "failed"


def test_a_fault_of_ours_is_written_down_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr("freewheel.run.evaluate.evaluate", broken)
    with pytest.raises(ZeroDivisionError):
        freewheel.train("freewheel.testing.worlds:Counter", quiet=True, steps=64, runs_dir=tmp_path, run="x")
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert (summary["ended"], summary["exit_code"], summary["error"]) == ("failed", 1, "of ours")


def test_an_update_that_fails_keeps_its_rows_in_the_books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("freewheel.learn.ppo.numpy_engine.NumpyEngine.improve", broken)
    with pytest.raises(MemoryError):
        freewheel.train("freewheel.testing.worlds:Counter", quiet=True, num_envs=2, evals=0, runs_dir=tmp_path, run="x")
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert (summary["produced"], summary["trained"], summary["dropped"]) == (128, 0, {"shutdown": 128})


# ----------------------------------------------------------------------------------------------------------------- signals


def wait_until(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


@contextmanager
def training(runs: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """`freewheel train`, in a session of its own as a terminal would have it, killed if it does not end."""
    command = [sys.executable, "-m", "freewheel", "train", *argv, "--runs-dir", str(runs), "--run", "cut"]
    path = os.pathsep.join([str(ROOT), str(runs.parent)])
    process = subprocess.Popen(
        command,
        cwd=runs.parent,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def has_logged(runs: Path) -> bool:
    log = runs / "cut" / "metrics.jsonl"
    return log.is_file() and b"\n" in log.read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("placement", ["inline", "processes"])
def test_a_signal_ends_the_run_in_order(tmp_path: Path, number: signal.Signals, placement: str) -> None:
    """SIGINT goes to the whole group, as from a terminal; SIGTERM to the trainer alone, as from a job queue."""
    runs = tmp_path / "runs"
    argv = ["CartPole-v1", "--placement", placement, "--num-envs", "2", "--steps", "1000000000", "--log-every", "0.01"]
    argv += ["--eval-episodes", "2"]
    with training(runs, *argv) as process:
        wait_until(lambda: has_logged(runs))
        children = psutil.Process(process.pid).children(recursive=True)
        sent = time.monotonic()
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        _, err = process.communicate(timeout=20)
        assert time.monotonic() - sent < 5.0
    assert (process.returncode, err) == (128 + number, "")
    assert bool(children) == (placement == "processes")
    assert not psutil.wait_procs(children, timeout=2)[1]
    summary = json.loads((runs / "cut" / "summary.json").read_text())
    assert (summary["exit_code"], summary["ended"]) == (128 + number, f"interrupted ({number.name})")
    assert summary["produced"] == summary["trained"] + sum(summary["dropped"].values()) > 0
    assert summary["dropped"].keys() <= {"shutdown"}
    _, warnings = open_run("cut", str(runs)).actor("latest")
    assert warnings == []


SLOW = """
import pathlib
from freewheel.testing.worlds import Counter

class World(Counter):
    taken = 0

    def judge(self, action):
        World.taken += 1
        if World.taken == 8:
            pathlib.Path("collected").touch()
        return 0.0
"""


def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    """In the middle of an update that would take for ever, which the first waits for."""
    (tmp_path / "slow_world.py").write_text(SLOW)
    argv = [
        "slow_world:World",
        "--mode",
        "sequential",
        "--num-steps-per-env",
        "8",
        "--ppo.epochs",
        "100000000",
        "--evals",
        "0",
    ]
    with training(tmp_path / "runs", *argv) as process:
        wait_until((tmp_path / "collected").exists)
        time.sleep(0.3)  # not to synchronise: the first step is taken, and the update it leads to never ends
        os.kill(process.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.7)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=5)
    assert (process.returncode, err) == (130, "")
    summary = json.loads((tmp_path / "runs" / "cut" / "summary.json").read_text())
    assert (summary["exit_code"], summary["updates"]) == (130, 0)
    assert summary["produced"] == sum(summary["dropped"].values()) == 8


def test_a_crawling_env_does_not_delay_the_end(tmp_path: Path) -> None:
    """Sixty steps of half a second are still to come."""
    runs = tmp_path / "runs"
    argv = [
        "freewheel.testing.worlds:Crawls",
        "--env.seconds",
        "0.5",
        "--env.at",
        "0",
        "--env.length",
        "4",
        "--placement",
        "inline",
    ]
    with training(runs, *argv, "--num-envs", "1", "--evals", "0") as process:
        wait_until((runs / "cut" / "config.json").exists)
        time.sleep(1.0)  # not to synchronise: whenever it strikes, the end must be near
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=5) == 143
    assert json.loads((runs / "cut" / "summary.json").read_text())["ended"] == "interrupted (SIGTERM)"


class Counting:
    """A learner of nothing but rows."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.version, self._snapshot = 0, snapshot
        self.queued = self.trained = 0

    @property
    def ready(self) -> bool:
        return self.queued > 0

    hungry = True
    buffer_util = 0.0

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
    """Raise SIGINT as the n-th line of these files is about to run; gives the number of lines seen so far."""
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


def test_a_signal_loses_no_row_wherever_it_strikes() -> None:
    """From the first reset to the second update, at every line of whoever counts rows."""
    world = GymConfig(id="freewheel.testing.worlds:Counter")
    probe = world.make(range(2))
    policy = PolicyConfig(hidden=(2,)).resolve(probe.spec)
    snapshot = Snapshot(0, FlatParams(full_layout(policy)).views)

    def strike(line: int) -> tuple[bool, int, RowCounts]:
        stop = Stop()
        env = WrappedEnv(world.make(range(2)), stop.guard, stop.guard)
        recipe = RunnerFactory(lambda lanes, processes=False, fault_tolerant=False: env, make_actor(policy), 0)
        collector, learner = (
            SequentialConfig(2).build(recipe, CollectSpec(env=env.spec, batch=BatchSpec(2, env.spec.lanes))),
            Counting(snapshot),
        )
        with (
            stop.listening(),
            interrupted_at(line, ["rollout/runner.py", "collect/serial.py", "freewheel/loop.py"]) as seen,
        ):
            try:
                for tick in loop(collector, learner, Meter(1)):
                    if tick.version == 2:
                        break
                cut = False
            except Interrupted:
                cut = True
        return cut, seen[0], balance(collector.rows(), learner.rows())

    _, lines, whole = strike(0)
    assert whole == RowCounts(produced=8, trained=8)
    outcomes = [strike(line) for line in range(1, lines + 1)]
    assert len(outcomes) > 100
    assert all(cut for cut, _, _ in outcomes[: lines // 2])
    assert {rows.produced for _, _, rows in outcomes} == {0, 2, 4, 6, 8}
