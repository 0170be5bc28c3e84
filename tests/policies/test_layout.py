"""Spaces as plain data: what is written as JSON is what is read."""

from __future__ import annotations

import json
import re
from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pytest

from freewheel.envs.spaces import layout_of
from freewheel.policies.layout import Layout
from tests.support.kinds import KINDS

BOX, TWO = gs.Box(-1, 1, (3,)), gs.Discrete(2)


def of(kind: str) -> Layout:
    observation, action, mask = KINDS[kind]
    return layout_of(observation, action, info_mask=mask == "info")


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_survives_a_file(kind: str) -> None:
    layout = of(kind)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json(), allow_nan=False))) == layout
    assert layout.spec("any", 1, ()).layout == layout.to_json()
    assert not layout.misfit(layout)


@pytest.mark.parametrize(
    ("observation", "action", "line"),
    [
        (gs.Box(-9, 9, (3,), np.float64), TWO, ""),  # other bounds and precision become the same columns
        (gs.Box(-1, 1, (4,)), TWO, r"the policy reads 'obs' Box\(-1.0, 1.0, \(3,\), float32\), the environment has"),
        (gs.Box(0, 255, (3,), np.uint8), TWO,
         "the policy reads observations as float32, those of the environment become"),
        (gs.Dict(x=BOX), TWO, "the policy reads 'obs' Box.*, the environment has no 'obs'"),
        (BOX, gs.Discrete(2, start=1),
         r"the policy acts in Discrete\(2, start=0\), the environment in Discrete\(2, start=1\)"),
        (BOX, gs.Box(-1, 1, (2,)),
         r"the policy acts in Discrete\(2, start=0\), the environment in Box\(-1, 1, \(2,\), float32\)"),
    ],
)  # fmt: skip
def test_what_differs_is_said(observation: gs.Space[Any], action: gs.Space[Any], line: str) -> None:
    said = layout_of(BOX, TWO).misfit(layout_of(observation, action))
    assert re.match(line, said) if line else not said


def test_the_order_of_parts_matters() -> None:
    first, second = (layout_of(gs.Tuple([BOX, TWO][::step]), TWO) for step in (1, -1))
    assert first.misfit(second)


def test_keys_that_json_cannot_have_leave_the_layout_out() -> None:
    odd: Any = {("a", 1): BOX}
    assert layout_of(gs.Dict(odd), TWO).to_json() == {}
