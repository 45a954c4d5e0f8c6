"""Reads are cut so that every block is read once, and a request for what a lease does not hold is refused."""

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from kvferry_runtime.transfer.ranges import read_ranges, requested_blocks
from kvferry_wire.data import ReadRequest
from kvferry_wire.limits import Limits


@given(
    counts=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    nbytes=st.integers(1, 10_000),
    read_blocks=st.integers(1, 100),
    read_bytes=st.integers(1, 200_000),
)
def test_every_block_is_read_once(counts: list[int], nbytes: int, read_blocks: int, read_bytes: int) -> None:
    """In order, without gap or overlap, within both caps (one block may exceed the bytes)."""
    limits = msgspec.structs.replace(Limits(), read_blocks=read_blocks, read_bytes=read_bytes)
    covered = []
    for part in read_ranges(counts, [nbytes] * len(counts), limits):
        assert 1 <= part.count <= read_blocks
        assert part.count == 1 or part.count * nbytes <= read_bytes
        covered += [(part.group, index) for index in range(part.first, part.first + part.count)]
    assert covered == [(group, index) for group, count in enumerate(counts) for index in range(count)]


def make_request(group: int, first: int, count: int) -> ReadRequest:
    return ReadRequest(incarnation=b"", epoch=1, lease_id=1, prompt_digest=b"", group=group, first=first, count=count)


@pytest.mark.parametrize(
    ("group", "first", "count"),
    [
        (2, 0, 1),
        (-1, 0, 1),
        (0, -1, 1),
        (0, 0, 0),
        (0, 0, -1),
        (0, 0, 4),
        (0, 3, 1),
        (0, 2, 2),
        (0, 2**63, 1),
        (0, 0, 2**63),
        (1, 0, 65),
    ],
)
def test_requests_outside_the_lease_are_refused(group: int, first: int, count: int) -> None:
    """Groups, places and counts outside the lease, negative ones and too many at once."""
    blocks = ((7, 8, 9), tuple(range(1, 101)))
    assert requested_blocks(make_request(group, first, count), blocks, Limits()) is None


def test_requests_inside_the_lease_name_its_blocks() -> None:
    """In the lease's own order."""
    blocks = ((7, 3, 9), tuple(range(1, 101)))
    assert requested_blocks(make_request(0, 1, 2), blocks, Limits()) == (3, 9)
    assert requested_blocks(make_request(1, 36, 64), blocks, Limits()) == tuple(range(37, 101))
