"""API keys and tenants: who asks, and the salt that keeps tenants' KV apart. Pure; ``key_source`` reads the files.

A list has one ``tenant:sha256hex`` per line (``#`` starts a comment), or is a JSON object from tenant to one digest or
a list of digests. A folder, as a Secret is mounted, holds lists in files named ``*.keys`` or ``*.json``; every other
file has the keys themselves, one per line, of the tenant whose name it has. What is kept of a key is its digest.
Without authentication everybody is the tenant ``default``.
"""

import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

import msgspec

from kvferry_wire.keys import derive, mac

DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")  # as an Authorization header can carry it
_KEY_ACCEPTED = "a key has 16 to 512 characters of A-Z a-z 0-9 . _ ~ + / = -"
# By the name and not by what is inside: a line of a list that was cut would else be taken for a key.
_LISTS = (".keys", ".json")


class KeyFileError(ValueError):
    """API keys that cannot be used; the message names the file, the line and what is accepted, never what is there."""


Pairs = tuple[tuple[bytes, str], ...]  # SHA-256 digest of a key, tenant
_Found = list[tuple[str, str, str]]  # place, tenant, digest in hex


def parse_api_keys(text: str, *, where: str, max_tenants: int) -> Pairs:
    """Read a list. Raises ``KeyFileError`` with all faults."""
    return _checked(_listed(text, where), where, max_tenants)


def parse_key_folder(files: Mapping[str, str], *, where: str, max_tenants: int) -> Pairs:
    """Read the files of a folder, by name. Raises ``KeyFileError`` with all faults."""
    found: _Found = []
    faults: list[str] = []
    for name, text in sorted(files.items()):
        if name.endswith(_LISTS):
            listed = _listed(text, f"{where}/{name}")
            found += [(f"{name}: {place}", tenant, digest) for place, tenant, digest in listed]
            continue
        for number, key in _lines(text):
            if _KEY.fullmatch(key):
                found.append((f"{name}: line {number}", name, sha256(key.encode()).hexdigest()))
            else:
                faults.append(f"{name}: line {number}: {_KEY_ACCEPTED}; a list is in a file named *.keys or *.json")
    return _checked(found, where, max_tenants, faults)


def _checked(pairs: _Found, where: str, max_tenants: int, known: Sequence[str] = ()) -> Pairs:
    faults = list(known)
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


def _listed(text: str, where: str) -> _Found:
    return _json_pairs(text, where) if text.lstrip().startswith("{") else _line_pairs(text)


def _lines(text: str) -> list[tuple[int, str]]:
    """The lines with something in them, by number, without comments."""
    lines = [(number, raw.partition("#")[0].strip()) for number, raw in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in lines if line]


def _line_pairs(text: str) -> _Found:
    pairs = []
    for number, line in _lines(text):
        tenant, _, digest = line.partition(":")
        pairs.append((f"line {number}", tenant.strip(), digest.strip()))
    return pairs


def _json_pairs(text: str, where: str) -> _Found:
    try:
        content = msgspec.json.decode(text, type=dict[str, str | list[str]])
    except msgspec.DecodeError as error:
        raise KeyFileError(f"{where}: {error}; an object from tenant to digest(s) is expected") from None
    return [
        (f"tenant {number}", tenant, digest)
        for number, (tenant, digests) in enumerate(content.items(), 1)
        for digest in ([digests] if isinstance(digests, str) else digests)
    ]


class KeyRing:
    """Keys by their digests."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs

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
