"""One file from a store into a folder: goes on where it stopped, tries again, is compared with what the store says.

What has arrived lies in ``parts`` beside a note of which content it is the beginning of; a file comes into ``files``
only when it is whole, checked and on the disk.
"""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from kvferry_runtime.model.fetch.checks import Checks
from kvferry_runtime.model.fetch.client import connection_words
from kvferry_runtime.model.fetch.errors import FetchError, TryAgainError
from kvferry_runtime.model.fetch.place import KeptFile, disk_fault, kept, size_text
from kvferry_runtime.model.fetch.progress import Progress
from kvferry_runtime.model.fetch.store import RemoteFile, Store
from kvferry_wire.fetch import FetchReason
from kvferry_wire.limits import Limits

CHUNK_BYTES = 2**20
FIRST_WAIT_S = 0.5
ASKED = 3  # tries of a question
FILES, PARTS, NOTE = "files", "parts", ".note"
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
Got = TypeVar("Got")


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Of which content a file is (the beginning of), and how it lay once it was whole and checked."""

    size: int | None
    validator: str
    whole: KeptFile | None = None

    @classmethod
    def of(cls, file: RemoteFile) -> "Note":
        return cls(size=file.size, validator=file.validator or file.sha256 or "")

    def begins(self, other: "Note") -> bool:
        """Whether two notes are of the same content, as far as a store tells."""
        return bool(self.validator) and (self.size, self.validator) == (other.size, other.validator)


async def with_tries(act: Callable[[], Awaitable[Got]], limits: Limits, moved: Callable[[], int] | None = None) -> Got:
    """Try until it works; gives up after so many tries without a byte more.

    Args:
        moved: bytes so far; more of them than before make the tries count from one again. A question that moves no
            bytes is tried less often.

    Raises:
        FetchError: as raised by the act, or the last failure's words.
    """
    most = limits.fetch_tries if moved else min(ASKED, limits.fetch_tries)
    tries, before = 0, 0
    while True:
        try:
            return await act()
        except TryAgainError as again:
            now = moved() if moved else 0
            tries, before = (1 if now > before else tries + 1), now
            if tries >= most:
                raise FetchError(f"{again} ({tries} tries); another try goes on where it stopped") from again
            wait = FIRST_WAIT_S * 2**tries if again.wait_s is None else again.wait_s
            await asyncio.sleep(min(wait, limits.fetch_wait_s))


async def download(store: Store, file: RemoteFile, partial: Path, limits: Limits, progress: Progress) -> KeptFile:
    """Get one file into ``partial/files``; what has arrived of it lies in ``partial/parts``. Raises ``FetchError``."""
    what = f"{store.what}: {file.name}"
    try:
        transfer = _Transfer(store, file, partial, what=what, limits=limits, progress=progress)
        if (there := transfer.resume()) is not None:
            return there
        await with_tries(transfer.run, limits, lambda: transfer.checks.size)
        return transfer.finish()
    except OSError as error:
        raise disk_fault(error, what) from error


def arrived(partial: Path) -> int:
    """Bytes that earlier tries have left, whole files and parts."""
    return sum(
        path.stat().st_size
        for path in (*(partial / FILES).glob("*"), *(partial / PARTS).glob("*"))
        if not path.name.endswith(NOTE)
    )


class _Transfer:
    """A file on its way."""

    def __init__(
        self, store: Store, file: RemoteFile, partial: Path, *, what: str, limits: Limits, progress: Progress
    ) -> None:
        self.checks = Checks(file)
        self._store, self._file = store, file
        self._whole, self._part = partial / FILES / file.name, partial / PARTS / file.name
        self._note = partial / PARTS / f"{file.name}{NOTE}"
        self._what, self._limits, self._progress = what, limits, progress
        self._most = limits.fetch_text_bytes if file.size is None else file.size

    def resume(self) -> KeptFile | None:
        """Take over what an earlier fetch left, if it is of the same content; else begin anew. The file, if whole."""
        self._whole.parent.mkdir(exist_ok=True)
        self._part.parent.mkdir(exist_ok=True)
        begun, left = Note.of(self._file), self._left()
        if left is not None and begun.begins(left):
            if left.whole is not None and _lies(self._whole, left.whole):
                self._progress.add(left.whole.size)
                return left.whole
            if left.whole is None and self._part.is_file() and self._part.stat().st_size <= self._most:
                self.checks.update_from(self._part)
                self._progress.add(self.checks.size)
                return None
        self._part.unlink(missing_ok=True)
        self._part.touch()
        self._note.write_bytes(msgspec.json.encode(begun))
        return None

    def _left(self) -> Note | None:
        try:
            return msgspec.json.decode(self._note.read_bytes(), type=Note)
        except (FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError):
            return None

    async def run(self) -> None:
        """One try: ask from where we are, and take what comes."""
        if self._file.size is not None and self.checks.size == self._file.size:
            return
        async with self._store.open(self._file, self.checks.size) as response:
            self._place(response)
            # Opened for each try: what follows is written behind what was counted.
            with self._part.open("r+b") as out:
                out.truncate(self.checks.size)
                out.seek(self.checks.size)
                await self._take(response, out.write)
        if self._file.size is not None and self.checks.size < self._file.size:
            raise TryAgainError(f"{self._what}: the connection ended early")

    def finish(self) -> KeptFile:
        """Check, make it last, give it its name; what is wrong is thrown away."""
        try:
            sha256 = self.checks.finish(self._what)
        except FetchError:
            self._part.unlink(missing_ok=True)
            self._note.unlink(missing_ok=True)
            raise
        handle = os.open(self._part, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self._part.replace(self._whole)
        whole = kept(self._whole, sha256)
        self._note.write_bytes(msgspec.json.encode(msgspec.structs.replace(Note.of(self._file), whole=whole)))
        return whole

    def _place(self, response: aiohttp.ClientResponse) -> None:
        """Find out where the answer begins and whether it is of the content that was described."""
        if response.status == 200:
            self._restart()
            length = response.content_length
            if self._file.size is not None and length is not None and length != self._file.size:
                raise FetchError(
                    f"{self._what}: {length} bytes, but {self._file.size} a moment ago: it changes while it is fetched;"
                    " try again"
                )
            if length is None and response.headers.get("Transfer-Encoding", "").lower() != "chunked":
                raise FetchError(f"{self._what}: the server says no size, so that nobody could tell if it is whole")
            return
        found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if found is None or int(found[1]) != self.checks.size or int(found[3]) != self._file.size:
            self._restart()
            raise TryAgainError(f"{self._what}: the server sent another part than was asked for")

    def _restart(self) -> None:
        if self.checks.size:
            self._progress.add(-self.checks.size)
            self.checks = Checks(self._file)

    async def _take(self, response: aiohttp.ClientResponse, write: Callable[[bytes], int]) -> None:
        try:
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                if self.checks.size + len(chunk) > self._most:
                    raise FetchError(f"{self._what}: more than {size_text(self._most)} came", FetchReason.REFUSED)
                write(chunk)
                self.checks.update(chunk)
                self._progress.add(len(chunk))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TryAgainError(f"{self._what}: {connection_words(error)}") from error
        except ConnectionError as error:
            raise TryAgainError(f"{self._what}: {connection_words(error)}") from error


def _lies(path: Path, file: KeptFile) -> bool:
    """Whether a whole file is still as it was noted."""
    try:
        found = path.stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (file.size, file.mtime_ns)
