"""HTTP to the pods: probes, descriptions, snapshots, legs and aborts.

A pod's answer is bounded in headers, body and time, whoever writes it. Nothing of a client's request headers goes to a
pod, and no proxy of the environment is asked.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import msgspec

from kvferry_router.discovery.endpoints import Endpoint
from kvferry_router.discovery.pod_table import Probe
from kvferry_router.flow_messages import Kind
from kvferry_wire import pod, state
from kvferry_wire.keys import ServiceKeys
from kvferry_wire.leg import AbortRequest, Leg
from kvferry_wire.limits import Limits

_SMALL_BODY = 64 * 2**10
_INFO_BODY = 1 * 2**20
_CALL_S = 5.0  # for info, text and snapshot
_ABORT_S = 2.0
_KEEPALIVE_S = 30.0  # below the pods' 75 s, so that they do not close a connection that we are about to use

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_PATHS: dict[Kind, str] = {"prefill": "/internal/v1/prefill", "decode": "/internal/v1/generate"}


class PodAnswerError(Exception):
    """A pod's answer is not what was asked for: status, size or content."""


class PodClient:
    """One pooled session to all pods of a service. Open it with ``async with``."""

    def __init__(self, keys: ServiceKeys, limits: Limits) -> None:
        self._limits = limits
        self._authorization = {"Authorization": f"Bearer {keys.bearer()}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "PodClient":
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=self._make_socket, happy_eyeballs_delay=None
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_timeout_s),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def _make_socket(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol = address[:3]
        made = socket.socket(family=family, type=kind, proto=protocol)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # A pod that acknowledges nothing is given up by the kernel soon after the stall timeout.
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * self._limits.stall_timeout_s))
        return made

    def _client(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the client is not open"
        return self._session

    # ---- questions ---------------------------------------------------------------------------------------------

    async def probe(self, endpoint: Endpoint) -> Probe:
        """Ask whether the pod would answer a leg now."""
        try:
            async with (
                asyncio.timeout(self._limits.pod_reply_s),
                self._client().get(endpoint.url("/readyz"), allow_redirects=False) as response,
            ):
                if response.status == 200:
                    await _read(response, _SMALL_BODY)
                    return Probe("ready")
                return Probe("not_ready", await _reason(response))
        except TimeoutError:
            return Probe("late", f"no answer within {self._limits.pod_reply_s:g} s")
        except (aiohttp.ClientError, OSError, PodAnswerError) as error:
            return Probe("refused", f"not reachable ({type(error).__name__})")

    async def info(self, endpoint: Endpoint) -> pod.PodInfo:
        """Raises ``PodAnswerError``, ``aiohttp.ClientError``, ``OSError`` or ``TimeoutError``, as all below."""
        return _decoded(pod.decode_info, await self._get(endpoint, "/internal/v1/info", _INFO_BODY), "info")

    async def text(self, endpoint: Endpoint) -> pod.TextBundle:
        body = await self._get(endpoint, "/internal/v1/text", self._limits.text_bundle_bytes)
        return _decoded(pod.decode_text, body, "text bundle")

    async def snapshot(self, endpoint: Endpoint) -> state.Snapshot:
        # 16 bytes of hash and their msgpack head, for each block that one pod may announce.
        body = await self._get(endpoint, "/internal/v1/state", 18 * self._limits.index_blocks + _SMALL_BODY)
        return _decoded(state.decode_snapshot, body, "snapshot")

    async def _get(self, endpoint: Endpoint, path: str, cap: int) -> bytes:
        async with (
            asyncio.timeout(_CALL_S),
            self._client().get(endpoint.url(path), headers=self._authorization, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise PodAnswerError(f"{path}: HTTP {response.status}")
            return await _read(response, cap)

    # ---- legs --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def leg(self, endpoint: Endpoint, kind: Kind, leg: Leg) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a leg; yields the response as soon as its headers are here. Leaving early closes the connection."""
        headers = self._authorization | {"Content-Type": "application/msgpack", "x-request-id": leg.request_id}
        url = endpoint.url(_PATHS[kind])
        async with self._client().post(url, data=_encode(leg), headers=headers, allow_redirects=False) as response:
            yield response

    async def abort(self, endpoint: Endpoint, internal_id: str, attempt: int) -> bool:
        """Abort a leg by name, trying twice; returns whether the pod confirmed it."""
        body = _encode(AbortRequest(internal_id=internal_id, attempt=attempt))
        headers = self._authorization | {"Content-Type": "application/msgpack"}
        for _ in range(2):
            try:
                async with (
                    asyncio.timeout(_ABORT_S),
                    self._client().post(
                        endpoint.url("/internal/v1/abort"), data=body, headers=headers, allow_redirects=False
                    ) as response,
                ):
                    await _read(response, _SMALL_BODY)
                    return response.status < 300
            except (aiohttp.ClientError, OSError, PodAnswerError, TimeoutError):
                continue  # once more; who asked is told if that fails, too
        return False

    async def hand_over(self, endpoint: Endpoint, internal_id: str, attempt: int) -> bool:
        """Ask a leg to leave its pod; returns whether it runs there. What becomes of it comes in its stream."""
        body = _encode(AbortRequest(internal_id=internal_id, attempt=attempt))
        headers = self._authorization | {"Content-Type": "application/msgpack"}
        url = endpoint.url("/internal/v1/handoff")
        try:
            async with (
                asyncio.timeout(_ABORT_S),
                self._client().post(url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                await _read(response, _SMALL_BODY)
                return response.status < 300
        except (aiohttp.ClientError, OSError, PodAnswerError, TimeoutError):
            return False


class PodRefusal(msgspec.Struct, frozen=True):
    """A leg refused by status: the error object of its body, if it has one."""

    status: int
    message: str = ""
    param: str | None = None


class _Error(msgspec.Struct):
    message: str = ""
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


async def read_refusal(response: aiohttp.ClientResponse) -> PodRefusal:
    """The refusal of a response other than 200. A body that is no error object (plain text, HTML, none) is dropped."""
    try:
        body = await _read(response, _SMALL_BODY)
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.DecodeError, PodAnswerError, UnicodeDecodeError):
        return PodRefusal(response.status)
    return PodRefusal(response.status, error.message[:2000], error.param)


async def _read(response: aiohttp.ClientResponse, cap: int) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > cap:
            response.close()
            raise PodAnswerError(f"more than {cap} bytes")
        parts.append(part)
    return b"".join(parts)


async def _reason(response: aiohttp.ClientResponse) -> str:
    body = await _read(response, _SMALL_BODY)
    try:
        reason = msgspec.json.decode(body, type=dict[str, Any]).get("reason")
    except (msgspec.DecodeError, UnicodeDecodeError):
        reason = None
    return str(reason)[:200] if reason else f"HTTP {response.status}"


def _decoded(decode: Callable[[bytes], T], body: bytes, what: str) -> T:
    try:
        return decode(body)
    except msgspec.DecodeError as error:
        raise PodAnswerError(f"{what}: {error}") from None
