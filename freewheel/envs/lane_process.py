"""What runs in the process of a lane: an Env of this lane, which writes its row into shared memory when it is woken."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import closing
from time import perf_counter_ns
from typing import Any, NamedTuple, TypeAlias

import cloudpickle  # type: ignore[import-untyped]

from freewheel.core import EnvSpec, Failure, NDArray, Played, SeedStream
from freewheel.envs.loop import GymLoop
from freewheel.errors import FreewheelError, SetupError, cut, text_of
from freewheel.policies.layout import Actions
from freewheel.rollout.probe import watching
from freewheel.transport.barrier import Line
from freewheel.transport.forkserver import freeze_heap
from freewheel.transport.shm.memory import Fields, SharedArrays
from freewheel.transport.workers import heartbeats as phase
from freewheel.transport.workers.heartbeats import Heartbeats, LaneCalls

Shown: TypeAlias = tuple[str, type[Warning], str, int]  # a warning that was caught in another process


class Ready(NamedTuple):
    """The first answer of a process."""

    spec: EnvSpec
    actions: Actions
    shown: Sequence[Shown]


def serve(line: Line, heartbeats: Heartbeats, number: int, factory: bytes, lane: int, who: str) -> None:
    """The main function of the process with this number."""
    process = _LaneProcess(heartbeats, number)
    answer: Any = _answer(process.make, factory, lane, who)
    asked: Any = None
    while True:
        heartbeats.enter(number, phase.WAIT)
        try:
            line.wake() if answer is None else line.send(answer)
            if asked is not None and asked[0] == "close":
                return
            asked = line.receive()
        except (EOFError, ConnectionError):  # nobody asks any more
            return
        answer = _answer(process.step) if asked is None else _answer(getattr(process, asked[0]), *asked[1:])


def _answer(method: Any, *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except FreewheelError as error:
        return error


class _Calls(LaneCalls):
    """Counts the episodes of a stream as well."""

    def __init__(self, heartbeats: Heartbeats, number: int, lane: int) -> None:
        super().__init__(heartbeats, number, range(lane, lane + 1))
        self.begun = heartbeats.memory.cells("begun", number)
        self.steps = self._steps

    def reset(self, lane: int, seed: int) -> None:
        super().reset(lane, seed)
        self.begun[0] += 1


class _LaneProcess:
    """Its methods are called by name; what they return is the answer."""

    def __init__(self, heartbeats: Heartbeats, number: int) -> None:
        self._heartbeats, self._number = heartbeats, number
        self._phase = heartbeats.memory.cells("phase", number)
        self._env: GymLoop | None = None

    def make(self, factory: bytes, lane: int, who: str) -> Ready:
        self._calls = _Calls(self._heartbeats, self._number, lane)
        with warnings.catch_warnings(record=True, action="default") as caught:
            try:
                make = cloudpickle.loads(factory)
            except Exception as error:
                reason = f"{type(error).__name__}: {cut(text_of(error))}"
                raise SetupError(f"{who} cannot be loaded in another process ({reason})") from error
            with watching(self._calls):
                self._env = env = make(lane)
        env.watch(self._calls.lane, self._calls.reset)
        freeze_heap()
        return Ready(env.spec, env.actions, _shown(caught))

    def attach(self, fields: Fields, path: str) -> None:
        """Use these rows from now on."""
        number = self._number
        with closing(SharedArrays.opened(fields, path)) as rows:  # what is used of it stays
            self._action, self._reset_ns = rows["action"][number : number + 1], rows.cells("reset_ns", number)
            self._first, self._next_obs, self._measures = (
                rows[name][number] for name in ("first", "next_obs", "measures")
            )
            self._reward, self._terminated, self._truncated, self._valid = (
                rows[name] for name in ("reward", "terminated", "truncated", "valid")
            )

    def set_context(self, context: NDArray) -> None:
        self._made.set_context(context)

    def reset(self, stream: SeedStream) -> None:
        self._calls.begun[0] = 0
        self._first[:] = self._made.reset([stream])[0]

    def replay(self, stream: SeedStream, played: Played | None) -> str:
        """Why the episode is not where it was."""
        self._calls.begun[0] = 0
        obs, (reason,) = self._made.replay([stream], [played], self._calling)
        self._first[:] = obs[0]
        return reason

    def step(self) -> tuple[Failure, ...] | None:
        number = self._number
        self._heartbeats.enter(number, phase.STEP)
        env = self._made
        step = env.step(self._action)
        self._calls.steps[0] += 1
        terminated, truncated, valid = step.terminated[0], step.truncated[0], step.valid[0]
        self._terminated[number], self._truncated[number], self._valid[number] = terminated, truncated, valid
        self._reward[number], self._next_obs[:] = step.reward[0], step.next_obs[0]
        self._reset_ns[0] = 0
        if terminated or truncated or not valid:
            self._measures[:] = step.measures[0]
            began = perf_counter_ns()
            self._first[:] = env.autoreset()[0]
            self._reset_ns[0] = perf_counter_ns() - began
        return step.failures or None

    def close(self) -> Sequence[Shown] | None:
        with warnings.catch_warnings(record=True, action="default") as caught:
            if self._env is not None:
                self._env.close()
        return _shown(caught) or None

    @property
    def _made(self) -> GymLoop:
        assert self._env is not None, "it is made first"
        return self._env

    def _calling(self, what: str) -> None:
        """An episode is played again: each call of the environment has its own time limit."""
        self._calls.steps[0] += self._phase[0] == phase.STEP  # a step has returned
        self._heartbeats.enter(self._number, phase.RESET if what == "reset" else phase.STEP)


def _shown(caught: Sequence[warnings.WarningMessage]) -> list[Shown]:
    return [(str(one.message), one.category, one.filename, one.lineno) for one in caught]
