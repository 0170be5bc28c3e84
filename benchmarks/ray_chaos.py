"""Ray actors are killed every 5 s for 2 minutes beside an undisturbed twin, drivers with -9, and an object store is full."""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import psutil

from benchmarks._common import Notebook, number, table
from benchmarks._trainers import RUN, Trainer, alive, balanced, usual_signals, wait_until, words_of
from freewheel_ray.actors import local_cluster
from freewheel_ray.actors.cluster import LEAST_STORE, Cluster

NAME = "ray_chaos"
WORKERS = 8
WORLD = {"law": "lognormal", "mean": "0.005", "kind": "sleep", "length": "100"}
EVERY = 5.0  # seconds between two kills
BACK = 20.0  # seconds within which a killed actor must have been replaced
LEFT = 15.0  # seconds after which nothing may be left
LEAST_OF_TWIN = 0.50
AGENTS = ("ray::Dashboard", "ray::RuntimeEnv", "ray::IDLE", "ray::QuestionRelay")
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Times:
    """Seconds of the parts."""

    calm: float = 40.0
    storm: float = 120.0
    full: float = 20.0
    every: float = EVERY


QUICK = Times(calm=4.0, storm=6.0, full=0.0, every=2.0)


def argv(*more: str) -> list[str]:
    world = [word for key, value in WORLD.items() for word in (f"--env.{key}", value)]
    saved = ["--checkpoint-every", "0.1", "--log-every", "0.2", "--evals", "0"]
    budget = ["--steps", "1000000000", "--seed", "1", "--run", RUN]
    return [
        "train",
        "freewheel/Straggler-v0",
        *world,
        "--mode",
        "ray",
        "--workers",
        str(WORKERS),
        *saved,
        *budget,
        *more,
    ]


class Training(Trainer):
    """A training whose workers are Ray actors."""

    def actors(self) -> list[psutil.Process]:
        return [
            one for one in self.note_family() if alive(one) and title(one).startswith("ray::") and not is_agent(one)
        ]

    def folders(self) -> set[Path]:
        """Of the clusters that it has started."""
        paths = {Path(word) for one in self.note_family() for word in words_of(one) if "fw-ray-" in word}
        return {folder for path in paths for folder in path.parents if folder.name.startswith("fw-ray-")}

    def open_to_others(self) -> set[str]:
        """Addresses beyond this machine on which one of its processes listens."""
        found: set[str] = set()
        for one in [psutil.Process(self.process.pid), *self.note_family()]:
            with suppress(psutil.Error):
                found |= {link.laddr.ip for link in one.net_connections("inet") if link.status == psutil.CONN_LISTEN}
        return found - LOOPBACK

    def rate(self, seconds: float) -> float:
        """Rows trained a second in the next seconds."""
        began = self.rows()[-1]
        time.sleep(seconds)
        ended = self.rows()[-1]
        return float((ended["trained"] - began["trained"]) / (ended["wall_s"] - began["wall_s"]))

    def vanish(self, folders: set[Path]) -> float:
        """Seconds until no process of the ended training is left, agents included, nor its folder."""
        return wait_until(lambda: not self.left() and not any(map(Path.exists, folders)), 2 * LEFT, "something is left")


def title(process: psutil.Process) -> str:
    return " ".join(words_of(process))


def is_agent(process: psutil.Process) -> bool:
    return title(process).startswith(AGENTS)


@contextmanager
def training(*more: str, env: dict[str, str] | None = None) -> Iterator[Training]:
    with (
        TemporaryDirectory(prefix="ray-chaos-", ignore_cleanup_errors=True) as folder,
        Training(Path(folder), *argv(*more), env=env) as one,
    ):
        one.await_row()
        wait_until(lambda: one.rows()[-1].get("trained", 0) > 0, 60.0, "nothing was trained")
        yield one


def undisturbed(notebook: Notebook, seconds: float, *, resume: bool) -> Row:
    """The twin; at its end the driver is killed with -9, and perhaps the run is resumed."""
    with training() as one:
        rate, folders, family = one.rate(seconds), one.folders(), len(one.note_family())
        beyond = one.open_to_others()
        steps = one.rows()[-1]["env_steps"]
        one.process.kill()
        one.process.wait()
        gone = one.vanish(folders)
        row = {
            "part": "calm, then kill -9",
            "rate": rate,
            "processes": family,
            "gone_s": gone,
            "beyond": sorted(beyond),
        }
        if resume:
            with Training(one.folder, "resume", RUN) as again:
                row["resumed_s"] = again.await_row(beyond=int(steps * 0.5))
                again.send(signal.SIGINT)
                again.end(30.0)
                row["ledger"] = balanced(again.summary())
    return show(notebook, row)


def storm(notebook: Notebook, seconds: float, every: float, rng: random.Random) -> Row:
    """Every few seconds the process of one actor gets a SIGKILL."""
    backs: list[float] = []
    beyond: set[str] = set()
    with training() as one:
        wait_until(lambda: len(one.actors()) >= WORKERS, 60.0, "not all actors have come")
        began, first = time.monotonic(), one.rows()[-1]
        while time.monotonic() < began + seconds:
            time.sleep(max(0.0, began + every * (len(backs) + 1) - time.monotonic()))
            known = {actor.pid for actor in one.note_family()}
            beyond |= one.open_to_others()
            rng.choice(one.actors()).kill()

            def replaced(known: set[int] = known) -> bool:
                return len(one.actors()) >= WORKERS and any(actor.pid not in known for actor in one.actors())

            backs.append(wait_until(replaced, BACK, "the actor was not replaced"))
        last, folders = one.rows()[-1], one.folders()
        steps = last["env_steps"]
        one.await_row(beyond=steps)
        one.send(signal.SIGINT)
        ended = one.end(30.0)
        gone, summary, code = one.vanish(folders), one.summary(), one.process.returncode
    rate = (last["trained"] - first["trained"]) / (last["wall_s"] - first["wall_s"])
    return show(
        notebook,
        {
            "part": "storm",
            "rate": rate,
            "kills": len(backs),
            "back_s": backs,
            "restarts": summary["worker_restarts"],
            "ledger": balanced(summary),
            "dropped": summary["dropped"],
            "code": code,
            "ended_s": ended,
            "gone_s": gone,
            "beyond": sorted(beyond),
        },
    )


def full_store(notebook: Notebook, seconds: float) -> Row:
    """A training on a cluster whose object store another program fills with what cannot be moved out of it."""
    import ray

    with Cluster(None, workers=WORKERS, cpus_per_worker=1.0, placement="spread", object_store=LEAST_STORE):
        address = ray.get_runtime_context().gcs_address
        folder = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent
        many = ("--address", address, "--workers", "2", "--envs-per-worker", "64", "--env.mean", "0.0005")
        with training(*many, env=local_cluster.with_token(folder)) as one:
            empty = one.rate(seconds)
            held = [ray.get(ray.put(np.zeros(2**20, np.uint8))) for _ in range(2 * LEAST_STORE // 2**20)]
            steps = one.rows()[-1]["env_steps"]
            full = one.rate(seconds)
            one.await_row(beyond=steps)
            one.send(signal.SIGINT)
            one.end(60.0)
            summary = one.summary()
            del held
    row = {"part": "object store full", "rate": full, "empty": empty, "ledger": balanced(summary)}
    return show(notebook, row | {"restarts": summary["worker_restarts"], "dropped": summary["dropped"]})


def show(notebook: Notebook, row: Row) -> Row:
    print(*(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
    return notebook.keep(row)


def judge(notebook: Notebook, calms: list[Row], wild: Row, full: Row | None) -> None:
    calm = float(np.mean([row["rate"] for row in calms]))
    part, backs = wild["rate"] / calm, wild["back_s"]
    header = ("", "rows trained/s", "of the twin", "kills", "restarts", "back after s", "gone after s")
    back = f"{np.median(backs):.2f} (.. {max(backs):.2f})"
    lines = [
        ["undisturbed, then kill -9 to the driver", number(row["rate"]), "1", "1", "-", "-", f"{row['gone_s']:.1f}"]
        for row in calms
    ]
    lines += [
        [
            "an actor killed every 5 s",
            number(wild["rate"]),
            f"{part:.3f}",
            str(wild["kills"]),
            str(wild["restarts"]),
            back,
            f"{wild['gone_s']:.1f}",
        ]
    ]
    if full is not None:
        lines += [
            [
                "object store full",
                number(full["rate"]),
                f"{full['rate'] / full['empty']:.3f} (of the same run before)",
                "-",
                str(full["restarts"]),
                "-",
                "-",
            ]
        ]
    notebook.write(table(header, lines))
    notebook.judge(f"storm: {part:.3f} of its twin, at least {LEAST_OF_TWIN}", part >= LEAST_OF_TWIN)
    notebook.judge(
        f"storm: {wild['kills']} kills, {wild['restarts']} restarts", wild["kills"] == wild["restarts"], exact=True
    )
    ledgers = [row["ledger"] for row in (*calms, wild, full) if row and "ledger" in row]
    notebook.judge(f"ledger exact in {sum(ledgers)} of {len(ledgers)} runs", all(ledgers), exact=True)
    notebook.judge(
        f"the storm ended in good order (exit code {wild['code']})", wild["code"] == 128 + signal.SIGINT, exact=True
    )
    gone = max(row["gone_s"] for row in (*calms, wild))
    notebook.judge(
        f"nothing left {gone:.1f} s after the end, agents and folder included; at most {LEFT:g}",
        gone <= LEFT,
        exact=True,
    )
    beyond = sorted({address for row in (*calms, wild) for address in row["beyond"]})
    notebook.judge(f"sockets that listen beyond this machine: {' '.join(beyond) or 'none'}", not beyond, exact=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--quick", action="store_true", help="see that it works: nothing is kept and no figure of speed counts"
    )
    given = parser.parse_args()
    usual_signals()
    notebook = Notebook(NAME, f"{WORKERS} Ray actors, one killed every {EVERY:g} s", quick=given.quick)
    times = QUICK if given.quick else Times()
    calms = [undisturbed(notebook, times.calm, resume=not given.quick)]
    wild = storm(notebook, times.storm, times.every, random.Random(given.seed))
    if not given.quick:
        calms.append(undisturbed(notebook, times.calm, resume=False))
    full = full_store(notebook, times.full) if times.full else None
    judge(notebook, calms, wild, full)
    return notebook.close()


if __name__ == "__main__":
    raise SystemExit(main())
