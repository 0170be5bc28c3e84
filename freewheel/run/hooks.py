"""Hooks: a user's own code in a run, called when something has happened, with a handle on the run."""

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
from freewheel.run.ending import Ending
from freewheel.run.evaluation.episodes import Score
from freewheel.run.plan import Plan, nothing
from freewheel.run.process import Stop


class Run:
    """A run while it trains, as hooks see it."""

    def __init__(
        self,
        planned: Plan,
        learner: Learner,
        meter: Meter,
        save: Callable[[], Path | None],
        contexts: NDArray | None = None,
        check: Callable[[], None] = nothing,
    ) -> None:
        """`contexts`: those of the session before, in a run that goes on; `check`: see Stop.check."""
        self._plan, self._learner, self._meter, self._save, self._check = planned, learner, meter, save, check
        self._contexts, self._reason = planned.config.run.contexts if contexts is None else contexts, ""
        self._rate: float | None = None  # what hooks have assigned since `_assigned` was called
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
        """Episodes that have ended, those included that on_episode has not seen yet."""
        return self._meter.done["episodes"]

    @property
    def rows(self) -> RowCounts:
        """Rows that have reached the learner, up to this very moment: trained, queued and dropped."""
        return self._learner.rows()

    @property
    def updates(self) -> int:
        """Updates of the learner."""
        return self._meter.done["updates"]

    @property
    def version(self) -> int:
        """The version of the weights: it counts publications."""
        return self._learner.version

    @property
    def seconds(self) -> float:
        """Wall time since training began."""
        return self._meter.wall_s

    @property
    def progress(self) -> float:
        """How much of the budget is spent, 0 to 1."""
        return self._plan.config.run.budget.progress(self.env_steps, self.seconds, self.episodes)

    @property
    def learning_rate(self) -> float:
        """Adam's step size in the next update. What is assigned stays until it is assigned again: a schedule of the algorithm
        (ppo.lr_schedule) has no effect after that."""
        return self._adjustable().learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"run.learning_rate must be a positive number, not {value}")
        self._adjustable().learning_rate = self._rate = float(value)

    @property
    def contexts(self) -> NDArray:
        """The table [K, C] that training episodes draw their context from. A new table is sent with the next version of the
        weights, and serves the episodes that begin after that. Evaluations keep the table that the run was started with."""
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
        """What hooks have assigned since the last call, for learners beside this one: a learning rate, a table of contexts."""
        found = self._rate, self._new_contexts
        self._rate = self._new_contexts = None
        return found

    @property
    def spaces(self) -> Mapping[str, Any]:
        """The spaces of observations and actions, as plain data."""
        return self._plan.spec.layout

    @property
    def learned(self) -> dict[str, NDArray]:
        """A copy of all that the learner has learned, by name: weights of its policy and critics, and running statistics. What
        is assigned has the same names and shapes; its optimiser and its rows stay as they are. Assigned in on_publish, it is
        what is sent to those who act."""
        return self._learned()

    @learned.setter
    def learned(self, learned: Mapping[str, NDArray]) -> None:
        if problem := misfit(learned, self._learned()):
            raise ValueError(f"run.learned: {problem}")
        self._learner.adopt(learned)

    def check(self) -> None:
        """Call it now and then in a hook that waits: rows of metrics are written when they are due, and the run ends if a signal
        has asked for that or its time is over."""
        self._check()

    def log(self, name: str, value: SupportsFloat) -> None:
        """Add a metric of your own to the next row of metrics.jsonl and of every other sink: the mean of what was logged under
        this name since the last row. Rows without a new value do not have it."""
        self._meter.log(name, value)

    def save(self) -> Path | None:
        """Save a checkpoint now, which becomes the latest, and return its folder when it is written; None if the disk failed.
        From on_episode, on_update and on_eval it is one from which the run can be resumed, elsewhere it has the weights alone.
        The newest two are kept, and the best. on_checkpoint is not called."""
        with self._meter.span("save"):
            return self._save()

    def stop(self, reason: str = "stopped") -> None:
        """End the run in good order after this turn of the loop. The reason becomes summary["ended"]; the first one counts."""
        if not reason or not isinstance(reason, str):
            raise ValueError(f"run.stop(reason) takes a text that says why, not {reason!r}")
        self._reason = self._reason or reason

    @property
    def stopping(self) -> str:
        """The reason that a hook gave to `stop`; empty while the run goes on."""
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
    """What may be called during a run; define what you need. Any object with some of these methods is a hook.

    A turn of the loop calls on_publish, on_episode, on_update, on_eval and on_checkpoint, in this order; several hooks in the
    order of their list. Never two at a time, and learning waits for them. What a hook raises ends the run as any failure does.
    """

    def on_start(self, run: Run) -> None:
        """Before environments are started."""

    def on_episode(self, run: Run, episode: Episode) -> None:
        """After a training episode has ended and its last row has reached the learner."""

    def on_publish(self, run: Run) -> None:
        """After an update, before its weights are sent to those who act: run.learned may be read and replaced."""

    def on_update(self, run: Run, metrics: Metrics) -> None:
        """After an update, with its metrics, when new weights have been sent to those who act. Algorithms with a replay buffer
        report up to 32 gradient steps at once, and most metrics not every time."""

    def on_eval(self, run: Run, step: int, score: Score) -> None:
        """After an evaluation of the weights of this step has ended, which may be a while ago."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """After a checkpoint was saved in this folder: the best weights so far, one of every --checkpoint-every minutes, or the
        last one at the end of the run."""

    def on_stop(self, run: Run, ended: str) -> None:
        """Once, however the run ended: steps, minutes, episodes, interrupted, failed, or the reason that
        was given to run.stop. The last weights are saved, the summary is not written yet."""


EVENTS = ("on_start", "on_episode", "on_publish", "on_update", "on_eval", "on_checkpoint", "on_stop")


Listener: TypeAlias = Callable[..., Any]


def _unchanged(listener: Listener) -> Listener:
    return listener


class Hooks:
    """All hooks of a run; events without a listener cost nothing."""

    def __init__(self, hooks: Sequence[object], run: Run, wrap: Callable[[Listener], Listener] = _unchanged) -> None:
        """`wrap`: what to make of each method."""
        self.run = run
        listeners = {event: [wrap(method) for hook in hooks if (method := _method(hook, event))] for event in EVENTS}
        self._start, self._episode, self._publish, self._update = list(listeners.values())[:4]
        self._eval, self._checkpoint, self._stop = list(listeners.values())[4:]

    def start(self) -> None:
        for call in self._start:
            call(self.run)

    def publishing(self) -> None:
        """Before a new version is published."""
        for call in self._publish:
            call(self.run)

    def turn(self, tick: Tick) -> None:
        """After every turn of the loop."""
        if self._episode:
            for episode in (one for chunk in tick.chunks for one in chunk.episodes):
                for call in self._episode:
                    call(self.run, episode)
        if tick.metrics is not None:
            for call in self._update:
                call(self.run, tick.metrics)

    def evaluated(self, step: int, score: Score, saved: Path | None) -> None:
        """After an evaluation; `saved`: the folder of the weights, if they are the best so far."""
        for call in self._eval:
            call(self.run, step, score)
        if saved is not None:
            self.saved(saved)

    def saved(self, folder: Path) -> None:
        for call in self._checkpoint:
            call(self.run, folder)

    def end(self, saved: Path | None, ending: Ending, stop: Stop) -> None:
        """After the last weights were saved, if they could be. Every hook is told, whatever others raise. A second signal may
        interrupt a hook."""
        calls = [partial(call, self.run, saved) for call in self._checkpoint if saved is not None]
        for tell in (*calls, *(partial(call, self.run, ending.reason) for call in self._stop)):
            stop.over = False
            try:
                ending.attempt("a hook", tell, None)
            finally:
                stop.over = True


def misfit(arrays: Mapping[str, NDArray], known: Mapping[str, NDArray]) -> str:
    """What is wrong with arrays that should have the names, shapes and types of those that are known, and finite values; empty:
    nothing."""
    for name in (*known, *arrays):
        ours, theirs = (None if name not in some else (some[name].shape, some[name].dtype) for some in (known, arrays))
        if ours != theirs:
            there, here = ("missing" if one is None else f"{one[0]} {one[1]}" for one in (theirs, ours))
            return f"'{name}' is {there}, and should be {here}"
        if not np.isfinite(arrays[name]).all():
            return f"'{name}' is not finite"
    return ""


def find_hooks(given: Sequence[object]) -> list[object]:
    """Hooks from objects and names (package.module:Name or path/to/file.py:Name, a class without arguments or an object);
    UsageError about what is none. Names come from the command line and from config.json."""
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
    if isinstance(found, type) and any(hasattr(found, event) for event in EVENTS):  # anything else is not called
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
        raise UsageError(f"{hook!r} is no hook: it has none of {', '.join(EVENTS)}")


def _method(hook: object, event: str) -> Callable[..., Any] | None:
    """The method for an event, unless it is that of Hook, which does nothing."""
    own = getattr(type(hook), event, None)
    found: Callable[..., Any] | None = getattr(hook, event, None)
    return None if own is not None and own is getattr(Hook, event) else found
