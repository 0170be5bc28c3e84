"""Describes in sentences what each part of a running trainer waits for, or how a trainer has ended.

All facts come from the run directory and from the operating system. The trainer is not asked, because it may not be
able to answer, and it is not changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import psutil

from freewheel.errors import FileError
from freewheel.files import read
from freewheel.files.lock import FileLock
from freewheel.metrics.names import SHARES
from freewheel.run.live.following import state_of
from freewheel.run.live.status import STATUS, EvaluatorStatus, Status, Worker, called, read_status
from freewheel.run.naming import LOCK, SUMMARY
from freewheel.sinks.formats import duration

LONG = 2.0  # seconds above which a call or a wait counts as long
STALE = 3.0  # seconds without a new status; the trainer writes one every second
SAMPLE = 0.2  # seconds over which the processor time of a process is measured
COMPUTES = 0.2  # share of a core above which a process computes
MOST = 10  # workers that get a separate line, at most
CALLS = ("construct", "reset", "step")
WORKING = ("observe", "update", "fit", "rollout", "publish", "other")  # states in which the learner waits for nothing


def why_stuck(path: Path) -> list[str]:
    """Return the lines of `freewheel doctor --why-stuck`."""
    summary = None
    with suppress(FileError):
        summary = read.json_object(path / SUMMARY)
    try:
        status = read_status(path)
    except FileError as error:
        status, unreadable = None, str(error)
    state = state_of(path, summary)
    if state != "running":
        return list(_ended(path, state, summary, status))
    pid = FileLock.holder(path / LOCK) or (0 if status is None else status.stamp.pid)
    if status is None:
        missing = not (path / STATUS).exists()
        why = "it is still starting, or its version writes no status" if missing else unreadable
        return [f"{path.name} runs (process {pid}), but its status is not known: {why}"]
    return list(_running(path, status, pid))


def _ended(path: Path, state: str, summary: Mapping[str, Any] | None, status: Status | None) -> Iterator[str]:
    if summary is not None:
        code, error = summary.get("exit_code"), summary.get("error")
        yield f"{path.name} does not run: it has ended ({summary.get('ended')}), exit code {code}"
        if error:
            yield f"  {error}"
        yield from (f"  {problem}" for problem in summary.get("problems") or ())
    else:
        who = "" if status is None else f" ({status.stamp.pid})"
        yield f"{path.name} does not run: its process{who} is gone and has left no summary"
        yield "  it was killed (SIGKILL, out of memory), or the machine was stopped"
        if status is not None:
            yield f"  last seen {_doing(status)}, {status.done.env_steps:,} steps after {duration(status.wall_s)}"
    if state in ("interrupted", "gone"):
        yield f"  freewheel resume {path} continues from its newest checkpoint"


def _running(path: Path, status: Status, pid: int) -> Iterator[str]:
    slow = [worker for worker in status.workers if worker.state in CALLS and worker.since_s > LONG]
    activity = activities([pid, *(worker.pid for worker in slow[:MOST] if worker.pid is not None)])
    trainer, age = activity.get(pid, "cannot be seen from here"), status.age
    yield f"{path.name} runs: process {pid} {trainer}; {status.done.env_steps:,} steps after {duration(status.wall_s)}"
    if trainer == WORDS[psutil.STATUS_STOPPED]:
        yield f"  a signal has stopped it (Ctrl-Z, SIGSTOP): kill -CONT {pid} resumes it. Its timeouts are paused"
    elif age > STALE:
        yield f"  it has not written its status for {duration(age)}: C code holds Python's lock (an environment, or"
        yield "  an extension in the trainer's process), or the disk accepts no writes. Its last status follows"
    yield ""
    stopped = trainer == WORDS[psutil.STATUS_STOPPED]
    yield f"verdict     {'the trainer is stopped' if stopped else _verdict(status, slow)}"
    yield f"learner     {_doing(status)}" + (f"; it waits for {waits}" if (waits := status.learner.waits_for) else "")
    for number, line in enumerate(_workers(status, slow, activity)):
        yield f"{'' if number else 'workers':<12}{line}"
    yield f"evaluator   {_evaluator(status.evaluator)}"
    for part in status.beside:
        yield f"beside      {part.doing}: for {duration(part.since_s)}, in a separate thread or process"
    saver = status.saver
    yield f"checkpoints {'none is being written' if saver is None else f'{saver.doing}, for {duration(saver.since_s)}'}"
    if status.learner.stack:
        yield "stack       of the trainer, innermost last:"
        yield from (f"            {place}" for place in status.learner.stack)


def _doing(status: Status) -> str:
    learner = status.learner
    meaning = SHARES["learner"].get(learner.doing, "").partition(".")[0].partition(":")[0]
    told = f" ({meaning[:1].lower()}{meaning[1:]})" if meaning and not learner.waits_for else ""
    return f"{learner.doing} for {duration(learner.since_s)}{told}"


def _verdict(status: Status, slow: Sequence[Worker]) -> str:
    learner, workers = status.learner, status.workers
    if learner.doing == "wait-data" and slow:
        most = max(slow, key=lambda worker: worker.since_s)
        who = f"{len(slow)} environments" if len(slow) > 1 else f"the environment of lane {most.lane}"
        return f"the learner waits for rows, and {who} did not return from {called(most)} for {duration(most.since_s)}"
    rowless = learner.doing == "wait-data" and len(workers) > 0
    if rowless and all(one.state in ("down", "lost") for one in workers):
        return "the learner waits for rows, and no worker is alive: they die and are replaced"
    if rowless and all(one.state in ("pending", "lost") for one in workers):
        return "the learner waits for rows, and the cluster has no room for any worker: see ray status, or --cpus-per-worker"
    if rowless and all(one.state.startswith("wait") and one.since_s > LONG for one in workers):
        return "the learner waits for rows, and every worker waits: a deadlock, please report it with this text"
    if learner.since_s <= LONG:
        calls = "one call of an environment takes" if len(slow) == 1 else f"{len(slow)} calls of environments take"
        return f"nothing is stuck, but {calls} long" if slow else "nothing is stuck"
    if learner.doing in WORKING:
        idle = sum(worker.state.startswith("wait") for worker in workers)
        beside = f"; {idle} of {len(workers)} workers wait for it" if idle else ""
        return f"the learner is busy with one {learner.doing} for {duration(learner.since_s)}{beside}"
    return f"the learner waits for {learner.waits_for or 'something'}, for {duration(learner.since_s)}"


def _workers(status: Status, slow: Sequence[Worker], activity: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each worker in a long call, the longest first, and one for each state of the others."""
    if not status.workers:
        yield "none yet"
    for worker in sorted(slow, key=lambda worker: -worker.since_s)[:MOST]:
        yield _call(status, worker, activity)
    if len(slow) > MOST:
        yield f"and {len(slow) - MOST} more in calls of more than {LONG:g} s"
    others = sorted((worker for worker in status.workers if worker not in slow), key=lambda worker: worker.state)
    for state, members in groupby(others, key=lambda worker: worker.state):
        group = list(members)
        since = max(worker.since_s for worker in group)
        reasons = list(dict.fromkeys(worker.waits_for for worker in group if worker.waits_for))
        reason = f"; waits for {reasons[0]}" if reasons else ""
        yield f"{numbers([worker.worker for worker in group])}: {state}, for {duration(since)} at most{reason}"


def _call(status: Status, worker: Worker, activity: Mapping[int, str]) -> str:
    own = worker.pid == status.stamp.pid
    who = "the trainer's own environments" if own else f"{worker.worker} (process {worker.pid})"
    lane = "" if worker.lane is None else f", lane {worker.lane} of {status.env}"
    parts = [f"{who}: in {called(worker)}{lane}, for {duration(worker.since_s)}"]
    if worker.pid is not None and worker.pid in activity and not own:
        parts.append(f"its process {activity[worker.pid]}")
    if worker.limit_s is not None:
        left = max(0.0, worker.limit_s - worker.since_s)
        ends = "the run" if own else "it, and another one takes its place"
        parts.append(f"--{worker.state}-timeout ({worker.limit_s:g} s) ends {ends}, in {duration(left)}")
    return "; ".join(parts)


def _evaluator(found: EvaluatorStatus | None) -> str:
    if found is None:
        return "there are no evaluations"
    if found.doing == "idle":
        return "idle"
    told = f"plays for {duration(found.since_s)}, {found.ended} of {found.episodes} episodes have ended"
    if found.limit_s is not None:
        told += f"; it is given up in {duration(max(0.0, found.limit_s - found.since_s))}"
    if found.call is not None and found.call_s > LONG:
        limit = "" if found.call_limit_s is None else f" of {found.call_limit_s:g} s that it may take"
        told += f"; {found.call} has not returned for {duration(found.call_s)}{limit}"
    return told


def numbers(found: Sequence[int]) -> str:
    """Write numbers with ranges, such as "0-3, 7"."""
    ordered = sorted(found)
    starts = [ordered[0], *(later for before, later in pairwise(ordered) if later != before + 1)]
    ends = [*(before for before, later in pairwise(ordered) if later != before + 1), ordered[-1]]
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def activities(pids: Sequence[int]) -> dict[int, str]:
    """Return what these processes do according to the system; processes that it does not show are missing."""
    before = {pid: _used(pid) for pid in pids}
    time.sleep(SAMPLE)
    told = {}
    for pid, first in before.items():
        with suppress(psutil.Error, OSError):
            state = psutil.Process(pid).status()
            used = (_used(pid) - first) / SAMPLE
            told[pid] = WORDS.get(state) or (
                f"computes ({100 * used:.0f} % of a core)" if used > COMPUTES else "sleeps"
            )
    return told


WORDS = {
    psutil.STATUS_STOPPED: "is stopped",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits for a disk",
    psutil.STATUS_ZOMBIE: "has ended",
}


def _used(pid: int) -> float:
    """Return the processor time of a process in seconds."""
    with suppress(psutil.Error, OSError):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
