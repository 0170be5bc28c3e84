"""A Runner for a single environment that touches as little code and memory as it can, and which Runner a worker gets."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, Protocol, runtime_checkable

import numpy as np

from freewheel.core import Actor, Decision, Env, Episode, NDArray, Step, Transitions
from freewheel.rollout.factory import RunnerFactory
from freewheel.rollout.row_writer import PythonRowWriter, RowWriter
from freewheel.rollout.runner import INFER, STEP, WRITE, Author, Runner

PAGES = 64  # of which it keeps track


@runtime_checkable
class SingleEnv(Env, Protocol):
    """An Env of one lane that can be stepped without arrays."""

    @property
    def first(self) -> NDArray: ...  # [1, D] where `reset` and `autoreset` show an episode's first observation
    @property
    def after(
        self,
    ) -> Step: ...  # the arrays of every Step; `step_one` writes next_obs, and measures where an episode ends
    def step_one(
        self, action: Any
    ) -> tuple[float, bool, bool] | Step: ...  # reward, terminated, truncated; or what is wrong


@runtime_checkable
class OneLaneActor(Actor, Protocol):
    """An Actor that can also choose for one lane, without arrays; only where it has no memory."""

    def act_one(
        self, obs: NDArray, rng: np.random.Generator
    ) -> tuple[Any, float]: ...  # [D] to action, log-probability


def make_runner(factory: RunnerFactory, lanes: range, env: Env, author: Author) -> Runner:
    """The Runner with the least overhead for this environment and policy."""
    actor = factory.actor()
    if isinstance(env, SingleEnv) and isinstance(actor, OneLaneActor) and not actor.state_size:
        return SingleEnvRunner(factory, lanes, env=env, author=author, actor=actor)
    return Runner(factory, lanes, env=env, author=author, actor=actor)


class SingleEnvRunner(Runner):
    """The same rows for less.

    A worker with one slow env sleeps most of the time. When it wakes its caches are cold, and what a step costs is what it
    touches: code, objects, pages. With a hundred such workers that alone can fill the machine.
    """

    def __init__(
        self, factory: RunnerFactory, lanes: range, *, env: SingleEnv, author: Author, actor: OneLaneActor
    ) -> None:
        super().__init__(factory, lanes, env=env, author=author, actor=actor)
        self._step_one, self._after, self._first = env.step_one, env.after, env.first
        self._act_one = actor.act_one
        self._pages: dict[int, tuple[PythonRowWriter, Transitions]] = {}
        self._ret, self._steps = 0.0, 0  # of this episode
        self._fresh, self._row = True, env.first[0]  # what the env shows
        self._successor = env.after.next_obs[0]

    def begin(self) -> None:
        super().begin()
        self._look()

    def autoreset(self) -> None:
        super().autoreset()
        self._look()

    def step(self, data: Transitions, t: int) -> Sequence[Episode]:
        page = (self._pages.get(id(data)) or self._turn_to(data))[0]
        time = self._time
        clock0 = perf_counter_ns()
        page.see(t, self._fresh)
        action, log_prob = self._act_one(self._row, self._rng)
        clock1 = perf_counter_ns()
        answer = self._step_one(action)
        clock2 = perf_counter_ns()
        time[INFER] += clock1 - clock0
        self._fresh, self._row = False, self._successor
        if not isinstance(answer, tuple):
            decision = Decision(np.asarray(action), np.asarray(log_prob), self._state)
            return self._record_as_many(data, t, decision, answer, clock1)
        reward, terminated, truncated = answer
        self._ret += page.put(t, action, log_prob, reward, terminated, truncated)
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

    def _look(self) -> None:
        self._fresh = self._obs is self._first
        self._row = self._first[0] if self._fresh else self._successor

    def _turn_to(self, data: Transitions) -> tuple[PythonRowWriter, Transitions]:
        """These rows as a page, for as long as they are kept in mind."""
        if len(self._pages) == PAGES:
            self._pages.clear()
        columns = (
            *(data.obs[:, 0], data.action[:, 0], data.log_prob[:, 0], data.reward[:, 0]),
            *(data.terminated[:, 0], data.truncated[:, 0], data.next_obs[:, 0], data.valid[:, 0]),
        )
        self._pages[id(data)] = turned = RowWriter(columns, self._first[0], self._successor), data
        return turned

    def _record_as_many(
        self, data: Transitions, t: int, decision: Decision, step: Step, clock1: int
    ) -> Sequence[Episode]:
        """The lane failed, or has just begun again after that."""
        self._return[0], self._length[0] = self._ret, self._steps
        episodes = self._record(data, t, decision, step, clock1)
        self._ret, self._steps = float(self._return[0]), int(self._length[0])
        return episodes
