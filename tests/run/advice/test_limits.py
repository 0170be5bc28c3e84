"""R26: what this machine cannot hold is refused before anything is started, with the arithmetic and what to type."""

from __future__ import annotations

import os
import resource
from contextlib import nullcontext
from typing import Any

import pytest

from freewheel.config.resolve import Config, from_argv
from freewheel.core import ActionSpec, EnvSpec, Slice
from freewheel.errors import SetupError
from freewheel.files import memory
from freewheel.run.advice import limits

WORLD = EnvSpec("CartPole-v1", 40, 4, "float32", (Slice("obs", 0, 4, (4,)),), ActionSpec("discrete", 2))
WORKERS = from_argv(["CartPole-v1", "--mode", "continuous", "--workers", "40", "--num-envs", "40"])
LANES = from_argv(["CartPole-v1", "--mode", "lockstep", "--num-envs", "40", "--placement", "processes"])
INLINE = from_argv(["CartPole-v1", "--mode", "lockstep", "--num-envs", "40", "--placement", "inline"])


def limited(monkeypatch: pytest.MonkeyPatch, which: int, soft: int, hard: int) -> list[Any]:
    """What setrlimit is called with, where this limit is as given."""
    real, calls = resource.getrlimit, list[Any]()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard) if kind == which else real(kind))
    monkeypatch.setattr(resource, "setrlimit", lambda *given: calls.append(given))
    return calls


@pytest.mark.parametrize(("config", "option"), [(WORKERS, "--workers"), (LANES, "--num-envs")])
def test_too_few_open_files_for_the_processes(config: Config, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, resource.RLIMIT_NOFILE, 64, 64)
    with pytest.raises(SetupError, match=r"^40 processes x 4 \+ \d+ = \d+ open files, but ulimit -n allows 64: use .*"):
        limits.check_machine(config, 40)
    limited(monkeypatch, resource.RLIMIT_NOFILE, 150, 150)
    with pytest.raises(SetupError, match=rf"use {option} \d+ or fewer, or a higher limit \(ulimit -n \d+\)"):
        limits.check_machine(config, 40)
    limits.check_machine(INLINE, INLINE.collector.env_processes)


def test_a_soft_limit_is_raised_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = limited(monkeypatch, resource.RLIMIT_NOFILE, 64, 4096)
    limits.check_machine(WORKERS, 40)
    assert calls == [(resource.RLIMIT_NOFILE, (4096, 4096))]


def test_too_few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, resource.RLIMIT_NPROC, 100, 100)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(limits, "_running", lambda: 70)
    more = "48 more processes, and 70 are running of 100 allowed; use 22 or fewer"
    with pytest.raises(SetupError, match=f"--workers is too much for ulimit -u: {more}"):
        limits.check_machine(WORKERS, 40)
    monkeypatch.setattr(limits, "_running", lambda: 10)
    limits.check_machine(WORKERS, 40)
    assert limits._running() == 10


def test_the_processes_of_this_user_are_counted() -> None:
    assert limits._running() >= 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--policy.hidden 20000 20000", r"^800,1\d\d,\d\d\d weights x 40 bytes = 30 GB.* but 21 GB of memory are free"),
        ("--policy.hidden 9000 9000 --minutes 0.2", "^--minutes 0.2 would end before the first update: 162,.* weights"),
        ("--policy.hidden 64 64 --minutes 0.2", ""),
        ("--policy.hidden 6000 6000", ""),
    ],
)
def test_a_network_that_would_not_learn_here(monkeypatch: pytest.MonkeyPatch, words: str, told: str) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 21 << 30)
    config = from_argv(["CartPole-v1", *words.split()])
    with pytest.raises(SetupError, match=told) if told else nullcontext():
        limits.check_sizes(config)
