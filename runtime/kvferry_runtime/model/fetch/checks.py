"""Digests of a file while it arrives, compared with what its store says of it."""

import hashlib
import zlib
from pathlib import Path

from kvferry_runtime.model.fetch.errors import FetchError
from kvferry_runtime.model.fetch.store import RemoteFile

_READ_BYTES = 2**20


class Checks:
    """The running digests of one file. SHA-256 is always computed: it is what a later look compares with."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        # Not for security: S3 and git name their content so.
        self._md5 = None if file.md5 is None else hashlib.md5(usedforsecurity=False)
        self._sha1 = None if file.git_sha1 is None else hashlib.sha1(usedforsecurity=False)
        self._crc = 0
        self.size = 0
        if self._sha1 is not None:
            self._sha1.update(f"blob {file.size}\0".encode())

    def update(self, data: bytes) -> None:
        self.size += len(data)
        self._sha256.update(data)
        if self._md5 is not None:
            self._md5.update(data)
        if self._sha1 is not None:
            self._sha1.update(data)
        if self._file.crc32 is not None:
            self._crc = zlib.crc32(data, self._crc)

    def update_from(self, path: Path) -> None:
        """Take what lies in a file already."""
        with path.open("rb") as data:
            while chunk := data.read(_READ_BYTES):
                self.update(chunk)

    def finish(self, what: str) -> str:
        """The file's SHA-256. Raises ``FetchError`` if anything differs from what the store says."""
        file = self._file
        found = self._sha256.hexdigest()
        for kind, expected, got in (
            ("size", file.size, self.size),
            ("SHA-256", file.sha256, found),
            ("git object", file.git_sha1, self._sha1 and self._sha1.hexdigest()),
            ("MD5", file.md5, self._md5 and self._md5.hexdigest()),
            ("CRC-32", file.crc32, self._crc),
        ):
            if expected is not None and expected != got:
                raise FetchError(f"{what}: {kind} {got}, expected {expected}; the download is not used")
        return found


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
