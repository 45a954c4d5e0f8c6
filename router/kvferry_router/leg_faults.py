"""How a leg can end without an answer, in few words: what they mean for the pod, the retry and the client."""

from typing import Literal

from kvferry_router import failures
from kvferry_router.flow_messages import CloseCause, Failure
from kvferry_wire.frames import FailKind

Fault = Literal["busy", "draining", "dead", "stalled", "deadline", "protocol", "failed", "transfer", "moved"]

# By how the stream ended. `invalid` is the client's fault and no fault of a leg.
CLOSED_AS: dict[CloseCause, Fault] = {
    "ended": "dead",  # before its last frame
    "cut": "dead",
    "refused": "dead",
    "garbage": "protocol",
    "busy": "busy",
    "draining": "draining",
    "invalid": "failed",  # of a request that another pod has taken
    "failed": "failed",
}
# By what the pod said.
FAILED_AS: dict[FailKind, Fault] = {
    "invalid": "failed",  # of a request that another pod has taken
    "busy": "busy",
    "draining": "draining",
    "deadline": "deadline",
    "cancelled": "failed",  # not by us
    "internal": "failed",
    "transfer": "transfer",
}
# Refused by status: there is nothing at the pod to abort.
NEVER_TAKEN: frozenset[CloseCause] = frozenset({"busy", "draining", "invalid"})
# What the client is told when a leg failed like this and no other pod is left.
LEG_FAILURES: dict[Fault, Failure] = {
    "busy": failures.BUSY,
    "draining": failures.NO_CAPACITY,
    "dead": failures.ENGINE_LOST,
    "stalled": failures.ENGINE_LOST,
    "protocol": failures.ENGINE_PROTOCOL,
    "failed": failures.ENGINE_FAILED,
    "deadline": failures.DEADLINE,
    "transfer": failures.TRANSFER_FAILED,
    "moved": failures.NO_CAPACITY,
}
# A healthy pod may have these.
NO_FAULT_OF_THE_POD: frozenset[Fault] = frozenset({"busy", "draining", "deadline", "transfer"})
# The pod had the leg, and lost it.
LOST: frozenset[Fault] = frozenset({"dead", "stalled", "protocol", "failed"})


def recompute_reason(fault: Fault) -> str:
    """Why decode computes a prompt that prefill was asked for: a label of metrics and of the leg."""
    return f"prefill_{fault}"
