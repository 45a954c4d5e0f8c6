"""From a store to a verified folder: which files a model needs, refused as early as can be told, a few at a time.

The small files come first, so that a model that will not be served costs no download of its weights.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvferry_runtime.model.config_hf import parse_hf_config
from kvferry_runtime.model.errors import ModelError
from kvferry_runtime.model.fetch.download import FILES, arrived, download, with_tries
from kvferry_runtime.model.fetch.errors import FetchError
from kvferry_runtime.model.fetch.options import Fetched, FetchOptions
from kvferry_runtime.model.fetch.place import (
    LATEST,
    PARTIAL,
    KeptFile,
    Record,
    check_room,
    disk_fault,
    latest,
    locked,
    point,
    publish,
    size_text,
    whole,
)
from kvferry_runtime.model.fetch.progress import Progress, say, shown
from kvferry_runtime.model.fetch.store import RemoteFile, Store
from kvferry_runtime.model.folder import CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE, WEIGHTS_FILE, open_folder, read_json
from kvferry_runtime.model.safetensors_file import read_index
from kvferry_wire.fetch import FetchReason

# What `kvferry_runtime.model.text` reads beside the tokenizer, where it is there.
TEXT_FILES = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja", "chat_template.json")
_SMALL = frozenset({CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE, *TEXT_FILES})
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one model."""

    small: tuple[RemoteFile, ...]
    weights: tuple[RemoteFile, ...]

    @property
    def all(self) -> tuple[RemoteFile, ...]:
        return (*self.small, *self.weights)

    @property
    def bytes(self) -> int:
        return sum(file.size or 0 for file in self.all)


def choose(names: Iterable[str], what: str) -> str | None:
    """What to fetch of a store that lists its files: ``None`` for a safetensors model, else the one GGUF file.

    Raises:
        FetchError: no model, or several.
    """
    given = frozenset(names)
    if CONFIG_FILE in given and (WEIGHTS_FILE in given or INDEX_FILE in given):
        return None
    ggufs = sorted(name for name in given if name.endswith(".gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        listed = ", ".join(ggufs[:8]) + (", ..." if len(ggufs) > 8 else "")
        raise FetchError(
            f"{what}: {len(ggufs)} .gguf files, of which one can be served ({listed}); give the address of one of them",
            FetchReason.REFUSED,
        )
    pickles = sorted(name for name in given if name.endswith(_PICKLES))
    if pickles:
        raise FetchError(
            f"{what}: {pickles[0]} holds pickled weights, which can run code when read;"
            " safetensors and gguf are accepted",
            FetchReason.REFUSED,
        )
    raise FetchError(
        f"{what}: no model: neither {CONFIG_FILE} with {WEIGHTS_FILE} (or {INDEX_FILE}), nor a .gguf file",
        FetchReason.MISSING,
    )


def collect(
    store: Store, root: Path, name: str, source: str, options: FetchOptions, *, pointer: str = LATEST
) -> Fetched:
    """Get a model from a store, or find it here as the store has it.

    Args:
        name: of the source's folder below ``root``.
        source: as asked for; kept in the record.
        pointer: of the link to the version that was fetched last for this source.

    Raises:
        FetchError: it cannot be had. What has arrived stays, and the next call goes on from there.
    """
    with locked(root, name, options.limits.fetch_lock_s):
        home = root / name
        if store.pinned is not None and (there := whole(home / store.pinned)) is not None:
            return _verified(home / store.pinned, there)
        try:
            (home / PARTIAL).mkdir(parents=True, exist_ok=True)
            return asyncio.run(_Collection(store, home, source, options, pointer).run())
        except FetchError as error:
            found = latest(home / pointer) if error.reason == FetchReason.FAILED else None
            if found is None or options.commit not in (None, found[1].commit):
                raise
            say(options.show, f"{error}; what was fetched before is used")
            return _verified(*found)
        except OSError as error:
            raise disk_fault(error, store.what) from error


class _Collection:
    """One fetch from one store."""

    def __init__(self, store: Store, home: Path, source: str, options: FetchOptions, pointer: str) -> None:
        self._store, self._what = store, store.what
        self._home, self._partial = home, home / PARTIAL
        self._source, self._options, self._limits = source, options, options.limits
        self._pointer = home / pointer
        self._progress = Progress()
        self._files: dict[str, KeptFile] = {}  # that lie in the partial folder, checked

    async def run(self) -> Fetched:
        limits = self._limits
        with shown(self._progress, self._what, self._options.show):
            try:
                async with asyncio.timeout(limits.fetch_s), self._store:
                    wanted = await self._wanted()
                    version = _version(self._store.commit, wanted)
                    if (record := whole(self._home / version)) is not None:
                        shutil.rmtree(self._partial)
                        point(self._pointer, Path(version))
                        return _verified(self._home / version, record)
                    await self._download(wanted)
            except TimeoutError:
                raise FetchError(
                    f"{self._what}: not fetched within {limits.fetch_s:.0f} s; running the command again goes on where"
                    " it stopped"
                ) from None
        return self._publish(wanted, version)

    async def _wanted(self) -> Wanted:
        names = await with_tries(self._store.names, self._limits)
        gguf = None if names is None else choose(names, self._what)
        if gguf is not None:
            return Wanted(small=(), weights=(_sized(await self._needed(gguf), self._what),))
        return await self._folder()

    async def _folder(self) -> Wanted:
        """The files of a safetensors model. Its configuration and index are fetched to know, and checked at once."""
        config = await self._needed(CONFIG_FILE)
        path = await self._now(config)
        try:
            parse_hf_config(read_json(path), f"{self._what}: {CONFIG_FILE}")
        except ModelError as error:
            raise FetchError.of_model(error) from error
        tokenizer = await self._needed(TOKENIZER_FILE)
        texts = [await self._described(name) for name in TEXT_FILES]
        small = [config, tokenizer, *(file for file in texts if file is not None)]
        whole = await self._described(WEIGHTS_FILE)
        if whole is not None:
            return Wanted(small=tuple(small), weights=(_sized(whole, self._what),))
        index = await self._needed(INDEX_FILE, instead=WEIGHTS_FILE)
        shards = self._shards(await self._now(index))
        weights = [_sized(await self._needed(name), self._what) for name in shards]
        return Wanted(small=(*small, index), weights=tuple(weights))

    def _shards(self, index: Path) -> list[str]:
        try:
            shards = sorted(set(read_index(index).values()))
        except ModelError as error:
            raise FetchError.of_model(error) from error
        if len(shards) > self._limits.fetch_files:
            raise FetchError(
                f"{self._what}: {len(shards)} files of weights; at most {self._limits.fetch_files} are accepted",
                FetchReason.REFUSED,
            )
        return shards

    async def _described(self, name: str) -> RemoteFile | None:
        file = await with_tries(lambda: self._store.stat(name), self._limits)
        most = self._limits.fetch_text_bytes
        if file is not None and name in _SMALL and file.size is not None and file.size > most:
            raise FetchError(
                f"{self._what}: {name} has {size_text(file.size)}; at most {size_text(most)} are accepted",
                FetchReason.REFUSED,
            )
        return file

    async def _needed(self, name: str, *, instead: str = "") -> RemoteFile:
        file = await self._described(name)
        if file is None:
            other = f", nor {instead}" if instead else ""
            raise FetchError(f"{self._what}: there is no {name}{other}", FetchReason.MISSING)
        return file

    async def _now(self, file: RemoteFile) -> Path:
        """Get a small file before the others."""
        self._files[file.name] = await download(self._store, file, self._partial, self._limits, Progress())
        return self._partial / FILES / file.name

    async def _download(self, wanted: Wanted) -> None:
        check_room(
            self._partial,
            needed=max(0, wanted.bytes - arrived(self._partial)),
            most=self._options.most_bytes,
            total=wanted.bytes,
            what=self._what,
        )
        self._progress.total = wanted.bytes
        self._progress.add(sum(file.size for file in self._files.values()))
        gate = asyncio.Semaphore(self._limits.fetch_parallel)

        async def one(file: RemoteFile) -> None:
            async with gate:
                self._files[file.name] = await download(self._store, file, self._partial, self._limits, self._progress)

        try:
            async with asyncio.TaskGroup() as group:
                for file in wanted.all:
                    if file.name not in self._files:
                        group.create_task(one(file))
        except* FetchError as errors:
            raise _first(errors) from None

    def _publish(self, wanted: Wanted, version: str) -> Fetched:
        """Look into the files as the engine will, then give them their name."""
        names = {file.name for file in wanted.all}
        record = Record(
            source=self._source,
            commit=self._store.commit,
            files={name: file for name, file in self._files.items() if name in names},
        )
        folder = self._partial / FILES
        for stray in folder.iterdir():
            if stray.name not in names:
                stray.unlink()
        try:
            open_folder(folder)
        except ModelError as error:
            shutil.rmtree(self._partial)  # bytes as the store has them: kept, they would be found again
            raise FetchError.of_model(error) from error
        final = publish(folder, self._home / version, record)
        point(self._pointer, Path(version))
        shutil.rmtree(self._partial)
        say(self._options.show, f"{self._what}: fetched and verified, {size_text(record.bytes)}")
        return Fetched(path=final, source=self._source, commit=record.commit, bytes=record.bytes)


def _verified(folder: Path, record: Record) -> Fetched:
    """A version that lies here, if its model can be opened."""
    try:
        open_folder(folder)
    except ModelError as error:
        raise FetchError.of_model(error) from error
    return Fetched(path=folder, source=record.source, commit=record.commit, bytes=record.bytes)


def _version(commit: str | None, wanted: Wanted) -> str:
    """A name for exactly this content: the store's own, else one made of what it says of the files."""
    if commit is not None:
        return commit
    described = sorted((file.name, file.size, file.validator or file.sha256 or "") for file in wanted.all)
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()[:16]


def _sized(file: RemoteFile, what: str) -> RemoteFile:
    if file.size is None:
        raise FetchError(
            f"{what}: the server says no size of {file.name}, so that nobody could tell if it is whole",
            FetchReason.REFUSED,
        )
    return file


def _first(errors: "ExceptionGroup[FetchError]") -> FetchError:
    """One error of several: what cannot be mended by another try goes first."""
    leaves: list[FetchError] = []
    pending: list[BaseException] = list(errors.exceptions)
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending = [*error.exceptions, *pending]
        elif isinstance(error, FetchError):
            leaves.append(error)
    return min(leaves, key=lambda error: error.reason == FetchReason.FAILED)
