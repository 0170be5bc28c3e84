"""Hooks: user code that a run calls when events happen, with a handle on the run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat, TypeAlias

import numpy as np
import numpy.typing as npt

from freewheel.config.resolve import Config
from freewheel.core import MOST_CONTEXTS, Episode, Learner, Metrics, NDArray, RowCounts, Tick
from freewheel.errors import UsageError, nearest
from freewheel.metrics.meter import Meter
from freewheel.registry import own_module, refuse_builtin
from freewheel.run.evaluation.episodes import Score
from freewheel.run.plan import Plan, nothing
from freewheel.run.stopping.ending import Ending
from freewheel.run.stopping.stop import Stop


class Run:
    """A training run, as hooks see it."""

    def __init__(
        self,
        planned: Plan,
        learner: Learner,
        meter: Meter,
        save: Callable[[], Path | None],
        contexts: NDArray | None = None,
        check: Callable[[], None] = nothing,
    ) -> None:
        """`contexts`: those of the previous session, if this one resumes a run; `check`: see Stop.check."""
        self._plan, self._learner, self._meter, self._save, self._check = planned, learner, meter, save, check
        self._contexts, self._reason = planned.config.run.contexts if contexts is None else contexts, ""
        self._rate: float | None = None  # assigned by hooks since the last call of `_assigned`
        self._new_contexts: NDArray | None = None

    def __repr__(self) -> str:
        return f"<Run {self.path} at step {self.env_steps}, version {self.version}>"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._plan.path

    @property
    def config(self) -> Config:
        """All options of the run."""
        return self._plan.config

    @property
    def env_steps(self) -> int:
        """Environment steps delivered to the learner."""
        return self._meter.done["env_steps"]

    @property
    def episodes(self) -> int:
        """Finished episodes, including those that on_episode has not seen yet."""
        return self._meter.done["episodes"]

    @property
    def rows(self) -> RowCounts:
        """Counts of the rows that have reached the learner up to now: trained, queued and dropped."""
        return self._learner.rows()

    @property
    def updates(self) -> int:
        """The learner's finished updates."""
        return self._meter.done["updates"]

    @property
    def version(self) -> int:
        """The version of the weights: the number of publications."""
        return self._learner.version

    @property
    def seconds(self) -> float:
        """Wall time since training began."""
        return self._meter.wall_s

    @property
    def progress(self) -> float:
        """The share of the budget that is spent, 0 to 1."""
        return self._plan.config.run.budget.progress(self.env_steps, self.seconds, self.episodes)

    @property
    def learning_rate(self) -> float:
        """Adam's step size in the next update. An assigned value stays until the next assignment: it disables a
        schedule of the algorithm (ppo.lr_schedule)."""
        return self._adjustable().learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"run.learning_rate must be a positive number, not {value}")
        self._adjustable().learning_rate = self._rate = float(value)

    @property
    def contexts(self) -> NDArray:
        """The table [K, C] from which training episodes draw their context. A new table is sent with the next version
        of the weights and applies to episodes that begin after that. Evaluations keep the run's first table."""
        return self._contexts

    @contexts.setter
    def contexts(self, table: npt.ArrayLike) -> None:
        first = self._plan.config.run.contexts
        if not len(first):
            raise ValueError(
                "run.contexts: a run without contexts has none to change; start it with context=[[...], ...]"
            )
        new = np.array(table, np.float32)  # a copy: the caller may change theirs
        if (
            new.ndim != 2
            or new.shape[1] != first.shape[1]
            or not 0 < len(new) <= MOST_CONTEXTS
            or not np.isfinite(new).all()
        ):
            wanted = f"1 to {MOST_CONTEXTS} rows of {first.shape[1]} finite numbers"
            raise ValueError(f"run.contexts must have {wanted}, not the shape {new.shape}")
        self._contexts = self._new_contexts = new

    def _assigned(self) -> tuple[float | None, NDArray | None]:
        """Return the learning rate and contexts assigned since the last call, for the run's other learners."""
        found = self._rate, self._new_contexts
        self._rate = self._new_contexts = None
        return found

    @property
    def spaces(self) -> Mapping[str, Any]:
        """The spaces of observations and actions, as plain data."""
        return self._plan.spec.layout

    @property
    def learned(self) -> dict[str, NDArray]:
        """A copy of all learned arrays, by name: weights of its policy and critics, and running statistics.
        Assigned values need the same names and shapes; the optimiser and the rows are unchanged. Values assigned in
        on_publish are sent to the actors."""
        return self._learned()

    @learned.setter
    def learned(self, learned: Mapping[str, NDArray]) -> None:
        if problem := misfit(learned, self._learned()):
            raise ValueError(f"run.learned: {problem}")
        self._learner.adopt(learned)

    def check(self) -> None:
        """Call this regularly in a hook that waits. It writes rows of metrics when they are due, and ends the run if a
        signal has requested that or its time is up."""
        self._check()

    def log(self, name: str, value: SupportsFloat) -> None:
        """Add your own metric to the next row of metrics.jsonl and of every other sink. The row gets the mean of all
        values logged since the last row; rows without a new value omit the metric."""
        self._meter.log(name, value)

    def save(self) -> Path | None:
        """Save a checkpoint now, as the latest, and return its folder once it is written; None if the disk failed.
        In on_episode, on_update and on_eval, the run can be resumed from it; elsewhere, it holds only the weights.
        The newest two checkpoints and the best one are kept. on_checkpoint is not called."""
        with self._meter.span("save"):
            return self._save()

    def stop(self, reason: str = "stopped") -> None:
        """End the run cleanly after this turn of the loop. The first reason given becomes summary["ended"]."""
        if not reason or not isinstance(reason, str):
            raise ValueError(f"run.stop(reason) takes a text that says why, not {reason!r}")
        self._reason = self._reason or reason

    @property
    def stopping(self) -> str:
        """The reason that a hook gave to `stop`; empty if none did."""
        return self._reason

    def _learned(self) -> dict[str, NDArray]:
        if (found := self._learner.learned()) is not None:
            return found
        remedy = "give its Learner `learned` and `adopt` (freewheel.core.Learner)"
        raise ValueError(f"{self._plan.config.algo} does not hand over what it has learned: {remedy}")

    def _adjustable(self) -> Learner:
        if not math.isnan(self._learner.learning_rate):
            return self._learner
        remedy = "give its Learner a property `learning_rate` (freewheel.core.Learner)"
        raise ValueError(f"{self._plan.config.algo} has no learning rate that can be changed: {remedy}")


class Hook:
    """The events of a run; define the methods you need. Any object with some of these methods is a hook.

    A turn of the loop calls on_publish, on_episode, on_update, on_eval and on_checkpoint, in this order. For each
    event, hooks are called one by one, in list order, and learning waits. An exception from a hook ends the run.
    """

    def on_start(self, run: Run) -> None:
        """Called before environments are started."""

    def on_episode(self, run: Run, episode: Episode) -> None:
        """Called after a training episode has ended and its last row has reached the learner."""

    def on_publish(self, run: Run) -> None:
        """Called after an update, before its weights are sent to the actors: run.learned may be read and replaced."""

    def on_update(self, run: Run, metrics: Metrics) -> None:
        """Called after an update, with its metrics, when new weights have been sent to the actors. Algorithms with a
        replay buffer report up to 32 gradient steps at once, and omit most metrics from some of the reports."""

    def on_eval(self, run: Run, step: int, score: Score) -> None:
        """Called after an evaluation of the weights of this step, which may lie well before the present step."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Called after a checkpoint was saved in this folder: the best so far, a periodic one (--checkpoint-every), or
        the last one at the end of the run."""

    def on_stop(self, run: Run, ended: str) -> None:
        """Called once, however the run ended: steps, minutes, episodes, interrupted, failed, or the reason that
        was given to run.stop. The last weights are saved, but the summary is not written yet."""


EVENTS = ("on_start", "on_episode", "on_publish", "on_update", "on_eval", "on_checkpoint", "on_stop")


Listener: TypeAlias = Callable[..., Any]


class Hooks:
    """All hooks of a run; events without a listener cost nothing."""

    def __init__(
        self, hooks: Sequence[object], run: Run, wrap: Callable[[Listener], Listener] = lambda call: call
    ) -> None:
        """`wrap`: a decorator for each method."""
        self.run = run
        listeners = {event: [wrap(method) for hook in hooks if (method := _method(hook, event))] for event in EVENTS}
        self._start, self._episode, self._publish, self._update = list(listeners.values())[:4]
        self._eval, self._checkpoint, self._stop = list(listeners.values())[4:]

    def start(self) -> None:
        for call in self._start:
            call(self.run)

    def publishing(self) -> None:
        """Call on_publish before a new version is published."""
        for call in self._publish:
            call(self.run)

    def turn(self, tick: Tick) -> None:
        """Call on_episode and on_update after a turn of the loop."""
        if self._episode:
            for episode in (one for chunk in tick.chunks for one in chunk.episodes):
                for call in self._episode:
                    call(self.run, episode)
        if tick.metrics is not None:
            for call in self._update:
                call(self.run, tick.metrics)

    def evaluated(self, step: int, score: Score, saved: Path | None) -> None:
        """Call on_eval; `saved`: the checkpoint of these weights if they are the best so far, for on_checkpoint."""
        for call in self._eval:
            call(self.run, step, score)
        if saved is not None:
            self.saved(saved)

    def saved(self, folder: Path) -> None:
        for call in self._checkpoint:
            call(self.run, folder)

    def end(self, saved: Path | None, ending: Ending, stop: Stop) -> None:
        """Call on_checkpoint if the last weights could be saved, then on_stop. Every hook is called even if others
        raise. A second signal may interrupt a hook."""
        calls = [partial(call, self.run, saved) for call in self._checkpoint if saved is not None]
        for tell in (*calls, *(partial(call, self.run, ending.reason) for call in self._stop)):
            stop.over = False
            try:
                ending.attempt("a hook", tell, None)
            finally:
                stop.over = True


def misfit(arrays: Mapping[str, NDArray], known: Mapping[str, NDArray]) -> str:
    """Describe the first array that is not finite or differs from the known arrays in name, shape or type; empty if
    there is none."""
    for name in (*known, *arrays):
        ours, theirs = (None if name not in some else (some[name].shape, some[name].dtype) for some in (known, arrays))
        if ours != theirs:
            there, here = ("missing" if one is None else f"{one[0]} {one[1]}" for one in (theirs, ours))
            return f"'{name}' is {there}, and should be {here}"
        if not np.isfinite(arrays[name]).all():
            return f"'{name}' is not finite"
    return ""


def find_hooks(given: Sequence[object]) -> list[object]:
    """Return hooks for objects and names (package.module:Name or path/to/file.py:Name, an object or a class that takes
    no arguments); UsageError if one is not a hook. Names come from the command line and from config.json."""
    if isinstance(given, (str, Hook)) or not isinstance(given, Sequence):
        raise UsageError(
            f"hooks takes a list: hooks=[{repr(given) if isinstance(given, str) else type(given).__name__ + '()'}]"
        )
    hooks = [_named(hook) if isinstance(hook, str) else hook for hook in given]
    for hook in hooks:
        _check(hook)
    return hooks


def _named(place: str) -> object:
    module, _, name = place.rpartition(":")
    if not module or not name:
        raise UsageError(f"--hooks takes package.module:Name or path/to/file.py:Name, not '{place}'")
    known = vars(own_module(module))
    if name not in known:
        hooks = [own for own, value in known.items() if any(hasattr(value, event) for event in EVENTS)]
        raise UsageError(f"'{module}' has no hook '{name}'{nearest(name, hooks, '')}")
    found: object = known[name]
    refuse_builtin(found, f"the hook '{place}'")
    if isinstance(found, type) and any(hasattr(found, event) for event in EVENTS):  # no other class is instantiated
        return found()
    return found


def _check(hook: object) -> None:
    if isinstance(hook, type):
        raise UsageError(f"the hook {hook.__name__} is a class; pass an object: hooks=[{hook.__name__}()]")
    kind = type(hook).__name__
    names = [name for name in dir(hook) if name.startswith("on_") and callable(getattr(hook, name))]
    for name in names:
        if name not in EVENTS:
            raise UsageError(f"{kind}.{name} would never be called{nearest(name, EVENTS)}")
        wanted = list(inspect.signature(getattr(Hook, name)).parameters)[1:]
        try:
            inspect.signature(getattr(hook, name)).bind(*wanted)
        except TypeError:
            raise UsageError(f"{kind}.{name} must take ({', '.join(wanted)})") from None
    if not names:
        raise UsageError(f"{hook!r} is not a hook: it has none of {', '.join(EVENTS)}")


def _method(hook: object, event: str) -> Callable[..., Any] | None:
    """Return the hook's method for an event; None if it is missing or inherited from Hook, where it does nothing."""
    own = getattr(type(hook), event, None)
    found: Callable[..., Any] | None = getattr(hook, event, None)
    return None if own is not None and own is getattr(Hook, event) else found
