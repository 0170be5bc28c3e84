"""A seeded run still ends with the weights that the first release ended with, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from tests.same_bits.record import CASES, PAIRS, arithmetic, weights

REFERENCE = Path(__file__).with_name("reference")


OTHERS = [pytest.param(case, marks=pytest.mark.system) for case in CASES if case not in PAIRS]


@pytest.mark.parametrize("case", [*PAIRS, *OTHERS])
def test_weights_equal_those_of_the_first_release(case: str) -> None:
    with safe_open(REFERENCE / f"{case}.safetensors", framework="np") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        same_arithmetic = file.metadata()["arithmetic"] == arithmetic()
    found = weights(case)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if same_arithmetic:
            assert found[name].tobytes() == value.tobytes(), name
        else:  # another processor rounds otherwise
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-2, err_msg=name)
