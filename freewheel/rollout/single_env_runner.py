"""A Runner for a single environment with minimal overhead, and the choice of the Runner for a worker."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, Protocol, runtime_checkable

import numpy as np

from freewheel.core import Actor, Decision, Env, Episode, NDArray, Step, Transitions
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.kernel import PythonRowWriter, RowWriter
from freewheel.rollout.runner import INFER, STEP, WRITE, Author, Runner

WRITERS = 64  # row writers kept at most


class SingleEnv(Env):
    """An Env of one lane that can be stepped without arrays."""

    first: NDArray  # [1, D] where `reset` and `autoreset` write an episode's first observation
    after: Step  # arrays of every Step; `step_one` writes next_obs, and measures where an episode ends

    # reward, terminated, truncated; or a whole Step where something failed
    @abstractmethod
    def step_one(self, action: Any) -> tuple[float, bool, bool] | Step: ...


@runtime_checkable
class OneLaneActor(Actor, Protocol):
    """An Actor without memory that can also choose for one lane without arrays."""

    # [D] to action, log-probability
    def act_one(self, obs: NDArray, rng: np.random.Generator) -> tuple[Any, float]: ...


def make_runner(factory: RunnerFactory, lanes: range, env: Env, author: Author) -> Runner:
    """The Runner with the least overhead for this environment and policy."""
    actor = factory.actor()
    if isinstance(env, SingleEnv) and isinstance(actor, OneLaneActor) and not actor.state_size:
        return SingleEnvRunner(factory, lanes, env=env, author=author, actor=actor)
    return Runner(factory, lanes, env=env, author=author, actor=actor)


class SingleEnvRunner(Runner):
    """Writes the same rows as a Runner, with less overhead.

    A worker with one slow env sleeps most of the time and wakes with cold caches, so the cost of a step depends on the
    amount of code and memory that it touches. With a hundred such workers, that cost alone can fill the machine.
    """

    def __init__(
        self, factory: RunnerFactory, lanes: range, *, env: SingleEnv, author: Author, actor: OneLaneActor
    ) -> None:
        super().__init__(factory, lanes, env=env, author=author, actor=actor)
        self._step_one, self._after, self._first = env.step_one, env.after, env.first
        self._act_one = actor.act_one
        self._writers: dict[int, tuple[PythonRowWriter, Transitions]] = {}
        self._ret, self._steps = 0.0, 0  # of this episode
        self._fresh, self._row = True, env.first[0]  # whether an episode has just begun, and the observation to act on
        self._successor = env.after.next_obs[0]

    def begin(self) -> None:
        super().begin()
        self._ret, self._steps = float(self._return[0]), int(self._length[0])
        self._locate_obs()

    def autoreset(self) -> None:
        super().autoreset()
        self._locate_obs()

    def places(self) -> list[tuple[int, int]]:
        return [(self._played[0], self._steps)]

    def step(self, data: Transitions, t: int) -> Sequence[Episode]:
        writer = (self._writers.get(id(data)) or self._writer_for(data))[0]
        time = self._time
        clock0 = perf_counter_ns()
        writer.see(t, self._fresh)
        action, log_prob = self._act_one(self._row, self._rng)
        clock1 = perf_counter_ns()
        answer = self._step_one(action)
        clock2 = perf_counter_ns()
        time[INFER] += clock1 - clock0
        self._fresh, self._row = False, self._successor
        if not isinstance(answer, tuple):
            decision = Decision(np.asarray(action), np.asarray(log_prob), self._state)
            return self._record_step(data, t, decision, answer, clock1)
        reward, terminated, truncated = answer
        self._ret += writer.put(t, action, log_prob, reward, terminated, truncated)
        self._steps += 1
        self.produced += 1
        self.open += 1
        self.rows, self.over, self.failures = 1, terminated or truncated, ()
        episodes = self._end(clock2) if self.over else ()
        time[STEP] += clock2 - clock1
        time[WRITE] += perf_counter_ns() - clock2
        return episodes

    def _end(self, now: int) -> Sequence[Episode]:
        self._return[0], self._length[0] = self._ret, self._steps
        self._ret, self._steps = 0.0, 0
        return [self._finish(0, self._after.measures[0], now)]

    def _locate_obs(self) -> None:
        self._fresh = self._obs is self._first
        self._row = self._first[0] if self._fresh else self._successor

    def _writer_for(self, data: Transitions) -> tuple[PythonRowWriter, Transitions]:
        """Return a row writer for these arrays; up to WRITERS of them are kept."""
        if len(self._writers) == WRITERS:
            self._writers.clear()
        columns = (
            *(data.obs[:, 0], data.action[:, 0], data.log_prob[:, 0], data.reward[:, 0]),
            *(data.terminated[:, 0], data.truncated[:, 0], data.next_obs[:, 0], data.valid[:, 0]),
        )
        self._writers[id(data)] = made = RowWriter(columns, self._first[0], self._successor), data
        return made

    def _record_step(self, data: Transitions, t: int, decision: Decision, step: Step, clock1: int) -> Sequence[Episode]:
        """Take the slow path, for a failed lane and its first step after a failure."""
        self._return[0], self._length[0] = self._ret, self._steps
        episodes = self._record(data, t, decision, step, clock1)
        self._ret, self._steps = float(self._return[0]), int(self._length[0])
        return episodes
