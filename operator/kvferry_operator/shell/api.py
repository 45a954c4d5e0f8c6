"""Calls of the Kubernetes API: what the operator needs of it, as a port; and that port over the ``kubernetes`` client.

Every call has a deadline. Nothing is tried again here: whoever called decides that. A change is sent only while the
fence is open (this process holds the Lease) and only so long as it stays open.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import aiohttp
from kubernetes.aio.client import ApiClient

from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.shell.apply_text import apply_text
from kvferry_operator.shell.kinds import LEASE, Kind

READ_S = 10.0
WRITE_S = 10.0  # no longer than the fence stays open, which is less
CALLS = 12  # at once but for the Lease's, which must not wait behind them on a server that is slow
BODY_BYTES = 8 * 2**20  # of an answer
MESSAGE_CHARS = 1000
_MERGE, _JSON = "application/merge-patch+json", "application/json"
# Named with its charset, the library takes the body as it is given.
_APPLY = "application/apply-patch+yaml; charset=utf-8"


class ApiError(Exception):
    """A call that was refused or not answered.

    Attributes:
        code: HTTP status; 0 where there was no answer. The change may have been made then.
        message: the server's words.
        reason: the server's one word. A 409 is of two kinds: ``exists``, and two who wrote at the same moment.
        retry_after_s: how long the server asks to wait; 0 where it does not.
        away: no connection to the server, or no answer in time.
    """

    def __init__(
        self, code: int, message: str, *, reason: str = "", retry_after_s: float = 0.0, away: bool = False
    ) -> None:
        super().__init__(f"{code}: {message}" if code else message)
        self.code = code
        self.message = message
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.away = away

    @property
    def pause_s(self) -> float:
        """For how long nothing should be asked of the server: it is busy, or away."""
        if self.code == 429:
            return max(1.0, self.retry_after_s)
        return max(self.retry_after_s, 1.0 if self.away else 0.0)

    @property
    def exists(self) -> bool:
        """Whether a new object was refused for there is one of its name. Any other refusal says nothing of that."""
        return self.code == 409 and self.reason == "AlreadyExists"

    @property
    def passing(self) -> bool:
        """Whether it may pass by itself: no answer, too many requests, or a failure of the server."""
        return self.code in (0, 408, 429) or self.code >= 500


class FencedError(Exception):
    """This process does not hold the Lease (any more): it changes nothing."""


class Api(Protocol):
    """What the operator does with the API server. All raise ``ApiError``; those that change, ``FencedError``."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """An object, or ``None`` where there is none."""

    async def served(self, api_version: str) -> frozenset[str]:
        """Names of the kinds that the server has in a group and version now."""

    async def create(self, kind: Kind, body: Object, manager: str) -> Object:
        """A new object; an error that ``exists`` where there is one of this name."""

    async def apply(self, kind: Kind, body: Object, manager: str, sub: str = "") -> Object:
        """Server-side apply with force, of the object or of a subresource."""

    async def merge(self, kind: Kind, namespace: str, name: str, body: Object, manager: str) -> Object:
        """JSON merge patch; 404 where there is no such object."""

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete in the background, if it still is the object of this uid; 404 where there is none, 409 for another."""

    async def replace(self, kind: Kind, body: Object, *, timeout_s: float) -> Object:
        """Write over exactly the version in ``body``; 409 where there is another. Not fenced: for the Lease."""

    async def start(self, kind: Kind, body: Object, *, timeout_s: float) -> Object:
        """Create, not fenced: for the Lease."""


Fence = Callable[[], float]  # seconds for which this process may still write; 0 or less: not at all
Observe = Callable[[str, str, int], None]  # verb, kind, status


class KubeApi:
    """The port over the ``kubernetes`` client."""

    def __init__(self, client: ApiClient, fence: Fence, observe: Observe = lambda verb, kind, code: None) -> None:
        self._client = client
        self._fence = fence
        self._observe = observe
        self._places = asyncio.Semaphore(CALLS)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        try:
            async with nullcontext() if kind is LEASE else self._places:
                return await self._call("GET", kind, kind.path(namespace, name), timeout_s=READ_S)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def served(self, api_version: str) -> frozenset[str]:
        try:
            found = await self._call("GET", None, f"/apis/{api_version}", timeout_s=READ_S)
        except ApiError as error:
            if error.code == 404:
                return frozenset()
            raise
        return frozenset(str(served["kind"]) for served in found.get("resources", ()))

    async def create(self, kind: Kind, body: Object, manager: str) -> Object:
        path = kind.path(body["metadata"]["namespace"]) + f"?fieldManager={manager}"
        return await self._change("POST", kind, path, body)

    async def apply(self, kind: Kind, body: Object, manager: str, sub: str = "") -> Object:
        metadata = body["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"], sub) + f"?fieldManager={manager}&force=true"
        return await self._change("PATCH", kind, path, apply_text(body), _APPLY)

    async def merge(self, kind: Kind, namespace: str, name: str, body: Object, manager: str) -> Object:
        path = kind.path(namespace, name) + f"?fieldManager={manager}"
        return await self._change("PATCH", kind, path, body, _MERGE)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        await self._change("DELETE", kind, kind.path(namespace, name), options)

    async def replace(self, kind: Kind, body: Object, *, timeout_s: float) -> Object:
        metadata = body["metadata"]
        return await self._call(
            "PUT", kind, kind.path(metadata["namespace"], metadata["name"]), body, timeout_s=timeout_s
        )

    async def start(self, kind: Kind, body: Object, *, timeout_s: float) -> Object:
        return await self._call("POST", kind, kind.path(body["metadata"]["namespace"]), body, timeout_s=timeout_s)

    # ---- inside

    async def _change(self, method: str, kind: Kind, path: str, body: Object | bytes, content: str = _JSON) -> Object:
        async with self._places:
            left = self._fence()
            if left <= 0:
                raise FencedError("the Lease is not held")
            return await self._call(method, kind, path, body, content=content, timeout_s=min(WRITE_S, left))

    async def _call(
        self, method: str, kind: Kind | None, path: str, body: Any = None, *, timeout_s: float, content: str = _JSON
    ) -> Object:
        headers = {"Accept": _JSON, "Content-Type": content, "User-Agent": "kvferry-operator"}
        code = 0
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
                answer = await self._client.rest_client.request(  # type: ignore[no-untyped-call]
                    method,
                    self._client.configuration.host + path,
                    headers=headers,
                    body=body,
                    _request_timeout=aiohttp.ClientTimeout(total=timeout_s),
                )
                code, content_bytes = answer.status, await _read(answer.response)
        except TimeoutError:
            raise ApiError(0, f"no answer within {timeout_s:.1f} s", away=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, f"{type(error).__name__}: {error}"[:MESSAGE_CHARS], away=True) from None
        finally:
            self._observe(method, "" if kind is None else kind.kind, code)
        return _decoded(code, content_bytes, answer.headers.get("Retry-After", ""))


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """The whole body, which has a cap. Raises ``ApiError``."""
    parts: list[bytes] = []
    size = 0
    async with answer:
        async for part in answer.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > BODY_BYTES:
                raise ApiError(0, f"an answer of more than {BODY_BYTES} bytes")
    return b"".join(parts)


def _decoded(code: int, content: bytes, retry_after: str) -> Object:
    """An answer's object. Raises ``ApiError``."""
    try:
        found: Any = json.loads(content)
    except ValueError:
        found = None
    if not 200 <= code < 300:
        told, reason = (found.get("message", ""), found.get("reason", "")) if isinstance(found, dict) else ("", "")
        message = str(told) or content[:200].decode("utf-8", "replace").strip() or f"status {code}"
        wait_s = _seconds(found, retry_after)
        raise ApiError(code, message[:MESSAGE_CHARS], reason=str(reason or ""), retry_after_s=wait_s)
    if not isinstance(found, dict):
        raise ApiError(0, f"status {code} with an answer that is no object")
    return found


def _seconds(found: Any, retry_after: str) -> float:
    """How long the server asks to wait, from its header or its Status."""
    if retry_after.isdigit():
        return min(float(retry_after), 300.0)
    details = found.get("details") if isinstance(found, dict) else None
    asked = details.get("retryAfterSeconds", 0) if isinstance(details, dict) else 0
    return min(float(asked), 300.0) if isinstance(asked, int) else 0.0
