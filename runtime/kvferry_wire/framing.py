"""Whole messages in a byte stream: a 4-byte little-endian length, and as many bytes."""

import struct

_HEAD = struct.Struct("<I")


class MessageTooLongError(ValueError):
    """A message says that it is longer than is accepted."""


def framed(body: bytes) -> bytes:
    """A message with its length in front."""
    return _HEAD.pack(len(body)) + body


def cut(buffer: bytearray, max_bytes: int) -> list[bytes]:
    """Take the whole messages out of ``buffer``, in order; what is left in it is the beginning of one.

    Raises:
        MessageTooLongError: one is longer than ``max_bytes``; the buffer is of no use after it.
    """
    messages = []
    start = 0
    with memoryview(buffer) as view:
        while len(view) - start >= _HEAD.size:
            (length,) = _HEAD.unpack_from(view, start)
            if length > max_bytes:
                raise MessageTooLongError(f"{length} bytes; at most {max_bytes} are accepted")
            end = start + _HEAD.size + length
            if len(view) < end:
                break
            messages.append(bytes(view[start + _HEAD.size : end]))
            start = end
    del buffer[:start]
    return messages
