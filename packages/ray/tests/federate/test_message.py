"""Messages hold plain values and arrays that fit; everything else is refused."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from freewheel.core import NDArray
from freewheel.errors import FileError
from freewheel_ray.federate.message import ROOM, SiteMessage, unpack

KNOWN: dict[str, NDArray] = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "statistics.x": np.zeros(3)}


def test_a_message_arrives_as_it_was_sent() -> None:
    came = unpack(SiteMessage("learned", {"round": 3, "rows": 70}, KNOWN).pack(), "a", "learned", known=KNOWN)
    assert (came.kind, came.values) == ("learned", {"round": 3, "rows": 70})
    assert all(np.array_equal(came.arrays[name], KNOWN[name]) for name in KNOWN)
    assert all(value.flags.writeable and value.flags.aligned for value in came.arrays.values())
    assert unpack(SiteMessage("failed", {"problem": "x"}).pack(), "a", "learned", "failed", known=KNOWN).arrays == {}


def without(name: str) -> dict[str, NDArray]:
    return {key: value for key, value in KNOWN.items() if key != name}


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({**KNOWN, "w": np.full((2, 3), np.nan, np.float32)}, "'w' is not finite"),
        ({**KNOWN, "w": np.full((2, 3), np.inf, np.float32)}, "'w' is not finite"),
        ({**KNOWN, "w": np.zeros((3, 2), np.float32)}, "should be"),
        ({**KNOWN, "w": np.zeros((2, 3))}, "float64, and should be"),
        ({**KNOWN, "rows": np.zeros((9, 4), np.float32)}, "should be missing"),
        (without("w"), "'w' is missing"),
    ],
)
def test_weights_that_do_not_fit_are_refused(arrays: dict[str, NDArray], said: str) -> None:
    with pytest.raises(FileError, match="a sent weights that do not fit") as caught:
        unpack(SiteMessage("learned", {"round": 1, "rows": 1}, arrays).pack(), "a", "learned", known=KNOWN)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04K\x01.",
        pickle.dumps(KNOWN),
        b'{"kind": "learned", "rows": NaN}\n',
        b'{"kind": "learned"}\n12345678',
        b'{"kind": "order"}\n',
        b'["learned"]\n',
        json.dumps({"kind": "learned"}).encode() + b"\n" + bytes(ROOM + 1000),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(FileError):
        unpack(data, "a", "learned", known=KNOWN)
