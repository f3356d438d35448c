"""Messages in a stream of bytes: each with its length before it."""

from __future__ import annotations

import struct

LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


class FrameBuffer:
    """Bytes as they come, messages as they are whole."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole now."""
        self._data += data
        whole = []
        while len(self._data) >= LENGTH.size:
            (count,) = LENGTH.unpack_from(self._data)
            end = LENGTH.size + count
            if len(self._data) < end:
                break
            whole.append(bytes(self._data[LENGTH.size : end]))
            del self._data[:end]
        return whole
