"""Which actor runs which policy, and that plain ones leave torch out of the worker."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

from freewheel.policies.build import make_actor
from freewheel.policies.nets import TorchActor
from freewheel.policies.numpy_actor import NumpyActor
from freewheel.policies.spec import PolicySpec
from tests.support.places import ROOT, SUPPORT


def policy(module: str = "") -> PolicySpec:
    return PolicySpec(2, "float32", ((0, 2),), ((0, 2),), (), None, "categorical", 3, (4,), "tanh", 0.0, module)


def test_our_own_networks_run_in_numpy() -> None:
    make = pickle.loads(pickle.dumps(make_actor(policy())))  # noqa: S301 - as it travels to a worker
    first, second = make(), make()
    assert isinstance(first, NumpyActor)
    assert not np.shares_memory(first.params.vector, second.params.vector)


def test_a_users_module_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SUPPORT)
    make = pickle.loads(pickle.dumps(make_actor(policy("custom_module:Shared"))))  # noqa: S301
    assert isinstance(make(), TorchActor)


def test_a_worker_with_our_own_network_does_without_torch() -> None:
    script = f"""
import pickle, sys
make = pickle.loads({pickle.dumps(make_actor(policy()))!r})
make()
assert "torch" not in sys.modules
"""
    root = ROOT
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=30)
