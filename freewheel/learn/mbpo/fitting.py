"""Fitting of the dynamics model: new rows in, parameters and elites out. It keeps its data, so it can run anywhere."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from freewheel.core import Array, Compile, Metrics
from freewheel.learn.mbpo.config import MBPOConfig
from freewheel.learn.mbpo.dynamics import Ensemble, ModelSpec
from freewheel.rollout.graphs import Program
from freewheel.seeding import tree

HOLDOUT, MOST_HELD_OUT = 0.2, 5_000  # share of the rows, and most rows
PROGRESS, PATIENCE = 0.01, 5  # a fit ends when no member's error falls by this share for more than PATIENCE epochs
FIRST_ALLOCATION = 16_384  # rows; the allocation doubles when it is full


@dataclass(frozen=True)
class Fit:
    """A fitted model. It holds numpy arrays from a CPU, tensors from any other device."""

    state: Mapping[str, Array]  # input of `Ensemble.load`
    elites: Array  # [k] int64, the best first
    metrics: Metrics
    not_finite: str = ""  # name of what was not finite; the model is then as before
    fitter: Mapping[str, Array] = field(default_factory=dict)  # what another Fitter needs besides `state` and rows


@dataclass(frozen=True)
class Continuation:
    """The first argument of a Fitter that continues the work of another one, from the other's last Fit."""

    new: Array  # new rows, as in any call
    kept: Array  # rows that the other Fitter had; missing ones are forgotten
    state: Mapping[str, Array]
    fitter: Mapping[str, Array]


class Fitter:
    """Fits the ensemble. Every call adds packed rows [n, width], keeps the newest `model_rows`, and fits again."""

    def __init__(self, spec: ModelSpec, config: MBPOConfig, seed: int, device: str, compile_: Compile) -> None:
        self.config, self.device, self._compile = config, device, compile_
        self.ensemble = Ensemble(spec, device, torch.Generator().manual_seed(tree(seed, "model")))
        self.seen = 0  # rows ever received
        self._rng = torch.Generator(device).manual_seed(tree(seed, "fit"))
        self._flat = nn.Parameter(self.ensemble.vector)
        self._flat.grad = self.ensemble.grad
        self._adam = torch.optim.Adam([self._flat], config.model_lr, fused=True, capturable=device != "cpu")
        self._moments = {name: torch.zeros_like(self._flat) for name in ("exp_avg", "exp_avg_sq")}
        self._moments["step"] = torch.zeros((), device=device)
        self._adam.state[self._flat] = self._moments
        self._best = torch.zeros_like(self.ensemble.vector)
        self._owner = _owners(spec).to(device)
        self._loss = torch.zeros((), device=device)  # summed over an epoch's steps
        self._column = torch.arange(config.model_batch, device=device)  # of `_order`, for the next step
        self._allocate(min(FIRST_ALLOCATION, config.model_rows))

    @property
    def rows(self) -> int:
        """The rows to fit to."""
        return min(self.seen, self.config.model_rows)

    def __call__(self, rows: Array | Continuation) -> Fit:
        fitting = self.in_steps(rows)
        while True:
            try:
                next(fitting)
            except StopIteration as end:
                fit: Fit = end.value
                return fit

    def in_steps(self, rows: Array | Continuation) -> Generator[None, None, Fit]:
        """Do the same as a call, but yield after every gradient step."""
        if isinstance(rows, Continuation):
            self._continue(rows)
            rows = rows.new
        self._append(torch.as_tensor(rows, device=self.device))
        before = self.ensemble.vector.clone(), {name: value.clone() for name, value in self._moments.items()}
        metrics, elites = yield from self._train(*self._draw())
        not_finite = "" if np.isfinite(metrics["model/holdout"]) else "error on held-out rows"
        if not_finite:
            self.ensemble.vector.copy_(before[0])
        for name, value in self._moments.items():  # reset those of diverged members, or of all
            value.copy_(before[1][name] if not_finite else torch.where(value.isfinite(), value, before[1][name]))
        state = {name: _export(value) for name, value in self.ensemble.state().items()}
        fitter = {name: _export(value.clone()) for name, value in self._moments.items()}
        fitter |= {"rng": self._rng.get_state().numpy(), "seen": np.array(self.seen)}
        return Fit(state, _export(elites), metrics, not_finite, fitter)

    def _continue(self, other: Continuation) -> None:
        kept = torch.as_tensor(other.kept, device=self.device)
        seen = int(other.fitter["seen"])
        # Rows keep their places, so that the same draw takes the same rows. That is impossible if some are missing.
        self.seen = seen - len(kept) if len(kept) == min(seen, self.config.model_rows) else 0
        self._append(kept)
        self.ensemble.load(other.state)
        for name, value in self._moments.items():
            value.copy_(torch.as_tensor(other.fitter[name]))
        self._rng.set_state(torch.as_tensor(np.array(other.fitter["rng"])))

    def _append(self, rows: Tensor) -> None:
        capacity = self.config.model_rows
        self.seen += len(rows)
        rows = rows[-capacity:]
        if self.rows > len(self._data):
            kept = self._data
            self._allocate(min(max(2 * len(kept), self.rows), capacity))
            self._data[: len(kept)] = kept
        place = torch.arange(self.seen - len(rows), self.seen, device=self.device) % capacity
        self._data.index_copy_(0, place, rows)

    def _allocate(self, rows: int) -> None:
        """Allocate memory for this many rows. The step is captured again, because it reads them at a fixed address."""
        batch, members = self.config.model_batch, self.config.members
        self._data = torch.zeros(rows, self.ensemble.spec.columns.width, device=self.device)
        self._order = torch.zeros(members, -(-rows // batch) * batch, dtype=torch.int64, device=self.device)
        state = [self.ensemble.vector, self.ensemble.grad, self._loss, self._column, *self._moments.values()]
        self._step = Program(self._gradient_step, self._compile, state=state)

    def _gradient_step(self) -> None:
        rows = self._data[self._order.index_select(1, self._column)]  # [E, n, W]
        self._loss += self.ensemble.gradient(rows)
        self._adam.step()
        self._column += len(self._column)

    def _draw(self) -> tuple[Tensor, int]:
        """Split the rows, normalise by the training part, draw each member's sample. Return held-out rows, steps."""
        shuffled = torch.randperm(self.rows, generator=self._rng, device=self.device)
        held = min(max(1, int(HOLDOUT * self.rows)), MOST_HELD_OUT)
        train = shuffled[held:]
        steps = -(-len(train) // self.config.model_batch)
        size = (self.config.members, steps * self.config.model_batch)  # whole minibatches: all steps have one shape
        draws = torch.randint(len(train), size, generator=self._rng, device=self.device)
        self._order[:, : size[1]] = train[draws]
        self.ensemble.normalise(self._data[train])
        return self._data[shuffled[:held]], steps

    def _train(self, held: Tensor, steps: int) -> Generator[None, None, tuple[dict[str, float], Tensor]]:
        """Train until held-out errors do not improve; members keep their best weights. Return metrics and elites."""
        vector = self.ensemble.vector
        self._best.copy_(vector)
        least = torch.full((self.config.members,), torch.inf)
        epochs = idle = 0
        while epochs < self.config.max_epochs and idle <= PATIENCE:
            yield from self._epoch(steps)
            epochs += 1
            error = self.ensemble.holdout_error(held)[0].cpu()  # the only wait for the device
            better = error < (1 - PROGRESS) * least
            least = torch.where(better, error, least)
            self._best.copy_(torch.where(better.to(self.device)[self._owner], vector, self._best))
            idle = 0 if better.any() else idle + 1
        vector.copy_(self._best)
        elites = least.argsort(stable=True)[: self.config.elites]
        metrics = {
            "model/holdout": float(least[elites].mean()),
            "model/epochs": float(epochs),
            "model/steps": float(epochs * steps),
            "model/rows": float(self.rows),
            "model/train_loss": float(self._loss) / steps,  # of the last epoch, all members
        }
        elites = elites.to(self.device)
        if self.ensemble.spec.learns_termination:
            metrics["model/termination_error"] = float(self.ensemble.holdout_error(held)[1][elites].mean())
        return metrics, elites

    def _epoch(self, steps: int) -> Iterator[None]:
        """Make one pass of every member over its sample, in a new order."""
        order = self._order[:, : steps * self.config.model_batch]
        keys = torch.rand(order.shape, generator=self._rng, device=self.device)
        order.copy_(order.gather(1, keys.argsort(1)))
        torch.arange(self.config.model_batch, out=self._column)
        self._loss.zero_()
        for _ in range(steps):
            self._step()
            yield


def _owners(spec: ModelSpec) -> Tensor:
    """Return the member that each parameter of the flat vector belongs to."""
    member = torch.arange(spec.members)[:, None, None]
    return torch.cat([member.expand(shape).reshape(-1) for shape in spec.layout().values()])


def _export(value: Tensor) -> Array:
    return value if value.is_cuda else value.numpy()
