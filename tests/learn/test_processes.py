"""Learners in processes of their own, over gloo: equal to one learner on the same rows, with the same bits in all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from freewheel.transport.learners.rank import open_store
from tests.support.gloo_learner import LIMIT, what_becomes
from tests.support.places import ROOT

COUNTS = (2, 3)


@pytest.fixture(scope="session", autouse=True)
def opened_once() -> None:
    """The first store of a process keeps a pipe of its library, which is not a leak of the test."""
    open_store(LIMIT)


@pytest.mark.system
@pytest.mark.timeout(3 * LIMIT)
def test_two_and_three_processes_learn_what_one_learns_from_all_rows(tmp_path: Path) -> None:
    stores = {count: open_store(LIMIT) for count in COUNTS}
    groups = [f"{port}:{count}" for count, (_, port) in stores.items()]
    command = [sys.executable, "-m", "tests.support.gloo_learner", str(tmp_path), *groups]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=2 * LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    expected = {count: what_becomes(None, count) for count in COUNTS}
    for count in COUNTS:
        found = [dict(np.load(tmp_path / f"{count}-{rank}.npz")) for rank in range(count)]
        assert found[0].keys() == expected[count].keys()
        for name, one in expected[count].items():
            assert all(other[name].tobytes() == found[0][name].tobytes() for other in found), name
            first_gradient = name.endswith(".1.mean")  # Adam's mean is a tenth of it
            np.testing.assert_allclose(
                found[0][name], one, rtol=0, atol=1e-6 if first_gradient else 2e-5, err_msg=f"{count} {name}"
            )
            assert not first_gradient or np.abs(one).max() > 1e-3
