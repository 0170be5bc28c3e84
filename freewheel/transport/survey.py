"""The survey of an environment: a separate process tries it within the time-outs. An error names a call that hangs."""

from __future__ import annotations

import math
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any, Self

import cloudpickle  # type: ignore[import-untyped]

from freewheel.errors import EnvError, FreewheelError, SetupError, cut, text_of
from freewheel.rollout.factory import MakeEnv, WorkerSpec
from freewheel.rollout.probe import BUDGET, SURVEYED, EnvCost, cpu_of, measured
from freewheel.rollout.tolerance import GOOD_STEPS
from freewheel.seeding import training_episodes
from freewheel.transport import forkserver
from freewheel.transport.clock import GAP, Limit, clock
from freewheel.transport.workers import call_tracker as places
from freewheel.transport.workers.call_tracker import At, CallTracker

LOOK = 0.1  # seconds between two checks of the env's call
HURRY = 1.0  # seconds that a hurried survey waits for a step, because nothing depends on its time
QUIET = 5.0  # seconds between two messages
TRIES = 3  # for an env that dies or hangs after GOOD_STEPS steps: then a worker would be replaced, too


class Survey:
    """Starts to measure an environment on entry, in another process; `result` waits for the end.

    On exit, the process is killed together with all processes that the env has started.
    """

    def __init__(
        self,
        make: MakeEnv,
        name: str,
        workers: WorkerSpec,
        *,
        seed: int = 0,
        budget: float = BUDGET,
        patient: bool = False,
        hurried: bool = False,
    ) -> None:
        """`patient`: an env that dies or hangs after a few good steps is tried again, with fewer steps. `hurried`: the
        survey does not wait for a long step; the cost is then what is known by that time."""
        self._hurried, self._deadline = hurried, _Deadline(math.inf, lambda _: None)
        self._make, self._name, self._workers = forkserver.pickled(make, name), name, workers
        self._seed, self._budget, self._tries = seed, budget, TRIES if patient else 1
        self._running: _Running | None = None
        self._held = ExitStack()

    def within(self, seconds: float, told: Callable[[str], None]) -> Self:
        """Limit the survey to this many seconds from now on. In a long one, `told` receives messages about its call."""
        self._deadline = _Deadline(seconds, told)
        return self

    def __enter__(self) -> Self:
        self._held.enter_context(clock)
        forkserver.prepare(self._workers.modules, min(self._workers.timeouts.construct, self._deadline.seconds))
        self._start(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None
        self._held.close()

    def result(self, *, opened: bool = False) -> EnvCost:
        """Return the measurement; EnvError or SetupError if the environment failed, hung or died. It starts again if
        this process was stopped meanwhile, because that pause would count as time of the environment. `opened`: return
        what is known before the first step."""
        tries, most_steps = 1, 0
        while True:
            assert self._running is not None, "enter it first"
            try:
                limit = self._deadline
                cost = self._running.opened(limit) if opened else self._running.result(limit, hurried=self._hurried)
            except _LostError as error:
                if tries == self._tries or error.good < GOOD_STEPS:
                    raise EnvError(error.report, "worker_death") from None
                tries, most_steps = tries + 1, max(GOOD_STEPS, error.good // 2)
            else:
                # On a busy machine a pause may be an ordinary delay. Only a call that took as long can contain it.
                longest = max(cost.longest, cost.construct, cost.reset * cost.resets)
                if not clock.slept_since(self._running.began) or longest < GAP:
                    return cost
            self._running.end()
            self._start(most_steps)

    def _start(self, most_steps: int) -> None:
        self._running = _Running(self._make, self._name, self._workers, self._seed, self._budget, most_steps)


class _LostError(Exception):
    """The process hung or died after `good` steps."""

    def __init__(self, report: str, good: int) -> None:
        super().__init__(report)
        self.report, self.good = report, good


class _Deadline:
    """When a survey has to end, and when to report what it does."""

    def __init__(self, seconds: float, told: Callable[[str], None]) -> None:
        self._limit, self.seconds, self._told = Limit(seconds), seconds, told
        self._began = self._next = time.monotonic()

    def look(self, name: str, at: At, seed: int) -> None:
        """Raise SetupError if the time is over."""
        if not self._limit.left:
            reason = f"--minutes was over while {name} was measured, in {at.called(seed)}"
            raise SetupError(f"{reason}: give the run more than {self.seconds:.3g} s")
        if (now := time.monotonic()) >= self._next + QUIET:
            self._next = now
            self._told(f"measuring {name} for {now - self._began:.0f} s: {at.age:.0f} s in {at.called(seed)}")


class _Running:
    """The survey's process and its present call."""

    def __init__(self, make: bytes, name: str, workers: WorkerSpec, seed: int, budget: float, most_steps: int) -> None:
        self._name, self._seed, self._limits, self.began = name, seed, workers.timeouts, time.monotonic()
        self._place = CallTracker()
        self._lifeline = forkserver.Lifeline()
        self._pipe, theirs = get_context("forkserver").Pipe(duplex=False)
        process = self._lifeline.process(
            _measure, make, name, self._place, theirs, (seed, budget, most_steps), name="freewheel-survey"
        )
        self._process: ForkServerProcess | None = process
        self._place("constructor", 0, 0)
        try:
            forkserver.start(process)
        except BaseException:
            self._process = None
            self.end()
            raise
        finally:
            theirs.close()

    def opened(self, deadline: _Deadline) -> EnvCost:
        begun = self._answer(deadline, math.inf)
        assert begun is not None, "all time was given"
        return begun

    def result(self, deadline: _Deadline, *, hurried: bool) -> EnvCost:
        begun = self.opened(deadline)
        cost = self._answer(deadline, HURRY if hurried else math.inf)
        assert self._process is not None, "it runs until `end`"
        if cost is not None:
            closed = Limit(places.CLOSE_LIMIT).join(self._process)
            self._show_last()
            return replace(cost, closed=closed)
        took = self._place.read().age  # so far
        cpu = max(0.0, cpu_of(self._process.pid or 0) - begun.cpu)
        return replace(begun, wall=took, row=took, cpu=cpu, median=took, longest=took, times=(took,), steps=1)

    def _answer(self, deadline: _Deadline, longest_step: float) -> EnvCost | None:
        """Return the next answer of the process; None if it is in a step that takes longer than `longest_step`."""
        while not self._pipe.poll(LOOK):
            at = self._place.read()
            if at.age >= at.limit(self._limits):
                raise self._lost(late=True)
            deadline.look(self._name, at, self._seed_of(at))
            if at.phase == "step" and at.age > longest_step:
                return None
        try:
            outcome, shown = cloudpickle.loads(self._pipe.recv_bytes())
        except EOFError:
            raise self._lost(late=False) from None
        for warning in shown:
            warnings.warn_explicit(*warning)
        if isinstance(outcome, FreewheelError):
            raise outcome
        cost: EnvCost = outcome
        return cost

    def _show_last(self) -> None:
        """Show the warnings of the env's close()."""
        with suppress(EOFError):
            while self._pipe.poll():
                for warning in cloudpickle.loads(self._pipe.recv_bytes()):
                    warnings.warn_explicit(*warning)

    def _lost(self, *, late: bool) -> _LostError:
        """Return an error that names the call that hung or died, so that the user can repeat it."""
        at = self._place.read()
        seed = self._seed_of(at)
        if late:
            return _LostError(f"{self._name} {at.overdue(self._limits, seed)}", at.good)
        assert self._process is not None, "it runs until `end`"
        self._process.join(1.0)
        code = self._process.exitcode
        how = f"ended its process (exit code {code})"
        if code is not None and code < 0:
            how = f"was killed ({signal.Signals(-code).name})"
        return _LostError(f"{self._name} {how} in {at.called(seed)}", at.good)

    def _seed_of(self, at: At) -> int:
        return 0 if at.episode == SURVEYED else training_episodes(self._seed, 0).seed(at.episode)

    def end(self) -> None:
        """Kill the process and those that the env has started."""
        process, self._process = self._process, None
        if process is not None and process.pid is not None:
            forkserver.kill_tree(process.pid)
            forkserver.end([process], 0.0)
        self._pipe.close()
        self._lifeline.close()
        self._place.close()


def _measure(make: bytes, name: str, place: CallTracker, pipe: Any, how: tuple[int, float, int]) -> None:
    """Run the survey in its process."""
    seed, budget, most_steps = how
    with warnings.catch_warnings(record=True, action="default") as caught:

        def begun(cost: EnvCost) -> None:
            pipe.send_bytes(cloudpickle.dumps((cost, [])))

        def shown() -> list[tuple[str, type[Warning], str, int]]:
            """Return the warnings since the last call."""
            new = [(str(one.message), one.category, one.filename, one.lineno) for one in caught]
            caught.clear()
            return new

        answered = False

        def answer(outcome: EnvCost | FreewheelError) -> None:
            nonlocal answered
            answered = True
            pipe.send_bytes(cloudpickle.dumps((outcome, shown())))

        try:
            own = _loaded(make, name)
            with measured(own, seed, budget=budget, most_steps=most_steps, watch=place, begun=begun) as cost:
                answer(cost)
        except FreewheelError as error:
            if not answered:
                answer(error)
        except Exception as error:  # noqa: BLE001 - an env without an adapter that explains it
            if not answered:
                trace = "".join(traceback.format_exception(error)).rstrip().encode(errors="backslashreplace").decode()
                answer(EnvError(f"{name} raised {type(error).__name__}: {cut(text_of(error))}\n{cut(trace)}"))
        with suppress(OSError):  # the survey no longer listens
            pipe.send_bytes(cloudpickle.dumps(shown()))
    pipe.close()


def _loaded(make: bytes, name: str) -> MakeEnv:
    try:
        loaded: MakeEnv = cloudpickle.loads(make)
    except Exception as error:
        raise SetupError(
            f"{name} cannot be loaded in another process ({type(error).__name__}: {cut(text_of(error))})"
        ) from error
    return loaded
