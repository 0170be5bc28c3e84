"""The dynamics model: an ensemble of Gaussian networks with one flat parameter vector and products over all members."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from freewheel.core import Array
from freewheel.learn.mbpo.config import Predict
from freewheel.learn.mbpo.prediction import EnsembleOutput, Prediction, divergence
from freewheel.learn.replay.rows import Batch, Columns
from freewheel.policies.spec import views

MIN_LOGVAR, MAX_LOGVAR = -10.0, 0.5  # initial values of the learned bounds, for normalised targets
BOUNDS = 0.01  # weight of the loss that pulls the bounds together
DECAY, LAST_DECAY = (2.5e-5, 5e-5, 7.5e-5), 1e-4  # hidden layers (the third for all later ones); last layer
CONSTANT = 1e-6  # a deviation below this share of the mean is rounding noise


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a model. Functions of the task compute what it does not learn."""

    columns: Columns  # of the packed rows to learn from, with observations as the model sees them (task.py)
    members: int
    hidden: tuple[int, ...]
    predict: Predict
    learns_reward: bool
    learns_termination: bool
    predicted: int | None = None  # the first columns of a next observation that are predicted; None: all
    choices: int = 0  # number of discrete actions, which the model reads as one-hot columns; 0: a box

    @property
    def action_inputs(self) -> int:
        """Columns of an action as the model reads it."""
        return self.choices or self.columns.action_size

    @property
    def inputs(self) -> int:
        """Columns of (observation, action)."""
        return self.columns.obs_size + self.action_inputs

    @property
    def targets(self) -> int:
        """Columns of (reward, if learned; predicted columns of the next observation)."""
        return self.learns_reward + (self.columns.obs_size if self.predicted is None else self.predicted)

    @property
    def seen(self) -> int:
        """Columns of the inputs that the networks see. They do not see the action if their outputs are its effects."""
        return self.inputs - (self.action_inputs if self.predict == "affine" else 0)

    @property
    def effects(self) -> int:
        """Outputs for the effects of the action, see `Ensemble._add_effects`."""
        per_column = self.targets + self.learns_termination + self.learns_reward
        return per_column * self.action_inputs if self.predict == "affine" else 0

    def layout(self) -> dict[str, tuple[int, int, int]]:
        """Return names and shapes of the parameters, [E, in, out] each."""
        sizes = (self.seen, *self.hidden, 2 * self.targets + self.learns_termination + self.effects)
        layout = dict.fromkeys(("max_logvar", "min_logvar"), (self.members, 1, self.targets))
        for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            layout |= {f"{i}.weight": (self.members, fan_in, fan_out), f"{i}.bias": (self.members, 1, fan_out)}
        return layout


class Ensemble:
    """E networks. `vector` holds all parameters and `grad` their gradients; `params` and their `.grad` are named views.

    Inputs and targets are normalised by column with the statistics in_mean, in_scale, out_mean and out_scale, which are
    part of the state but not trained. A constant column has scale 0: an input without information, a target that is
    constant and not learned. One-hot columns of discrete actions are not normalised, because a rare action would then
    be a huge input. Actions are columns of packed rows, or indices from a policy. Without a generator all weights are 0
    until they are loaded.
    """

    def __init__(self, spec: ModelSpec, device: str, generator: torch.Generator | None = None) -> None:
        self.spec = spec
        self.depth = len(spec.hidden) + 1
        layout = spec.layout()
        start, decay = torch.zeros(2, sum(math.prod(shape) for shape in layout.values()))
        first, decays = views(start, layout), views(decay, layout)
        first["max_logvar"].fill_(MAX_LOGVAR)
        first["min_logvar"].fill_(MIN_LOGVAR)
        for i in range(self.depth):
            weight, deviation = first[f"{i}.weight"], 0.5 / math.sqrt(layout[f"{i}.weight"][1])
            if generator is not None:
                nn.init.trunc_normal_(weight, 0, deviation, -2 * deviation, 2 * deviation, generator)
            decays[f"{i}.weight"].fill_(LAST_DECAY if i == self.depth - 1 else DECAY[min(i, len(DECAY) - 1)])
        self.vector, self._decay = start.to(device), decay.to(device)
        self.grad = torch.zeros_like(self.vector)
        self.params = {name: nn.Parameter(view) for name, view in views(self.vector, layout).items()}
        for name, view in views(self.grad, layout).items():
            self.params[name].grad = view
        sizes = (("in", spec.inputs), ("out", spec.targets))
        self._precision = {side: torch.ones(size, device=device) for side, size in sizes}
        self.statistics = {f"{side}_scale": torch.ones_like(ones) for side, ones in self._precision.items()}
        self.statistics |= {f"{side}_mean": torch.zeros_like(ones) for side, ones in self._precision.items()}
        self._state = {"vector": self.vector} | self.statistics
        self._choices = torch.arange(spec.choices, device=device)
        self._certain = torch.zeros(spec.targets, device=device)  # 1 for targets that need no successor
        self._certain[: spec.learns_reward] = 1

    def normalise(self, rows: Tensor) -> None:
        """Set the statistics from packed rows [n, width]. Rows without a successor count only for the other columns."""
        row = self.spec.columns.split(rows)
        target, weight = self._raw_targets(row)
        inputs = torch.cat([row.obs, self._encoded(row.action)], dim=-1)
        for side, value, weights in (("in", inputs, inputs.new_ones(1).expand_as(inputs)), ("out", target, weight)):
            count = weights.sum(0).clamp(min=1)
            mean = (weights * value).sum(0) / count
            scale = ((weights * (value - mean).square()).sum(0) / count).sqrt()
            self.statistics[f"{side}_mean"].copy_(mean)
            self.statistics[f"{side}_scale"].copy_(torch.where(scale > CONSTANT * mean.abs(), scale, 0))
        if self.spec.choices:
            self.statistics["in_mean"][-self.spec.choices :] = 0
            self.statistics["in_scale"][-self.spec.choices :] = 1
        self._refresh()

    def _refresh(self) -> None:
        for side, precision in self._precision.items():
            precision.copy_((1 / self.statistics[f"{side}_scale"]).nan_to_num(posinf=0.0))

    def gradient(self, rows: Tensor) -> Tensor:
        """Return the summed loss of members on their packed rows [E, n, width], and write its gradient into `grad`.

        Negative log-likelihood (mean over rows and targets; next observations only if known) + cross entropy of
        termination + BOUNDS × (Σ max_logvar − Σ min_logvar, mean over members) + weight decay.
        """
        torch.mul(self.vector, self._decay, out=self.grad)
        decay = 0.5 * torch.dot(self.grad, self.vector)
        row = self.spec.columns.split(rows)
        target, weight = self._targets(row)
        out = self.forward(self._inputs(row.obs, row.action))
        each = (out.mean - target).square() * torch.exp(-out.logvar) + out.logvar
        loss = (each * weight).sum() / target[0].numel()
        loss = loss + BOUNDS / self.spec.members * (self.params["max_logvar"].sum() - self.params["min_logvar"].sum())
        if self.spec.learns_termination:
            ends = functional.binary_cross_entropy_with_logits(out.logit, row.terminated[..., None])
            loss = loss + self.spec.members * ends
        loss.backward()
        return loss.detach() + decay

    @torch.no_grad()
    def holdout_error(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return by member [E] the mean squared error of normalised targets, and the mean error of terminations."""
        row = self.spec.columns.split(rows)
        target, weight = self._targets(row)
        out = self.forward(self._inputs(row.obs, row.action).expand(self.spec.members, -1, -1))
        error = ((out.mean - target).square() * weight).sum((1, 2)) / weight.sum().clamp(min=1)
        return error, (torch.sigmoid(out.logit) - row.terminated[..., None]).abs().sum((1, 2)) / len(rows)

    def _inputs(self, obs: Tensor, action: Tensor) -> Tensor:
        return (torch.cat([obs, self._encoded(action)], dim=-1) - self.statistics["in_mean"]) * self._precision["in"]

    def _encoded(self, action: Tensor) -> Tensor:
        if not self.spec.choices:
            return action
        number = action if action.is_floating_point() else action[..., None]
        return (number == self._choices).float()

    def _raw_targets(self, row: Batch) -> tuple[Tensor, Tensor]:
        """Return targets [..., K] and their weights. Both are 0 where the row does not hold the target."""
        columns = slice(self.spec.predicted)
        successor = row.next_obs[..., columns]
        successor = successor if self.spec.predict == "direct" else successor - row.obs[..., columns]
        target = torch.cat([row.reward[..., None], successor], dim=-1) if self.spec.learns_reward else successor
        weight = torch.maximum(row.has_successor[..., None], self._certain)
        return torch.where(weight > 0, target, 0), weight

    def _targets(self, row: Batch) -> tuple[Tensor, Tensor]:
        target, weight = self._raw_targets(row)
        normalised = (target - self.statistics["out_mean"]) * self._precision["out"]
        return normalised, weight * self._precision["out"].sign()

    def forward(self, x: Tensor, elites: Tensor | None = None) -> EnsembleOutput:
        """Predict from normalised inputs x [E, N, in], with all members or with `elites` in their order."""
        params = {name: value if elites is None else value[elites] for name, value in self.params.items()}
        x, action = x[..., : self.spec.seen], x[..., self.spec.seen :]
        for i in range(self.depth):
            x = torch.baddbmm(params[f"{i}.bias"], x, params[f"{i}.weight"])
            x = x if i == self.depth - 1 else functional.silu(x)
        size, effects = self.spec.targets, self.spec.effects
        x, effect = x.split([x.shape[-1] - effects, effects], dim=-1)
        highest, lowest = params["max_logvar"], params["min_logvar"]
        logvar = highest - functional.softplus(highest - x[..., size : 2 * size])
        logvar = lowest + functional.softplus(logvar - lowest)
        out = EnsembleOutput(x[..., :size], logvar, x[..., 2 * size :])
        return self._add_effects(out, effect, action) if effects else out

    def _add_effects(self, out: EnsembleOutput, effect: Tensor, action: Tensor) -> EnsembleOutput:
        """Add the effect of the action [E, N, A] to the means and the logit: a matrix [K + 1, A], which depends on the
        observation alone, times the action. A learned reward also has a coefficient for the square of each action
        column, because the cost of effort often grows with its square."""
        size, ends, reward = self.spec.targets, int(self.spec.learns_termination), int(self.spec.learns_reward)
        linear, square = effect.unflatten(-1, (-1, action.shape[-1])).split([size + ends, reward], dim=-2)
        of_mean, of_logit = (linear * action[..., None, :]).sum(-1).split([size, ends], dim=-1)
        price = functional.pad((square * action.square()[..., None, :]).sum(-1), (0, size - reward))
        return EnsembleOutput(out.mean + of_mean + price, out.logvar, out.logit + of_logit)

    @torch.no_grad()
    def sample(
        self, obs: Tensor, action: Tensor, elites: Tensor, generator: torch.Generator, *, compare: bool = False
    ) -> Prediction:
        """Draw for each row from a random elite. A random permutation of the rows gives each elite an equal share.

        compare: also return the disagreement of each row's elite with a second, different elite. Over many rows this
        estimates the mean over all pairs of elites, at the cost of two members instead of all.
        """
        rows, members = len(obs), len(elites)
        share = -(-rows // members)
        order = torch.rand(rows, generator=generator, device=obs.device).argsort()
        filled = order[torch.arange(share * members, device=obs.device) % rows]
        inputs = self._inputs(obs, action)[filled].view(members, share, -1)
        out = self.forward(inputs, elites)

        def in_order(part: Tensor) -> Tensor:
            part = part.flatten(0, 1)[:rows]
            return torch.empty_like(part).index_copy_(0, order, part)

        disagreement = None
        if compare:
            ahead = 1 + torch.rand(1, generator=generator, device=obs.device).mul(members - 1).long()
            other = self.forward(inputs, elites[(torch.arange(members, device=obs.device) + ahead) % members])
            disagreement = in_order(divergence(out, other, self._precision["out"].sign())[..., None]).squeeze(-1)
        drawn = self._draw(obs, EnsembleOutput(*map(in_order, out)), generator)
        return drawn._replace(disagreement=disagreement)

    @torch.no_grad()
    def expect(self, obs: Tensor, action: Tensor, elites: Tensor) -> Tensor:
        """Return the predicted columns of the next observation [N, P], as the mean over these members."""
        each = self.forward(self._inputs(obs, action).expand(len(elites), -1, -1), elites).mean
        return self._successor(obs, each.mean(0))

    def _draw(self, obs: Tensor, out: EnsembleOutput, generator: torch.Generator) -> Prediction:
        noise = torch.randn(out.mean.shape, generator=generator, device=obs.device)
        drawn = out.mean + torch.exp(0.5 * out.logvar) * noise
        reward = drawn[:, 0] * self.statistics["out_scale"][0] + self.statistics["out_mean"][0]
        return Prediction(
            reward if self.spec.learns_reward else None,
            self._successor(obs, drawn),
            torch.sigmoid(out.logit).squeeze(-1) if self.spec.learns_termination else None,
        )

    def _successor(self, obs: Tensor, target: Tensor) -> Tensor:
        """Return the next observation's predicted columns from normalised targets [N, K]."""
        raw = (target * self.statistics["out_scale"] + self.statistics["out_mean"])[:, self.spec.learns_reward :]
        return raw if self.spec.predict == "direct" else obs[:, : self.spec.predicted] + raw

    def state(self) -> dict[str, Tensor]:
        """Return copies of parameters and statistics."""
        return {name: value.clone() for name, value in self._state.items()}

    def load(self, state: Mapping[str, Array]) -> None:
        """Load a state in place, so that captured graphs read the new values."""
        for name, value in self._state.items():
            value.copy_(torch.as_tensor(state[name]))
        self._refresh()
