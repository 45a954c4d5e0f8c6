"""API keys and tenants: who asks, and the salt that keeps tenants' KV apart.

The key file has one ``tenant:sha256hex`` per line (``#`` starts a comment), or is a JSON object from tenant to one
digest or a list of digests. It holds digests only, and is read again when it changes. Without authentication
everybody is the tenant ``default``.
"""

import hmac
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec

from kvferry_wire.keys import derive, mac

DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE_BYTES = 4 * 2**20


class KeyFileError(ValueError):
    """A file of API keys that cannot be used; the message names the file, the line and what is accepted."""


def parse_api_keys(text: str, *, where: str, max_tenants: int) -> tuple[tuple[bytes, str], ...]:
    """Read the pairs (SHA-256 digest of a key, tenant). Raises ``KeyFileError`` with all faults."""
    pairs = _json_pairs(text, where) if text.lstrip().startswith("{") else _line_pairs(text)
    faults: list[str] = []
    found: dict[bytes, str] = {}
    for place, tenant, digest in pairs:
        if not _TENANT.fullmatch(tenant):
            faults.append(f"{place}: the tenant must match {_TENANT.pattern}")
        elif not _DIGEST.fullmatch(digest.lower()):
            faults.append(f"{place}: a SHA-256 digest has 64 hex digits; {len(digest)} characters were given")
        elif found.setdefault(bytes.fromhex(digest), tenant) != tenant:
            faults.append(f"{place}: the same key belongs to another tenant")
    if len(set(found.values())) > max_tenants:
        faults.append(f"{len(set(found.values()))} tenants; at most {max_tenants} are accepted")
    if faults:
        raise KeyFileError(f"{where}: " + "; ".join(faults[:20]))
    return tuple(found.items())


def _line_pairs(text: str) -> list[tuple[str, str, str]]:
    pairs = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if line:
            tenant, _, digest = line.partition(":")
            pairs.append((f"line {number}", tenant.strip(), digest.strip()))
    return pairs


def _json_pairs(text: str, where: str) -> list[tuple[str, str, str]]:
    try:
        content = msgspec.json.decode(text, type=dict[str, str | list[str]])
    except msgspec.DecodeError as error:
        raise KeyFileError(f"{where}: {error}; an object from tenant to digest(s) is expected") from None
    return [
        (f"tenant {number}", tenant, digest)
        for number, (tenant, digests) in enumerate(content.items(), 1)
        for digest in ([digests] if isinstance(digests, str) else digests)
    ]


class ApiKeys:
    """The keys of a file, read again when its change time or size does."""

    def __init__(self, path: Path, max_tenants: int) -> None:
        """Raises ``KeyFileError`` when the file cannot be used."""
        self._path = path
        self._max_tenants = max_tenants
        self._seen: tuple[int, int] | None = None
        self._pairs: tuple[tuple[bytes, str], ...] = ()
        self.reload()

    def reload(self) -> bool:
        """Read the file if it changed; returns whether it did. On ``KeyFileError`` the old keys stay."""
        try:
            status = self._path.stat()
            mark = (status.st_mtime_ns, status.st_size)
            if mark == self._seen:
                return False
            if status.st_size > _FILE_BYTES:
                raise KeyFileError(f"{self._path}: larger than {_FILE_BYTES} bytes")
            text = self._path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFileError(f"{self._path}: {error}") from None
        self._seen = mark  # also of a file that is wrong: it is complained of once
        self._pairs = parse_api_keys(text, where=str(self._path), max_tenants=self._max_tenants)
        return True

    def __len__(self) -> int:
        return len(self._pairs)

    def authenticate(self, header: str) -> str | None:
        """The tenant that an ``Authorization`` header stands for; ``None`` refuses.

        Compared as digests, each time against all of them, so that timing tells nothing about any.
        """
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return None
        shown = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: str | None = None
        for digest, tenant in self._pairs:
            if hmac.compare_digest(digest, shown):
                found = tenant
        return found


def default_tenant(_: str) -> str | None:
    """``--auth none``: nobody is asked, all are one tenant."""
    return DEFAULT_TENANT


def salter(hash_key: bytes) -> Callable[[str], bytes]:
    """From tenant to salt: 32 bytes that nobody without the ``hash`` key can compute, equal on every router."""
    key = derive(hash_key, "tenant-salt")
    return lambda tenant: mac(key, "tenant", tenant.encode())
