"""How a fetch of a model ends: what `kvferry model fetch` exits with, and what it reports of a model that it has got.

One table for both sides: the fetcher exits with a status of its own for each reason, and the operator, which sees of a
container no more than its exit status and last line, reads the reason back.
"""

import enum

import msgspec


class FetchReason(enum.StrEnum):
    """Why a model could not be got. The values are reasons of a service's status."""

    MISSING = "ModelMissing"  # the source has no such model, revision or file
    DENIED = "ModelAccessDenied"  # it has, but not for this token or these credentials
    FAILED = "ModelFetchFailed"  # network, time, or bytes that are not the source's; another try may do
    DISK_FULL = "DiskFull"  # no room, or more than may be fetched
    REFUSED = "ModelRefused"  # damaged, not supported, or a source that is never asked
    REMOTE_CODE = "RemoteCodeRefused"  # the model wants its own code to run


# Exit statuses of `kvferry model fetch`. 0, 1, 2 and 130 keep their meaning of every command.
FETCH_EXITS: dict[FetchReason, int] = {
    FetchReason.MISSING: 10,
    FetchReason.DENIED: 11,
    FetchReason.FAILED: 12,
    FetchReason.DISK_FULL: 13,
    FetchReason.REFUSED: 14,
    FetchReason.REMOTE_CODE: 15,
}
_REASONS = {status: reason for reason, status in FETCH_EXITS.items()}

FETCHED_NAME = "model"  # what a fetch into a pod's volume calls the model there, wherever it lies below
COMMIT_VARIABLE = "KVFERRY_MODEL_COMMIT"  # the hub commit that is fetched in place of a branch or tag
MAX_REPORT = 2048  # bytes; what a kubelet keeps of a container's last message is 4096


class FetchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was fetched, as JSON in the container's termination message."""

    source: str  # as asked for
    commit: str | None = None  # of a hub: what the revision resolved to
    digest: str | None = None  # of the model as it lies there: the `model_digest` of an engine that runs it
    bytes: int = 0  # of the model's files


def reason_of(status: int) -> FetchReason:
    """The reason of an exit status that is not 0; ``FAILED`` for one that is none of ours."""
    return _REASONS.get(status, FetchReason.FAILED)


def encode_report(report: FetchReport) -> bytes:
    """A report as it is written. Raises ``ValueError`` where it would be too long to be read back whole."""
    encoded = msgspec.json.encode(report)
    if len(encoded) > MAX_REPORT:
        raise ValueError(f"a report of {len(encoded)} bytes; at most {MAX_REPORT} are kept")
    return encoded


def decode_report(text: str) -> FetchReport | None:
    """A report read back; ``None`` for anything else that a container may have left there."""
    try:
        return msgspec.json.decode(text, type=FetchReport)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
