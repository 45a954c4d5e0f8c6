"""The exit statuses of a fetch: one table for the container that exits and the operator that reads it."""

import pytest

from kvferry_cli.errors import ExitCode
from kvferry_wire.fetch import (
    FETCH_EXITS,
    MAX_REPORT,
    FetchReason,
    FetchReport,
    decode_report,
    encode_report,
    reason_of,
)


def test_each_reason_has_a_status_of_its_own() -> None:
    """None of them means something else for other commands, or is a signal's."""
    assert set(FETCH_EXITS) == set(FetchReason)
    statuses = set(FETCH_EXITS.values())
    assert len(statuses) == len(FETCH_EXITS)
    assert not statuses & {int(code) for code in ExitCode}
    assert all(2 < status < 126 for status in statuses)
    assert {reason_of(status) for status in statuses} == set(FetchReason)


@pytest.mark.parametrize("status", [1, 2, 99, 137, 143])
def test_a_status_of_nobody_may_pass(status: int) -> None:
    """A signal or an unforeseen end is tried again."""
    assert reason_of(status) == FetchReason.FAILED


def test_a_report_comes_back_whole() -> None:
    """For the longest source that a manifest takes; too long a one is refused, not cut."""
    report = FetchReport(source="s3://" + "a" * 1019, commit="1" * 40, digest="2" * 64, bytes=2**50)
    assert decode_report(encode_report(report).decode()) == report
    with pytest.raises(ValueError, match=str(MAX_REPORT)):
        encode_report(FetchReport(source="x" * MAX_REPORT))


@pytest.mark.parametrize("text", ["", "killed", "{}", "[]", '{"source": 1}', "null"])
def test_other_words_of_a_container_are_no_report(text: str) -> None:
    """A log's end or an older image's silence is taken as such."""
    assert decode_report(text) is None
