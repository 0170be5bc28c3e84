"""The policy as learners run it: torch modules over one flat parameter vector, and the distributions they speak in."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from freewheel.core import Array, Decision, NDArray, Snapshot, to_numpy
from freewheel.errors import SetupError
from freewheel.policies.fast_categorical import MASKED
from freewheel.policies.numpy_actor import EDGE, HALF_LOG_2PI
from freewheel.policies.spec import (
    LOG_STD,
    Columns,
    FlatParams,
    PolicySpec,
    full_layout,
    initialise,
    layers,
    network_inputs,
    statistics_layout,
)

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu_,  # in place: what it is given is always a layer's fresh output
    "elu": functional.elu,
    "silu": functional.silu,
}


class Output(NamedTuple):
    """What a network says about N observations."""

    head: Tensor  # [N, K]
    value: Tensor  # [N]


class Affine(nn.Module):
    """x @ weight + bias, with the weight [in, out] as numpy actors read it."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(fan_in, fan_out))
        self.bias = nn.Parameter(torch.zeros(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class MLP(nn.Module):
    """The plain actor-critic of a PolicySpec: separate trunks, parameters called as in its layout."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.spec = spec
        self._activation = ACTIVATIONS[spec.activation]
        shapes = FlatParams(full_layout(spec)).views
        self.actor, self.critic = (
            nn.ModuleList(Affine(*weight.shape) for weight, _ in layers(shapes, part)) for part in ("actor", "critic")
        )

    def head(self, inputs: Tensor) -> Tensor:
        return self._trunk(self.actor, select(self.spec.actor_columns, inputs))

    def forward(self, inputs: Tensor) -> Output:
        head = self.head(inputs)
        return Output(head, self._trunk(self.critic, select(self.spec.critic_columns, inputs)).squeeze(-1))

    def _trunk(self, trunk: nn.ModuleList, x: Tensor) -> Tensor:
        *hidden, last = trunk
        for layer in hidden:
            x = self._activation(layer(x))
        out: Tensor = last(x)
        return out


class PolicyNet:
    """A network whose every weight is a view of one flat vector, and whose every gradient is a view of another.

    `params` names the weights as numpy views on the CPU (a plain MLP's are the ones numpy actors load); `vector` and `grad`
    hold the trainable part in one piece each. On a GPU the vectors live there and `pull` refreshes the numpy side.
    """

    def __init__(self, spec: PolicySpec, rng: np.random.Generator, device: str = "cpu") -> None:
        self.spec = spec
        self.module = _build(spec, rng)
        layout = full_layout(spec) if not spec.module else _module_layout(spec, self.module)
        self.params = FlatParams(layout)
        fixed = sum(int(np.prod(shape)) for shape in statistics_layout(spec).values())
        initialise(spec, self.params, rng)
        if spec.module:
            for name, value in self.module.named_parameters():
                self.params.views[name][...] = value.detach().numpy()
        self.host = self.params.vector[fixed:]
        self.vector = torch.from_numpy(self.host) if device == "cpu" else torch.from_numpy(self.host).to(device)
        self.grad = torch.zeros_like(self.vector)
        self.log_std: Tensor | None = None
        self._adopt(layout, fixed)

    def _adopt(self, layout: Mapping[str, tuple[int, ...]], fixed: int) -> None:
        """Make every parameter and its gradient a view of the flat vectors."""
        self.module.to(self.vector.device)
        parameters = dict(self.module.named_parameters())
        start = -fixed
        for name, shape in layout.items():
            size = int(np.prod(shape))
            if start >= 0:
                view, grad = (flat[start : start + size].view(shape) for flat in (self.vector, self.grad))
                if name == "actor.log_std":
                    parameters[name] = self.log_std = nn.Parameter(view)
                else:
                    parameters[name].data = view
                parameters[name].grad = grad
            start += size

    def pull(self) -> None:
        """Refresh the numpy views from the device."""
        if self.vector.device.type != "cpu":
            self.host[...] = self.vector.cpu().numpy()

    def push(self) -> None:
        """Refresh the device from the numpy views."""
        if self.vector.device.type != "cpu":
            self.vector.copy_(torch.from_numpy(self.host))

    def begin(self, params: Mapping[str, Array]) -> None:
        """With these weights instead of those that were drawn; SetupError if they are another network's."""
        views = self.params.views
        here, there = ({name: tuple(value.shape) for name, value in some.items()} for some in (views, params))
        for name in (*here, *there):
            ours, theirs = here.get(name, "missing"), there.get(name, "missing")
            if ours != theirs:
                what = f"{name} is {theirs} there and {ours} here"
                raise SetupError(f"the weights to begin with are another network's: {what}; choose the same policy")
        for name, view in views.items():
            view[...] = to_numpy(params[name])
        self.push()

    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable weight by name, as a view of `vector`."""
        shapes = {name: view.shape for name, view in self.params.views.items() if not name.startswith("norm.")}
        parts = self.vector.split([math.prod(shape) for shape in shapes.values()])
        return ((name, part.view(shape)) for (name, shape), part in zip(shapes.items(), parts, strict=True))

    def __call__(self, inputs: Tensor) -> Output:
        head, value = self.module(inputs)
        return Output(head, value)

    def head(self, inputs: Tensor) -> Tensor:
        """What the actor alone says, [N, K]."""
        return self.module.head(inputs) if isinstance(self.module, MLP) else self(inputs).head

    def distribution(self, head: Tensor, mask: Tensor | None) -> Distribution:
        """The distribution these head outputs mean; mask [N, K] of allowed actions for categorical heads."""
        if self.spec.head == "categorical":
            return Categorical(head, mask)
        if self.spec.head == "gaussian":
            assert self.log_std is not None
            return Gaussian(head, self.log_std)
        return Squashed(head)

    def law(self, inputs: Tensor, head: Tensor) -> Distribution:
        """The same for the inputs [N, D] that gave this head, which hold the mask if there is one."""
        mask = self.spec.mask
        return self.distribution(head, None if mask is None else inputs[:, slice(*mask)])


class Categorical:
    """Over K choices."""

    def __init__(self, logits: Tensor, mask: Tensor | None) -> None:
        if mask is not None:
            logits = torch.where(mask > 0, logits, float(MASKED))
        self.log_p = torch.log_softmax(logits, dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_p.gather(-1, action[:, None]).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_p.exp() * self.log_p).sum(-1)


class Gaussian:
    """Independent columns with a deviation that does not depend on the observation."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean, self.log_std = mean, log_std

    def log_prob(self, action: Tensor) -> Tensor:
        noise = (action - self.mean) * torch.exp(-self.log_std)
        return -0.5 * noise.square().sum(-1) - self.log_std.sum() - HALF_LOG_2PI * self.mean.shape[-1]

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 + HALF_LOG_2PI).sum().expand(len(self.mean))


class Squashed:
    """tanh of a Gaussian whose mean and deviation both depend on the observation; float64 near the edges."""

    def __init__(self, head: Tensor) -> None:
        self.mean, log_std = head.double().chunk(2, dim=-1)
        self.log_std = log_std.clamp(*LOG_STD)

    def log_prob(self, action: Tensor) -> Tensor:
        wide = action.double().clamp(-EDGE, EDGE)
        noise = (torch.atanh(wide) - self.mean) * torch.exp(-self.log_std)
        each = -0.5 * noise.square() - self.log_std - HALF_LOG_2PI - torch.log1p(-wide.square())
        return each.sum(-1).float()

    def entropy(self) -> Tensor:
        """Of the Gaussian before squashing: the usual stand-in, since the true one has no closed form."""
        return (self.log_std + 0.5 + HALF_LOG_2PI).sum(-1).float()


Distribution = Categorical | Gaussian | Squashed


class TorchActor:
    """Acts with a user's own module; whoever acts then imports torch. Implements core.Actor."""

    state_size = 0

    def __init__(self, spec: PolicySpec) -> None:
        self.net = PolicyNet(spec, np.random.default_rng(0))

    def load(self, snapshot: Snapshot) -> None:
        for name, view in self.net.params.views.items():
            view[...] = to_numpy(snapshot.params[name])

    @torch.no_grad()
    def act(
        self, obs: NDArray, rng: np.random.Generator, *, state: NDArray | None = None, greedy: bool = False
    ) -> Decision:
        state = np.zeros((len(obs), 0), np.float32) if state is None else state
        spec = self.net.spec
        inputs = torch.from_numpy(network_inputs(spec, self.net.params.views, obs))
        mask = None if spec.mask is None else torch.from_numpy(obs[:, slice(*spec.mask)])
        law = self.net.distribution(self.net(inputs).head, mask)
        if isinstance(law, Categorical):
            noise = 0.0 if greedy else torch.from_numpy(rng.gumbel(size=law.log_p.shape))
            action = (law.log_p + noise).argmax(-1)
        else:
            noise = 0.0 if greedy else torch.from_numpy(rng.standard_normal(law.mean.shape))
            raw = law.mean + torch.exp(law.log_std) * noise
            action = (torch.tanh(raw).clamp(-EDGE, EDGE) if isinstance(law, Squashed) else raw).float()
        return Decision(
            action.numpy(),
            law.log_prob(action).numpy(),
            state,
        )


def _build(spec: PolicySpec, rng: np.random.Generator) -> nn.Module:
    if not spec.module:
        return MLP(spec)
    place, _, name = spec.module.partition(":")
    try:
        factory = getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(
            f"policy.module '{spec.module}' cannot be imported ({error}); write package.module:Factory"
        ) from None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.integers(2**31)))
        module = factory(spec)
        if not isinstance(module, nn.Module):
            raise SetupError(f"policy.module '{spec.module}' returned {type(module).__name__}, not a torch.nn.Module")
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
            raise SetupError(
                f"policy.module '{spec.module}' uses BatchNorm, whose running statistics do not travel; use LayerNorm"
            )
        _try(spec, module)
    return module


@torch.no_grad()
def _try(spec: PolicySpec, module: nn.Module) -> None:
    """Refuse a network whose outputs have other shapes: values [N, 1], say, would broadcast against targets [N]."""
    shapes = [tuple(part.shape) for part in module(torch.zeros(2, spec.obs_size))]
    if shapes != [(2, spec.outputs), (2,)]:
        raise SetupError(
            f"policy.module '{spec.module}' answered two observations with shapes {shapes}, "
            f"not head [N, {spec.outputs}] and value [N]"
        )


def _module_layout(spec: PolicySpec, module: nn.Module) -> dict[str, tuple[int, ...]]:
    layout = statistics_layout(spec)
    if spec.head == "gaussian":
        layout["actor.log_std"] = (spec.action_size,)
    parameters = {name: tuple(value.shape) for name, value in module.named_parameters()}
    if taken := sorted(layout.keys() & parameters):
        raise SetupError(
            f"policy.module '{spec.module}' has a parameter {taken[0]}, which is a name of ours; rename it"
        )
    return layout | parameters


def select(columns: Columns, inputs: Tensor) -> Tensor:
    """The columns a part of the network reads."""
    if columns == ((0, inputs.shape[-1]),):
        return inputs
    return torch.cat([inputs[..., start:stop] for start, stop in columns], dim=-1)
