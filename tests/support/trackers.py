"""What trackers keep of a run, read back from their files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wandb.proto.wandb_internal_pb2

BLOCK, HEADER = 32768, struct.Struct("<IHB")  # of a log of LevelDB's kind: checksum, length, kind
RECORD: Any = vars(wandb.proto.wandb_internal_pb2)["Record"]
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def wandb_records(folder: Path) -> Iterator[Any]:
    """The records of a run of wandb's that was kept offline, of all its sessions."""
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in _log(path.read_bytes()):
            record: Any = RECORD()
            record.ParseFromString(data)
            yield record


def wandb_history(folder: Path) -> list[dict[str, float]]:
    """The rows that were logged, without wandb's own columns."""
    rows = [record.history.item for record in wandb_records(folder) if record.HasField("history")]
    named = [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in named]


def _log(data: bytes) -> Iterator[bytes]:
    place, parts = 7, b""  # after the name of the format
    while place < len(data):
        if (room := BLOCK - place % BLOCK) < HEADER.size:
            place += room
            continue
        _, length, kind = HEADER.unpack_from(data, place)
        place += HEADER.size
        parts += data[place : place + length]
        place += length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def tensorboard_events(folder: Path) -> Any:
    """All that TensorBoard shows of a folder of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found
