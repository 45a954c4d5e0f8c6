"""Why KV that was to be ferried is computed again: a closed set, used as a metric label and in `Failed` messages."""

import enum


class RecomputeReason(enum.StrEnum):
    """Labels of `PullFinished.reason` and of what `TransferService.check` returns."""

    MAC = "mac"  # the handle is not of this service, or was changed
    DIGEST = "digest"  # the handle is for other tokens, another tenant or another adapter
    HANDLE = "handle"  # the handle contradicts itself or the request: token or block counts, lease duration
    OWN_HANDLE = "own_handle"  # the handle is of this very engine
    MISMATCH = "mismatch"  # protocol version, compat hash or layout differ; the log line names the field
    NO_BACKEND = "no_backend"  # no transfer back end is available on both sides
    CONNECT = "connect"  # the data plane of the peer cannot be reached, or it failed the challenge
    PEER_DEAD = "peer_dead"  # the peer does not answer on the control plane
    LEASE_EXPIRED = "lease_expired"
    LEASE_UNKNOWN = "lease_unknown"  # the peer does not know the lease: restarted, another epoch, released
    READ_ERROR = "read_error"  # the data plane broke off, stalled or sent what is no answer
    CHECKSUM = "checksum"  # a block did not arrive as its owner had granted it
    DEADLINE = "deadline"  # the leg's time, or the time that this many bytes may take
    NO_ROOM = "no_room"  # the engine had no blocks for it, and nothing moved that would give it some
    CANCELLED = "cancelled"  # the engine dropped the pull, or the service closes
