"""Faults at the beginning of real trainings, and saves that come at one env step. A trial returns a row, or raises."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks._trainers import RUN, StuckError, Trainer, balanced, shared_memory, wait_until
from freewheel.run.checkpoints.checkpoint import load, load_state, names

START = 12.0  # seconds in which a training begins, on a busy machine
SAVED = 1.0  # seconds after a row with an update, within which the first save is whole
END = 5.0
HOOK = '''
import os


class Saves:
    """Saves several times at one env step and notes each save when it is whole, and where the run goes on."""

    def on_start(self, run):
        self.note(run, f"start {run.version} {run.env_steps}")

    def on_update(self, run, metrics):
        for _ in range(3):
            self.note(run, f"saved {run.save().name} {run.version}")

    def note(self, run, text):
        with open(run.path.parent.parent / "told.txt", "a") as file:
            file.write(text + "\\n")
            file.flush()
            os.fsync(file.fileno())
'''


def argv(mode: str, algo: str, env: str, *more: str) -> list[str]:
    """A training with the checkpoints that everybody gets."""
    size = ["--workers", "2"] if mode in ("batch", "continuous", "episodes") else ["--num-envs", "4"]
    learn = ["--mbpo.learning-starts", "300"] if algo == "mbpo" else []
    usual = ["--log-every", "0.2", "--steps", "1000000000", "--seed", "1", "--run", RUN]
    return ["train", env, "--mode", mode, "--algo", algo, *size, *learn, *usual, *more]


def began(trainer: Trainer) -> bool:
    return (trainer.path / "config.json").exists()


#: The moments at which a training is killed: what has to be there first, and how many seconds after that at most.
MOMENTS: Mapping[str, tuple[Callable[[Trainer], bool], float]] = {
    "starting": (lambda _: True, START / 2),
    "named": (lambda trainer: trainer.path.exists(), 0.01),
    "begun": (began, 0.1),
    "before the first update": (began, 1.5),
    "first save": (lambda trainer: any((trainer.path / "checkpoints").glob(".part-*")), 0.02),
    "saved": (lambda trainer: any((trainer.path / "checkpoints").glob("[0-9]*")), 1.0),
}


def killed_early(folder: Path, rng: random.Random, setup: Any, trials: int) -> Iterator[dict[str, Any]]:
    """SIGKILL in the first seconds: what is there can be resumed, and nothing is lost that was worth it."""
    for number in range(trials):
        moment = list(MOMENTS)[number % len(MOMENTS)]
        yield {"moment": moment, **_killed_at(folder / str(number), rng, setup, moment)}


def _killed_at(folder: Path, rng: random.Random, setup: Any, moment: str) -> dict[str, Any]:
    folder.mkdir()
    command, before = argv(setup.mode, setup.algo, setup.env), shared_memory()
    condition, within = MOMENTS[moment]
    with Trainer(folder, *command) as trainer:
        wait_until(lambda: condition(trainer), 10 * START, f"'{moment}' did not come")
        time.sleep(rng.uniform(0.0, within))
        rows, gone = trainer.rows(), trainer.kill()
        left = sorted(shared_memory() - before)
    there = trainer.path / "checkpoints"
    saved = load_state(there)[0] if names(there) else None
    if saved is not None and (saved.warnings or load(there).path != saved.path):
        raise StuckError(f"not whole, or not the one that is evaluated: {saved.path} {saved.warnings}")
    if saved is None and any(row["updates"] and row["wall_s"] < rows[-1]["wall_s"] - SAVED for row in rows):
        raise StuckError(f"nothing was saved {SAVED:g} s after the first update")
    again = ["resume", RUN] if began(trainer) else command
    with Trainer(folder, *again) as trainer:
        back = trainer.await_row(beyond=0 if saved is None else saved.step)
        if saved is not None and f"continuing from step {saved.step:,}" not in trainer.said():
            raise StuckError("it has not gone on from its newest checkpoint")
        if saved is None and again != command and "begins again" not in trainer.said():
            raise StuckError("it has not begun again")
        trainer.send(signal.SIGINT)
        trainer.end(3 * END)
        whole = trainer.process.returncode == 130 and balanced(trainer.summary())
    at = 0.0 if saved is None else next((row["wall_s"] for row in rows if row["env_steps"] >= saved.step), 0.0)
    lost = max(0.0, rows[-1]["wall_s"] - at) if rows else 0.0
    return {
        "survived": whole and not left,
        "lost": lost,
        "recover_s": back,
        "saved": saved is not None,
        "children_gone_s": gone,
        "shared_memory_left": left,
    }


def same_step(folder: Path, rng: random.Random, setup: Any, trials: int) -> Iterator[dict[str, Any]]:
    """Several saves at every env step, SIGKILL, `resume`: it goes on from the last whole one, as `eval` does."""
    (folder / "saves.py").write_text(HOOK)
    told, command = folder / "told.txt", argv(setup.mode, setup.algo, setup.env, "--hooks", "./saves.py:Saves")
    for _ in range(trials):
        told.unlink(missing_ok=True)
        with Trainer(folder, *command) as trainer:
            trainer.await_row()
            wait_until(lambda: told.read_text().count("saved") > 3, START, "it has not saved")
            time.sleep(rng.uniform(0.0, 1.0))
            trainer.kill()
        lines = [line.split() for line in told.read_text().splitlines()]
        saves = [name for what, name, _ in lines if what == "saved"]
        there = trainer.path / "checkpoints"
        found, agreed = load_state(there)[0], load(there)
        if found.path != agreed.path or (found.path.name in saves and found.path.name != saves[-1]):
            raise StuckError(
                f"{found.path.name} is resumed and {agreed.path.name} evaluated, {saves[-1]} was saved last"
            )
        if len(set(saves)) < len(saves):
            raise StuckError("a name was used again")
        command = ["resume", RUN]
        told.unlink()
        with Trainer(folder, *command) as trainer:
            back = trainer.await_row(beyond=found.step)
            _, version, _ = told.read_text().splitlines()[0].split()
            trainer.kill()
        yield {"survived": int(version) == found.about["version"], "lost": 0, "recover_s": back, "saves": len(saves)}
