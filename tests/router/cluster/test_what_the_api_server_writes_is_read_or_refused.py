"""Lists, events and the cutting of a stream into lines. Pure."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_router.discovery.api_server import ApiFailure, Lines
from kvferry_router.discovery.slice_events import (
    Bookmark,
    Broken,
    Changed,
    Deleted,
    Expired,
    UnreadableError,
    read_event,
    read_list,
)

from .objects import make_endpoint, make_slice


def event(kind: str, made: Any) -> bytes:
    return json.dumps({"type": kind, "object": made}).encode()


def test_events_are_what_they_say() -> None:
    """Each type, with the version from which a watch would go on."""
    made = make_slice("s", make_endpoint("d1", "10.0.0.1"), version="12")
    for kind in ("ADDED", "MODIFIED"):
        changed = read_event(event(kind, made))
        assert isinstance(changed, Changed)
        assert (changed.version, changed.slice.metadata.name) == ("12", "s")
    assert read_event(event("DELETED", made)) == Deleted("12", "s")
    bare = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": {"resourceVersion": "13"}}
    assert read_event(event("BOOKMARK", bare)) == Bookmark("13")


def test_an_error_ends_the_watch_and_an_expired_version_is_told_apart() -> None:
    """410 asks for a new list; anything else is tried again, when the API server says."""
    status = {"kind": "Status", "status": "Failure", "reason": "Expired", "message": "too old", "code": 410}
    assert read_event(event("ERROR", status)) == Expired("the watch ended with 410: too old")
    busy = status | {"code": 429, "message": "later", "details": {"retryAfterSeconds": 3}}
    assert read_event(event("ERROR", busy)) == Broken("the watch ended with 429: later", 3.0)
    assert read_event(event("ERROR", {"code": 500})) == Broken("the watch ended with 500: ", 0.0)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        event("RENAMED", {}),
        event("ADDED", {}),
        event("ADDED", {"metadata": {"name": 3}}),
        event("ADDED", make_slice("s") | {"endpoints": [{"addresses": "10.0.0.1"}]}),
        event("ADDED", make_slice("s") | {"ports": [{"port": "80"}]}),
        event("BOOKMARK", {}),
        b'{"type": "ADDED"}',
    ],
    ids=lambda line: line[:60].decode("latin-1"),
)
def test_what_cannot_be_read_is_an_error_and_no_guess(line: bytes) -> None:
    """The caller lists anew."""
    with pytest.raises(UnreadableError, match="an event of a watch"):
        read_event(line)


def test_a_list_has_a_version_and_may_be_empty() -> None:
    """Without a version nothing could be watched from there."""
    made = make_slice("s", make_endpoint("d1", "10.0.0.1"))
    found = read_list(json.dumps({"metadata": {"resourceVersion": "5"}, "items": [made]}).encode())
    assert (found.version, [one.metadata.name for one in found.slices]) == ("5", ["s"])
    assert read_list(b'{"metadata": {"resourceVersion": "5"}, "items": null}').slices == ()
    for body in (
        b"",
        b"<html>",
        b'{"metadata": {}, "items": []}',
        b'{"items": []}',
        b'{"metadata": {"resourceVersion": "5"}}',
    ):
        with pytest.raises(UnreadableError, match="a list of EndpointSlices"):
            read_list(body)


@given(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"x")), max_size=8), st.data())
def test_lines_come_whole_however_the_stream_is_cut(parts: list[bytes], data: st.DataObject) -> None:
    """Empty ones are dropped; a last one without its end is not there yet."""
    stream = b"".join(part + b"\n" for part in parts) + b"rest"
    lines, found = Lines(100), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += lines.feed(stream[:size])
        stream = stream[size:]
    assert found == [part for part in parts if part.strip()]


@pytest.mark.parametrize("chunks", [[b"x" * 101], [b"x" * 60, b"x" * 60], [b"ok\n" + b"x" * 101], [b"x" * 101 + b"\n"]])
def test_a_line_without_end_is_not_kept(chunks: list[bytes]) -> None:
    """Memory is bounded by the cap."""
    lines = Lines(100)
    with pytest.raises(ApiFailure, match="more than 100 bytes") as caught:
        for chunk in chunks:
            lines.feed(chunk)
    assert caught.value.reason == "protocol"
