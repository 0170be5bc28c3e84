"""PNG files, read without the code that writes them."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from freewheel.core import NDArray


def decoded(data: bytes) -> NDArray:
    """The picture [H, W, 3] of an RGB file whose rows are stored plainly (0) or as differences to the row above (2)."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size)[0] == zlib.crc32(name + body)
        chunks[name], at = body, at + 12 + size
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *kind = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert kind == [8, 2, 0, 0, 0]  # bytes of red, green and blue; no interlacing
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    picture = np.zeros((height, 3 * width), np.uint8)
    for number, (filtered, *_) in enumerate(rows):
        assert filtered in (0, 2)
        above = picture[number - 1] if filtered == 2 and number else np.uint8(0)
        picture[number] = rows[number, 1:] + above
    return picture.reshape(height, width, 3)
