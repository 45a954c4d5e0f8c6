"""Health: live means "not wedged"; ready means "would answer a request now", and says why not."""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from aiohttp import web


class Readiness:
    """The parts that must be ready, each with the reason why it is not yet. Ready when no reason is left."""

    def __init__(self, **reasons: str) -> None:
        self._reasons = dict(reasons)

    def set(self, part: str, reason: str) -> None:
        """Give a part's reason for not being ready; an empty one makes it ready."""
        if reason:
            self._reasons[part] = reason
        else:
            self._reasons.pop(part, None)

    def reason(self) -> str:
        """Why this process is not ready: ``part: reason`` of each, empty when it is."""
        return "; ".join(f"{part}: {reason}" for part, reason in sorted(self._reasons.items()))

    def __repr__(self) -> str:
        return f"Readiness({self.reason() or 'ready'})"


HealthCheck = Callable[[], str]


def add_health_routes(
    app: web.Application,
    *,
    live: HealthCheck,
    ready: HealthCheck,
    parts: Mapping[str, HealthCheck] = MappingProxyType({}),
) -> None:
    """Serve ``/healthz``, ``/readyz`` and ``/readyz/<part>``: 200, or 503 with the reason that the check returns."""

    async def healthz(_: web.Request) -> web.Response:
        reason = live()
        if reason:
            return web.json_response({"live": False, "reason": reason}, status=503)
        return web.json_response({"live": True})

    def readiness(check: HealthCheck) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def readyz(_: web.Request) -> web.Response:
            reason = check()
            if reason:
                return web.json_response({"ready": False, "reason": reason}, status=503)
            return web.json_response({"ready": True})

        return readyz

    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readiness(ready))
    for part, check in parts.items():
        app.router.add_get(f"/readyz/{part}", readiness(check))
