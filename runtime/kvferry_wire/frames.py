"""Frames: how a pod answers a leg. On the wire: u32 little-endian length, then msgpack.

A frame is recorded and forwarded whole or not at all.
"""

from typing import Literal

import msgspec

from kvferry_wire.framing import MessageTooLongError, cut, framed
from kvferry_wire.handle import KVHandle
from kvferry_wire.limits import DEFAULT_LIMITS

FailKind = Literal[
    "invalid",  # the leg cannot be served as it is (client fault): 400
    "busy",  # a queue is full or leases hold their share: try another pod, else 429
    "deadline",  # the request's time is up
    "cancelled",  # aborted by name or by a tombstone
    "draining",  # this pod does not take the leg: it is drained, its engine starts again, or it is another model's
    "internal",  # the engine failed
    "transfer",  # the KV could not be had, and the leg is not to compute it: `param` says why, in a word
]


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, tag="prefilled"):
    """Prefill is done: the first token of each choice, and where the KV is (``None`` if no decode needs it)."""

    first: tuple[int, ...]
    cached_tokens: int
    handle: KVHandle | None


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Ids of one choice, and the SSE events (whole ones) that they let go; no bytes when held back or not streaming."""

    choice: int
    ids: tuple[int, ...]
    data: bytes
    chars: int = 0  # characters of the choice's text in `data`


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """Before the first ids of a generate leg: where the prompt's KV came from, as `End` will tell it."""

    cached_tokens: int
    recomputed: str = ""


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """The EngineCore completed this many steps or idle ticks. Sent each second only while the number grows."""

    step: int


class Handoff(msgspec.Struct, frozen=True, kw_only=True, tag="handoff"):
    """A decode pod was asked to give its leg away: the last frame. The handle is of the prompt and ids emitted so far.

    It may name fewer ids than were emitted, never more: the last one has no KV yet.
    """

    handle: KVHandle


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The one right end: finish reasons, usage and ``[DONE]`` together, or the whole body when not streaming."""

    data: bytes
    finish: tuple[str, ...]
    completion_tokens: int
    cached_tokens: int
    recomputed: str = ""  # the reason, when KV was to be ferried and was computed again


class Fail(msgspec.Struct, frozen=True, kw_only=True, tag="fail"):
    """The leg ends without an answer. ``message`` is fit for the client: no path, no address, no prompt.

    ``param``: the field of the request at fault; of `transfer`, the reason.
    """

    kind: FailKind
    message: str
    param: str | None = None


Frame = Prefilled | Begun | Tokens | Alive | Handoff | End | Fail

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


class FrameError(ValueError):
    """Bytes that are no frame: too long, cut, or not of the schema."""


def encode_frame(frame: Frame) -> bytes:
    """One frame with its length prefix."""
    return framed(_encoder.encode(frame))


class FrameDecoder:
    """Cuts a byte stream into frames. Holds at most one incomplete frame, capped in size."""

    def __init__(self, max_bytes: int = DEFAULT_LIMITS.frame_bytes) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes as they come; return the frames completed by them.

        Raises:
            FrameError: a frame is longer than the cap or is not of the schema. The decoder is of no use after it.
        """
        self._buffer += data
        try:
            return [_decoder.decode(body) for body in cut(self._buffer, self._max_bytes)]
        except MessageTooLongError as error:
            raise FrameError(f"frame of {error}") from error
        except msgspec.DecodeError as error:
            raise FrameError(f"not a frame: {error}") from error

    @property
    def pending_bytes(self) -> int:
        """Bytes of an incomplete frame: more than none at the end of a stream is a cut stream."""
        return len(self._buffer)
