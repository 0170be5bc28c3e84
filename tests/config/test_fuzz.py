"""R18: any config is planned, or refused by one line of ours that names an option, in a second and before a process starts."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import random
import re
import time
import typing
from pathlib import Path
from typing import Any

import pytest

from freewheel.collect.mode import MODES
from freewheel.config import flags
from freewheel.config.resolve import _all_options, from_argv, from_file, options_of
from freewheel.core import ActionSpec, EnvSpec, Slice
from freewheel.envs.family import WORLDS
from freewheel.errors import FreewheelError, Range
from freewheel.learn.spec import ALGORITHMS
from freewheel.rollout.probe import EnvCost
from freewheel.run.advice.limits import check_sizes
from freewheel.run.naming import name_run
from freewheel.run.planning import arrange
from freewheel.transport import forkserver
from tests.support.places import LONG

CASES = 10_000 if LONG else 150

ELSE = ("config", "environment", "option")  # what a message may be about, besides options
SLICES = (Slice("obs", 0, 4, (4,)),)
DISCRETE, BOUNDED = ActionSpec("discrete", 2), ActionSpec("box", 1, (-1.0,), (1.0,))
COSTS = {
    name: EnvCost(spec=EnvSpec(name, 1, 4, "float32", SLICES, action), wall=1e-5, row=1e-5, cpu=1e-5, memory=1 << 16)
    for name, action in (("CartPole-v1", DISCRETE), ("Pendulum-v1", BOUNDED))
}
WHOLE = (0, -1, 1, 2, 7, 64, 10**3, 10**6, 10**9, 10**12, 2**31, 2**63, 10**30)
REAL = ("nan", "inf", "-inf", 0.0, -1.5, 0.5, 1.0, 1.5, 1e-300, 1e12, 1e300)
ODD: tuple[Any, ...] = ("", "x", "auto", "none", "True", "../..", "0x10", "1e5", "é", "a b", "--steps", "\n")
ODD += (None, True, [], [1, 2], [[1]], {"a": 1})


def value(rng: random.Random, kind: Any) -> Any:
    """Mostly of the option's type, seldom a sensible one."""
    if rng.random() < 0.2:
        return rng.choice(ODD)
    kinds = {kind, *typing.get_args(kind)}
    if typing.get_origin(kind) is tuple:
        return [value(rng, typing.get_args(kind)[0]) for _ in range(rng.randrange(5))]
    if typing.get_origin(kind) is typing.Literal:
        return rng.choice(typing.get_args(kind))
    if int in kinds:
        return rng.choice(WHOLE)
    return rng.choice(REAL) if float in kinds else rng.choice(ODD)


def drawn(rng: random.Random) -> dict[str, Any]:
    """One to six options of one environment, algorithm and mode; now and then a name that is none."""
    algo = rng.choice(("ppo", "sac", "mbpo"))
    known = {name: kind for name, kind in _all_options().items() if name not in ("config", "init", "hooks", "device")}
    names = [name for name in known if name.partition(".")[0] in (algo, "policy") or "." not in name]
    options = {name: value(rng, known[name]) for name in rng.sample(names, rng.randint(1, 6))}
    usual = {"env": rng.choice(tuple(COSTS)), "algo": algo}
    usual["mode"] = rng.choice(("sequential", "lockstep", "continuous", "batch"))
    odd = {rng.choice(("stepz", "ppo.x", "a.b.c", "-", "env_args", "")): rng.choice(ODD)} if rng.random() < 0.1 else {}
    return {**usual, **options, **odd}


def attempt(options: dict[str, Any], place: Path, *, as_file: bool) -> str:
    """What is wrong with a config; empty: it was planned."""
    try:
        if as_file:
            place.write_text(json.dumps(options))
            config = from_file(place)
        else:
            config = from_argv([word for name, given in options.items() for word in words(name, given)])
        check_sizes(config)
        if (cost := COSTS.get(config.env.name)) is not None:
            arrange(config, cost, name_run(config), "cpu")
    except FreewheelError as error:
        return str(error)
    return ""


def words(name: str, given: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag, *map(str, given)] if isinstance(given, list) else [f"{flag}={given}"]


@pytest.mark.timeout(3_000 if LONG else 60)
def test_random_configs_are_planned_or_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        forkserver, "start_process", lambda *_, **__: pytest.fail("a process was started"), raising=False
    )
    importlib.import_module("torch")  # as the first plan that measures a learner does, which takes a second
    rng, planned, slowest = random.Random(13), 0, 0.0
    for number in range(CASES):
        options = drawn(rng)
        began = time.process_time()
        problem = attempt(options, tmp_path / "c.json", as_file=number % 2 == 0)
        if (took := time.process_time() - began) > 0.5:  # once more: the collector of garbage may have come by
            began = time.process_time()
            attempt(options, tmp_path / "c.json", as_file=number % 2 == 0)
            took = min(took, time.process_time() - began)
        slowest = max(slowest, took)
        planned += not problem
        if problem:
            assert "\n" not in problem, (options, problem)
            assert len(problem) < 600, (options, problem)
            names = {part for name in (*_all_options(), *options, *ELSE) for part in re.split(r"[._]", name) if part}
            assert any(name in problem for name in names), (options, problem)
    assert planned > CASES / 50, planned
    assert slowest < 1.0, slowest


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num-envs 1e9", r"--num-envs must be at most 10,000,000, not 1,000,000,000"),
        ("--num-envs 1e7", r"10,000,000 envs x 10 KB = 95 GB.* 23 GB of memory are free: use a smaller --num-envs"),
        ("--mode continuous --workers 9000", r"9,000 workers x 12 MB = 105 GB, but 23 GB of memory are free"),
        ("--ppo.epochs 1e12", r"--ppo\.epochs must be at most 10,000, not 1,000,000,000,000"),
        ("--eval-episodes 1e12", r"--eval-episodes must be at most 1,000,000"),
        ("--mode episodes --episodes-per-update 1e12", r"--episodes-per-update must be at most 10,000,000"),
        ("--mode episodes --episodes-per-update 200000",
         r"--episodes-per-update 200,000 is more than --steps 100,000: nothing would be learned"),
        ("--policy.hidden 1e6 1e6", r"2,000,00\d,\d+ weights x 40 bytes|weights x .* --policy\.hidden"),
        ("--policy.hidden 1e9", r"--policy\.hidden must be at most 1,000,000, not 1,000,000,000"),
        ("--algo sac --sac.buffer 1e10 --steps 1e10", r"10,000,000,\d+ rows of the replay buffer x .* --sac\.buffer"),
        ("--num-steps-per-env 1e7 --num-envs 1000", r"rows of an update x .* --num-steps-per-env"),
        ("--ppo.epochs 10000 --ppo.minibatch 1 --num-steps-per-env 100000 --num-envs 8",
         r"one update on 800,000 rows would take 1\.9 days \(8,000,000,000 gradient steps of at least 20 µs\)"),
        ("--ppo.lr inf", r"--ppo\.lr must be positive, not inf"),
        ("--ppo.lr nan", r"--ppo\.lr must be positive, not nan"),
        ("--ppo.gamma 1.5", r"--ppo\.gamma must lie in 0\.\.1, not 1\.5"),
        ("--step-timeout 1e12", r"--step-timeout must be at most 10,000,000"),
        ("--policy.log-std 1e9", r"--policy\.log-std must be at most 20"),
        ("--seed 1e30", r"--seed must be at most 9,223,372,036,854,775,8"),
        ("--mode continuous --max-queue-size 1e12", r"--max-queue-size must be at most"),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_with_arithmetic(argv: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freewheel.files.memory.free_memory", lambda: 23 << 30)
    with pytest.raises(FreewheelError, match=message):
        check_sizes(from_argv(["CartPole-v1", *argv.split()]))


def test_every_numeric_option_has_a_range() -> None:
    choices = itertools.product(ALGORITHMS.ours, MODES.ours, WORLDS.ours.values())
    assert {name for choice in choices for name in unranged(options_of(*choice))} == set()


def unranged(kind: Any) -> set[str]:
    """The numeric options of a dataclass, and of those in it, that declare no range."""
    found, hints = set[str](), typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        bare, *marks = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        if dataclasses.is_dataclass(bare):
            found |= unranged(bare)
        elif hint is not flags.Table and {int, float} & {bare, *typing.get_args(bare)}:
            found |= set() if any(isinstance(mark, Range) for mark in marks) else {f"{kind.__name__}.{field.name}"}
    return found
