"""One leg over HTTP: its bytes become frames, and whatever ends it becomes one ``LegClosed``."""

import asyncio
from collections.abc import Callable

import aiohttp

from kvferry_router.discovery.endpoints import Endpoint
from kvferry_router.flow_messages import CloseCause, Kind, LegClosed, LegFrames
from kvferry_router.pod_client import PodClient, PodRefusal, read_refusal
from kvferry_service import logs
from kvferry_wire.frames import FrameDecoder, FrameError
from kvferry_wire.leg import Leg
from kvferry_wire.limits import Limits

_log = logs.get_logger(__name__)

Deliver = Callable[[LegFrames | LegClosed], None]

_STATUS_CAUSES: dict[int, CloseCause] = {
    400: "invalid",
    413: "invalid",
    422: "invalid",
    429: "busy",
    503: "draining",
}


async def run_leg(
    client: PodClient, endpoint: Endpoint, kind: Kind, leg: Leg, *, limits: Limits, deliver: Deliver
) -> None:
    """Send a leg and deliver what comes back, until its stream is over. Cancelling it closes the connection."""
    deliver(await _run(client, endpoint, kind, leg, limits=limits, deliver=deliver))


async def _run(
    client: PodClient, endpoint: Endpoint, kind: Kind, leg: Leg, *, limits: Limits, deliver: Deliver
) -> LegClosed:
    attempt = leg.attempt
    begun = False
    try:
        async with client.leg(endpoint, kind, leg) as response:
            begun = True
            if response.status != 200:
                async with asyncio.timeout(limits.stall_timeout_s):
                    return _refused(attempt, await read_refusal(response))
            decoder = FrameDecoder(limits.frame_bytes)
            async for data in response.content.iter_any():
                frames = decoder.feed(data)
                if frames:
                    deliver(LegFrames(attempt, tuple(frames)))
            return LegClosed(attempt, "cut" if decoder.pending_bytes else "ended")
    except (FrameError, aiohttp.ClientError, OSError, TimeoutError) as error:
        # A response keeps the error that ended it, a traceback this frame: without it neither keeps the request.
        return _broken(attempt, endpoint, error.with_traceback(None), begun=begun)


def _broken(attempt: int, endpoint: Endpoint, error: Exception, *, begun: bool) -> LegClosed:
    """The end of a leg that ended in an error. ``begun``: its pod has answered."""
    match error:
        case FrameError():
            _log.warning("a pod sent what is no frame", extra=logs.fields(pod=endpoint.name, reason=str(error)[:200]))
            return LegClosed(attempt, "garbage")
        case aiohttp.ClientConnectorError() | aiohttp.ServerTimeoutError():
            return LegClosed(attempt, "refused")
        case aiohttp.ClientResponseError():
            # Headers that are no HTTP, or more of them than we take.
            _log.warning("a pod's answer is no HTTP", extra=logs.fields(pod=endpoint.name, reason=error.message[:200]))
            return LegClosed(attempt, "garbage")
        case _:
            return LegClosed(attempt, "cut" if begun else "refused")


def _refused(attempt: int, refusal: PodRefusal) -> LegClosed:
    cause = _STATUS_CAUSES.get(refusal.status, "failed")
    return LegClosed(attempt, cause, refusal.message, refusal.param)
