"""HTTP to places that a manifest names: connects only to addresses that were judged, follows redirects by hand.

A host is resolved once for each connection, every address that comes is judged, and the connection goes to one of
them: a name that resolves differently the next time gains nothing. Where a proxy is configured in the environment,
the proxy resolves names, and its rules hold.
"""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from kvferry_runtime.model.fetch.errors import FetchError, TryAgainError
from kvferry_wire.fetch import FetchReason
from kvferry_wire.limits import Limits
from kvferry_wire.urls import WebUrl, Zone, redirected, zone_of

REDIRECTS = frozenset({301, 302, 303, 307, 308})
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses that another try may not meet
_AGENT = "kvferry"


class Guard:
    """Judges the addresses of one fetch: never link-local, and none nearer than the first that answered."""

    def __init__(self) -> None:
        self._floor: Zone | None = None

    def admit(self, host: str, addresses: list[str]) -> None:
        """Raise ``FetchError`` for addresses that are not connected to."""
        try:
            zone = min(zone_of(address) for address in addresses)
        except ValueError as error:
            raise FetchError(f"{host}: {error}", FetchReason.REFUSED) from None
        if self._floor is None:
            self._floor = zone
        elif zone < self._floor:
            raise FetchError(
                f"{host}: a {self._floor.name.lower()} address led to a {zone.name.lower()} one, which is not followed",
                FetchReason.REFUSED,
            )


class GuardedResolver(AbstractResolver):
    """Resolves names as the machine does, and lets a guard see what comes."""

    def __init__(self, guard: Guard, resolver: AbstractResolver | None = None) -> None:
        self._guard = guard
        self._resolver = resolver or ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        self._guard.admit(host, [result["host"] for result in found])
        return found

    async def close(self) -> None:
        await self._resolver.close()


class Client:
    """One session of requests. An async context manager."""

    def __init__(self, limits: Limits, *, resolver: AbstractResolver | None = None, redirects: bool = True) -> None:
        """``redirects``: whether they are followed at all."""
        self._guard = Guard()
        self._resolver = resolver
        self._limits = limits
        self._redirects = limits.fetch_redirects if redirects else 0

    async def __aenter__(self) -> "Client":
        limits = self._limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=GuardedResolver(self._guard, self._resolver),
                use_dns_cache=False,
                limit=2 * limits.fetch_parallel,
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=limits.fetch_connect_s, sock_read=limits.fetch_stall_s
            ),
            headers={"User-Agent": _AGENT, "Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def request(
        self, method: str, url: WebUrl, headers: Mapping[str, str], secret: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask, and follow redirects.

        Args:
            headers: sent to whoever answers.
            secret: sent to the asked host alone.

        Raises:
            FetchError: an address that is not asked, or a redirect that is not followed.
            TryAgainError: no connection, no answer in time, or a status that may pass.
        """
        asked, hops = url, 0
        while True:
            own = dict(secret or {}) if asked.authority == url.authority else {}
            async with self._once(method, asked, {**headers, **own}) as response:
                location = response.headers.get("Location")
                if response.status not in REDIRECTS or location is None:
                    _check_passing(response, asked)
                    yield response
                    return
            hops += 1
            if hops > self._redirects:
                told = f"more than {self._redirects} redirects" if self._redirects else "a redirect is not followed"
                raise FetchError(f"{url}: {told} (status {response.status})")
            try:
                asked = redirected(asked, location)
            except ValueError as error:
                raise FetchError(f"{url}: a redirect that is not followed: {error}", FetchReason.REFUSED) from None

    @asynccontextmanager
    async def _once(
        self, method: str, url: WebUrl, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        self._judge_literal(url)
        target = URL.build(
            scheme=url.scheme,
            host=url.host,
            port=url.port,
            path=url.path,
            query_string=url.query,
            encoded=True,
        )
        try:
            response = await self._session.request(method, target, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TryAgainError(f"{url}: {connection_words(error)}") from error
        try:
            yield response
        finally:
            # What is left of a body is not worth reading: the connection goes.
            response.close()

    def _judge_literal(self, url: WebUrl) -> None:
        """An address in place of a name never reaches the resolver."""
        try:
            socket.inet_pton(socket.AF_INET6 if ":" in url.host else socket.AF_INET, url.host)
        except OSError:
            return
        self._guard.admit(url.host, [url.host])


def _check_passing(response: aiohttp.ClientResponse, url: WebUrl) -> None:
    if response.status in PASSING:
        raise TryAgainError(f"{url}: status {response.status}", retry_after(response.headers.get("Retry-After")))
    encoding = response.headers.get("Content-Encoding", "identity")
    if response.status in (200, 206) and encoding.lower() != "identity":
        raise FetchError(f"{url}: the answer is encoded ({encoding}) although that was declined")


def retry_after(text: str | None) -> float | None:
    """Seconds that a server asks for; None for a date or nonsense."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 6 else None


def connection_words(error: BaseException) -> str:
    """What went wrong with a connection, for people."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return f"its certificate is not accepted: {error}"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name does not resolve"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {error.os_error.strerror or error.os_error}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"the connection broke: {' '.join(str(error).split()) or type(error).__name__}"
