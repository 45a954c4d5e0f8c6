"""The file or folder of the clients' API keys, read again when something in it changes."""

from pathlib import Path

from kvferry_router.tenants import KeyFileError, KeyRing, Pairs, parse_api_keys, parse_key_folder

_FILE_BYTES = 4 * 2**20

_Mark = tuple[tuple[str, int, int, int], ...]


class ApiKeys:
    """The keys as they were read last."""

    def __init__(self, path: Path, max_tenants: int) -> None:
        """Raises ``KeyFileError`` when they cannot be used. None at all is no fault: then nobody is let in."""
        self._path = path
        self._max_tenants = max_tenants
        self._seen: _Mark | None = None
        self._ring = KeyRing(())
        self.stale = True  # what is there now cannot be used, and the keys are older
        self.reload()

    def __len__(self) -> int:
        return len(self._ring)

    def authenticate(self, header: str) -> str | None:
        """The tenant that an ``Authorization`` header stands for; ``None`` refuses."""
        return self._ring.authenticate(header)

    def why_closed(self) -> str:
        """Why nobody can be let in; empty when somebody can."""
        return "" if len(self._ring) else "there is no API key, so that nobody could ask"

    def reload(self) -> bool:
        """Read what has changed; returns whether anything had. On ``KeyFileError`` the old keys stay."""
        try:
            mark = _mark(self._path)
            if mark == self._seen:
                return False
            texts = _read(self._path, self._max_tenants)
            if _mark(self._path) != mark:
                raise KeyFileError(f"{self._path}: changed while it was read")
        except (OSError, UnicodeDecodeError, KeyFileError) as error:
            self._seen, self.stale = None, True
            if isinstance(error, KeyFileError):
                raise
            # A decoder's own words show what it has read.
            told = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise KeyFileError(f"{self._path}: {told}") from None
        self._seen, self.stale = mark, True  # what is wrong is complained of once
        self._ring = KeyRing(self._parsed(texts))
        self.stale = False
        return True

    def _parsed(self, texts: str | dict[str, str]) -> Pairs:
        where = str(self._path)
        if isinstance(texts, str):
            return parse_api_keys(texts, where=where, max_tenants=self._max_tenants)
        return parse_key_folder(texts, where=where, max_tenants=self._max_tenants)


def _mark(path: Path) -> _Mark:
    """What is there: another mark, another content. Raises ``OSError``."""
    marks = []
    for name, file in _files(path).items():
        status = file.stat()
        marks.append((name, status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(marks)


def _files(path: Path) -> dict[str, Path]:
    """The file, or those of the folder by name. Names with a dot in front are the kubelet's own."""
    if not path.is_dir():
        return {"": path}
    return {file.name: file for file in sorted(path.iterdir()) if not file.name.startswith(".")}


def _read(path: Path, max_files: int) -> str | dict[str, str]:
    """The file's text, or those of the folder's files by name.

    Raises:
        OSError, UnicodeDecodeError: a file cannot be read.
        KeyFileError: too many files or bytes.
    """
    files = _files(path)
    if len(files) > max_files:
        raise KeyFileError(f"{path}: {len(files)} files; at most {max_files} are accepted")
    texts, left = {}, _FILE_BYTES
    for name, file in files.items():
        with file.open("rb") as opened:
            content = opened.read(left + 1)
        left -= len(content)
        if left < 0:
            raise KeyFileError(f"{path}: larger than {_FILE_BYTES} bytes")
        texts[name] = content.decode("utf-8")
    return texts.get("", texts)
