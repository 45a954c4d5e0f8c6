"""A small S3: ListObjectsV2, HeadObject and GetObject over a `FileServer`, for the real client library."""

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from aiohttp import web

from tests.runtime.model.fetch.servers import FileServer, Seen, running


@dataclass
class FakeS3:
    """Buckets of objects. ``key_id`` is who may read; None lets everyone."""

    files: FileServer
    buckets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    key_id: str | None = None
    page: int = 1000  # keys of one listing
    multipart: bool = False  # ETags are then no MD5
    wrong_md5: set[str] = field(default_factory=set)
    sha256: dict[str, str] = field(default_factory=dict)  # key -> checksum that is told, base64
    region: str | None = None  # where the buckets are; asking elsewhere is told so

    def put(self, bucket: str, prefix: str, folder: Path) -> None:
        """A folder's files as objects."""
        objects = self.buckets.setdefault(bucket, {})
        objects |= {prefix + file.name: file.read_bytes() for file in folder.iterdir()}

    down: bool = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.files.seen.append(Seen(request.method, request.raw_path, dict(request.headers)))
        if self.down:
            return web.Response(status=503)
        bucket, _, key = request.path.lstrip("/").partition("/")
        if self.region is not None and f"/{self.region}/s3/" not in self._credential(request):
            return _error(301, "PermanentRedirect", {"x-amz-bucket-region": self.region})
        if self.key_id is not None and not self._credential(request).startswith(self.key_id + "/"):
            unsigned = not self._credential(request)
            return _error(403, "AccessDenied" if unsigned else "InvalidAccessKeyId")
        if bucket not in self.buckets:
            return _error(404, "NoSuchBucket")
        if request.query.get("list-type") == "2":
            return self._list(request, bucket)
        if key not in self.buckets[bucket]:
            return _error(404, "NoSuchKey")
        return await self._object(request, bucket, key)

    def _credential(self, request: web.Request) -> str:
        signed = request.headers.get("Authorization", "").partition("Credential=")[2].partition(",")[0]
        return request.query.get("X-Amz-Credential", signed)

    def _list(self, request: web.Request, bucket: str) -> web.StreamResponse:
        prefix, after = request.query.get("prefix", ""), request.query.get("continuation-token", "")
        keys = sorted(key for key in self.buckets[bucket] if key.startswith(prefix))
        keys = [key for key in keys if "/" not in key.removeprefix(prefix) and key > after]
        shown, more = keys[: self.page], len(keys) > self.page
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.buckets[bucket][key])}</Size>"
            f"<ETag>{escape(self._etag(bucket, key))}</ETag></Contents>"
            for key in shown
        )
        token = f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if more else ""
        body = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        headers = {"x-amz-bucket-region": self.region} if self.region else None
        return web.Response(text=body, content_type="application/xml", headers=headers)

    def _etag(self, bucket: str, key: str) -> str:
        digest = hashlib.md5(self.buckets[bucket][key]).hexdigest()
        if key in self.wrong_md5:
            digest = hashlib.md5(b"other").hexdigest()
        return f'"{digest}-2"' if self.multipart else f'"{digest}"'

    async def _object(self, request: web.Request, bucket: str, key: str) -> web.StreamResponse:
        etag, path = self._etag(bucket, key), f"/{bucket}/{key}"
        if request.headers.get("If-Match", etag) != etag:
            return _error(412, "PreconditionFailed")
        headers = {"ETag": etag, "x-amz-server-side-encryption": "AES256"}
        if key in self.sha256 and request.headers.get("x-amz-checksum-mode") == "ENABLED":
            headers |= {"x-amz-checksum-sha256": self.sha256[key], "x-amz-checksum-type": "FULL_OBJECT"}
        if request.method == "HEAD":
            headers["Content-Length"] = str(len(self.buckets[bucket][key]))
            return web.Response(headers=headers)
        self.files.files[path], self.files.headers[path] = self.buckets[bucket][key], headers
        self.files.validators = False
        return await self.files.handle(request)


def checksum(content: bytes) -> str:
    """A SHA-256 as S3 writes it."""
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


def _error(status: int, code: str, headers: dict[str, str] | None = None) -> web.Response:
    body = f"<Error><Code>{code}</Code><Message>because</Message></Error>"
    return web.Response(status=status, text=body, content_type="application/xml", headers=headers)


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    """A store without buckets."""
    store = FakeS3(FileServer())

    def started(url: str) -> None:
        store.files.url = url

    with running(store.handle, started):
        yield store
