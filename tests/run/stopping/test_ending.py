"""The end of a run: the summary is written whatever fails before it, and the first failure is the one that is told."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import freewheel
from freewheel.cli import main as cli
from freewheel.collect.serial import SerialCollector
from freewheel.core import RowCounts
from freewheel.errors import DivergedError, EnvError, LedgerError, SetupError, UsageError
from freewheel.run import session
from freewheel.run.hooks import Run
from freewheel.run.session import Session
from freewheel.run.stopping.ending import Ending, exit_code_of
from freewheel.run.stopping.stop import Interrupted
from tests.support.failing_disk import FailingDisk
from tests.support.runs import train
from tests.support.surveys import survey_once
from tests.support.worlds import Identity


def fail(error: BaseException) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def test_every_part_is_tried_and_the_first_failure_is_the_one() -> None:
    ending, done = Ending(), list[str]()
    assert ending.attempt("saving", lambda: 3, 0) == 3
    assert ending.attempt("saving", fail(ValueError("first\nmore")), 7) == 7
    assert ending.attempt("a hook", fail(KeyError("second")), None) is None
    assert ending.attempt("closing", fail(KeyboardInterrupt()), None) is None
    ending.attempt("the summary", lambda: done.append("summary"), None)
    assert (str(ending.failure), ending.reason, done) == ("first\nmore", "failed", ["summary"])
    assert ending.failure is not None
    told = ["A hook failed after that: KeyError('second')", "Closing failed after that: KeyboardInterrupt()"]
    assert ending.failure.__notes__ == told
    assert ending.problems == ["a hook failed: 'second'", "closing failed: KeyboardInterrupt()"]


def test_a_signal_on_the_way_is_no_failure() -> None:
    ending = Ending()
    ending.attempt("a hook", fail(Interrupted()), None)
    assert (ending.failure, ending.reason) == (None, "interrupted")
    assert ending.exit_code(signal.SIGTERM, degraded=True) == 143


def test_exit_codes() -> None:
    assert Ending().exit_code(None, degraded=False) == 0
    assert Ending().exit_code(None, degraded=True) == 3
    failed = Ending()
    failed.fail(ValueError(), "training")
    assert failed.exit_code(signal.SIGINT, degraded=True) == 1
    codes = {EnvError("x"): 1, KeyboardInterrupt(): 130, OSError(): 1, UsageError("x"): 2}
    assert all(exit_code_of(error) == code for error, code in codes.items())


@contextmanager
def resource(out: BaseException | None) -> Iterator[str]:
    try:
        yield "it"
    finally:
        if out is not None:
            raise out


def test_what_fails_on_the_way_out_hides_nothing() -> None:
    ending = Ending()
    with ending.leaving(resource(EnvError("cannot close")), "closing") as value:
        assert value == "it"
    assert (ending.failure, ending.problems) == (None, ["closing failed: cannot close"])
    with pytest.raises(KeyError, match="inside") as caught, ending.leaving(resource(OSError("out")), "closing"):
        raise KeyError("inside")
    assert caught.value.__notes__ == ["Closing failed after that: OSError('out')"]
    with pytest.raises(LedgerError), ending.leaving(resource(LedgerError("ours")), "closing"):
        pass


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    survey_once(monkeypatch)


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "one" / "summary.json").read_text())
    assert freewheel.load(folder / "one", which="latest").step == found["env_steps"]
    return found


SHORT: dict[str, Any] = {"steps": 128, "evals": 0, "run": "one"}


def test_an_unbalanced_ledger_has_a_summary_with_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SerialCollector, "rows", lambda self: RowCounts(produced=self._runner.produced + 1))
    with pytest.raises(LedgerError, match=r"^the ledger does not balance: 1 rows were lost"):
        train(tmp_path, **SHORT, log_every=60.0)
    summary = summary_of(tmp_path)
    assert (summary["exit_code"], summary["ended"]) == (1, "failed")
    assert summary["error"].startswith("the ledger does not balance")
    assert summary["produced"] == summary["trained"] + 1


class CannotClose(Identity):
    def close(self) -> None:
        raise RuntimeError("the simulator has gone")


def test_an_env_that_cannot_be_closed_has_done_its_work(tmp_path: Path) -> None:
    result = train(tmp_path, CannotClose, **SHORT | {"evals": 1})
    summary = summary_of(tmp_path)
    assert (summary["exit_code"], summary["ended"]) == (0, "steps")
    assert summary["final_eval"] is not None
    assert any("the simulator has gone" in problem for problem in result.summary["problems"])


class Raises(Identity):
    def judge(self, action: Any) -> float:
        if self.count == 9:
            raise ValueError("no more")
        return super().judge(action)


def test_the_envs_failure_is_told_though_saving_fails_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingDisk(monkeypatch)

    class Break:
        def on_episode(self, run: Any, episode: Any) -> None: ...

        def on_stop(self, run: Any, ended: str) -> None:
            raise KeyError("a hook")

    disk.failing = range(5, 10**6)
    with pytest.raises(EnvError, match="no more") as caught:
        train(tmp_path, Raises, **SHORT, hooks=[Break()])
    notes = "\n".join(caught.value.__notes__)
    assert "Saving failed after that: DiskError(" in notes
    assert "A hook failed after that: KeyError('a hook')" in notes
    assert "The summary failed after that: DiskError(" in notes


@pytest.mark.parametrize("part", ["closing", "balance"])
def test_a_bug_of_ours_leaves_a_summary_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(session, part, fail(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, **SHORT)
    assert summary_of(tmp_path)["env_steps"] > 0


@pytest.mark.parametrize(("code", "ended"), [(1, "failed"), (143, "interrupted")])
def test_a_thread_can_end_a_stuck_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, ended: str) -> None:
    """Weights and summary are there before the process is ended; the collector and its rows are as they are."""
    found: list[dict[str, Any]] = []

    class StuckError(BaseException):
        pass

    def ends_it(self: Session) -> str:
        if self._learner.version == 1:
            thread = threading.Thread(target=self.emergency_end, args=("lane 0 hangs in step 3", code))
            thread.start()
            thread.join(20)
            found.append(summary_of(tmp_path))
            assert not self._ending.begin(), "it is ended once"
            raise StuckError
        return ""

    monkeypatch.setattr(Session, "_why_ended", ends_it)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - the process would be gone
        train(tmp_path, **SHORT)
    (summary,) = found
    assert summary["ended"].split()[0] == ended
    assert "lane 0 hangs in step 3" in (summary["error"] if code == 1 else " ".join(summary["problems"]))
    assert summary["env_steps"] == 64


class TooFast:
    """A hook that sets a step size which no option allows."""

    def on_start(self, run: Run) -> None:
        run.learning_rate = 1e30


def test_a_diverged_run_keeps_its_last_finite_weights(tmp_path: Path) -> None:
    """--ppo.lr inf, or rewards of 3e38, ended with exit 0 and every row dropped."""
    with pytest.raises(DivergedError, match=r"^ppo learns nothing: 10 of the last 10 updates were skipped"):
        train(tmp_path, **SHORT | {"steps": 6400}, hooks=[TooFast()])
    summary = summary_of(tmp_path)
    assert (summary["exit_code"], summary["updates"], summary["dropped"]["nan"]) == (1, 10, 640)


@pytest.mark.parametrize("event", ["on_start", "on_update", "on_episode", "on_stop"])
@pytest.mark.parametrize("leave", ["sys.exit", "os._exit"])
def test_a_hook_that_ends_the_process_has_failed_whatever_code_it_gives(event: str, leave: str, tmp_path: Path) -> None:
    calls: dict[str, Callable[[int], object]] = {"sys.exit": sys.exit, "os._exit": lambda code: os._exit(code)}  # noqa: PLW0108 - it is replaced
    hook = type("Leaving", (freewheel.Hook,), {event: lambda *_: calls[leave](0)})()
    with pytest.raises(SetupError, match=rf"test_ending\.py:\d+ called {leave}\(0\)"):
        train(tmp_path, hooks=[hook], run="one")
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert (summary["exit_code"], summary["ended"]) == (1, "failed")
    assert "which would have ended the run" in summary["error"]


def test_a_module_that_ends_the_process_is_refused(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "leaves_at_once.py").write_text("import os\nos._exit(0)\n")
    for name in ("leaves", "leaves_at_once"):
        with pytest.raises(SetupError, match=rf"cannot import '{tmp_path}/{name}\.py': it raised"):
            train(tmp_path, hooks=[f"{tmp_path}/{name}.py:X"])


@pytest.mark.parametrize(("code", "answer"), [(0, 1), (None, 1), (3, 1), ("words", 1)])
def test_a_command_that_is_left_on_the_way_has_failed(code: Any, answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_dispatch", lambda _: sys.exit(code))
    assert cli.main(["eval", "one"]) == answer
