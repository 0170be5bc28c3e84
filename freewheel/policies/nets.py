"""The policy in torch: modules over one flat parameter vector, for learners and actors with a module or on tensors."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn
from torch.nn import functional

from freewheel.core import Array, Decision, NDArray, Snapshot
from freewheel.errors import FreewheelError, SetupError, cut, text_of
from freewheel.policies.spec import (
    HEADS,
    Distribution,
    FlatParams,
    NamedWeights,
    PolicySpec,
    Reparameterised,
    full_layout,
    head_layout,
    initialise,
    layers,
    network_inputs,
    select,
    statistics_layout,
    views,
)
from freewheel.policies.torch_private import BatchNorm
from freewheel.registry import own_object

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu_,  # in place: its input is always a layer's fresh output
    "elu": functional.elu,
    "silu": functional.silu,
}


class NetworkOutput(NamedTuple):
    """The outputs of a network for N observations."""

    head: Tensor  # [N, K] outputs of the actor
    value: Tensor  # [N]


class Affine(nn.Module):
    """x @ weight + bias, with the weight [in, out] as in numpy actors."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(fan_in, fan_out))
        self.bias = nn.Parameter(torch.zeros(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class MLP(nn.Module):
    """The plain actor-critic of a PolicySpec: separate trunks, parameters named as in its layout."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.spec = spec
        self._activation = ACTIVATIONS[spec.activation]
        shapes = FlatParams(full_layout(spec)).views
        self.actor = nn.ModuleList(Affine(*weight.shape) for weight, _ in layers(shapes, "actor"))
        self.critic = nn.ModuleList(Affine(*weight.shape) for weight, _ in layers(shapes, "critic"))

    def outputs(self, inputs: Tensor) -> Tensor:
        return self._trunk(self.actor, select(self.spec.actor_columns, inputs))

    def values(self, inputs: Tensor) -> Tensor:
        return self._trunk(self.critic, select(self.spec.critic_columns, inputs)).squeeze(-1)

    def forward(self, inputs: Tensor) -> NetworkOutput:
        return NetworkOutput(self.outputs(inputs), self.values(inputs))

    def _trunk(self, trunk: nn.ModuleList, x: Tensor) -> Tensor:
        *hidden, last = trunk
        for layer in hidden:
            x = self._activation(layer(x))
        out: Tensor = last(x)
        return out


class PolicyNet:
    """A network whose every trainable weight is a view of one flat `vector`.

    `params` names weights and statistics as numpy views (for a plain MLP, the names that numpy actors load). On a CPU,
    `vector` shares their memory; on another device, they hold the initial weights.
    """

    def __init__(self, spec: PolicySpec, rng: Generator, device: str = "cpu") -> None:
        self.spec, self._head = spec, HEADS[spec.head]
        self.module = _build(spec, rng)
        layout = full_layout(spec) if not spec.module else _module_layout(spec, self.module)
        self.params = FlatParams(layout)
        initialise(spec, self.params, rng)
        if spec.module:
            for name, value in self.module.named_parameters():
                self.params.views[name][...] = value.detach().numpy()
        fixed = sum(math.prod(shape) for shape in statistics_layout(spec).values())
        self.array = self.params.vector[fixed:]  # the trainable part in numpy
        self.vector = torch.from_numpy(self.array).to(device)
        self.module.to(device)
        own, self._head_parameters = dict(self.module.named_parameters()), dict[str, nn.Parameter]()
        for name, view in self.named_views().items():
            if name in own:
                own[name].data = view
            else:
                self._head_parameters[name] = nn.Parameter(view)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the module, then of the head."""
        return [*self.module.parameters(), *self._head_parameters.values()]

    @property
    def trainable_layout(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parts of `vector`, in order."""
        return {name: view.shape for name, view in self.params.views.items() if not name.startswith("norm.")}

    def begin(self, params: Mapping[str, Array]) -> None:
        """Replace the initial weights with these; raises SetupError if they belong to another network."""
        known = self.params.views
        here, there = ({name: tuple(value.shape) for name, value in some.items()} for some in (known, params))
        for name in (*here, *there):
            ours, theirs = here.get(name, "missing"), there.get(name, "missing")
            if ours != theirs:
                what = f"{name} is {theirs} there and {ours} here"
                raise SetupError(f"the initial weights belong to another network: {what}; choose the same policy")
        self.params.load(params)
        self.vector.copy_(torch.from_numpy(self.array))

    def named_views(self) -> dict[str, Tensor]:
        """Every trainable weight by name, as a view of `vector`."""
        return views(self.vector, self.trainable_layout)

    def __call__(self, inputs: Tensor) -> NetworkOutput:
        return NetworkOutput(*self.module(inputs))

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the actor alone, [N, K]."""
        return self.module.outputs(inputs) if isinstance(self.module, MLP) else self(inputs).head

    def values(self, inputs: Tensor) -> Tensor:
        """Return the values of the critic alone, [N]."""
        return self.module.values(inputs) if isinstance(self.module, MLP) else self(inputs).value

    def distribution(self, inputs: Tensor, outputs: Tensor) -> Distribution:
        """Return the distribution of these actor outputs; the inputs [N, D] hold the mask, if there is one."""
        mask = None if self.spec.mask is None else inputs[:, slice(*self.spec.mask)]
        return self._head.distribution(outputs, mask, self._head_parameters)


class TensorPolicy:
    """A PolicyNet with its normaliser and its random numbers, all on one device; nothing here waits for that device."""

    def __init__(self, spec: PolicySpec, rng: Generator, device: str, seed: int) -> None:
        self.spec, self.net = spec, PolicyNet(spec, rng, device)
        first = self.net.params.views
        self._layout = {name: view.shape for name, view in first.items()}
        self.statistics = {name: torch.tensor(first[name], device=device) for name in statistics_layout(spec)}
        self.generator = torch.Generator(device).manual_seed(seed)

    def inputs(self, obs: Tensor) -> Tensor:
        """Observations as the network reads them."""
        return network_inputs(self.spec, self.statistics, obs)

    def normalise(self, mean: Array, scale: Array) -> None:
        """Set the statistics of the next version."""
        for name, value in (("norm.mean", mean), ("norm.scale", scale)):
            for start, stop in self.spec.normalised:
                self.statistics[name][start:stop] = torch.as_tensor(value[start:stop])

    def distribution(self, inputs: Tensor) -> Distribution:
        return self.net.distribution(inputs, self.net.outputs(inputs))

    def rsample(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, A] and their log-probabilities [N]; gradients flow through both."""
        return cast(Reparameterised, self.distribution(inputs)).rsample(self.generator)

    @torch.no_grad()
    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Sampled actions and their log-probabilities."""
        return self.distribution(self.inputs(obs)).sample(self.generator)

    @torch.no_grad()
    def greedy(self, obs: Tensor) -> Tensor:
        """The likeliest actions."""
        return self.distribution(self.inputs(obs)).mode()

    @property
    def flat(self) -> Tensor:
        """A copy of statistics and weights in one vector."""
        return torch.cat([*self.statistics.values(), self.net.vector])

    @torch.no_grad()
    def load_flat(self, values: Array) -> None:
        """Load what `flat` returned, in place, so that captured graphs read the new weights."""
        parts, flat = [*self.statistics.values(), self.net.vector], values
        if not isinstance(flat, Tensor):
            flat = torch.as_tensor(values)
        for part, value in zip(parts, flat.split([part.shape[0] for part in parts]), strict=True):
            part.copy_(value, non_blocking=part.is_cuda)

    def weights(self, *, on_device: bool) -> NamedWeights[Any]:
        """A copy of statistics and weights by name: on their device, or as numpy; one transfer either way."""
        return self.named(self.flat if on_device and self.net.vector.is_cuda else self.flat.cpu().numpy())

    def named(self, flat: Array) -> NamedWeights[Any]:
        """Name the parts of what `flat` returned."""
        return NamedWeights(flat, self._layout)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Array]) -> None:
        """Load what `weights` returned, in place."""
        if isinstance(weights, NamedWeights) and list(weights.layout.items()) == list(self._layout.items()):
            self.load_flat(weights.vector)
            return
        for name, view in (*self.statistics.items(), *self.net.named_views().items()):
            view.copy_(torch.as_tensor(weights[name]), non_blocking=view.is_cuda)

    def load(self, snapshot: Snapshot) -> None:
        self.load_weights(snapshot.params)

    def begin(self, params: Mapping[str, Array]) -> None:
        """Replace the initial weights and statistics with these."""
        self.net.begin(params)
        for name, value in self.statistics.items():
            value.copy_(torch.from_numpy(self.net.params.views[name]))


class TorchActor:
    """Acts with a user's own module, which brings torch into the worker. Implements core.Actor."""

    state_size = 0

    def __init__(self, spec: PolicySpec) -> None:
        self.policy = TensorPolicy(spec, np.random.default_rng(0), "cpu", 0)
        self.load = self.policy.load

    @torch.no_grad()
    def act(self, obs: NDArray, rng: Generator, *, state: NDArray | None = None, greedy: bool = False) -> Decision:
        state = np.zeros((len(obs), 0), np.float32) if state is None else state
        distribution = self.policy.distribution(self.policy.inputs(torch.from_numpy(obs)))
        if greedy:
            action = distribution.mode()
        else:
            action, _ = distribution.sample(self.policy.generator.manual_seed(int(rng.integers(2**63))))
        return Decision(action.numpy(), distribution.log_prob(action).numpy(), state)


def carried_actor(factory: Callable[[PolicySpec], nn.Module], spec: PolicySpec) -> TorchActor:
    """Return an actor with the network of a script or notebook: workers cannot import it, so it is sent to them."""
    vars(sys.modules["__main__"])[spec.module.rpartition(":")[2]] = factory
    return TorchActor(spec)


class TensorActor:
    """A private copy of the policy for a simulator. Implements core.Actor[Tensor], with a private generator."""

    state_size = 0

    def __init__(self, spec: PolicySpec, device: str, seed: int) -> None:
        self.policy = TensorPolicy(spec, np.random.default_rng(0), device, seed)
        self.load, self.generators = self.policy.load, [self.policy.generator]

    def act(
        self, obs: Tensor, rng: Generator, *, state: Tensor | None = None, greedy: bool = False
    ) -> Decision[Tensor]:
        state = obs.new_zeros(len(obs), 0) if state is None else state
        if greedy:
            return Decision(self.policy.greedy(obs), obs.new_zeros(len(obs), dtype=torch.float32), state)
        return Decision(*self.policy.act(obs), state)


def _build(spec: PolicySpec, rng: Generator) -> nn.Module:
    if not spec.module:
        return MLP(spec)
    here, factory = f"policy.module '{spec.module}'", own_object("policy.module", spec.module, "Factory")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.integers(2**31)))
        with _explained(f"{here}, called with a PolicySpec (obs_size {spec.obs_size}, outputs {spec.outputs}),"):
            module = factory(spec)
        if not isinstance(module, nn.Module):
            raise SetupError(f"{here} returned {type(module).__name__}, not a torch.nn.Module")
        if any(isinstance(part, BatchNorm) for part in module.modules()):
            raise SetupError(f"{here} uses BatchNorm, whose running statistics are not sent to workers; use LayerNorm")
        with torch.no_grad(), _explained(f"{here}, given two observations [2, {spec.obs_size}],"):
            shapes = [tuple(part.shape) for part in module(torch.zeros(2, spec.obs_size))]
    if shapes != [(2, spec.outputs), (2,)]:  # values [N, 1], for example, would broadcast against targets [N]
        wanted = f"head [N, {spec.outputs}] and value [N]"
        raise SetupError(f"{here} answered two observations with shapes {shapes}, not {wanted}")
    return module


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise SetupError, with the traceback from the user's own first line on, if the user's network raises."""
    try:
        yield
    except FreewheelError:
        raise
    except Exception as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_globals.get("__name__", "").startswith(("freewheel.policies.", "torch.")):
            trace = trace.tb_next
        text = "\n" + "".join(traceback.format_exception(type(error), error, trace)).rstrip() if trace else ""
        message = cut(" ".join(text_of(error).split()))
        raise SetupError(f"{what} raised {type(error).__name__}: {message}{text}") from error


def _module_layout(spec: PolicySpec, module: nn.Module) -> dict[str, tuple[int, ...]]:
    layout = statistics_layout(spec) | head_layout(spec)
    parameters = {name: tuple(value.shape) for name, value in module.named_parameters()}
    if taken := sorted(layout.keys() & parameters):
        what = f"has a parameter {taken[0]}, which is a reserved name; rename it"
        raise SetupError(f"policy.module '{spec.module}' {what}")
    return layout | parameters
