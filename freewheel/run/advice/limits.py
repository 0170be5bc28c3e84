"""Checks by arithmetic, before anything starts, whether this machine can hold a run: memory, time, files, processes."""

from __future__ import annotations

import itertools
import math
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from freewheel.collect.workers import WORKER_MEMORY, WorkersConfig
from freewheel.config.resolve import Config
from freewheel.core import BatchSpec
from freewheel.errors import SetupError, UsageError
from freewheel.files.memory import Need, require_memory
from freewheel.learn.spec import LearnerSpec
from freewheel.policies.spec import PolicySpec

LEAST_ENV = 10 << 10  # bytes of an environment in this process, at least
LEAST_STEP = 20e-6  # seconds of a gradient step, at least
FASTEST, CORE = 1e15, 2e11  # operations per second of any device and of a core, at most
DAY = 86_400.0
DESCRIPTORS = 4  # that the trainer holds for each process with environments
SPARE = 40  # descriptors for everything else: files, libraries, evaluation processes
SPARE_PROCESSES = 8  # the fork server, the survey, evaluation processes, threads


def check_sizes(config: Config) -> None:
    """Refuse a run that cannot fit with any environment. This runs before anything is started."""
    collector = config.collector
    lanes, workers = collector.lanes, collector.worker_count if isinstance(collector, WorkersConfig) else 0
    _check_episodes(config)
    needs = [] if config.env.on_device else [Need(lanes, "envs", LEAST_ENV, "--num-envs")]
    if workers:
        needs.append(Need(workers, "workers", WORKER_MEMORY, "--workers"))
    batch = BatchSpec(steps=config.run.steps_per_env, lanes=lanes)
    one, hidden, module = ((0, 1),), config.policy.hidden, config.policy.module
    least = PolicySpec(1, "float32", one, one, (), None, "categorical", 1, hidden, "tanh", 0.0, module)
    check_learner(config, LearnerSpec(policy=least, batch=batch, seed=0, total_steps=config.horizon), needs)


def check_learner(config: Config, spec: LearnerSpec, others: list[Need]) -> None:
    """Raise SetupError if the run does not fit into memory, or one update takes over a day or --minutes."""
    on_device = spec.compute.device != "cpu"  # a GPU has separate memory
    require_memory([*others, *(() if on_device else config.learner.needs(spec))])
    steps, rows = config.learner.gradient_steps(spec), spec.batch.rows
    weights = (
        0 if spec.policy.module else sum(need.count for need in config.learner.needs(spec) if need.what == "weights")
    )
    fastest, epochs = FASTEST if on_device else CORE * config.run.machine.threads, getattr(config.learner, "epochs", 1)
    draws = 0.0 if spec.policy.module else sum(_drawn(spec.policy.hidden))
    seconds = steps * LEAST_STEP + 6.0 * weights * rows * epochs / fastest
    if seconds > DAY:
        arithmetic = f"{steps:,} gradient steps of at least {LEAST_STEP * 1e6:.0f} µs"
        raise SetupError(
            f"one update on {rows:,} rows would take {seconds / DAY:,.1f} days ({arithmetic}), and nothing is saved "
            f"until then: use fewer --{config.algo}.epochs, larger minibatches or fewer rows (--num-steps-per-env)"
        )
    minutes, first = config.run.budget.minutes or math.inf, (seconds + draws / CORE) / 60
    if first > minutes:
        raise SetupError(
            f"--minutes {minutes:g} would end before the first update: {weights:,} weights and {rows:,} rows take at least "
            f"{first:.2g} minutes here; use a smaller --policy.hidden, fewer rows or more time"
        )


def _drawn(hidden: Sequence[int]) -> Iterator[float]:
    """Yield the operations per layer that make the initial weights orthogonal, in one thread."""
    for before, after in itertools.pairwise(hidden):
        low, high = sorted((before, after))
        yield 2 * 4 * low * low * (high - low / 3)


def check_machine(config: Config, processes: int) -> None:
    """Raise SetupError if descriptors or process limits do not allow this many processes with environments."""
    if not processes:
        return
    option = "--workers" if isinstance(config.collector, WorkersConfig) else "--num-envs"
    _check_descriptors(processes, option)
    _check_processes(processes, option)


def _check_episodes(config: Config) -> None:
    """Raise UsageError if the run ends before the first update. Every episode has at least one step."""
    wanted, budget = config.collector.episodes_per_update, config.run.budget
    for option, limit in (("--episodes", budget.episodes), ("--steps", budget.steps)):
        if wanted is not None and limit is not None and wanted > limit:
            raise UsageError(
                f"--episodes-per-update {wanted:,} is more than {option} {limit:,}: nothing would be learned"
            )


def _check_descriptors(processes: int, option: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = psutil.Process().num_fds() + SPARE + DESCRIPTORS * processes
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard == resource.RLIM_INFINITY or need <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need if hard == resource.RLIM_INFINITY else hard, hard))
        return
    most = (hard - need + DESCRIPTORS * processes) // DESCRIPTORS
    remedy = f"use {option} {most} or fewer, or a higher limit" if most > 0 else "use a higher limit"
    arithmetic = f"{processes:,} processes x {DESCRIPTORS} + {need - DESCRIPTORS * processes} = {need:,} open files"
    raise SetupError(f"{arithmetic}, but ulimit -n allows {hard:,}: {remedy} (ulimit -n {need})")


def _check_processes(processes: int, option: str) -> None:
    need = processes + SPARE_PROCESSES
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:  # root has no limit
        _refuse_processes(need, _running(), limit, f"{option} is too much for ulimit -u")
    with suppress(OSError, ValueError):  # "max" means no limit
        group = Path("/sys/fs/cgroup")
        limit, running = (int((group / name).read_text()) for name in ("pids.max", "pids.current"))
        _refuse_processes(need, running, limit, f"{option} is too much for the container's limit")


def _refuse_processes(need: int, running: int, limit: int, what: str) -> None:
    if running + need > limit:
        room = max(0, limit - running - SPARE_PROCESSES)
        arithmetic = f"{need:,} more processes, and {running:,} are running of {limit:,} allowed"
        raise SetupError(
            f"{what}: {arithmetic}; use {room} or fewer, or raise the limit" if room else f"{what}: {arithmetic}"
        )


def _running() -> int:
    """Return the number of threads in all processes of this user."""
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid():
                count += process.num_threads()
    return count
