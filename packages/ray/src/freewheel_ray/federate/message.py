"""Messages between the coordinator and the sites. They hold only a few plain values and named arrays of numbers, so reading one
never creates any other object.

    kind      from          plain values                            arrays
    order     coordinator   the settings of the site's training     none
    ready     site          the spaces of its environment           its initial weights, drawn at random
    round     coordinator   the number of the round                 the average
    learned   site          the number of the round and its rows;   what the site has learned
                            also what --site-report names
    end       coordinator   none                                    the last average
    failed    site          why its training cannot start, or the   none
                            type of the error that ended it
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from freewheel.core import NDArray
from freewheel.errors import FileError
from freewheel.files.read import parse_arrays, parse_json
from freewheel.run.checkpoints.checkpoint import encode_arrays
from freewheel.run.hooks import misfit

Kind = Literal["order", "ready", "round", "learned", "end", "failed"]
ROOM = 1 << 20  # bytes for names and plain values, in addition to the values of the arrays


@dataclass(frozen=True)
class SiteMessage:
    """One message."""

    kind: Kind
    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray] = field(default_factory=dict)

    def pack(self) -> bytes:
        head = json.dumps({"kind": self.kind, **self.values}, allow_nan=False)
        return head.encode() + b"\n" + (encode_arrays(self.arrays) if self.arrays else b"")


def unpack(data: bytes, source: str, *kinds: Kind, known: Mapping[str, NDArray] | None = None) -> SiteMessage:
    """Read a message of one of these kinds. FileError reports other bytes, arrays that are not finite, and arrays whose names,
    shapes or types differ from the known ones."""
    if known is not None and len(data) > sum(value.nbytes for value in known.values()) + ROOM:
        raise FileError(f"{source} sent {len(data):,} bytes, far more than the learned weights have")
    head, _, body = data.partition(b"\n")
    values = parse_json(head, f"the message of {source}")
    kind: Any = values.pop("kind", None)
    if kind not in kinds:
        raise FileError(f"{source} sent {str(kind)[:20]!r} instead of {' or '.join(kinds)}")
    arrays = parse_arrays(bytearray(body), f"the message of {source}") if body else {}
    if known is not None and arrays and (problem := misfit(arrays, known)):
        raise FileError(f"{source} sent weights that do not fit: {problem}")
    return SiteMessage(kind, values, arrays)
