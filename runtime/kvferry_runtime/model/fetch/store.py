"""What a place that holds models looks like to the fetcher: names, sizes, and bytes from any position on."""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from aiohttp import ClientResponse


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file as its store describes it. What is given of size and digests is checked."""

    name: str
    size: int | None  # bytes; None where the server does not say it, which only small files may
    validator: str = ""  # changes with the content: an ETag or a date; empty where nothing tells
    sha256: str | None = None  # hex
    git_sha1: str | None = None  # hex, of git's blob: its header, then the content
    md5: str | None = None  # hex
    crc32: int | None = None


class Store(Protocol):
    """A model somewhere else. An async context manager, entered once.

    Its methods raise ``FetchError``, and ``TryAgainError`` for what another try may mend.
    """

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *error: object) -> None: ...

    @property
    def what(self) -> str:
        """The model as messages name it, without credentials."""

    @property
    def commit(self) -> str | None:
        """What names this content for good, once ``names`` or ``stat`` has answered; None where nothing does."""

    @property
    def pinned(self) -> str | None:
        """The same where it is known without asking: a version that lies here needs no network then."""

    async def names(self) -> frozenset[str] | None:
        """Names of the model's files; None where they cannot be listed."""

    async def stat(self, name: str) -> RemoteFile | None:
        """A file's description; None if it is not there."""

    def open(self, file: RemoteFile, start: int) -> AbstractAsyncContextManager["ClientResponse"]:
        """An answer of status 200 (the whole file) or 206 (from ``start`` on)."""
