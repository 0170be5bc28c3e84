"""Numbers that are not finite: how they are found, what is put back, and when a run has to end because it learns nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from freewheel.core import Array, Learner
from freewheel.errors import DivergedError

if TYPE_CHECKING:  # a session is made ready while torch is not imported yet
    from torch import Tensor

    from freewheel.policies.nets import TensorPolicy

LATEST, MOST_SKIPPED = 20, 10  # a run ends when so many of its latest updates were skipped
REMEMBER = 500  # gradient steps between two copies of a state that can be put back

#: What the numbers of an update are called where they are not a loss, a gradient or a weight.
STATISTICS, TARGET, ADVANTAGE, LOG_PROB = "observation statistics", "value target", "advantage", "log-probability"
GRADIENT, WEIGHTS = "gradient", "weights"
NOTHING: Mapping[str, float] = MappingProxyType({})


def is_finite(value: Any) -> bool:
    """Whether all numbers are; a tensor is waited for."""
    if hasattr(value, "isfinite"):  # a tensor: its sum is much faster to look at, and finite if they all are
        return math.isfinite(float(value.sum())) or bool(value.isfinite().all())
    return bool(np.isfinite(value).all())


class Asked:
    """Whether all numbers of a tensor are finite. To ask does not wait for a GPU that still computes them; the answer does."""

    def __init__(self, value: Tensor) -> None:
        import torch

        self.on_device = torch.isfinite(value).all()  # a tensor: what comes after it there can go by it
        self._here = self.on_device.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if value.is_cuda else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(value.device))

    def answer(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._here)


def first_not_finite(values: Mapping[str, Any]) -> str:
    """The name of the first value with a number that is not finite; empty: there is none."""
    return next((name for name, value in values.items() if not is_finite(value)), "")


class LastGood:
    """The state of what is trained when all of it was last known to be finite."""

    def __init__(self, state: Mapping[str, Array]) -> None:
        self.state, self._steps = state, 0

    def renew(self, state: Mapping[str, Array], steps: int) -> str:
        """After so many gradient steps, if this state is finite; else what in it is not."""
        broken = first_not_finite({name: value for name, value in state.items() if np.asarray(value).dtype.kind == "f"})
        if not broken:
            self.state, self._steps = state, steps
        return broken

    def is_old(self, steps: int) -> bool:
        return steps - self._steps >= REMEMBER


class Trained(Protocol):
    """What gradient steps change."""

    policy: TensorPolicy

    def losses(self) -> dict[str, float]: ...  # means since the last call
    def state_dict(self) -> dict[str, Array]: ...
    def load_state_dict(self, state: Mapping[str, Array]) -> None: ...


class KeptFinite:
    """Weights that are not finite never leave: the state in which all that is trained was last good is put back.

    Where it `asks`, weights stay on a GPU and no publication waits for it: whether they are finite is known at the next one, and
    until then the GPU itself replaces those that are not by those that were published before.
    """

    def __init__(self, trained: Trained, put_back: Callable[[Mapping[str, Array]], None], *, asks: bool) -> None:
        self._trained, self._put_back, self.asks = trained, put_back, asks
        self.not_finite = ""  # what was not when a state was last put back, until `told`
        self._good: LastGood | None = None  # None: nothing was updated yet
        self._checked = 0  # gradient steps when weights were last looked at
        self._asked: Asked | None = None  # about the weights of the last publication; None: they are known to be finite
        self._published: Tensor | None = None

    def begin(self) -> None:
        """Before gradient steps."""
        if self._good is None:
            self._good = LastGood(self._trained.state_dict())

    def told(self) -> str:
        """What was not finite since the last call."""
        what, self.not_finite = self.not_finite, ""
        return what

    def look(self, steps: int, losses: Mapping[str, float] = NOTHING, *, wait: bool = True) -> None:
        """After so many gradient steps: put the last good state back if these losses or the policy are not finite; without `wait`
        a policy on a GPU may be that of the publication before. Now and then all that is trained is looked at, and remembered."""
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
            trained.losses()  # those of the state are told already

    def on_device(self, steps: int) -> Tensor:
        """The policy's statistics and weights for those who act on the same GPU."""
        if steps != self._checked:
            self.look(steps)
        flat, last = self._trained.policy.flat, self._published
        if self._asked is not None and last is not None:
            flat = flat.where(self._asked.on_device, last)
        self._published = flat
        return flat


class SkippedUpdates:
    """Counts updates that were skipped because a number was not finite. A learner that skips too many of them learns nothing."""

    def __init__(self, algorithm: str, remedy: str, what: str = "updates") -> None:
        self._algorithm, self._remedy, self._what = algorithm, remedy, what
        self._latest: deque[bool] = deque(maxlen=LATEST)
        self._updates = self._since = 0
        self._term = ""

    def take(self, not_finite: str) -> None:
        """One update, or one publication of an algorithm that publishes now and then: what was not finite, if anything."""
        self._updates += 1
        if not_finite:
            if not any(self._latest):
                self._since = self._updates
            self._term = not_finite
        self._latest.append(bool(not_finite))
        if sum(self._latest) >= MOST_SKIPPED:
            raise self._error()

    def end(self) -> None:
        """At the end of a run that was too short for that: most of its updates were skipped."""
        if 2 * sum(self._latest) > len(self._latest):
            raise self._error()

    def _error(self) -> DivergedError:
        skipped = f"{sum(self._latest)} of the last {len(self._latest)} {self._what} were skipped"
        share = f"{skipped}, since {self._what.removesuffix('s')} {self._since}"
        reason = f"because a number in the {self._term} was not finite"
        return DivergedError(f"{self._algorithm} learns nothing: {share}, {reason}; {self._remedy}")


class Judge:
    """Ends a run whose updates are skipped, because it learns nothing; learners that skip none are never judged."""

    def __init__(self, learner: Learner, algorithm: str) -> None:
        self._learner, self._version, self._skipped = learner, learner.version, None
        if learner.not_finite is not None:
            self._skipped = SkippedUpdates(algorithm, learner.remedy)

    def turn(self, version: int) -> None:
        """After every turn of the loop; DivergedError if too many updates were skipped."""
        if self._skipped is not None and version != self._version:
            self._version = version
            self._skipped.take(self._learner.not_finite or "")

    def end(self) -> None:
        """At the end of the run."""
        if self._skipped is not None:
            self._skipped.end()
