"""Checks for numbers that are not finite. They restore the last good state, and end a run that learns nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from freewheel.core import Array, Learner
from freewheel.errors import DivergedError

if TYPE_CHECKING:  # a session begins before torch is imported
    from torch import Tensor

    from freewheel.policies.nets import TensorPolicy

LATEST, MOST_SKIPPED = 20, 10  # a run ends when MOST_SKIPPED of its LATEST updates were skipped
REMEMBER = 500  # gradient steps between two copies of the last good state

#: The names of an update's numbers in messages. Losses have the names of their metrics.
STATISTICS, TARGET, ADVANTAGE, LOG_PROB = "observation statistics", "value target", "advantage", "log-probability"
GRADIENT, WEIGHTS = "gradient", "weights"
NOTHING: Mapping[str, float] = MappingProxyType({})


def is_finite(value: Any) -> bool:
    """Return whether all numbers are finite. This waits for the device of a tensor."""
    if hasattr(value, "isfinite"):  # a tensor: a finite sum proves it, and is much faster to check
        return math.isfinite(float(value.sum())) or bool(value.isfinite().all())
    return bool(np.isfinite(value).all())


class Asked:
    """A check whether all numbers of a tensor are finite. Only `answer` waits for a GPU that still computes them."""

    def __init__(self, value: Tensor) -> None:
        import torch

        self.on_device = torch.isfinite(value).all()  # a tensor, for later work on the device
        self._here = self.on_device.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if value.is_cuda else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(value.device))

    def answer(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._here)


def first_not_finite(values: Mapping[str, Any]) -> str:
    """Return the name of the first value with a number that is not finite, or an empty string."""
    return next((name for name, value in values.items() if not is_finite(value)), "")


class LastGood:
    """The last state of everything trained that was known to be finite."""

    def __init__(self, state: Mapping[str, Array]) -> None:
        self.state, self._steps = state, 0

    def renew(self, state: Mapping[str, Array], steps: int) -> str:
        """Keep this state, after `steps` gradient steps, if it is finite. Else return the name of what is not."""
        broken = first_not_finite({name: value for name, value in state.items() if np.asarray(value).dtype.kind == "f"})
        if not broken:
            self.state, self._steps = state, steps
        return broken

    def is_old(self, steps: int) -> bool:
        return steps - self._steps >= REMEMBER


class Trained(Protocol):
    """An object that gradient steps change."""

    policy: TensorPolicy

    def losses(self) -> dict[str, float]: ...  # means since the last call
    def state_dict(self) -> dict[str, Array]: ...
    def load_state_dict(self, state: Mapping[str, Array]) -> None: ...


class KeptFinite:
    """Prevents the publication of weights that are not finite: it puts back the last good state of everything trained.

    With `asks`, weights stay on a GPU and no publication waits for it. The answer is known at the next publication;
    until then the GPU itself replaces weights that are not finite by those of the publication before.
    """

    def __init__(self, trained: Trained, put_back: Callable[[Mapping[str, Array]], None], *, asks: bool) -> None:
        self._trained, self._put_back, self.asks = trained, put_back, asks
        self.not_finite = ""  # why a state was last put back; `told` clears it
        self._good: LastGood | None = None  # None: no update yet
        self._checked = 0  # gradient steps at the last check
        self._asked: Asked | None = None  # pending check of the last published weights; None: they are finite
        self._published: Tensor | None = None

    def begin(self) -> None:
        """Remember the first state. Call this before gradient steps."""
        if self._good is None:
            self._good = LastGood(self._trained.state_dict())

    def told(self) -> str:
        """Return what was not finite since the last call."""
        what, self.not_finite = self.not_finite, ""
        return what

    def look(self, steps: int, losses: Mapping[str, float] = NOTHING, *, wait: bool = True) -> None:
        """Put the last good state back if these losses or the policy are not finite after `steps` gradient steps.
        Without `wait` the check on a GPU is one publication late. Now and then, check and keep the whole state."""
        trained, good = self._trained, self._good
        if good is None or (steps == self._checked and not (wait and self._asked)):
            return
        self._checked, vector, before = steps, trained.policy.net.vector, self._asked
        self._asked = Asked(vector) if self.asks and not wait else None
        is_good = is_finite(vector) if self._asked is None else before is None or before.answer()
        broken = first_not_finite(losses) or ("" if is_good else WEIGHTS)
        if not broken and good.is_old(steps):
            broken = good.renew(trained.state_dict(), steps)
        if broken:
            self.not_finite = first_not_finite({**losses, **trained.losses()}) or broken
            self._put_back(good.state)
            self._asked = None
            trained.losses()  # the losses of the restored state were reported already

    def on_device(self, steps: int) -> Tensor:
        """Return the policy's statistics and weights for actors on the same GPU."""
        if steps != self._checked:
            self.look(steps)
        flat, last = self._trained.policy.flat, self._published
        if self._asked is not None and last is not None:
            flat = flat.where(self._asked.on_device, last)
        self._published = flat
        return flat


class SkippedUpdates:
    """Counts updates that were skipped because a number was not finite. With too many of them, nothing is learned."""

    def __init__(self, algorithm: str, remedy: str, what: str = "updates") -> None:
        self._algorithm, self._remedy, self._what = algorithm, remedy, what
        self._latest: deque[bool] = deque(maxlen=LATEST)
        self._updates = self._since = 0
        self._term = ""

    def take(self, not_finite: str) -> None:
        """Count one update, or one publication of an algorithm that publishes less often. `not_finite` may be empty."""
        self._updates += 1
        if not_finite:
            if not any(self._latest):
                self._since = self._updates
            self._term = not_finite
        self._latest.append(bool(not_finite))
        if sum(self._latest) >= MOST_SKIPPED:
            raise self._error()

    def end(self) -> None:
        """Raise DivergedError if most of the latest updates were skipped. Call this at the end of a run."""
        if 2 * sum(self._latest) > len(self._latest):
            raise self._error()

    def _error(self) -> DivergedError:
        skipped = f"{sum(self._latest)} of the last {len(self._latest)} {self._what} were skipped"
        share = f"{skipped}, since {self._what.removesuffix('s')} {self._since}"
        reason = f"because a number in the {self._term} was not finite"
        return DivergedError(f"{self._algorithm} learns nothing: {share}, {reason}; {self._remedy}")


class Judge:
    """Ends a run that learns nothing, because it skips its updates. Learners without `not_finite` are not judged."""

    def __init__(self, learner: Learner, algorithm: str) -> None:
        self._learner, self._version, self._skipped = learner, learner.version, None
        if learner.not_finite is not None:
            self._skipped = SkippedUpdates(algorithm, learner.remedy)

    def turn(self, version: int) -> None:
        """Raise DivergedError if too many updates were skipped. Call this after every turn of the loop."""
        if self._skipped is not None and version != self._version:
            self._version = version
            self._skipped.take(self._learner.not_finite or "")

    def end(self) -> None:
        """Raise DivergedError if most updates were skipped. Call this at the end of the run."""
        if self._skipped is not None:
            self._skipped.end()
