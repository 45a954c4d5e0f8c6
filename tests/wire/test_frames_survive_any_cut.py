"""The frame decoder: whole frames however the bytes are cut, and a clear error for what is no frame."""

import itertools
import random
import struct

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvferry_wire.frames import (
    Alive,
    Begun,
    End,
    Fail,
    Frame,
    FrameDecoder,
    FrameError,
    Handoff,
    Prefilled,
    Tokens,
    encode_frame,
)
from tests.wire.builders import KV_KEY, make_handle

FRAMES: list[Frame] = [
    Prefilled(first=(1, 2), cached_tokens=16, handle=make_handle().signed(KV_KEY)),
    Prefilled(first=(), cached_tokens=0, handle=None),
    Begun(cached_tokens=16, recomputed="mac"),
    Tokens(choice=0, ids=(5,), data=b"data: {}\n\n", chars=1),
    Tokens(choice=7, ids=(), data=b""),
    Alive(step=2**40),
    Handoff(handle=make_handle()),
    End(data="data: é\n\n".encode(), finish=("stop", "length"), completion_tokens=9, cached_tokens=3, recomputed="mac"),
    Fail(kind="busy", message="try again", param=None),
]
STREAM = b"".join(encode_frame(frame) for frame in FRAMES)

frames = st.one_of(
    st.builds(
        Tokens,
        choice=st.integers(0, 7),
        ids=st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
        data=st.binary(max_size=300),
        chars=st.integers(0, 2**20),
    ),
    st.builds(Alive, step=st.integers(0, 2**63 - 1)),
    st.builds(Fail, kind=st.just("internal"), message=st.text(max_size=50), param=st.none() | st.text(max_size=9)),
)


def feed_in_pieces(stream: bytes, cuts: list[int]) -> list[Frame]:
    decoder = FrameDecoder()
    decoded: list[Frame] = []
    edges = [0, *sorted(cuts), len(stream)]
    for start, end in itertools.pairwise(edges):
        decoded += decoder.feed(stream[start:end])
    assert decoder.pending_bytes == 0
    return decoded


def test_byte_by_byte() -> None:
    """Every frame comes out whole, when its last byte is there, and not before."""
    decoder = FrameDecoder()
    ends, at = [], 0
    for frame in FRAMES:
        at += len(encode_frame(frame))
        ends.append(at)
    decoded: list[Frame] = []
    for index in range(len(STREAM)):
        got = decoder.feed(STREAM[index : index + 1])
        assert len(got) == (index + 1 in ends)
        decoded += got
    assert decoded == FRAMES
    assert decoder.pending_bytes == 0


@given(sent=st.lists(frames, max_size=8), data=st.data())
def test_any_cut_gives_the_same_frames(sent: list[Frame], data: st.DataObject) -> None:
    """Pieces of any size, empty ones included."""
    stream = b"".join(encode_frame(frame) for frame in sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10))
    assert feed_in_pieces(stream, cuts) == sent


@given(garbage=st.binary(min_size=4, max_size=200))
def test_garbage_is_a_frame_error_or_waits(garbage: bytes) -> None:
    """Random bytes never raise anything else, never hold more than they are, and are never frames by chance alone."""
    decoder = FrameDecoder(max_bytes=64)
    try:
        decoder.feed(garbage)
    except FrameError:
        return
    assert decoder.pending_bytes <= len(garbage)


def test_flipped_bytes_never_raise_anything_but_frame_errors() -> None:
    """2,000 corruptions of a real stream: an error of one kind, or frames."""
    rng = random.Random(5)
    for _ in range(2000):
        broken = bytearray(STREAM)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        decoder = FrameDecoder()
        try:
            decoder.feed(bytes(broken))
        except FrameError as error:
            assert str(error)


@pytest.mark.parametrize("length", [65, 2**30, 2**32 - 1])
def test_a_frame_above_the_cap_is_refused_by_its_length(length: int) -> None:
    """Before its content is waited for; the message names both numbers."""
    with pytest.raises(FrameError, match=rf"{length} bytes; at most 64"):
        FrameDecoder(max_bytes=64).feed(struct.pack("<I", length))


def test_a_frame_at_the_cap_is_taken() -> None:
    """The cap is what it says."""
    frame = encode_frame(Alive(step=1))
    assert FrameDecoder(max_bytes=len(frame) - 4).feed(frame) == [Alive(step=1)]


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\xc0", b"\x80", b"\x81\xa4type\xa7unknown", b"\x81\xa4type\xa6tokens", b"\x91" * 60, b"\x01\x02"],
    ids=repr,
)
def test_what_is_not_of_the_schema_is_refused(body: bytes) -> None:
    """Empty, reserved, untagged, unknown, incomplete, deep and trailing content."""
    with pytest.raises(FrameError, match="not a frame"):
        FrameDecoder().feed(struct.pack("<I", len(body)) + body)


def test_frames_before_a_bad_one_are_lost_with_it() -> None:
    """A stream that breaks is broken: the error is all that comes of that piece, and earlier pieces stand."""
    decoder = FrameDecoder()
    assert decoder.feed(encode_frame(FRAMES[2])) == [FRAMES[2]]
    with pytest.raises(FrameError):
        decoder.feed(encode_frame(FRAMES[4]) + struct.pack("<I", 1) + b"\xc1")


def test_a_cut_stream_is_seen() -> None:
    """Bytes of an incomplete frame are pending at the end: no clean end on a cut answer."""
    decoder = FrameDecoder()
    decoder.feed(STREAM[:-1])
    assert decoder.pending_bytes > 0
