"""`freewheel train --seeds 1..5` runs the same command with several seeds, as many at a time as the
cores allow, and reports their mean.

Every run is a separate process with its run directory, NAME-s1, NAME-s2, ... The file
NAME-seeds.json next to them holds the table. The output of a run is kept in its directory as
output.txt.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freewheel.errors import SetupError, UsageError
from freewheel.files import disk
from freewheel.sinks.formats import clock

if TYPE_CHECKING:
    from freewheel.metrics.meter import Budget
    from freewheel.run.plan import Plan
    from freewheel.run.stopping.stop import Stop

MOST = 1000  # maximum number of seeds of one command
POLL = 0.1  # seconds between two polls of the processes
LEAST_CORES = 0.5  # minimum of cores of a run, even if its environments only wait
RUN_MEMORY = 400 << 20  # bytes of a run without its environments
GRACE = 20.0  # seconds that runs have to stop after a second signal before they are killed
#: 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom. For more, a series in 1/df is exact to three digits.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
INTERVAL = "95 % interval of the mean (Student's t)"
EVALUATIONS = ("final_eval", "best_eval")


def read(text: str) -> list[int]:
    """Parse seeds such as 1..5 or 1,2,7 or 1..3,9. Repeated seeds are dropped."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:\.\.(\d{1,18}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < first + MOST:
            raise UsageError(f"--seeds must be like 1..5 or 1,2,7 (at most {MOST} seeds), not {text}")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


@dataclass
class SeedRun:
    """One run of the command."""

    seed: int
    path: Path
    began: float = 0.0
    seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    code: int | None = None  # None: it is still running
    error: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        """Return the file with the output of the run until the run has ended."""
        return self.path.with_name(f".{self.path.name}.out")

    def start(self, argv: Sequence[str]) -> None:
        from freewheel.transport import command

        own = ["--seed", str(self.seed), "--run", self.path.name]
        self.began = time.monotonic()
        self.process = command.start("freewheel_lab.seeds.group", ["train", *argv, *own], self.output)

    def ended(self) -> bool:
        """Return whether the run has just ended. If so, read what it has written."""
        if self.process is None or self.code is not None or (code := self.process.poll()) is None:
            return False
        self.code = code if code >= 0 else 128 - code
        self.seconds = time.monotonic() - self.began
        with suppress(OSError, ValueError):
            self.summary = json.loads((self.path / "summary.json").read_text())
        lines = self.output.read_text(errors="replace").splitlines()
        if self.code not in (0, 3):
            reports = [line.removeprefix("freewheel: ") for line in lines if line.startswith("freewheel: ")]
            self.error = self.summary.get("error") or next(iter([*reports, *lines[-1:]]), f"exit code {self.code}")
        if self.path.is_dir():
            os.replace(self.output, self.path / "output.txt")
        else:
            self.output.unlink()
        return True

    def row(self) -> Mapping[str, Any]:
        """Return the newest row of the metrics, or an empty mapping if there is none."""
        from freewheel.files.read import newest_row

        return newest_row(self.path / "metrics.jsonl")

    def to_json(self) -> dict[str, Any]:
        kept = (*EVALUATIONS, "env_steps", "updates", "episodes", "ended")
        about = {"seed": self.seed, "path": str(self.path), "exit_code": self.code, "wall_s": round(self.seconds, 3)}
        return {**about, **{name: self.summary.get(name) for name in kept}, "error": self.error or None}


@dataclass
class SeedGroup:
    """Holds all runs of one command."""

    title: str
    file: Path  # path of the JSON table
    runs: list[SeedRun]
    at_once: int
    budget: Budget
    forwarded: bool = False  # whether the signal has been forwarded

    def start(self, argv: Sequence[str], every: float) -> int:
        """Run all seeds and return the worst of their exit codes. A signal stops all runs cleanly."""
        from freewheel.run.stopping.stop import Interrupted, Stop

        stop = Stop()
        display = _SeedProgress(self, every)
        stop.begin()
        with stop.listening(), display:
            try:
                while not self._turn(argv, stop, display):
                    time.sleep(POLL)
            except Interrupted:
                stop.over = True
                self._end_now(stop)
        code = 128 + stop.signal if stop.signal is not None else self.exit_code
        self._write(argv, code)
        display.print(*self.lines())
        return code

    @property
    def exit_code(self) -> int:
        """Return the worst exit code. A failure is worse than a run that has lost workers."""
        codes = [run.code for run in self.runs if run.code is not None]
        return max(codes, key=lambda code: (code not in (0, 3), code), default=0)

    def running(self) -> list[SeedRun]:
        return [run for run in self.runs if run.process is not None and run.code is None]

    def waiting(self) -> list[SeedRun]:
        return [run for run in self.runs if run.process is None]

    def _turn(self, argv: Sequence[str], stop: Stop, display: _SeedProgress) -> bool:
        """Handle runs that have ended, start waiting runs, and return whether all have ended."""
        for run in self.running():
            if run.ended() and run.error and stop.signal is None:
                display.print(f"seed {run.seed} failed: {run.error}")
        if stop.signal is not None and not self.forwarded:
            self._forward(stop)
        for run in self.waiting()[: 0 if stop.signal is not None else self.at_once - len(self.running())]:
            run.start(argv)
        display.update()
        return not self.running() and (stop.signal is not None or not self.waiting())

    def _forward(self, stop: Stop) -> None:
        assert stop.signal is not None
        self.forwarded = True
        for run in self.running():
            assert run.process is not None
            run.process.send_signal(stop.signal)

    def _end_now(self, stop: Stop) -> None:
        """Forward a second signal, and kill the runs that do not stop in time."""
        self._forward(stop)
        deadline = time.monotonic() + GRACE
        for run in self.running():
            assert run.process is not None
            try:
                run.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                run.process.kill()
                run.process.wait()
            run.ended()

    def _write(self, argv: Sequence[str], code: int) -> None:
        data = {
            "command": ["freewheel", "train", *argv],
            "seeds": [run.seed for run in self.runs],
            "exit_code": code,
            "interval": INTERVAL,
            **{name: _statistics(self._values(name)) for name in EVALUATIONS},
            "runs": [run.to_json() for run in self.runs],
        }
        disk.deliver(self.file, (json.dumps(data, indent=2, allow_nan=False) + "\n").encode())

    def _values(self, name: str) -> list[float]:
        values = (run.summary.get(name) for run in self.runs if run.code in (0, 3))
        return [float(value) for value in values if value is not None]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the final table."""
        yield f"{self.title}: {len(self.runs)} seeds"
        yield _columns("seed", "final", "best", "time", "run")
        for run in self.runs:
            final, best = (_number(run.summary.get(name)) for name in EVALUATIONS)
            where = str(run.path) if run.summary else "nothing was written" if run.process else "not started"
            ended = "" if run.code in (None, 0, 3) else f" (exit code {run.code}: {run.error})"
            yield _columns(str(run.seed), final, best, clock(run.seconds), where + ended)
        found = [_statistics(self._values(name)) for name in EVALUATIONS]
        counts = [one["seeds"] for one in found if one is not None]
        for label, key, text in (("mean", "mean", f"of {max(counts, default=0)} seeds"), ("±", "half_width", INTERVAL)):
            figures = [None if one is None else one[key] for one in found]
            if any(figure is not None for figure in figures):
                yield _columns(label, _number(figures[0]), _number(figures[1]), "", text)
        yield f"  {self.file}"


class _SeedProgress:
    """Shows the progress of all runs: a table on a terminal, otherwise a line for each interval."""

    def __init__(self, group: SeedGroup, every: float) -> None:
        from freewheel.files.terminal import Terminal

        self._group = group
        self._every = every
        self._console = Terminal()
        self._next = 0.0
        self._shown = ""
        self._live = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> None:
        if self._live is not None:
            self._live.start()

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text("\n".join(self._state(width=7)), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif (line := "  ".join(self._state())) != self._shown:
            self._shown = line
            self.print(line)

    def print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, soft_wrap=True)

    def _state(self, width: int = 0) -> Iterator[str]:
        """Yield the number of finished runs, and then a text for every active run."""
        group = self._group
        yield f"{sum(run.code is not None for run in group.runs)} of {len(group.runs)} seeds done"
        for run in group.running():
            if row := run.row():
                progress = group.budget.progress(row["env_steps"], row["wall_s"], row["episodes"])
                yield f"seed {run.seed:<{width}} {100 * progress:3.0f}% return {_number(row['return_mean'])}"
            else:
                yield f"seed {run.seed:<{width}} starting"


def group_of(planned: Plan, seeds: Sequence[int], jobs: int | None = None) -> SeedGroup:
    """Return a group of runs with unused names. Raise SetupError if the name that the user gave is
    taken."""
    config = planned.config
    name = planned.name
    if not name.exact:
        name = replace(name, number=1)
    while True:
        runs = [SeedRun(seed, name.folder / f"{name.name}-s{seed}") for seed in seeds]
        file = name.folder / f"{name.name}-seeds.json"
        taken = next((path for path in (file, *(run.path for run in runs)) if path.exists()), None)
        if taken is None:
            break
        if name.exact:
            raise SetupError(f"'{taken.name}' exists in {name.folder}; choose another --run or remove it")
        name = replace(name, number=name.number + 1)
    title = f"{config.env.name}  {config.algo}  {config.mode}"
    return SeedGroup(title, file, runs, min(jobs or at_once(planned), len(seeds)), config.run.budget)


def claim(planned: Plan, seeds: Sequence[int], jobs: int | None = None) -> SeedGroup:
    """Return the group and create its JSON file, so that no other command can get the same names."""
    from freewheel.run.checkpoints import checkpoint

    while True:
        group = group_of(planned, seeds, jobs)
        try:
            checkpoint.make_private(group.file.parent)
            group.file.touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            continue
        except OSError as error:
            raise SetupError(f"cannot create {group.file}: {error.strerror}; choose another --runs-dir") from None
        return group


def at_once(planned: Plan) -> int:
    """Return how many runs the cores and the memory can serve at the same time. A simulation that
    fills a device runs alone."""
    import psutil

    from freewheel.rollout.probe import usable_cores

    if planned.spec.batched_on_device or planned.device != "cpu":
        return 1
    cost = planned.cost
    if cost is None:
        return max(1, usable_cores() // planned.workers)
    fits = int(usable_cores() / max(LEAST_CORES, max(1, planned.env_processes) * min(1.0, cost.duty)))
    memory = psutil.virtual_memory().available / max(1, planned.spec.lanes * cost.memory + RUN_MEMORY)
    return max(1, min(fits, int(memory)))


def plan_lines(planned: Plan, group: SeedGroup) -> list[str]:
    """Return the plan of a run, followed by that of the group."""
    seeds = [str(run.seed) for run in group.runs]
    names = [str(run.path) for run in group.runs]
    shown = ", ".join(seeds if len(seeds) <= 10 else [*seeds[:3], "...", seeds[-1]])
    where = names[0] if len(names) == 1 else f"{names[0]} to {group.runs[-1].path.name}"
    own = [f"seeds    {shown}: {group.at_once} at once", f"runs     {where}", f"table    {group.file}"]
    return [*(line for line in planned.lines() if not line.startswith("run ")), *own]


def _statistics(values: Sequence[float]) -> dict[str, Any] | None:
    """Return the mean and the 95 % interval. Without values the result is None, and a single value
    has no interval."""
    if not values:
        return None
    mean = statistics.fmean(values)
    count = len(values)
    half = student(count - 1) * statistics.stdev(values) / math.sqrt(count) if count > 1 else None
    interval = None if half is None else [mean - half, mean + half]
    return {"mean": mean, "interval": interval, "half_width": half, "seeds": count}


def student(df: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution."""
    if df <= len(STUDENT):
        return STUDENT[df - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)


def _columns(first: str, final: str, best: str, duration: str, last: str) -> str:
    return f"  {first:>5}  {final:>8}  {best:>8}  {duration:>6}  {last}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _main() -> int:
    """Run one seed in the process that `SeedRun.start` has started."""
    from freewheel.cli.main import main
    from freewheel.transport.command import end_with

    parent, *argv = sys.argv[1:]
    end_with(int(parent))
    return main(argv)


if __name__ == "__main__":
    raise SystemExit(_main())
