"""What travels between the coordinator and the sites: bytes that hold a few plain values and named arrays of numbers, and nothing
else. No object is made from them but these.

    kind      from          plain values                           arrays
    order     coordinator   the options of the site's training     none
    ready     site          the spaces of its environment          what it begins with: drawn, not learned
    round     coordinator   the round                              the average
    learned   site          the round, rows; what --site-report    what it has learned
                            names
    end       coordinator   none                                   the last average
    failed    site          why its training cannot start, or the  none
                            kind of error that has ended it
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
ROOM = 1 << 20  # bytes beside the values of the arrays: names and plain values


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
    """A message of one of these kinds; FileError about anything else, and about arrays that have not the names, shapes and types
    of those that are known, or are not finite."""
    if known is not None and len(data) > sum(value.nbytes for value in known.values()) + ROOM:
        raise FileError(f"{source} has sent {len(data):,} bytes, far more than what is learned has")
    head, _, body = data.partition(b"\n")
    values = parse_json(head, f"what {source} has sent")
    kind: Any = values.pop("kind", None)
    if kind not in kinds:
        raise FileError(f"{source} has sent {str(kind)[:20]!r}, and not {' or '.join(kinds)}")
    arrays = parse_arrays(bytearray(body), f"what {source} has sent") if body else {}
    if known is not None and arrays and (problem := misfit(arrays, known)):
        raise FileError(f"{source} has sent weights that do not fit: {problem}")
    return SiteMessage(kind, values, arrays)
