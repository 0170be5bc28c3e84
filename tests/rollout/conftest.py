"""An environment with known rows, an actor that depends only on observations, and a clock controlled by the test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from freewheel.core import ActionSpec, Decision, Env, EnvSpec, Failure, NDArray, SeedStream, Slice, Snapshot, Step
from freewheel.rollout.factory import RunnerFactory

#: (step of the run, lane) -> fields of the Step with other values, "fail" or "raise"; step -1 is the first reset.
Faults = dict[tuple[int, int], dict[str, float]]


class Clock:
    """Nanoseconds, advanced by the test, and by one at every reading."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        self.now += 1
        return self.now


class CountingEnv(Env):
    """Lane i plays episodes of i + 2 steps: even ones are terminated, odd ones truncated. An observation is (lane, episode,
    step), the reward is 100 × lane + 10 × episode + step. The arrays are reused at every step."""

    def __init__(self, lanes: int, clock: Clock, faults: Faults | None = None) -> None:
        everything = Slice("obs", 0, 3, (3,))
        self._spec = EnvSpec(
            "Counting-v0", lanes, 3, "float32", (everything,), ActionSpec("discrete", 4), measures=("number",)
        )
        self.seeds: list[list[int]] = []
        self.actions: list[list[int]] = []
        self.closed = 0
        self.failures = [Failure(lane, "env_error", "boom") for lane in range(lanes)]
        self.step_ns, self.reset_ns = 700, 90
        self.steps = 0
        self._clock, self._faults = clock, faults or {}
        self._episode, self._count = [0] * lanes, [0] * lanes
        self._obs, self._next_obs = np.zeros((2, lanes, 3), np.float32)
        self._reward = np.zeros(lanes, np.float32)
        self._terminated, self._truncated, self._valid = np.zeros((3, lanes), np.bool_)
        self._measures = np.zeros((lanes, 1), np.float32)

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        self._streams = list(seeds)
        self.seeds = [[stream.seed(0)] for stream in seeds]
        self._clock.now += self.reset_ns
        self._obs[:] = [(lane, 0, 0) for lane in range(self.spec.lanes)]
        self._apply_faults(-1, "reset", ("obs",))
        return self._obs

    def step(self, action: NDArray) -> Step:
        self.actions.append(action.tolist())
        self._clock.now += self.step_ns
        for lane in range(self.spec.lanes):
            episode, count = self._episode[lane], self._count[lane]
            over = count + 1 == lane + 2
            self._reward[lane] = 100 * lane + 10 * episode + count
            self._terminated[lane], self._truncated[lane] = over and episode % 2 == 0, over and episode % 2 == 1
            self._measures[lane] = episode
            self._next_obs[lane] = (lane, episode, count + 1)
            self._count[lane] += 1
        self._valid[:] = True
        self._apply_faults(self.steps, "step")
        self.steps += 1
        return Step(
            self._reward, self._terminated, self._truncated, self._next_obs, self._valid, self._measures,
            failures=tuple(failure for failure in self.failures if failure.lane in self._failing(self.steps - 1)),
        )  # fmt: skip

    def set_context(self, context: NDArray) -> None:
        self.spec.check_context(context)

    def autoreset(self) -> NDArray:
        self._obs[:] = self._next_obs
        failed = self._failing(self.steps - 1)
        for lane in range(self.spec.lanes):
            if self._terminated[lane] or self._truncated[lane] or lane in failed:
                self._episode[lane], self._count[lane] = self._episode[lane] + 1, 0
                self.seeds[lane].append(self._streams[lane].seed(self._episode[lane]))
                self._clock.now += self.reset_ns
                self._obs[lane] = (lane, self._episode[lane], 0)
        self._apply_faults(self.steps - 1, "autoreset", ("obs",))
        return self._obs

    def _failing(self, step: int) -> set[int]:
        return {lane for lane in range(self.spec.lanes) if "fail" in self._faults.get((step, lane), {})}

    def _apply_faults(
        self, step: int, method: str, names: Sequence[str] = ("raise", "fail", "reward", "next_obs", "valid")
    ) -> None:
        for lane in range(self.spec.lanes):
            for name, value in self._faults.get((step, lane), {}).items():
                if name not in names:
                    continue
                if name == "raise":
                    raise RuntimeError(f"broken in {method}")
                if name == "fail":
                    self._valid[lane] = self._terminated[lane] = self._truncated[lane] = False
                    self._reward[lane] = 0
                else:
                    getattr(self, f"_{name}")[lane] = value

    def render(self) -> None:
        return None

    def close(self) -> None:
        self.closed += 1


class Follower:
    """Chooses the step number as action and minus the version as log-probability, and records its random numbers."""

    state_size = 0

    def __init__(self, clock: Clock) -> None:
        self.version, self.draws = -1, list[float]()
        self._clock = clock

    def load(self, snapshot: Snapshot) -> None:
        self._clock.now += 30
        self.version = snapshot.version

    def act(self, obs: NDArray, rng: np.random.Generator, *, state: object = None, greedy: bool = False) -> Decision:
        self._clock.now += 50
        self.draws.append(rng.random())
        log_prob = np.full(len(obs), -self.version, np.float32)
        action = np.nan_to_num(obs[:, 2], posinf=0, neginf=0).astype(np.int64)
        return Decision(action, log_prob, np.zeros((len(obs), 0)))


class FakeSetup:
    """A RunnerFactory whose environments and actors are visible to the test."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.envs: list[CountingEnv] = []
        self.actors: list[Follower] = []
        self.faults: Faults = {}
        self.factory = RunnerFactory(make=self._make, actor=self._actor, seed=11)

    @property
    def env(self) -> CountingEnv:
        (only,) = self.envs
        return only

    def _make(self, lanes: range, *, processes: bool = False, fault_tolerant: bool = False) -> CountingEnv:
        self.envs.append(CountingEnv(len(lanes), self.clock, self.faults))
        return self.envs[-1]

    def _actor(self) -> Follower:
        self.actors.append(Follower(self.clock))
        return self.actors[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSetup:
    clock = Clock()
    for module in ("rollout.runner", "collect.serial"):
        monkeypatch.setattr(f"freewheel.{module}.perf_counter_ns", clock)
    return FakeSetup(clock)
