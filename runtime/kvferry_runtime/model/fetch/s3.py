"""Models in S3 buckets, of AWS or of whatever speaks as it (MinIO, Ceph, ...).

boto3 finds credentials and region, signs, and reads listings; its requests go out through our own client, so that the
same addresses are refused, and the files come by signed addresses like any others. Credentials come from files that a
pod mounts, or as AWS's own tools find them, never from a manifest; where there are none, requests are not signed, as
public buckets want it.
"""

import asyncio
import base64
import binascii
import io
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvferry_runtime.model.fetch.client import Client
from kvferry_runtime.model.fetch.errors import FetchError, TryAgainError
from kvferry_runtime.model.fetch.options import FetchOptions
from kvferry_runtime.model.fetch.store import RemoteFile
from kvferry_runtime.model.fetch.web import check_status, read_body
from kvferry_wire.fetch import FetchReason
from kvferry_wire.urls import parse_endpoint, parse_signed

VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
SIGNED_S = 3600  # how long a signed address holds; each try signs anew
REPLY_S = 60.0
_SOURCE = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", re.ASCII)
_MD5 = re.compile(r'"([0-9a-f]{32})"')
_MISSING = frozenset({"NoSuchBucket", "NoSuchKey", "404"})
_DENIED = frozenset(
    {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "403", "401"}
)


class S3Store:
    """The objects below a prefix, or one object that is a .gguf file."""

    commit: str | None = None
    pinned: str | None = None

    def __init__(self, bucket: str, prefix: str, options: FetchOptions) -> None:
        self._bucket, self._options, self._limits = bucket, options, options.limits
        self._gguf = prefix.endswith(".gguf")
        self._prefix = prefix if self._gguf or not prefix else prefix.rstrip("/") + "/"
        self._client = Client(options.limits, redirects=False)
        self._s3: Any = None
        self._signs = False
        self._names: frozenset[str] = frozenset()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> "S3Store":
        self._loop = asyncio.get_running_loop()
        region = self._options.s3_region or os.environ.get("AWS_REGION") or None
        self._s3 = await asyncio.to_thread(self._connect, region)
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(*error)

    @property
    def what(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}"

    async def names(self) -> frozenset[str] | None:
        self._names = await asyncio.to_thread(self._list)
        return self._names

    async def stat(self, name: str) -> RemoteFile | None:
        return await asyncio.to_thread(self._head, name) if name in self._names else None

    @asynccontextmanager
    async def open(self, file: RemoteFile, start: int) -> AsyncIterator[aiohttp.ClientResponse]:
        signed = await asyncio.to_thread(
            self._s3.generate_presigned_url,
            "get_object",
            Params={"Bucket": self._bucket, "Key": self._key(file.name)},
            ExpiresIn=SIGNED_S,
        )
        headers = {"If-Match": file.validator} | ({"Range": f"bytes={start}-"} if start else {})
        async with self._client.request("GET", parse_signed(signed), headers) as response:
            if response.status == 412:
                raise FetchError(f"{self.what}: {file.name} changes while it is fetched; try again")
            check_status(response, f"{self.what}: {file.name}", self._advice())
            yield response

    # ---- in a thread: boto3 waits for each answer ----

    def _connect(self, region: str | None) -> Any:
        try:
            import boto3
            from botocore import UNSIGNED
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError:
            raise FetchError("s3:// needs boto3: install kvferry[s3]", FetchReason.REFUSED) from None
        own = _credentials(self._options.s3_credentials)
        endpoint = self._options.s3_endpoint
        own_endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        # A machine's metadata service hands its own rights to whoever asks: only on the user's word.
        os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
        try:
            session = boto3.Session(
                aws_access_key_id=own.get("AWS_ACCESS_KEY_ID"),
                aws_secret_access_key=own.get("AWS_SECRET_ACCESS_KEY"),
                aws_session_token=own.get("AWS_SESSION_TOKEN"),
                region_name=region,
            )
            self._signs = session.get_credentials() is not None
            config = Config(
                signature_version="s3v4" if self._signs else UNSIGNED,
                retries={"total_max_attempts": 1},  # we try again, with the same rules for all sources
                s3={"addressing_style": "path" if own_endpoint else "auto"},
            )
            client = session.client(
                "s3",
                endpoint_url=endpoint,
                region_name=region or session.region_name or "us-east-1",
                config=config,
            )
            parse_endpoint(client.meta.endpoint_url)
        except (BotoCoreError, ValueError) as error:
            raise FetchError(f"{self.what}: {error}", FetchReason.REFUSED) from error
        client.meta.events.register("before-send.s3", self._send)
        return client

    def _list(self) -> frozenset[str]:
        """Names of what lies directly below the prefix."""
        names: set[str] = set()
        more: dict[str, str] = {}
        while True:
            page = self._ask("list_objects_v2", Prefix=self._prefix, Delimiter="/", **more)
            keys = (str(entry["Key"]) for entry in page.get("Contents", ()))
            names |= {key.rpartition("/")[2] for key in keys if not self._gguf or key == self._prefix}
            if len(names) > self._limits.fetch_listing:
                raise FetchError(f"{self.what}: more than {self._limits.fetch_listing} objects", FetchReason.REFUSED)
            if not page.get("IsTruncated"):
                break
            more = {"ContinuationToken": page["NextContinuationToken"]}
        names.discard("")  # the prefix itself, where a tool has made it an object
        if not names:
            raise FetchError(f"{self.what}: nothing lies there", FetchReason.MISSING)
        return frozenset(names)

    def _head(self, name: str) -> RemoteFile:
        return described(name, self._ask("head_object", Key=self._key(name), ChecksumMode="ENABLED"))

    def _ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer: dict[str, Any] = getattr(self._s3, operation)(Bucket=self._bucket, **arguments)
        except ClientError as error:
            raise self._refused(error) from error
        except BotoCoreError as error:
            raise FetchError(f"{self.what}: {error}") from error
        # Signed addresses must be of the region in which the bucket is.
        told = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
        if told and told != self._s3.meta.region_name:
            self._s3 = self._connect(told)
        return answer

    def _key(self, name: str) -> str:
        return self._prefix if self._gguf else self._prefix + name

    def _refused(self, error: Any) -> FetchError:
        code = str(error.response.get("Error", {}).get("Code", ""))
        said = " ".join(str(error.response.get("Error", {}).get("Message", "")).split())[:300]
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = headers.get("x-amz-bucket-region")
        if code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "301") and region:
            return FetchError(
                f"{self.what}: the bucket is in region {region}: spec.model.s3.region, or AWS_REGION on one machine",
                FetchReason.MISSING,
            )
        if code in _MISSING:
            return FetchError(f"{self.what}: there is no bucket {self._bucket} ({code})", FetchReason.MISSING)
        if code in _DENIED:
            return FetchError(f"{self.what}: access denied ({code}: {said}): {self._advice()}", FetchReason.DENIED)
        return FetchError(f"{self.what}: the store answers {code}: {said}")

    def _advice(self) -> str:
        if self._signs:
            return "the credentials need s3:ListBucket and s3:GetObject there"
        return "credentials are needed: spec.model.s3.secretRef, or as for AWS's tools on one machine"

    def _send(self, request: Any, **_: Any) -> Any:
        """boto3's hook before a request: ours goes out in its place."""
        from botocore.awsrequest import AWSResponse

        assert self._loop is not None, "requests are made inside `async with`"
        headers = {
            name: value.decode() if isinstance(value, bytes) else str(value) for name, value in request.headers.items()
        }
        answer = asyncio.run_coroutine_threadsafe(self._answer(request.method, request.url, headers), self._loop)
        try:
            status, got, body = answer.result(REPLY_S + self._limits.fetch_connect_s)
        except TimeoutError:
            answer.cancel()
            raise TryAgainError(f"{self.what}: no answer in time") from None
        return AWSResponse(request.url, status, got, _Raw(body))

    async def _answer(self, method: str, url: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        async with self._client.request(method, parse_signed(url), headers) as response:
            body = await read_body(response, self._limits, self.what)
            return response.status, {name.lower(): value for name, value in response.headers.items()}, body


class _Raw(io.BytesIO):
    """A body in the form that botocore reads."""

    def stream(self, amt: int = 2**16, **_: object) -> Any:
        while chunk := self.read(amt):
            yield chunk


def s3_store(text: str, options: FetchOptions) -> S3Store:
    """The store of ``s3://BUCKET/PREFIX``. Raises ``FetchError``."""
    found = _SOURCE.fullmatch(text)
    if found is None:
        raise FetchError(
            f"model {text!r}: accepted: s3://BUCKET/PREFIX with a model as Hugging Face lays it out, or a .gguf file",
            FetchReason.REFUSED,
        )
    return S3Store(found[1], found[2] or "", options)


def described(name: str, head: dict[str, Any]) -> RemoteFile:
    """A file as a store describes it. Its ETag is the MD5 of what was put in one piece and not encrypted by KMS."""
    etag = str(head["ETag"])
    plain = head.get("ServerSideEncryption") in (None, "AES256") and "SSECustomerAlgorithm" not in head
    md5 = _MD5.fullmatch(etag) if plain else None
    whole = head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    sha256 = _raw(head.get("ChecksumSHA256"), 32) if whole else None
    crc32 = _raw(head.get("ChecksumCRC32"), 4) if whole else None
    return RemoteFile(
        name=name,
        size=int(head["ContentLength"]),
        validator=etag,
        sha256=None if sha256 is None else sha256.hex(),
        md5=None if md5 is None else md5[1],
        crc32=None if crc32 is None else int.from_bytes(crc32, "big"),
    )


def _raw(text: Any, length: int) -> bytes | None:
    """A checksum's bytes; None for one that is not of the whole object (its text then ends in -PARTS)."""
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except binascii.Error:
        return None
    return raw if len(raw) == length else None


def _credentials(folder: Path | None) -> dict[str, str]:
    """Credentials in files named as AWS's variables; empty where no folder is given."""
    if folder is None:
        return {}
    found: dict[str, str] = {}
    for name in VARIABLES:
        try:
            found[name] = (folder / name).read_text("ascii").strip()
        except FileNotFoundError:
            continue  # not every store asks for every variable
        except (OSError, UnicodeDecodeError) as error:
            raise FetchError(f"{folder / name}: cannot be read ({error})", FetchReason.DENIED) from error
    missing = [name for name in VARIABLES[:2] if not found.get(name)]
    if missing:
        raise FetchError(
            f"the Secret of spec.model.s3.secretRef has no entry {' and no '.join(missing)}", FetchReason.DENIED
        )
    return found
