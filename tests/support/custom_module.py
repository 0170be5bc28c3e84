"""Networks a user might bring, good and bad; imported by name, as a user's would be."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from freewheel.policies.spec import PolicySpec


class Shared(nn.Module):
    """One trunk under both heads, with layers called as a user might call them."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(spec.obs_size, 16), nn.LayerNorm(16), nn.Tanh())
        self.actor_0 = nn.Linear(16, spec.outputs)
        self.critic = nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(inputs)
        return self.actor_0(x), self.critic(x)[:, 0]


class Normed(Shared):
    """Running statistics that nobody publishes."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__(spec)
        self.trunk[1] = nn.BatchNorm1d(16)


class Tall(Shared):
    """Values [N, 1], which would broadcast against targets [N]."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(inputs)
        return self.actor_0(x), self.critic(x)


class Narrow(Shared):
    """A head output of the wrong width."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(inputs)
        return self.actor_0(x)[:, :1], self.critic(x)[:, 0]


class Lonely(Shared):
    """A head output and nothing else."""

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        return torch.as_tensor(self.actor_0(self.trunk(inputs)))


class Clashing(Shared):
    """A parameter called as one of ours."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__(spec)
        self.norm = nn.ParameterDict({"scale": torch.ones(16)})


class Unasked(nn.Module):
    """A constructor without the PolicySpec."""

    def __init__(self) -> None:
        super().__init__()


class Askew(Shared):
    """A layer for other inputs."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(inputs @ torch.zeros(self.columns, 1))

    @property
    def columns(self) -> int:
        return 99


def no_module(spec: PolicySpec) -> int:
    return spec.obs_size
