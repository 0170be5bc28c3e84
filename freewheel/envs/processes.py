"""An Env with one process per lane, a barrier at every step and rows in shared memory; and what its processes run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from time import perf_counter_ns
from typing import Any, NamedTuple, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from freewheel.core import NO_CONTEXT, Env, EnvSpec, EpisodePrefix, Failure, NDArray, SeedStream, Step
from freewheel.envs.lane import position
from freewheel.envs.loop import GymLoop
from freewheel.errors import EnvError, FreewheelError, SetupError, cut, text_of
from freewheel.policies.layout import Actions
from freewheel.rollout.factory import Timeouts
from freewheel.rollout.probe import watching
from freewheel.transport.forkserver import freeze_heap, pickled
from freewheel.transport.shm.barrier import Barrier, WakePipe
from freewheel.transport.shm.memory import Fields, SharedArrays, bytes_of, require_memory
from freewheel.transport.workers import heartbeats as phase
from freewheel.transport.workers.heartbeats import Heartbeats, LaneCalls

MakeLane: TypeAlias = Callable[[int], GymLoop]  # takes a lane number, returns an Env of this lane
Shown: TypeAlias = tuple[str, type[Warning], str, int]  # a warning that was caught in another process


class LaneProcesses(Env):
    """An Env that runs each lane in a separate process. The environment's code never runs in this process.

    A process begins the next episode within the step that ended one, while others still step. It must therefore have
    its contexts before that step, and it reports failures of a reset in the next step, as `GymLoop` does.
    """

    def __init__(self, make: MakeLane, name: str, lanes: range, timeouts: Timeouts) -> None:
        """`make` is sent to the processes. The Env is fault-tolerant if the Envs that it makes are."""
        factory, who = pickled(make, name), [f"lane {lane} of {name}" for lane in lanes]
        self._name, self._streams, self._context = name, list[SeedStream](), NO_CONTEXT
        self._given_up = np.zeros(len(lanes), np.bool_)
        self._rows: SharedArrays | None = None
        self._barrier = Barrier(who, timeouts, self._where)
        try:
            self._prepare(
                self._barrier.start(serve, [(factory, lane, own) for lane, own in zip(lanes, who, strict=True)]), who
            )
        except BaseException:
            self._barrier.close(broken=True)
            raise

    def _prepare(self, answers: Sequence[Any], who: Sequence[str]) -> None:
        """Check that all lanes have the same spaces, then allocate the shared rows."""
        ready: list[Ready] = _checked(answers)
        first = ready[0]
        _show(first.shown)  # the other lanes caught the same warnings
        for own, one in zip(who, ready, strict=True):
            if (one.spec, one.actions) != (first.spec, first.actions):
                raise SetupError(f"{own} has different spaces from earlier lanes: all lanes must have the same spaces")
        self._spec = spec = replace(first.spec, lanes=len(who))
        self._encode = first.actions.encoder()
        fields = _fields(spec)
        require_memory(bytes_of(fields), f"{spec.lanes} lanes of {self._name}")
        self._rows = rows = SharedArrays(fields)
        self._ask("attach", fields, rows.path)
        self._action, self._reset_ns, self._first = rows["action"], rows["reset_ns"], rows["first"]
        self._step = Step(
            reward=rows["reward"],
            terminated=rows["terminated"],
            truncated=rows["truncated"],
            next_obs=rows["next_obs"],
            valid=rows["valid"],
            measures=rows["measures"],
        )
        self._begun = np.zeros(spec.lanes, np.bool_)  # lanes that have begun an episode in the last step
        self._obs = np.zeros_like(self._first)

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    @property
    def processes(self) -> Sequence[Any]:
        """One process for each lane, while the Env is open."""
        return self._barrier.processes

    def set_context(self, context: NDArray) -> None:
        self._spec.check_context(context)
        if not np.array_equal(context, self._context):
            self._ask("set_context", context)
            self._context = context

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        self._follow(seeds)
        _checked(self._barrier.ask([("reset", stream) for stream in seeds]))
        np.copyto(self._obs, self._first)
        return self._obs

    def replay(
        self, seeds: Sequence[SeedStream], played: Sequence[EpisodePrefix | None], calling: Callable[[str], None]
    ) -> tuple[NDArray, list[str]]:
        """Replay each lane in its process, so that lanes do not wait for each other."""
        calling("reset")
        self._follow(seeds)
        asked = [("replay", stream, own) for stream, own in zip(seeds, played, strict=True)]
        reasons: list[str] = _checked(self._barrier.ask(asked))
        np.copyto(self._obs, self._first)
        return self._obs, reasons

    def step(self, action: NDArray) -> Step:
        self._action[...] = action
        answers, step = self._barrier.wake(), self._step
        failures = _failures(answers) if any(answers) else ()
        self._note_given_up(failures)
        np.logical_or(step.terminated, step.truncated, out=self._begun)
        if failures or not step.valid.all():
            self._begun |= ~step.valid
        if not failures and not self._begun.any():
            return step
        return replace(step, failures=failures, reset_ns=int(self._reset_ns.max()))

    def autoreset(self) -> NDArray:
        """Return the observations; the processes have begun the next episodes already."""
        if not self._begun.any():
            return self._step.next_obs
        np.copyto(self._obs, self._step.next_obs)
        np.copyto(self._obs, self._first, where=self._begun[:, None])
        return self._obs

    def render(self) -> NDArray | str | None:
        return None

    def close(self) -> None:
        if self._rows is None:
            return
        shown = self._barrier.close()
        self._rows.close()
        self._rows = None
        _show(next((one for one in shown if one), ()))

    def _ask(self, method: str, *arguments: Any) -> None:
        _checked(self._barrier.ask([(method, *arguments)] * self._spec.lanes))

    def _follow(self, seeds: Sequence[SeedStream]) -> None:
        self._streams = list(seeds)
        self._begun[:] = False

    def _note_given_up(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            self._given_up[failure.lane] |= failure.cause == "quarantine"
        if failures and self._given_up.all():
            raise EnvError(f"no lane of {self._name} is left: {failures[-1].report}", "quarantine")

    def _where(self, lane: int) -> str:
        """Describe the lane's episode, seed, step and action, as its process has recorded them."""
        heartbeats = self._barrier.heartbeats
        if not self._streams:
            return position(None, 0, 0, None)
        episode, step = heartbeats.memory.numbers["begun"][lane] - 1, heartbeats.step(lane)
        return position(self._streams[lane], episode, step, self._encode(self._action)[lane])


def _fields(spec: EnvSpec) -> Fields:
    """Return the shared arrays for a step of all lanes; each process writes its row."""
    lanes, observations = (spec.lanes,), ((spec.lanes, spec.obs_size), spec.obs_dtype)
    return {
        "action": ((*lanes, *spec.action.shape), spec.action.dtype),
        "reward": (lanes, "f4"),
        "terminated": (lanes, "?"),
        "truncated": (lanes, "?"),
        "valid": (lanes, "?"),
        "next_obs": observations,
        "first": observations,  # first observations of episodes that began in this step
        "measures": ((*lanes, len(spec.measures)), "f4"),
        "reset_ns": (lanes, "i8"),
    }


def _checked(answers: Sequence[Any]) -> list[Any]:
    """Return the answers, or raise the first error among them."""
    for answer in answers:
        if isinstance(answer, FreewheelError):
            raise answer
    return list(answers)


def _failures(answers: Sequence[Any]) -> tuple[Failure, ...]:
    """Collect the failures of all lanes; each process gives its lane the number 0."""
    found = enumerate(_checked(answers))
    return tuple(replace(failure, lane=lane) for lane, own in found if own for failure in own)


def _show(shown: Sequence[Shown]) -> None:
    for warning in shown:
        warnings.warn_explicit(*warning)


# --------------------------------------------------------------------------------------------------- in a process


class Ready(NamedTuple):
    """The first answer of a process."""

    spec: EnvSpec
    actions: Actions
    shown: Sequence[Shown]


def serve(line: WakePipe, heartbeats: Heartbeats, number: int, factory: bytes, lane: int, who: str) -> None:
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
        except (EOFError, ConnectionError):  # the other end is closed
            return
        answer = _answer(process.step) if asked is None else _answer(getattr(process, asked[0]), *asked[1:])


def _answer(method: Any, *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except FreewheelError as error:
        return error


class _Calls(LaneCalls):
    """Also counts the episodes of a stream."""

    def __init__(self, heartbeats: Heartbeats, number: int, lane: int) -> None:
        super().__init__(heartbeats, number, range(lane, lane + 1))
        self.begun = heartbeats.memory.cells("begun", number)
        self.steps = self._steps

    def reset(self, lane: int, seed: int) -> None:
        super().reset(lane, seed)
        self.begun[0] += 1


class _LaneProcess:
    """One lane in its process. Requests call methods by name; the results are the answers."""

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
        with closing(SharedArrays.opened(fields, path)) as rows:  # the views below keep the memory alive
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

    def replay(self, stream: SeedStream, played: EpisodePrefix | None) -> str:
        """Replay the episode; return why it did not get back to where it was, or an empty string."""
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
        assert self._env is not None, "call make() first"
        return self._env

    def _calling(self, what: str) -> None:
        """Note a call of the environment during a replay, so that each call has its own time limit."""
        self._calls.steps[0] += self._phase[0] == phase.STEP  # a step has returned
        self._heartbeats.enter(self._number, phase.RESET if what == "reset" else phase.STEP)


def _shown(caught: Sequence[warnings.WarningMessage]) -> list[Shown]:
    return [(str(one.message), one.category, one.filename, one.lineno) for one in caught]
