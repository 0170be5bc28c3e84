"""Random actions are allowed and uniform; what an env costs is measured."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from freewheel.core import ActionSpec, EnvSpec, Slice
from freewheel.envs.gym import GymConfig
from freewheel.errors import EnvError
from freewheel.rollout.probe import SURVEYED, EnvCost, Watch, measured, random_actions
from tests.support.worlds import Counter, Raises

LANES = 30_000


def spec(action: ActionSpec, *slices: Slice) -> EnvSpec:
    return EnvSpec("Toy-v0", LANES, 5, "float32", slices, action)


def test_box_actions_are_uniform_between_the_bounds() -> None:
    action = random_actions(spec(ActionSpec("box", 2)), np.zeros((LANES, 5)), np.random.default_rng(0))
    assert action.shape == (LANES, 2)
    assert action.dtype == np.float32
    assert np.abs(action).max() <= 1
    assert np.abs(action.mean(axis=0)).max() < 4 / np.sqrt(3 * LANES)
    assert action.var(axis=0) == pytest.approx(1 / 3, rel=0.03)


@pytest.mark.parametrize("allowed", [[1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 0, 1]])
def test_discrete_actions_are_uniform_over_the_allowed_ones(allowed: list[int]) -> None:
    masked = spec(ActionSpec("discrete", 3), Slice("action_mask", 1, 4, (3,)))
    obs = np.tile(np.array([9, *allowed, 9], np.float32), (LANES, 1))
    action = random_actions(masked, obs, np.random.default_rng(0))
    counts = np.bincount(action, minlength=3)
    expected = LANES / sum(allowed)
    assert action.dtype == np.int64
    assert not counts[np.array(allowed) == 0].any()
    assert np.abs(counts[np.array(allowed) == 1] - expected).max() < 4 * np.sqrt(expected)


def test_without_a_mask_all_actions_are_allowed() -> None:
    action = random_actions(spec(ActionSpec("discrete", 4)), np.zeros((LANES, 5)), np.random.default_rng(0))
    assert np.bincount(action, minlength=4) == pytest.approx(LANES / 4, abs=4 * np.sqrt(LANES / 4))


class Clock(Counter):
    """Its steps and resets take seconds of a false clock: the first step 100, a reset 7; half of them are computing."""

    def __init__(self, cost: float, length: int = 2) -> None:
        super().__init__(length)
        self.cost, self.seconds, self.taken = cost, 50.0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.seconds += 7.0
        return super().reset(seed=seed, options=options)

    def judge(self, action: Any) -> float:
        self.taken += 1
        self.seconds += self.cost if self.taken > 1 else WARM_UP
        return super().judge(action)


WARM_UP = 100.0


def measured_by(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, budget: float, most_steps: int = 0, stolen: float = 0.0
) -> EnvCost:
    monkeypatch.setattr("freewheel.rollout.probe.perf_counter", lambda: clock.seconds)
    monkeypatch.setattr("freewheel.rollout.probe.process_time", lambda: clock.seconds / 2)
    monkeypatch.setattr("freewheel.rollout.probe._stolen", lambda _: clock.seconds * stolen)
    with measured(GymConfig("Clock", factory=lambda: clock).make, 3, budget=budget, most_steps=most_steps) as cost:
        return cost


@pytest.mark.parametrize(
    ("cost", "budget", "most_steps", "steps", "resets"),
    [
        (0.001, 999.0, 20, 20, 10),  # as many steps as allowed
        (0.1, 107.25, 0, 29, 15),  # as many as there is time for, resets included
        (0.1, 11.0, 0, 3, 2),  # the first step took most of the time, but it may have been a start
        (0.1, 9.0, 0, 1, 0),  # the first step has used far more than the time: it counts
    ],
)
def test_time_is_measured_after_a_warm_up_and_within_a_budget(
    monkeypatch: pytest.MonkeyPatch, cost: float, budget: float, most_steps: int, steps: int, resets: int
) -> None:
    clock = Clock(cost)
    found = measured_by(clock, monkeypatch, budget, most_steps)
    if steps == 1:
        assert (found.wall, found.row, found.steps, clock.taken) == (WARM_UP, WARM_UP, 1, 1)
        return
    assert (found.steps, clock.taken) == (steps, steps + 1)
    assert found.resets == resets + 1
    assert (found.wall, found.median, found.longest) == pytest.approx((cost, cost, cost))
    assert found.row == pytest.approx(cost + 7.0 * resets / steps)
    assert found.cpu == pytest.approx(found.row / 2)
    assert found.reset == pytest.approx(7.0)
    assert found.duty == pytest.approx(0.5)


def test_what_other_processes_take_is_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_by(Clock(1.0), monkeypatch, 999.0, 20, stolen=0.5)
    assert found.stolen == pytest.approx(found.row / 2)
    assert found.duty == pytest.approx(1.0), "all that it could compute"


def test_an_env_of_many_short_steps_takes_a_fifteenth_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_by(Clock(0.01, length=10**6), monkeypatch, 150.0).steps == pytest.approx(1000, abs=1)


class UnevenClock(Clock):
    """One step in a hundred takes a hundred times as long."""

    def judge(self, action: Any) -> float:
        self.seconds += 0.99 if self.taken % 100 == 0 else 0.0
        return super().judge(action)


def test_uneven_steps_are_measured_until_their_mean_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_by(UnevenClock(0.01, length=10**6), monkeypatch, 150.0)
    assert 3000 < found.steps < 10_000, "100 times 1 s in 20 s of steps are 5 % certain after 10,000 steps"
    assert found.wall == pytest.approx(0.02, rel=0.05)


def test_the_times_that_are_kept_are_spread_as_those_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_by(UnevenClock(0.01, length=2), monkeypatch, 9e9, 1000)
    assert len(found.times) == 200
    assert sum(found.times) / 200 == pytest.approx(found.wall)
    assert sum(time > 0.5 for time in found.times) == 2
    assert set(found.lengths) == {2}


def test_a_hiccup_is_not_usual() -> None:
    cost = EnvCost(spec=spec(ActionSpec("box", 1)), wall=0.02, row=0.03, cpu=0.0, longest=1.01, steps=100)
    assert cost.usual == pytest.approx(0.02), "steps of 0.01 s and resets"


class Simulator(Counter):
    """A child process computes for it and holds memory."""

    def __init__(self, megabytes: int = 30, seconds: float = 0.01) -> None:
        super().__init__(100)
        code = f"""if True:
            import sys, time
            held = b"x" * ({megabytes} << 20)
            for line in sys.stdin:
                began = time.process_time()
                while time.process_time() - began < {seconds}:
                    pass
                print(flush=True)
        """
        self.child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def judge(self, action: Any) -> float:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(b"go\n")
        self.child.stdin.flush()
        self.child.stdout.readline()
        return super().judge(action)

    def close(self) -> None:
        self.child.communicate()


def test_child_processes_count_with_their_processor_time_and_memory() -> None:
    with measured(GymConfig("Simulator", factory=Simulator).make, 0) as cost:
        assert cost.children == 1
        assert 30 << 20 < cost.memory < 80 << 20
        assert 0.009 < cost.cpu < 0.05
        assert cost.duty > 0.5


@pytest.mark.parametrize("world", [Raises, lambda: Raises(at=2), lambda: Raises(at=0)])
def test_an_env_that_does_little_but_fail_is_refused_with_its_own_traceback(world: Any) -> None:
    with pytest.raises(EnvError, match=r"raised ValueError: boom \(.*seed(.|\n)*in fail"):
        measured(GymConfig("Raises", factory=world).make, 0).__enter__()


def test_an_env_that_fails_now_and_then_is_measured() -> None:
    make = GymConfig("Raises", factory=lambda: Raises(rate=0.01, length=50)).make
    for seed in range(5):
        with measured(make, seed, budget=100.0, most_steps=500) as cost:
            assert cost.steps == 500
            assert cost.failures > 0
            assert "raised ValueError: boom" in cost.failure


def test_it_says_what_it_is_about_to_do() -> None:
    said: list[tuple[str, int, int]] = []
    watch: Watch = lambda *where: said.append(where)  # noqa: E731
    with measured(GymConfig("Counter", factory=lambda: Counter(2)).make, 0, most_steps=3, budget=100.0, watch=watch):
        assert said == [
            ("constructor", 0, 0), ("constructor", 0, 0),  # what comes before the first env, and the env
            ("reset", SURVEYED, 0),
            ("reset", 0, 0), ("step", 0, 1), ("step", 0, 2),
            ("reset", 1, 0), ("step", 1, 1), ("step", 1, 2),
            ("reset", 2, 0),
        ]  # fmt: skip
    assert said[-1][0] == "close"
