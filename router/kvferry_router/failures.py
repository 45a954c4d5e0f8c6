"""The errors that the router itself answers with: one table, from what went wrong to status, type and code."""

from kvferry_router.flow_messages import Failure
from kvferry_wire.limits import DEFAULT_LIMITS

_RETRY_S = DEFAULT_LIMITS.retry_after_s

BUSY = Failure(
    status=429,
    message="All engines are at capacity. Try again.",
    type="rate_limit_error",
    code="over_capacity",
    outcome="busy",
    retry_after_s=_RETRY_S,
)
QUEUE_FULL = Failure(
    status=429,
    message="The router is at capacity. Try again.",
    type="rate_limit_error",
    code="over_capacity",
    outcome="busy",
    retry_after_s=_RETRY_S,
)
NO_CAPACITY = Failure(
    status=503,
    message="No engine can take the request now. Try again.",
    type="server_error",
    code="unavailable",
    outcome="unavailable",
    retry_after_s=_RETRY_S,
)
STOPPING = Failure(
    status=503,
    message="The router is stopping. Try again.",
    type="server_error",
    code="stopping",
    outcome="stopping",
    retry_after_s=_RETRY_S,
)
ENGINE_LOST = Failure(
    status=503,
    message="The engine that worked on the answer was lost before the answer was complete.",
    type="server_error",
    code="engine_lost",
    outcome="unavailable",
    retry_after_s=_RETRY_S,
)
BARREN = Failure(
    status=500,
    message="Engines were lost one after the other on this request, so it is not tried further.",
    type="server_error",
    code="engine_lost_repeatedly",
    outcome="failed",
)
ENGINE_FAILED = Failure(
    status=500,
    message="The engine failed on this request.",
    type="server_error",
    code="engine_failed",
    outcome="failed",
)
ENGINE_PROTOCOL = Failure(
    status=502,
    message="The engine answered in a way that does not follow the protocol.",
    type="server_error",
    code="engine_protocol",
    outcome="failed",
)
TRANSFER_FAILED = Failure(
    status=503,
    message="The prompt's KV could not be brought to the engine that answers. Try again.",
    type="server_error",
    code="transfer_failed",
    outcome="failed",
    retry_after_s=_RETRY_S,
)
DEADLINE = Failure(
    status=504,
    message="The request's deadline has passed.",
    type="server_error",
    code="deadline_exceeded",
    outcome="deadline",
)


def invalid(message: str, param: str | None) -> Failure:
    """The client's own fault, as a pod put it."""
    return Failure(
        status=400,
        message=message or "The request cannot be served as it is.",
        type="invalid_request_error",
        code=None,
        outcome="invalid",
        param=param,
    )
