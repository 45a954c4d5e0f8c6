"""The API server as a pod reaches it: one list and one watch of one kind, with the pod's ServiceAccount.

Token and certificates are read anew for each call, since the kubelet exchanges them. No proxy of the environment is
asked, no redirect followed, and answers are bounded in size and time.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import aiohttp
import msgspec

from kvferry_wire.limits import Limits

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Reason = Literal[
    "credentials",  # token or certificates cannot be read
    "unauthorized",
    "forbidden",
    "throttled",
    "gone",  # the version to watch from is too old
    "status",  # any other than these and 200
    "connection",
    "timeout",
    "silent",
    "protocol",  # an answer that cannot be read
]
REASONS: tuple[Reason, ...] = get_args(Reason)

_BY_STATUS: dict[int, Reason] = {401: "unauthorized", 403: "forbidden", 410: "gone", 429: "throttled"}
_STATUS_BYTES = 64 * 2**10
_TOKEN_BYTES = 64 * 2**10
_TOLD_CHARS = 300
# A connection that the other end does not acknowledge is given up by the kernel, long before a watch counts as silent.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


class AccessError(ValueError):
    """This process is in no pod that may ask an API server; the message names what is missing."""


class ApiFailure(Exception):  # noqa: N818 - an outcome that is expected
    """The API server gave no answer that can be used."""

    def __init__(self, reason: Reason, told: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(told[:_TOLD_CHARS])
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API server is, and the files that prove who asks."""

    url: str
    token: Path
    authority: Path


def in_cluster(folder: Path, env: Mapping[str, str] = os.environ) -> Access:
    """What the kubelet gives each pod. Raises ``AccessError``."""
    host, port = (env.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    token, authority = folder / "token", folder / "ca.crt"
    faults = [] if host and port.isdecimal() else ["KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT: not set"]
    faults += [f"{file}: no such file" for file in (token, authority) if not file.is_file()]
    if faults:
        raise AccessError(f"{'; '.join(faults)}; pods are watched from within a cluster, by a ServiceAccount")
    return Access(f"https://{f'[{host}]' if ':' in host else host}:{port}", token, authority)


class _Status(msgspec.Struct, frozen=True):
    message: str = ""


class Lines:
    """Cuts a stream into lines, however it is chunked. Pure."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole by now. Raises ``ApiFailure`` when one is longer than the cap."""
        first, *others = data.split(b"\n")
        self._rest += first
        if max(len(self._rest), *map(len, others), 0) > self._cap:
            raise ApiFailure("protocol", f"an event of more than {self._cap} bytes")
        if not others:
            return []
        whole = [bytes(self._rest), *others[:-1]]
        self._rest = bytearray(others[-1])
        return [line for line in whole if line.strip()]


class WatchStream:
    """A watch that has begun."""

    def __init__(self, response: aiohttp.ClientResponse, limits: Limits) -> None:
        self._content = response.content
        self._silence_s = limits.api_silence_s
        self._lines = Lines(limits.api_event_bytes)

    async def read(self) -> list[bytes] | None:
        """The lines that came together, one event each; ``None`` at the end. Raises ``ApiFailure``."""
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    data = await self._content.readany()
            except TimeoutError:
                raise ApiFailure("silent", f"a watch was silent for {self._silence_s:g} s") from None
            if not data:
                return None
            if lines := self._lines.feed(data):
                return lines


class ApiServer:
    """Calls of one process. Each has a connection of its own, and leaves none behind."""

    def __init__(self, access: Access, limits: Limits, user_agent: str) -> None:
        self._access = access
        self._limits = limits
        self._user_agent = user_agent

    async def get_list(self, path: str, query: Mapping[str, str]) -> bytes:
        """The body of a list. Raises ``ApiFailure``."""
        try:
            async with asyncio.timeout(self._limits.api_reply_s), self._get(path, query) as response:
                return await _body(response, self._limits.api_list_bytes)
        except TimeoutError:
            raise ApiFailure("timeout", f"no list within {self._limits.api_reply_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiFailure("connection", _words(error)) from None

    @asynccontextmanager
    async def watch(self, path: str, query: Mapping[str, str], seconds: int) -> AsyncIterator[WatchStream]:
        """A watch that has begun and that the API server ends after ``seconds``.

        Raises:
            ApiFailure: it does not begin, breaks off, or goes on for too long. From within the context, too.
        """
        asked = {**query, "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        try:
            async with asyncio.timeout(self._limits.api_reply_s) as deadline, self._get(path, asked) as response:
                deadline.reschedule(asyncio.get_running_loop().time() + seconds + self._limits.api_reply_s)
                yield WatchStream(response, self._limits)
        except TimeoutError:
            raise ApiFailure("timeout", "a watch did not begin, or not end, in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiFailure("connection", _words(error)) from None

    @asynccontextmanager
    async def _get(self, path: str, query: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of status 200. Raises ``ApiFailure``, ``aiohttp.ClientError``, ``OSError`` and ``TimeoutError``."""
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Authorization": f"Bearer {self._token()}",
            "User-Agent": self._user_agent,
        }
        connector = aiohttp.TCPConnector(ssl=self._context(), force_close=True, socket_factory=_make_socket)
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_timeout_s),
                read_bufsize=256 * 2**10,
            ) as session,
            session.get(self._access.url + path, params=query, headers=headers, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise await _refusal(response)
            yield response

    def _token(self) -> str:
        try:
            with self._access.token.open("rb") as file:
                token = file.read(_TOKEN_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ApiFailure("credentials", f"{self._access.token}: {_words(error)}") from None
        if not token or not token.isprintable():
            raise ApiFailure("credentials", f"{self._access.token}: holds no token")
        return token

    def _context(self) -> ssl.SSLContext | bool:
        if self._access.url.startswith("http:"):
            return True
        try:
            return ssl.create_default_context(cafile=self._access.authority)
        except OSError as error:  # of `ssl` too
            raise ApiFailure("credentials", f"{self._access.authority}: {_words(error)}") from None


async def _body(response: aiohttp.ClientResponse, cap: int) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > cap:
            raise ApiFailure("protocol", f"an answer of more than {cap} bytes")
        parts.append(part)
    return b"".join(parts)


async def _refusal(response: aiohttp.ClientResponse) -> ApiFailure:
    """What an answer other than 200 says."""
    try:
        message = msgspec.json.decode(await _body(response, _STATUS_BYTES), type=_Status).message
    except (msgspec.DecodeError, UnicodeDecodeError, ApiFailure):
        message = ""
    after = response.headers.get("Retry-After", "")
    told = f"HTTP {response.status}" + (f": {message}" if message else "")
    reason = _BY_STATUS.get(response.status, "status")
    return ApiFailure(reason, told, retry_after_s=float(after) if after.isdecimal() and len(after) < 6 else 0.0)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _make_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol = address[:3]
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Linux
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
