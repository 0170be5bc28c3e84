"""Which actor runs a policy: numpy for our own networks; a user's module brings torch into the worker."""

from __future__ import annotations

import functools

from freewheel.policies.numpy_actor import NumpyActor
from freewheel.policies.spec import PolicySpec
from freewheel.rollout.factory import MakeActor


def make_actor(policy: PolicySpec) -> MakeActor:
    """A picklable factory of actors for this policy."""
    if not policy.module:
        return functools.partial(NumpyActor, policy)
    from freewheel.policies.nets import TorchActor

    return functools.partial(TorchActor, policy)


def make_tensor_actor(policy: PolicySpec, device: str, seed: int) -> MakeActor:
    """For worlds on tensors."""
    from freewheel.policies.device_actor import TensorActor

    return functools.partial(TensorActor, policy, device, seed)
