"""A process a lane: the same rows as in one process, and the dead and the hung are named and gone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from freewheel.core import Env, NDArray
from freewheel.envs.gym import GymConfig
from freewheel.envs.processes import LaneProcesses
from freewheel.errors import EnvError, SetupError
from freewheel.rollout.factory import Timeouts
from freewheel.seeding import drawn, training_episodes
from freewheel.testing.conformance import check_env
from tests.support.places import ROOT
from tests.support.worlds import Counter, Identity

LANES = range(2, 5)
ONES = np.ones(3, np.int64)


def streams(lanes: range = LANES) -> list[Any]:
    return [training_episodes(0, lane) for lane in lanes]


def config(world: str, args: dict[str, Any], **options: Any) -> GymConfig:
    return GymConfig(f"tests.support.worlds:{world}", args, **options)


def in_processes(env: Env) -> LaneProcesses:
    assert isinstance(env, LaneProcesses)
    return env


def workers(env: Env) -> list[psutil.Process]:
    return [psutil.Process(process.pid) for process in in_processes(env).processes]


@contextmanager
def takes_at_most(seconds: float) -> Iterator[None]:
    """Far more than it should take, and far less than what hangs would."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


def nested() -> gymnasium.Env[Any, Any]:
    """A world of its own spaces, a mask in info, a shaped and scaled action or a shifted one: made here, so sent by value."""

    class Nested(Counter):
        def __init__(self) -> None:
            super().__init__(length=4)
            self.observation_space: gymnasium.Space[Any] = Dict(
                pair=Tuple([Box(0, 1000, (1,), np.float64), Discrete(9)]), noise=Box(-9, 9, (2, 1), np.float32)
            )
            self.action_space: gymnasium.Space[Any] = Discrete(3, start=5)

        def shown(self, seen: NDArray, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            noise = self.np_random.normal(size=(2, 1)).astype(np.float32)
            shown = {"pair": (seen[:1].astype(np.float64) / 3, int(seen[1])), "noise": noise}
            return shown, {**info, "action_mask": np.array([1, self.count % 2, 1], np.int8)}

        def reset(self, **given: Any) -> Any:
            return self.shown(*super().reset(**given))

        def step(self, action: Any) -> Any:
            seen, _, *ends, info = super().step(action)
            assert type(action) is int
            observation, info = self.shown(seen, {**info, "sum": action / 3})
            return observation, action / 7, *ends, info

    return Nested()


def roll(env: Env, steps: int) -> list[dict[str, Any]]:
    """All that an Env says, as bytes."""
    rng = np.random.default_rng(0)
    said: list[dict[str, Any]] = [{"first": env.reset(streams()).tobytes()}]
    for _ in range(steps):
        action = env.spec.action
        box = rng.uniform(-1.5, 1.5, (3, action.size)).astype(np.float32)
        step = env.step(box if action.kind == "box" else rng.integers(action.size, size=3))
        names = ("reward", "terminated", "truncated", "next_obs", "valid")
        row = {name: getattr(step, name).tobytes() for name in names}
        over = step.terminated | step.truncated
        said.append({**row, "measures": step.measures[over].tobytes(), "obs": env.autoreset().tobytes()})
    return said


PENDULUM = GymConfig("Pendulum-v1", max_episode_steps=30)
NESTED = GymConfig("Nested", factory=nested, measures=("sum", "count"))


@pytest.mark.parametrize("world", [PENDULUM, NESTED], ids=lambda world: world.name)
def test_processes_say_the_same_as_a_loop_bit_for_bit(world: GymConfig) -> None:
    with closing(world.make(LANES)) as loop, closing(world.make(LANES, processes=True)) as processes:
        assert processes.spec == loop.spec
        assert roll(processes, 70) == roll(loop, 70)


def test_a_world_in_processes_conforms() -> None:
    check_env(lambda lanes: GymConfig("CartPole-v1").make(lanes, processes=True))


def test_an_ended_episode_brings_its_measures_and_its_successor() -> None:
    with closing(config("Counter", {"length": 2}, measures=("count",)).make(LANES, processes=True)) as env:
        env.reset(streams())
        assert env.step(ONES).reset_ns == 0
        end = env.step(ONES)
        assert end.next_obs.tolist() == [[stream.seed(0) % 1000, 2] for stream in streams()]
        assert env.autoreset().tolist() == [[stream.seed(1) % 1000, 0] for stream in streams()]
        assert end.measures.tolist() == [[2], [2], [2]]
        assert end.reset_ns > 0, "workers reset within the step"
        assert env.render() is None


def test_lanes_in_processes_are_told_their_contexts() -> None:
    """Those that begin within a step too; and a table that is there already is not sent again."""
    check_env(lambda lanes: config("Conditioned", {"length": 4}).make(lanes, processes=True), steps=40)
    table = np.array([[1, 2], [3, 4]], np.float32)
    with closing(config("Conditioned", {}).make(LANES, processes=True)) as env:
        asked: list[str] = []
        barrier = in_processes(env)._barrier
        ask = barrier.ask
        barrier.ask = lambda values: asked.append(values[0][0]) or ask(values)  # type: ignore[func-returns-value, method-assign]
        for context in (table, table.copy(), table + 1):
            env.set_context(context)
        assert asked == ["set_context", "set_context"]
        barrier.ask = ask  # type: ignore[method-assign]
        assert env.reset(streams())[:, 1:].tolist() == [drawn(table + 1, own.seed(0)).tolist() for own in streams()]


def fails(env: Env, cause: str = "env_error") -> list[str]:
    """The report of the EnvError that a few steps end in."""

    def play() -> None:
        env.reset(streams())
        for _ in range(4):
            env.step(ONES)
            env.autoreset()

    with closing(env), pytest.raises(EnvError) as caught:
        play()
    assert (type(caught.value.report), caught.value.cause) == (str, cause)
    assert str(caught.value) == caught.value.report
    return caught.value.report.splitlines()


def test_a_worker_that_is_killed_between_steps_is_named() -> None:
    env = config("Counter", {"length": 3}).make(LANES, processes=True)
    env.reset(streams())
    for _ in range(4):
        env.step(ONES)
    victim = workers(env)[1]
    victim.kill()
    psutil.wait_procs([victim], timeout=30)
    with closing(env), takes_at_most(30.0), pytest.raises(EnvError) as caught:
        env.step(ONES)
    where = f"(episode 1, seed {training_episodes(0, 3).seed(1)}, step 2, last action 1)"
    assert caught.value.report == f"lane 3 of tests.support.worlds:Counter died (exit code -9) {where}"


@pytest.mark.parametrize(
    ("name", "lane", "at", "options", "what"),
    [
        ("Dies", 3, 2, {}, "died (exit code -9)"),
        ("Hangs", 4, 2, {"timeouts": Timeouts(step=0.5)}, "did not answer within 0.5 s"),
        ("Hangs", 4, 0, {"timeouts": Timeouts(reset=0.5)}, "did not answer within 0.5 s"),
    ],
    ids=["dies", "hangs in a step", "hangs in a reset, deaf to SIGTERM"],
)
def test_a_worker_that_dies_or_hangs_is_named_and_takes_the_others_along(
    name: str, lane: int, at: int, options: dict[str, Any], what: str
) -> None:
    seed = training_episodes(0, lane).seed(0)
    args = {"at": at, "only_seed": seed} | ({} if at else {"deaf": True})
    env = config(name, args, **options).make(LANES, processes=True)
    alive = workers(env)
    with takes_at_most(30.0):
        report = fails(env, "worker_death")
    where = f"(episode 0, seed {seed}, {'step 2, last action 1' if at else 'in reset'})"
    assert report == [f"lane {lane} of tests.support.worlds:{name} {what} {where}"]
    assert not [process for process in alive if process.is_running()]


def test_a_constructor_that_hangs_or_dies_is_named() -> None:
    def hangs() -> Any:
        time.sleep(600)

    def dies() -> Any:
        os._exit(3)

    with takes_at_most(30.0), pytest.raises(EnvError) as caught:
        GymConfig("Slow", factory=hangs, timeouts=Timeouts(construct=0.5)).make(LANES, processes=True)
    late = r"^lane [234] of Slow( and [12] more)? did not answer within 0\.5 s \(before its first episode\)$"
    assert re.search(late, caught.value.report)
    with pytest.raises(EnvError) as caught:
        GymConfig("Gone", factory=dies).make(LANES, processes=True)
    gone = r"^lane [234] of Gone( and [12] more)? died \(exit code 3\) \(before its first episode\)$"
    assert re.search(gone, caught.value.report)


def test_a_lane_that_comes_up_differently_is_named(tmp_path: Path) -> None:
    def differs() -> gymnasium.Env[Any, Any]:
        try:
            (tmp_path / "seen").touch(exist_ok=False)
        except FileExistsError:
            return Identity(3)
        return Identity(4)  # the first that comes

    with pytest.raises(SetupError, match=r"^lane [34] of Odd has different spaces from earlier lanes"):
        GymConfig("Odd", factory=differs).make(LANES, processes=True)


def test_an_env_that_raises_reports_from_its_process_and_the_others_live_on() -> None:
    seed = training_episodes(0, 3).seed(1)
    env = config("Raises", {"at": 1, "only_seed": seed, "length": 2}).make(LANES, processes=True)
    with closing(env):
        env.reset(streams())
        for _ in range(2):
            env.step(ONES)
        with pytest.raises(EnvError) as caught:
            env.step(ONES)
        report = caught.value.report.splitlines()
        where = f"(episode 1, seed {seed}, step 1, last action 1)"
        assert report[0] == f"lane 3 of tests.support.worlds:Raises raised ValueError: boom {where}"
        assert report[1] == "Traceback (most recent call last):"
        assert report[-1] == "ValueError: boom"
        env.reset([training_episodes(0, lane, start=7) for lane in LANES])
        assert env.step(ONES).reward.tolist() == [1, 1, 1]


def test_an_env_that_raises_in_its_own_reset_or_lies_reports_too() -> None:
    seed = training_episodes(0, 2).seed(1)
    report = fails(config("Raises", {"at": 0, "only_seed": seed, "length": 2}).make(LANES, processes=True))
    assert report[0].endswith(f"Raises raised ValueError: boom (episode 1, seed {seed}, in reset)")
    report = fails(config("WrongShape", {"at": 2}).make(LANES, processes=True), "shape")
    assert "gave a wrong observation in step(): obs: expected shape (2,), got (1,)" in report[0]


@pytest.mark.parametrize(
    ("world", "text"),
    [
        (GymConfig("CartPol-v1"), "unknown environment 'CartPol-v1'; did you mean 'CartPole-v1'?"),
        (GymConfig("Stuck", {"ends": (x for x in "")}, factory=Counter), "Stuck cannot be pickled for another process"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_cannot_be_made_is_explained_in_a_line(world: GymConfig, text: str) -> None:
    with pytest.raises(SetupError) as caught:
        world.make(LANES, processes=True)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_close_twice_and_nothing_is_left() -> None:
    def cycle() -> int:
        env = config("Counter", {}).make(LANES, processes=True)
        alive = workers(env)
        assert len(alive) == 3
        env.close()
        env.close()
        assert not [process for process in alive if process.is_running()]
        return len(os.listdir("/proc/self/fd"))

    assert cycle() == cycle(), "descriptors do not pile up"


def test_an_interrupt_is_left_to_the_trainer() -> None:
    with closing(config("Counter", {"length": 99}).make(LANES, processes=True)) as env:
        env.reset(streams())
        for process in workers(env):
            process.send_signal(signal.SIGINT)
        assert [env.step(ONES).reward.tolist() for _ in range(3)] == [[1, 1, 1], [2, 2, 2], [3, 3, 3]]


@pytest.mark.system
def test_an_env_that_hangs_in_close_can_be_used() -> None:
    def never_closed() -> gymnasium.Env[Any, Any]:
        class NeverClosed(Counter):
            def close(self) -> None:
                time.sleep(600.0)

        return NeverClosed()

    made = GymConfig("NeverClosed", factory=never_closed, timeouts=Timeouts(construct=20.0))
    with closing(made.make(range(2), processes=True)) as env:
        env.reset(streams(range(2)))
        assert env.step(np.ones(2, np.int64)).reward.tolist() == [1, 1]


def test_workers_do_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # a worker must not inherit it either

    def witness() -> gymnasium.Env[Any, Any]:
        class Witness(Counter):
            def judge(self, action: Any) -> float:
                return float("torch" in sys.modules)

        return Witness()

    with closing(GymConfig("Witness", factory=witness).make(range(2), processes=True)) as env:
        env.reset(streams(range(2)))
        assert env.step(np.ones(2, np.int64)).reward.tolist() == [0, 0]


SCRIPT = """
import os, sys, time
import numpy as np
from freewheel.envs.gym import GymConfig
from freewheel.seeding import training_episodes
from tests.support.worlds import Counter

print("script", flush=True)

class Mine(Counter):
    def judge(self, action):
        if HANG:
            os.write(1, b"hung\\n")
            time.sleep(600)
        return 42.0

env = GymConfig(factory=Mine).make(range(2), processes=True)
env.reset([training_episodes(0, lane) for lane in range(2)])
print(env.spec.name, env.step(np.zeros(2, np.int64)).reward.tolist(), __file__ == sys.argv[0], __spec__)
env.close()
"""


@contextmanager
def script(folder: Path, *, hang: bool) -> Iterator[subprocess.Popen[str]]:
    path = folder / "unguarded.py"
    path.write_text(SCRIPT.replace("HANG", str(hang)))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path)]
    with subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    with script(tmp_path, hang=False) as process:
        out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("script\nMine [42.0, 42.0] True None\n", "", 0)


@pytest.mark.system
def test_the_death_of_the_trainer_takes_hung_workers_along(tmp_path: Path) -> None:
    with script(tmp_path, hang=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["script\n", "hung\n", "hung\n"]
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=30)
    assert len(family) >= 2
    assert alive == []
