"""Daemons of a training's own Ray cluster are killed: the run says so in one line, saves, and a resume goes on."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks._trainers import RUN, Trainer, alive, balanced, wait_until, words_of
from freewheel.run.checkpoints.checkpoint import load

if TYPE_CHECKING:
    from benchmarks._faults import Setup

DAEMONS = ("raylet", "ray::DashboardAgent", "gcs_server", "ray::RuntimeEnvAgent")
END, GONE = 20.0, 15.0  # seconds: until the run has ended, and until nothing of its cluster is left


def daemons_killed(folder: Path, rng: random.Random, setup: Setup, trials: int) -> Iterator[dict[str, Any]]:
    """SIGKILL to one daemon after the other, at a random moment."""
    for number in range(trials):
        place = folder / str(number)
        place.mkdir()
        argv, after = setup.argv("--workers", "2", "--evals", "0"), rng.uniform(0.0, 5.0)
        yield daemon_killed(place, argv, DAEMONS[number % len(DAEMONS)], after)


def daemon_killed(folder: Path, argv: list[str], daemon: str, after: float = 0.0) -> dict[str, Any]:
    """SIGKILL to this daemon of a training's local cluster, so many seconds after it has learned; and a resume."""
    with Trainer(folder, *argv) as trainer:
        trainer.await_row()
        wait_until(lambda: trainer.rows()[-1]["updates"] > 0, 60.0, "nothing was learned")
        time.sleep(after)
        named(trainer, daemon).kill()
        ended = trainer.end(END)
        gone = wait_until(lambda: not trainer.left() and not clusters(trainer), GONE, "something is left")
        summary, code, said = trainer.summary(), trainer.process.returncode, trainer.said().splitlines()
        step = load(trainer.path / "checkpoints", "latest").step
    lines = [line for line in said if line.startswith("freewheel: ")]
    whole = balanced(summary) and step == summary["env_steps"] and summary["error"] is not None
    told = lines == said[-1:] and lines[0].removeprefix("freewheel: ") == summary["error"]
    with Trainer(folder, "resume", RUN) as again:
        back = again.await_row(beyond=step)
        again.send(signal.SIGINT)
        again.end(END)
        resumed = balanced(again.summary())
    survived = whole and told and resumed and code == summary["exit_code"] == 1
    row = {"daemon": daemon, "survived": survived, "lost": 0, "recover_s": back, "ended_s": ended, "gone_s": gone}
    return row | {"code": code, "said": said[-1]}


def named(trainer: Trainer, title: str) -> psutil.Process:
    """The process of a training whose name, or command, begins with this."""
    family = filter(alive, trainer.note_family())
    return next(one for one in family if one.name() == title or " ".join(words_of(one)).startswith(title))


def clusters(trainer: Trainer) -> set[Path]:
    """The folders of its clusters that are left."""
    known = {Path(word) for one in trainer.note_family() for word in words_of(one) if "fw-ray-" in word}
    return {
        folder for path in known for folder in path.parents if folder.name.startswith("fw-ray-") and folder.exists()
    }
