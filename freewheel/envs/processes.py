"""One process for each lane with a barrier: Gymnasium's AsyncVectorEnv with time limits, clear errors and a safe end."""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import _async_worker
from typing_extensions import override

from freewheel.core import NO_CONTEXT, EnvSpec, Failure, NDArray, Played, SeedStream, Step
from freewheel.envs.fault_tolerant import FaultTolerantLane
from freewheel.envs.lane import Lane, LaneBuffers, close_env, position, survey
from freewheel.envs.vector import GymVector
from freewheel.errors import EnvError, FreewheelError, SetupError, cut, text_of
from freewheel.policies.layout import Layout
from freewheel.rollout.factory import Timeouts
from freewheel.rollout.restoring import LIMIT, Clock, play_again
from freewheel.rollout.whereabouts import ALL, LANE, LANES, SEEDS, STEP
from freewheel.rollout.whereabouts import cells as here
from freewheel.transport.clock import LOOK, Limit, clock
from freewheel.transport.forkserver import (
    NAMELESS,
    end,
    freeze_heap,
    lead_group,
    pickled,
    prepare,
    signals_blocked,
    wait_until_it_serves,
    without_main,
)
from freewheel.transport.workers.place import CLOSE_LIMIT

if TYPE_CHECKING:
    _Workers = AsyncVectorEnv[Any, Any]
else:
    _Workers = AsyncVectorEnv  # generic only in later releases

Open: TypeAlias = Callable[[int], gymnasium.Env[Any, Any]]  # lane number in, env out

Shown: TypeAlias = tuple[str, type[Warning], str, int]  # a warning that was caught in another process
GRACE = 3.0  # seconds for envs to close when all is well
SHORT_GRACE = 0.3  # and after a failure; then SIGTERM, the same time again, then SIGKILL


def in_processes(
    open_env: Open, name: str, lanes: range, measures: tuple[str, ...], timeouts: Timeouts
) -> LaneProcesses:
    """An Env with a process for each lane. The env's code never runs in this process: a probe process reports its spaces."""
    factory = pickled(open_env, name)
    who = [f"lane {lane} of {name}" for lane in lanes]
    with closing(GymProcesses([partial(_Probe, factory, lanes[0], who[0])], who[:1], timeouts)) as probe:
        (layout, shown), *_ = probe.ask("survey")
        with suppress(EnvError):  # nobody waits long for an env that hangs in close()
            shown += probe.ask("shut", within=CLOSE_LIMIT)[0]
    for warning in shown:
        warnings.warn_explicit(*warning)
    makers = [partial(_Worker, factory, lane, own, layout, measures) for lane, own in zip(lanes, who, strict=True)]
    workers = GymProcesses([partial(maker, index) for index, maker in enumerate(makers)], who, timeouts)
    try:
        workers.ask("build")
    except BaseException:
        workers.close(terminate=True)
        raise
    return LaneProcesses(workers, name, measures, layout.flattened())


class GymProcesses(_Workers):
    """Processes that answer in time; otherwise an error names the lane and ends them all. None is left after `close`."""

    def __init__(
        self, makers: Sequence[Callable[[], gymnasium.Env[Any, Any]]], who: Sequence[str], timeouts: Timeouts
    ) -> None:
        self._who, self._timeouts = who, timeouts
        self._streams: Sequence[SeedStream] = ()
        self._episodes, self._steps = np.zeros(len(who), np.int64), np.zeros(len(who), np.int64)
        self._actions: NDArray | None = None
        self.failures: list[Failure] = []  # of the last step
        self.later: list[Failure] = []  # of resets, told with the next step
        self.given_up = np.zeros(len(who), np.bool_)
        self.down = np.zeros(len(who), np.bool_)  # lanes without a row in the last step
        self.parent_pipes, self.processes, self._polls = [], [], []
        self._lifeline = os.pipe()
        self._held = ExitStack()
        self._held.enter_context(clock)
        try:
            prepare()
            wait_until_it_serves()
            # Processes that are half started would complain: signals wait.
            with without_main(), signals_blocked(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                super().__init__(
                    makers,
                    copy=False,
                    context=NAMELESS,
                    worker=partial(_serve, f"/proc/{os.getpid()}/fd/{self._lifeline[0]}"),
                    autoreset_mode=AutoresetMode.SAME_STEP,
                )
        except (EOFError, ConnectionError):
            raise self._ended([], timeouts.construct) from None
        except BaseException as error:
            self.close(terminate=True)
            if isinstance(error, OSError):
                raise SetupError(f"cannot start {len(who)} processes ({error}): use fewer environments") from error
            raise
        # One select.poll for each pipe: Connection.poll makes a selector at every call.
        pollers = [select.poll() for _ in who]
        for poller, pipe in zip(pollers, self.parent_pipes, strict=True):
            poller.register(pipe.fileno(), select.POLLIN)
        self._polls = [poller.poll for poller in pollers]

    def ask(self, method: str, *arguments: Any, within: float | None = None) -> tuple[Any, ...]:
        """Call a method in every process; raises the first error among the answers."""
        call = partial(self.call_async, method, *arguments)
        answers: tuple[Any, ...] = self._exchange(call, self.call_wait, within or self._timeouts.construct)
        for answer in answers:
            if isinstance(answer, FreewheelError):
                raise answer
        return answers

    @override
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[NDArray, dict[str, Any]]:
        self._streams = options["seeds"] if options else ()
        self._episodes[:] = self._steps[:] = 0
        begin = partial(self.reset_async, seed, options)
        observations, info = self._exchange(begin, self.reset_wait, self._timeouts.reset)
        self.later = [failure for lane, found in _reported(info) for failure in self._noted(lane, found)]
        return observations, info

    def _noted(self, lane: int, failures: Sequence[Failure]) -> Sequence[Failure]:
        """Each failure but the last word on a lane is an episode that is over."""
        given_up = sum(failure.cause == "quarantine" for failure in failures)
        self._episodes[lane] += len(failures) - given_up
        self.given_up[lane] |= given_up > 0
        return failures

    def replay(self, seeds: Sequence[SeedStream], played: Sequence[Played | None]) -> tuple[tuple[NDArray, str], ...]:
        """What every lane acts on next, and why its episode is not where it was."""
        self._streams = seeds
        self._episodes[:] = 0
        self._steps[:] = [0 if own is None else len(own.action) for own in played]
        answers = self.ask("replay", (seeds, played, min(LIMIT, self._timeouts.construct / 2)))
        self._episodes[:] = [bool(reason) for _, reason in answers]
        return answers

    @override
    def step(self, actions: NDArray) -> tuple[NDArray, NDArray, NDArray, NDArray, dict[str, Any]]:
        self._actions = actions
        self._steps += 1
        answer: Any = self._exchange(partial(self.step_async, actions), self.step_wait, self._timeouts.step)
        observations, rewards, terminated, truncated, info = answer
        self.failures, self.later = self.later, []
        self.down[:] = info.get("down", False)
        over = terminated | truncated
        for lane, found in _reported(info):
            # Where a reset failed after the end of an episode, that end has to be counted first.
            (self.later if over[lane] else self.failures).extend(self._noted(lane, found))
        self._episodes += over
        self._steps[over | self.down] = 0
        return observations, rewards, terminated, truncated, info

    def _exchange(self, send: Callable[[], None], receive: Callable[[], Any], seconds: float) -> Any:
        limit, usual = Limit(seconds), min(seconds, LOOK) * 1000
        here[LANE] = ALL
        try:
            send()
            late = [
                lane
                for lane, poll in enumerate(self._polls)
                if not poll(usual) and not self._answers(lane, limit, poll)
            ]
            if not late:
                return receive()
        except (EOFError, ConnectionError):
            late = []
        raise self._ended(late, seconds)

    def _answers(self, lane: int, limit: Limit, poll: Callable[[float], object]) -> bool:
        """Whether a lane that takes long answers in time. Which one it is is written down, for those who ask what goes on."""
        if self._streams and lane < LANES:
            here[SEEDS + lane] = self._streams[lane].seed(int(self._episodes[lane]))
            here[STEP], here[LANE] = int(self._steps[lane]), lane
        return bool(limit.wait(partial(_answered, poll)))

    def _ended(self, late: Sequence[int], seconds: float) -> EnvError:
        """End all processes; the error names a lane that died or, if none did, one that is late."""
        sentinels = {process.sentinel: index for index, process in enumerate(self.processes) if process.pid is not None}
        poller = select.poll()
        for sentinel in sentinels:
            poller.register(sentinel, select.POLLIN)
        dead = [sentinels[sentinel] for sentinel, _ in poller.poll(0 if late else 500)]
        lane = min(dead or late, default=0)
        what = f"died (exit code {self.processes[lane].exitcode})" if dead else f"did not answer within {seconds:g} s"
        others = f" and {len(dead or late) - 1} others" if len(dead or late) > 1 else ""
        self.close(terminate=True)
        return EnvError(f"{self._who[lane]}{others} {what} ({self._where(lane)})", "worker_death")

    def _where(self, lane: int) -> str:
        stream = self._streams[lane] if self._streams else None
        action = self._actions[lane] if self._actions is not None else None
        return position(stream, int(self._episodes[lane]), int(self._steps[lane]), action)

    @override
    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        started = [process for process in self.processes if process.pid is not None]
        for pipe in self.parent_pipes:
            with suppress(OSError):
                pipe.send(("close", None))
        end(started, SHORT_GRACE if terminate else timeout or GRACE, SHORT_GRACE)
        for pipe in self.parent_pipes:
            pipe.close()
        for descriptor in self._lifeline:
            os.close(descriptor)
        self._held.close()
        self.processes, self.parent_pipes, self._polls = [], [], []
        vars(self).pop("error_queue", None)  # its descriptors go with it


class LaneProcesses(GymVector):
    """The processes as an Env. They begin episodes by themselves, so they get contexts in advance; also the next one of a lane
    that has failed."""

    fault_tolerant = False  # whether failures are reported in a Step instead of raised
    _vector: GymProcesses
    _contexts: NDArray = NO_CONTEXT

    def reset(self, seeds: Sequence[SeedStream]) -> NDArray:
        obs = super().reset(seeds)
        self._judge(self._vector.later)
        return obs

    def step(self, action: NDArray) -> Step:
        step, down, failures = super().step(action), self._vector.down, self._vector.failures
        np.logical_not(down, out=step.valid)
        self._judge([*failures, *self._vector.later])
        if not failures and not down.any():
            return step
        for values in (step.reward, step.next_obs):
            values[down] = 0
        return replace(step, failures=tuple(failures))

    def _judge(self, failures: Sequence[Failure]) -> None:
        """Raise what may not be reported."""
        if failures and not self.fault_tolerant:
            raise EnvError(failures[0].report, failures[0].cause)
        if failures and self._vector.given_up.all():
            raise EnvError(f"no lane of {self._name} is left: {failures[-1].report}", "quarantine")

    def _with_contexts(self, spec: EnvSpec) -> EnvSpec:
        return spec

    def replay(
        self, seeds: Sequence[SeedStream], played: Sequence[Played | None], calling: Callable[[str], None]
    ) -> tuple[NDArray, list[str]]:
        """Each lane in its own process, so they do not wait for each other."""
        calling("reset")
        reasons = []
        for lane, answer in enumerate(self._vector.replay(seeds, played)):
            self._obs[lane], reason = answer
            reasons.append(reason)
        self._ended[:] = False
        return self._obs, reasons

    def set_context(self, context: NDArray) -> None:
        self._spec.check_context(context)
        if not np.array_equal(context, self._contexts):
            self._vector.ask("set_context", context)
            self._contexts = context


def _answered(poll: Callable[[float], object], seconds: float) -> object:
    return poll(seconds * 1000)


def _reported(info: dict[str, Any]) -> Iterator[tuple[int, tuple[Failure, ...]]]:
    """The failures of each lane that has any."""
    return ((lane, found) for lane, found in enumerate(info.get("failures", ())) if found)


def _serve(lifeline: str, *arguments: Any) -> None:
    """What runs in a process."""
    if lead_group(lifeline):
        _async_worker(*arguments)


def _opened(factory: bytes, lane: int, who: str) -> gymnasium.Env[Any, Any]:
    try:
        open_env: Open = cloudpickle.loads(factory)
    except Exception as error:
        raise SetupError(
            f"{who} cannot be loaded in another process ({type(error).__name__}: {cut(text_of(error))})"
        ) from error
    return open_env(lane)


class _Probe(gymnasium.Env[Any, Any]):
    """Opens an env to report its spaces."""

    observation_space = action_space = spaces.Discrete(1)

    def __init__(self, factory: bytes, lane: int, who: str) -> None:
        self._factory, self._lane, self._who = factory, lane, who
        self._env: gymnasium.Env[Any, Any] | None = None

    def survey(self) -> tuple[Layout, list[Shown]] | FreewheelError:
        """Its spaces, and warnings to show."""
        try:
            with warnings.catch_warnings(record=True, action="default") as caught:
                self._env = _opened(self._factory, self._lane, self._who)
                layout = survey(self._env, self._who)
            return layout, _shown(caught)
        except FreewheelError as error:
            return error

    def shut(self) -> list[Shown]:
        """Close it; warnings to show."""
        with warnings.catch_warnings(record=True, action="default") as caught:
            close_env(self._env, self._who)
        return _shown(caught)


def _shown(caught: Sequence[warnings.WarningMessage]) -> list[Shown]:
    return [(str(one.message), one.category, one.filename, one.lineno) for one in caught]


class _Worker(gymnasium.Env[NDArray, Any]):
    """A Lane as AsyncVectorEnv needs it: flat, and it never raises but returns errors in `info`."""

    def __init__(
        self, factory: bytes, lane: int, who: str, layout: Layout, measures: tuple[str, ...], index: int
    ) -> None:
        self._factory, self._number, self._who, self._layout, self._names = factory, lane, who, layout, measures
        self._index = index  # among the lanes of this Env
        self._lane: Lane | None = None
        self._tolerant: FaultTolerantLane | None = None
        self._failures: list[Failure] = []
        self.metadata = {"render_modes": [], "lane_seeds": True}
        columns = layout.observation
        first, successor = np.zeros((2, columns.size), columns.dtype)
        self._rows = LaneBuffers(first, successor, np.zeros(len(measures), np.float32))
        self._encode = layout.action.encoder()
        self._plain: Callable[[Any], Any] = int if layout.action.spec.kind == "discrete" else lambda action: action
        low, high = (0, 255) if columns.dtype == "uint8" else (-np.inf, np.inf)
        self.observation_space = spaces.Box(low, high, (columns.size,), np.dtype(columns.dtype).type)
        self.action_space = spaces.Box(-np.inf, np.inf, layout.action.shape)  # only the shape is used

    def build(self) -> FreewheelError | None:
        try:
            with warnings.catch_warnings(action="ignore"):  # the probe has shown them
                env = _opened(self._factory, self._number, self._who)
            self._lane = Lane(env, self._who, self._layout, self._names, self._rows)
            self._tolerant = FaultTolerantLane(self._lane, self._index, self._rows.first, self._failures)
        except FreewheelError as error:
            return error
        freeze_heap()
        return None

    def set_context(self, context: NDArray) -> None:
        assert self._lane is not None, "call build() first"
        self._lane.set_context(context)

    def replay(self, given: tuple[Sequence[SeedStream], Sequence[Played | None], float]) -> tuple[NDArray, str]:
        assert self._lane is not None, "call build() first"
        assert self._tolerant is not None, "it is made with the lane"
        seeds, all_played, seconds = given
        self._lane.follow(seeds[self._index])
        played, reason, context = all_played[self._index], "", self._lane.context
        if played is not None:
            actions = [self._plain(action) for action in self._encode(played.action)]
            clock, successor = Clock(seconds), self._rows.successor
            reason = play_again(self._lane, played, actions, successor, clock, lambda _: None)
            self._lane.set_context(context)
            if not reason:
                self._tolerant.down = False
                return successor.copy(), ""
        self._tolerant.reset()
        return self._rows.first.copy(), reason

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray, dict[str, Any]]:
        assert self._lane is not None, "call build() first"
        if options:
            self._lane.follow(options["seeds"][self._index])
        assert self._tolerant is not None, "it is made with the lane"
        began = perf_counter_ns()
        self._tolerant.reset()
        return self._rows.first, {"reset_ns": perf_counter_ns() - began, **self._told()}

    @override
    def step(self, action: Any) -> tuple[NDArray, float, bool, bool, dict[str, Any]]:
        assert self._tolerant is not None, "call build() first"
        tolerant, rows = self._tolerant, self._rows
        reward, terminated, truncated = tolerant.step(self._plain(action))
        with np.errstate(over="ignore"):  # a reward beyond float32 becomes infinite
            answers = ("an observation", rows.successor), ("a reward", np.array(reward).astype(np.float32))
        for what, values in answers:
            if not tolerant.down and not np.isfinite(values).all():
                tolerant.fail(tolerant.lane.not_finite(what, values))
        if tolerant.down:
            tolerant.reset()
            return rows.first, 0.0, False, False, {"down": True, **self._told()}
        over = terminated or truncated
        measures = dict(zip(self._names, self._rows.measures.tolist(), strict=True)) if over else {}
        return self._rows.successor, reward, terminated, truncated, measures

    def _told(self) -> dict[str, tuple[Failure, ...]]:
        """What failed since the last answer."""
        failures = tuple(self._failures)
        self._failures.clear()
        return {"failures": failures} if failures else {}

    @override
    def close(self) -> None:
        if self._lane is not None:
            with warnings.catch_warnings(action="ignore"):  # the probe has shown them
                close_env(self._lane.env, self._who)
