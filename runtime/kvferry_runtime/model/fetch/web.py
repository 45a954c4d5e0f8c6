"""Models on plain web servers: a folder as Hugging Face lays it out, or one .gguf file.

No index of the folder is needed: a model's files have known names, and its weights are named by their index. A file
``SHA256SUMS`` beside them (as `sha256sum` writes it) is compared with what comes.
"""

import base64
import binascii
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from kvferry_runtime.model.fetch.client import Client
from kvferry_runtime.model.fetch.errors import FetchError, TryAgainError
from kvferry_runtime.model.fetch.options import FetchOptions
from kvferry_runtime.model.fetch.place import size_text
from kvferry_runtime.model.fetch.store import RemoteFile
from kvferry_wire.fetch import FetchReason
from kvferry_wire.limits import Limits
from kvferry_wire.urls import WebUrl, parse_url

SUMS_FILE = "SHA256SUMS"
TOKEN_BYTES = 16 * 2**10
_SUM = re.compile(r"([0-9a-fA-F]{64}) [ *]([^/\0]+)")
_TOTAL = re.compile(r"bytes \d+-\d+/(\d+)")
_NO_HEAD = frozenset({403, 405, 501})  # of servers that answer GET alone
_TOKEN = re.compile(r"[!-~]+")


class WebStore:
    """A model behind an address."""

    commit: str | None = None
    pinned: str | None = None

    def __init__(self, url: WebUrl, options: FetchOptions, client: Client | None = None) -> None:
        self._url, self._limits = url, options.limits
        self._client = client or Client(options.limits)
        self._sums: dict[str, str] = {}
        self._secret = _secret(url, options)

    async def __aenter__(self) -> "WebStore":
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(*error)

    @property
    def what(self) -> str:
        return str(self._url)

    async def names(self) -> frozenset[str] | None:
        if not self._url.is_folder:
            return frozenset({self._url.name})
        self._sums = await self._read_sums()
        return None

    async def stat(self, name: str) -> RemoteFile | None:
        url = self._address(name)
        described = await self._ask("HEAD", url, {}, name)
        if described is None:
            # Some servers answer only GET, and only then tell what is not there.
            described = await self._ask("GET", url, {"Range": "bytes=0-0"}, name)
        return described[0] if described else None

    @asynccontextmanager
    async def open(self, file: RemoteFile, start: int) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {} if not start else {"Range": f"bytes={start}-"}
        if start and file.validator and not file.validator.startswith("W/"):
            headers["If-Range"] = file.validator
        url = self._address(file.name)
        async with self._client.request("GET", url, headers, self._secret) as response:
            check_status(response, f"{self.what}: {file.name}", self._advice())
            now = _validator(response.headers)
            if now and file.validator and now != file.validator:
                raise FetchError(f"{self.what}: {file.name} changes while it is fetched; try again")
            yield response

    async def _ask(
        self, method: str, url: WebUrl, headers: Mapping[str, str], name: str
    ) -> tuple[RemoteFile | None] | None:
        """What a server says of a file, in brackets; without brackets: ask in another way."""
        async with self._client.request(method, url, headers, self._secret) as response:
            if method == "HEAD" and response.status in _NO_HEAD:
                return None
            if response.status in (404, 410):
                return (None,)
            check_status(response, f"{self.what}: {name}", self._advice())
            length = response.headers.get("Content-Length")
            size = int(length) if length is not None and length.isdigit() else None
            if response.status == 206:
                total = _TOTAL.fullmatch(response.headers.get("Content-Range", ""))
                size = None if total is None else int(total[1])
            described = RemoteFile(
                name=name,
                size=size,
                validator=_validator(response.headers),
                sha256=self._url.sha256 or self._sums.get(name) or _digest(response.headers),
            )
            return (described,)

    async def _read_sums(self) -> dict[str, str]:
        """The digests beside the model; none where there are none."""
        async with self._client.request("GET", self._address(SUMS_FILE), {}, self._secret) as response:
            if response.status != 200:
                return {}
            body = await read_body(response, self._limits, f"{self.what}: {SUMS_FILE}")
        lines = [_SUM.fullmatch(line) for line in body.decode("utf-8", "replace").splitlines() if line.strip()]
        # A server that answers whatever is asked with a page of its own has no digests.
        return {line[2].removeprefix("./"): line[1].lower() for line in lines if line is not None}

    def _address(self, name: str) -> WebUrl:
        return self._url.child(name) if self._url.is_folder else self._url

    def _advice(self) -> str:
        if self._secret:
            return "the token may not read it"
        return "it asks for a token: spec.model.tokenSecretRef, or KVFERRY_TOKEN_FILE on one machine"


def web_store(text: str, options: FetchOptions) -> WebStore:
    """The store of an address. Raises ``FetchError`` for one that is not asked."""
    try:
        return WebStore(parse_url(text), options)
    except ValueError as error:
        raise FetchError(f"model {text.partition('?')[0]!r}: {error}", FetchReason.REFUSED) from None


def check_status(response: aiohttp.ClientResponse, what: str, advice: str) -> None:
    """Raise ``FetchError`` for an answer that holds no file."""
    status = response.status
    if status in (200, 206):
        return
    if status in (401, 403):
        raise FetchError(f"{what}: access denied (status {status}): {advice}", FetchReason.DENIED)
    if status in (404, 410):
        raise FetchError(f"{what}: not there (status {status})", FetchReason.MISSING)
    if status == 416:
        raise FetchError(f"{what}: changes while it is fetched (status 416); try again")
    raise FetchError(f"{what}: the server answers with status {status}")


async def read_body(response: aiohttp.ClientResponse, limits: Limits, what: str) -> bytes:
    """A small body. Raises ``FetchError`` or ``TryAgainError``."""
    body = bytearray()
    try:
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > limits.fetch_text_bytes:
                raise FetchError(f"{what}: more than {size_text(limits.fetch_text_bytes)}", FetchReason.REFUSED)
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        raise TryAgainError(f"{what}: the connection broke") from error
    return bytes(body)


def _validator(headers: Mapping[str, str]) -> str:
    return headers.get("ETag") or headers.get("Last-Modified") or ""


def _digest(headers: Mapping[str, str]) -> str | None:
    """The SHA-256 of the whole file that a server may tell (RFC 9530); only its own digest field is read."""
    for part in headers.get("Repr-Digest", "").split(","):
        algorithm, _, value = part.strip().partition("=")
        if algorithm.lower() == "sha-256" and value.startswith(":") and value.endswith(":"):
            try:
                raw = base64.b64decode(value[1:-1], validate=True)
            except binascii.Error:
                return None
            return raw.hex() if len(raw) == 32 else None
    return None


def _secret(url: WebUrl, options: FetchOptions) -> dict[str, str]:
    """The header with the token, if there is one."""
    if options.token_file is None:
        return {}
    try:
        with options.token_file.open("rb") as file:
            token = file.read(TOKEN_BYTES + 1).decode("ascii").strip()
    except OSError as error:
        raise FetchError(f"the token in {options.token_file}: {error.strerror}", FetchReason.DENIED) from error
    except UnicodeDecodeError:
        token = ""
    if len(token) > TOKEN_BYTES or not _TOKEN.fullmatch(token):
        raise FetchError(f"{options.token_file}: no token: printable ASCII of one line is accepted", FetchReason.DENIED)
    if url.scheme != "https":
        raise FetchError(f"{url}: a token is sent over https alone", FetchReason.REFUSED)
    return {"Authorization": f"Bearer {token}"}
