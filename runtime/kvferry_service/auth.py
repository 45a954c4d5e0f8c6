"""Who may ask: a default-deny check in front of every route, and the few routes declared open."""

import hashlib
import hmac
from collections.abc import Callable, Mapping

from aiohttp import web

# Identity of the caller, or None: refuse. Gets the value of the Authorization header, "" when there is none.
Authenticate = Callable[[str], str | None]

# (method, route as registered) of the routes that need no key. They hold no tenant name, no id, no prompt.
OPEN_ROUTES: frozenset[tuple[str, str]] = frozenset(
    (method, path) for method in ("GET", "HEAD") for path in ("/healthz", "/readyz", "/metrics")
)


def bearer(tokens: Mapping[str, str]) -> Authenticate:
    """Admit whoever shows one of the tokens; returns the identity that the token stands for.

    Tokens are kept and compared as digests, each time against all of them, so timing tells nothing about any.
    """
    known = [(_digest(token), identity) for token, identity in tokens.items()]

    def check(header: str) -> str | None:
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer" or not token:
            return None
        shown = _digest(token.strip())
        found: str | None = None
        for digest, identity in known:
            if hmac.compare_digest(digest, shown):
                found = identity
        return found

    return check


def anyone(_: str) -> str | None:
    """No authentication: the loopback-only mode of ``kvferry serve``, and ``router.auth: none``."""
    return ""


def is_open(request: web.Request, open_routes: frozenset[tuple[str, str]] = OPEN_ROUTES) -> bool:
    """Whether the matched route is one of the open ones; an unknown path never is."""
    resource = request.match_info.route.resource
    return resource is not None and (request.method, resource.canonical) in open_routes


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
