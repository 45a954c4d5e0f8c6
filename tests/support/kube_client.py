"""A small client of a Kubernetes API server: plain dicts, blocking.

It does what tests need to see exactly what the server answers; the operator itself uses another client.
"""

import http.client
import json
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from kvferry_operator.shell.apply_text import apply_text

Object = dict[str, Any]

JSON = "application/json"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
TIMEOUT_S = 30.0
BUSY_S, POLL_S = 15.0, 0.05


class Refused(Exception):
    """An answer of 400 or more. ``fields`` are the causes: field and message of each."""

    def __init__(self, code: int, body: Object) -> None:
        self.code = code
        self.reason = str(body.get("reason", ""))
        self.message = str(body.get("message", ""))
        causes = body.get("details", {}).get("causes", ())
        self.fields = tuple((str(cause.get("field", "")), str(cause.get("message", ""))) for cause in causes)
        super().__init__(f"{code} {self.reason}: {self.message}")


def _as_os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else ConnectionError(str(error))


class KubeClient:
    """Speaks to one server as one user, over one connection that is kept: one call at a time."""

    def __init__(self, url: str, ca: str, token: str) -> None:
        self._host = urlsplit(url).netloc
        self._ssl = ssl.create_default_context(cafile=ca)
        self._token = token
        self._kinds: dict[tuple[str, str], Object] = {}
        self._connection: http.client.HTTPSConnection | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def request(
        self, method: str, path: str, body: Any = None, *, content_type: str = JSON, **query: str
    ) -> tuple[int, bytes]:
        """Status and body of the answer; bytes are sent as they are. Raises ``OSError`` where no server answers."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content_type, "Accept": JSON}
        url = f"{path}?{urlencode(query)}" if query else path
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with self._lock:
            kept = self._connection is not None
            try:
                return self._send(method, url, data, headers)
            except (OSError, http.client.HTTPException) as error:
                self._close()
                if not kept:
                    raise _as_os_error(error) from error
            try:  # the server has closed the kept connection meanwhile
                return self._send(method, url, data, headers)
            except (OSError, http.client.HTTPException) as error:
                self._close()
                raise _as_os_error(error) from error

    def _send(self, method: str, url: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = http.client.HTTPSConnection(self._host, context=self._ssl, timeout=TIMEOUT_S)
        self._connection.request(method, url, data, headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def call(self, method: str, path: str, body: Any = None, *, content_type: str = JSON, **query: str) -> Object:
        """The answer's object. Raises ``Refused``.

        A server that is not ready for a kind yet (429: the storage of a new or changed CRD is being set up) is asked
        again, as clients do.
        """
        deadline = time.monotonic() + BUSY_S
        while True:
            status, data = self.request(method, path, body, content_type=content_type, **query)
            try:
                answer: Object = json.loads(data)
            except ValueError:
                answer = {"message": data.decode("utf-8", "replace")}
            if status < 400:
                return answer
            if status != 429 or time.monotonic() > deadline:
                raise Refused(status, answer)
            time.sleep(POLL_S)

    # ---- objects

    def create(self, wanted: Object, **query: str) -> Object:
        return self.call("POST", self._path(wanted, named=False), wanted, **query)

    def get(self, wanted: Object) -> Object:
        """The object as it is; ``wanted`` need hold only its kind and names."""
        return self.call("GET", self._path(wanted))

    def find(self, wanted: Object) -> Object | None:
        """The object as it is, or ``None``."""
        try:
            return self.get(wanted)
        except Refused as refused:
            if refused.code == 404:
                return None
            raise

    def replace(self, wanted: Object, subresource: str = "", **query: str) -> Object:
        return self.call("PUT", self._path(wanted, subresource=subresource), wanted, **query)

    def apply(self, wanted: Object, manager: str = "test", subresource: str = "", **query: str) -> Object:
        """Server-side apply with force."""
        asked = {"fieldManager": manager, "force": "true", **query}
        path = self._path(wanted, subresource=subresource)
        return self.call("PATCH", path, apply_text(wanted), content_type=APPLY, **asked)

    def patch(self, wanted: Object, body: Object, subresource: str = "", **query: str) -> Object:
        """JSON merge patch of the object that ``wanted`` names."""
        return self.call("PATCH", self._path(wanted, subresource=subresource), body, content_type=MERGE, **query)

    def delete(self, wanted: Object, **query: str) -> Object:
        return self.call("DELETE", self._path(wanted), **query)

    def list(self, api_version: str, kind: str, namespace: str, **query: str) -> list[Object]:
        """All objects of a kind in a namespace, with their kind filled in."""
        asked = {"apiVersion": api_version, "kind": kind, "metadata": {"namespace": namespace}}
        items = self.call("GET", self._path(asked, named=False), **query)["items"]
        return [{"apiVersion": api_version, "kind": kind, **item} for item in items]

    def _path(self, wanted: Mapping[str, Any], *, named: bool = True, subresource: str = "") -> str:
        api_version, kind, metadata = wanted["apiVersion"], wanted["kind"], wanted["metadata"]
        resource = self._resource(api_version, kind)
        parts = ["api" if "/" not in api_version else "apis", *api_version.split("/")]
        if resource["namespaced"]:
            parts += ["namespaces", metadata["namespace"]]
        parts.append(resource["name"])
        if named:
            parts.append(metadata["name"])
        if subresource:
            parts.append(subresource)
        return "/" + "/".join(quote(part, safe="") for part in parts)

    def _resource(self, api_version: str, kind: str) -> Object:
        if (api_version, kind) not in self._kinds:
            root = "apis" if "/" in api_version else "api"
            for resource in self.call("GET", f"/{root}/{api_version}")["resources"]:
                if "/" not in resource["name"]:
                    self._kinds[api_version, resource["kind"]] = resource
        try:
            return self._kinds[api_version, kind]
        except KeyError:
            raise LookupError(f"the server knows no {kind} of {api_version}") from None
