"""Encodes pictures as PNG files."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from freewheel.core import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"
RGB, UP = 2, 2  # the type of pixels; the filter: each row is stored as its difference from the row above


def encode(picture: NDArray) -> bytes:
    """Return the PNG file of a picture [H, W, 3] of bytes."""
    height, width, _ = picture.shape
    rows = np.ascontiguousarray(picture, np.uint8).reshape(height, width * 3)
    filtered = np.full((height, 1 + width * 3), UP, np.uint8)
    filtered[0, 1:], filtered[1:, 1:] = rows[0], rows[1:] - rows[:-1]
    header = struct.pack(">IIBBBBB", width, height, 8, RGB, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(filtered.tobytes(), 9)), (b"IEND", b"")
    return SIGNATURE + b"".join(_chunk(name, data) for name, data in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
