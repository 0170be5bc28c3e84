"""Faults that a day brings, done to real trainings from outside. A trial is one of them: it returns a row, or raises."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil

from benchmarks._faults_early import killed_early, same_step
from benchmarks._faults_hostile import hostile
from benchmarks._faults_limits import no_end
from benchmarks._faults_ray import daemons_killed
from benchmarks._trainers import RUN, StuckError, Trainer, alive, balanced, shared_memory, wait_until
from freewheel.run.checkpoints.checkpoint import Checkpoint, fingerprint, load, load_state

EVERY = 3.0  # seconds between two checkpoints
SAVE_LIMIT = 1.0  # seconds that a save may take, on a busy machine
IN_A_SAVE = 0.5  # of the kills wait for a save
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_LIMIT, SECOND_LIMIT, LEFT_LIMIT = (
    5.0,
    0.5,
    2.0,
)  # seconds: after a signal, a second one, and for processes to be gone
STOPPED, STEP_TIMEOUT = 8.0, 3.0

Row: TypeAlias = dict[str, Any]


class Setup(NamedTuple):
    """A training to do harm to."""

    mode: str
    algo: str = "ppo"
    env: str = "CartPole-v1"

    def argv(self, *more: str) -> list[str]:
        workers = ["--workers", "2"] if self.mode in ("batch", "continuous", "episodes") else ["--num-envs", "4"]
        every = ["--checkpoint-every", str(EVERY / 60), "--log-every", "0.2"]
        learn = ["--mbpo.learning-starts", "300", "--mbpo.model-every", "200"] if self.algo == "mbpo" else []
        budget = ["--steps", "1000000000", "--seed", "1", "--run", RUN]
        return ["train", self.env, "--mode", self.mode, "--algo", self.algo, *workers, *every, *learn, *budget, *more]

    def __str__(self) -> str:
        return f"{self.mode} {self.algo}"


SETUPS = (
    Setup("continuous"),
    Setup("sequential"),
    Setup("lockstep", "sac", "Pendulum-v1"),
    Setup("batch"),
    Setup("lockstep"),
    Setup("episodes"),
    Setup("lockstep", "mbpo", "Pendulum-v1"),
    Setup("continuous", "sac", "Pendulum-v1"),
)
# with SAC a worker would be killed again before it has made the ten steps after which it is trusted
WORKERS = tuple(one for one in SETUPS if one.mode in ("batch", "continuous", "episodes") and one.algo == "ppo")


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `trials` yields a row a trial: survived, lost (how much work), recover_s, and what else is known."""

    title: str
    trials: Callable[[Path, random.Random, Setup, int], Iterator[Row]]
    setups: tuple[Setup, ...] = SETUPS


def saved(trainer: Trainer) -> Checkpoint:
    """The newest checkpoint, which must verify without any other one being tried."""
    found = load(trainer.path / "checkpoints", "latest")
    if found.warnings:
        raise StuckError(f"the newest checkpoint was not whole: {found.warnings[0]}")
    return found


def saving(trainer: Trainer) -> bool:
    return any((trainer.path / "checkpoints").glob(".part-*"))


# --------------------------------------------------------------------------------------------------------- the trainer is killed


def killed(folder: Path, rng: random.Random, setup: Setup, trials: int) -> Iterator[Row]:
    """SIGKILL at a random moment, often in the middle of a save; then `resume`, which is killed next."""
    before, at_step = shared_memory(), 0
    trainer = Trainer(folder, *setup.argv())
    try:
        trainer.await_row()
        for _ in range(trials):
            in_save = _wait_for_a_moment(trainer, rng)
            rows = trainer.rows()
            gone = trainer.kill()
            left = shared_memory() - before
            found = saved(trainer)
            lost = _seconds_since(found.step, rows)
            if found.step < at_step:
                raise StuckError(f"step {found.step} was resumed after {at_step}")
            at_step = found.step
            trainer.__exit__()
            trainer = Trainer(folder, "resume", RUN)
            back = trainer.await_row(beyond=at_step)
            after = trainer.new_rows()[0]
            yield {
                "survived": gone <= LEFT_LIMIT and not left and after["env_steps"] >= at_step,
                "lost": lost,
                "recover_s": back,
                "in_save": in_save,
                "children_gone_s": gone,
                "shared_memory_left": sorted(left),
            }
    finally:
        trainer.__exit__()


def _wait_for_a_moment(trainer: Trainer, rng: random.Random) -> bool:
    """Until the moment of the kill; whether it is in the middle of a save."""
    wait_until((trainer.path / "checkpoints" / "latest").exists, 60.0, "there was no checkpoint")
    time.sleep(rng.uniform(0.0, EVERY))
    if rng.random() > IN_A_SAVE:
        return saving(trainer)
    with suppress(StuckError):
        began = time.monotonic()
        while not saving(trainer):
            if time.monotonic() - began > 3 * EVERY:
                return False
        time.sleep(rng.uniform(0.0, 0.01))
    return True


def _seconds_since(step: int, rows: list[Row]) -> float:
    """Training time between a step and the last row."""
    times = [row["wall_s"] for row in rows if row["env_steps"] <= step] or [0.0]
    return float(max(0.0, rows[-1]["wall_s"] - times[-1])) if rows else 0.0


def killed_while_resuming(folder: Path, rng: random.Random, setup: Setup, trials: int) -> Iterator[Row]:
    """SIGKILL while a resume starts: the next one begins where it would have begun."""
    with Trainer(folder, *setup.argv()) as trainer:
        trainer.await_row()
        wait_until((trainer.path / "checkpoints" / "latest").exists, 60.0, "there was no checkpoint")
        trainer.kill()
        step = saved(trainer).step
    for _ in range(trials):
        with Trainer(folder, "resume", RUN) as one:
            time.sleep(rng.uniform(0.2, 4.0))
            early = not one.new_rows()
            gone = one.kill()
            found = saved(one).step
        with Trainer(folder, "resume", RUN) as one:
            back = one.await_row(beyond=found)
            one.kill()
            step, before = saved(one).step, step
        kept = found == before if early else found >= before
        yield {"survived": kept and gone <= LEFT_LIMIT, "lost": 0, "recover_s": back, "before_the_first_row": early}


# ------------------------------------------------------------------------------------------------------------------ signals


def signalled(folder: Path, rng: random.Random, setup: Setup, trials: int) -> Iterator[Row]:
    """A signal at any time from the first moment on; every third trial sends a second one."""
    for number in range(trials):
        before, twice = shared_memory(), number % 3 == 2
        place = folder / str(number)
        place.mkdir()
        with Trainer(place, *setup.argv()) as trainer:
            if number % 2:
                trainer.await_row()
            else:
                time.sleep(rng.uniform(0.8, 6.0))  # Python itself needs some time until it takes signals
            time.sleep(rng.uniform(0.0, 1.0))
            sent = rng.choice(SIGNALS)
            trainer.note_family()
            trainer.send(sent, group=sent == signal.SIGINT)
            limit = END_LIMIT
            if twice:
                time.sleep(rng.uniform(0.0, 0.2))
                limit = SECOND_LIMIT
                with suppress(ProcessLookupError):
                    trainer.send(sent)
            took = trainer.end(60.0)
            code, gone = trainer.process.returncode, wait_until(lambda t=trainer: not t.left(), 10.0, "left")  # type: ignore[misc]
            begun = bool(trainer.rows())
            codes = [128 + sent] if begun else [128 + sent, -sent]  # for a shell both are the same
            whole = twice or not begun or _in_order(trainer, 128 + sent)
            yield {
                "survived": whole and code in codes and took <= limit and gone <= LEFT_LIMIT
                and not shared_memory() - before,
                "lost": 0,
                "recover_s": took,
                "signal": sent.name, "twice": twice, "code": code, "begun": begun, "said": trainer.said()[-300:],
            }  # fmt: skip


def _in_order(trainer: Trainer, code: int) -> bool:
    """Whether the run directory is complete, with a checkpoint of the last step."""
    summary = trainer.summary()
    return summary["exit_code"] == code and balanced(summary) and saved(trainer).step == summary["env_steps"]


# -------------------------------------------------------------------------------------------------------- workers, sleep, disks


def workers_killed(folder: Path, rng: random.Random, setup: Setup, trials: int) -> Iterator[Row]:
    """SIGKILL to a worker; it is replaced, and every row is accounted for at the end."""
    kills: list[Row] = []
    with Trainer(folder, *setup.argv()) as trainer:
        trainer.await_row()
        for _ in range(trials):
            known = {one.pid for one in trainer.note_family()}
            rng.choice(trainer.workers()).kill()

            def replaced(known: set[int] = known) -> bool:
                return any(one.pid not in known for one in trainer.workers())

            back = wait_until(replaced, 20.0, "the worker was not replaced")
            steps = trainer.rows()[-1]["env_steps"]
            trainer.await_row(beyond=steps)
            kills.append({"survived": True, "lost": 0, "recover_s": back})
        trainer.send(signal.SIGINT)
        trainer.end(END_LIMIT)
        summary = trainer.summary()
    exact = balanced(summary) and summary["worker_restarts"] == trials
    for row in kills:
        yield row | {"survived": exact, "restarts": summary["worker_restarts"], "dropped": summary["dropped"]}


def slept(folder: Path, rng: random.Random, setup: Setup, trials: int) -> Iterator[Row]:
    """All processes of the run are stopped for longer than every time-out."""
    argv = setup.argv("--step-timeout", str(STEP_TIMEOUT), "--reset-timeout", str(STEP_TIMEOUT))
    with Trainer(folder, *argv) as trainer:
        trainer.await_row()
        for _ in range(trials):
            time.sleep(rng.uniform(0.0, 1.0))
            processes = [psutil.Process(trainer.process.pid), *filter(alive, trainer.note_family())]
            for one in processes:
                one.suspend()
            time.sleep(STOPPED)
            steps = trainer.rows()[-1]["env_steps"]
            for one in processes:
                one.resume()
            began = time.monotonic()
            trainer.await_row(beyond=steps)
            back = time.monotonic() - began
            restarts = trainer.rows()[-1].get("worker_restarts", 0)
            yield {"survived": not restarts, "lost": 0, "recover_s": back, "restarts": restarts}
        trainer.send(signal.SIGINT)
        trainer.end(END_LIMIT)
        if not balanced(trainer.summary()) or trainer.summary()["worker_restarts"]:
            raise StuckError("workers were replaced because of a sleep")


def disk_full(folder: Path, rng: random.Random, setup: Setup, trials: int) -> Iterator[Row]:
    """Nothing can be written for some seconds; what was logged meanwhile is written when there is space again."""
    full = folder / "full"
    with Trainer(folder, *setup.argv(), module="benchmarks._full_disk", env={"FULL_DISK": str(full)}) as trainer:
        trainer.await_row()
        for _ in range(trials):
            time.sleep(rng.uniform(0.0, EVERY))
            full.touch()
            time.sleep(rng.uniform(1.0, 1.5 * EVERY))
            steps = trainer.rows()[-1]["env_steps"]
            full.unlink()
            began = time.monotonic()
            trainer.await_row(beyond=steps)
            back = time.monotonic() - began
            gaps = [b["wall_s"] - a["wall_s"] for a, b in zip(trainer.rows(), trainer.rows()[1:], strict=False)]
            yield {"survived": True, "lost": 0, "recover_s": back, "longest_gap_s": max(gaps, default=0.0)}
        trainer.send(signal.SIGINT)
        trainer.end(END_LIMIT)
        if not _in_order(trainer, 130):
            raise StuckError("the run directory is not complete")
        if saving(trainer):
            raise StuckError("a temporary folder is left")


def deleted(folder: Path, rng: random.Random, setup: Setup, trials: int) -> Iterator[Row]:
    """The run directory is removed while it trains."""
    with Trainer(folder, *setup.argv()) as trainer:
        trainer.await_row()
        for _ in range(trials):
            time.sleep(rng.uniform(0.0, EVERY))
            shutil.rmtree(trainer.path, ignore_errors=True)
            began = time.monotonic()
            wait_until(lambda: bool(trainer.rows()), 30.0, "nothing was written again")
            yield {"survived": True, "lost": 0, "recover_s": time.monotonic() - began}
        trainer.send(signal.SIGINT)
        trainer.end(END_LIMIT)
        if not _in_order(trainer, 130):
            raise StuckError("the run directory is not complete")


# --------------------------------------------------------------------------------------------------------------- damaged files


def damaged(folder: Path, rng: random.Random, setup: Setup, trials: int) -> Iterator[Row]:
    """One byte of a file of the newest checkpoint is changed, or its end is cut off: the one before is used, if it matters."""
    with Trainer(folder, *setup.argv()) as trainer:
        trainer.await_row()
        time.sleep(3 * EVERY)
        trainer.send(signal.SIGINT)
        trainer.end(END_LIMIT)
    newest = saved(trainer)
    files = sorted(path for path in newest.path.iterdir() if path.is_file())
    for number in range(trials):
        path = rng.choice(files)
        whole = path.read_bytes()
        changed = bytearray(whole)
        if number % 6 == 5:
            del changed[rng.randrange(len(whole)) :]
        else:
            changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.unlink()  # it may be a hard link
        path.write_bytes(changed)
        began = time.monotonic()
        found, _ = load_state(trainer.path / "checkpoints", "latest")
        path.write_bytes(whole)
        told = any(str(newest.path) in warning for warning in found.warnings)
        same = not found.warnings and fingerprint(found.params) == fingerprint(newest.params)
        yield {
            "survived": same or (told and found.step < newest.step),
            "lost": 0,
            "recover_s": time.monotonic() - began,
            "file": path.name,
            "silent": not same and not found.warnings,
        }


FAULTS: Mapping[str, Fault] = {
    "killed": Fault("trainer killed, resumed", killed),
    "killed-resuming": Fault("killed while it resumes", killed_while_resuming, (SETUPS[0], SETUPS[2])),
    "signal": Fault("signal", signalled),
    "worker-killed": Fault("worker killed", workers_killed, WORKERS),
    "stopped": Fault("all processes stopped 8 s", slept, SETUPS[:6]),
    "disk-full": Fault("disk full", disk_full, SETUPS[:4]),
    "deleted": Fault("run directory deleted", deleted, SETUPS[:3]),
    "ray": Fault("daemon of Ray killed, resumed", daemons_killed, (Setup("ray"),)),
    "damaged": Fault("checkpoint damaged", damaged, (SETUPS[2], SETUPS[0])),
    "no-end": Fault("user's code that never ends", no_end, SETUPS[:2]),
    "killed-early": Fault("killed before or in its first save", killed_early, (SETUPS[4], SETUPS[6], SETUPS[0])),
    "same-step": Fault("several saves at one step, killed", same_step, (SETUPS[6], SETUPS[4], SETUPS[2])),
    "hostile": Fault("hostile run directory", hostile, (SETUPS[1],)),
}
