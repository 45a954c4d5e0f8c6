"""Web addresses of models: one strict grammar, read once, and which IP addresses may be connected to. Pure.

What was read is what is asked: requests are made from the parts of a ``WebUrl``, never from the text again, so that no
second parser can see another host in it.
"""

import enum
import ipaddress
import re
from typing import Literal
from urllib.parse import unquote, urljoin

import msgspec

MAX_URL = 1024  # characters, as in a manifest
MAX_REDIRECT = 8192  # where a server points to; signed addresses are long

ACCEPTS = (
    "accepts http(s)://HOST[:PORT]/FOLDER/ with a model as Hugging Face lays it out, or the address of a .gguf file,"
    " optionally with #sha256=HEX"
)

_URL = re.compile(r"(https?)://([^/?#]+)(/[^?#]*)?(?:\?([^#]*))?(?:#(.*))?", re.IGNORECASE | re.ASCII)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?)(?::([0-9]{1,5}))?")
_CHARACTERS = re.compile(r"[!-~]+")
_NOT_IN_URLS = frozenset('"<>\\^`{|}')
_DIGEST = re.compile(r"sha256=([0-9a-f]{64})")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})|%00|%5[cC]")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]*|[0-9]+")
_PORTS = {"http": 80, "https": 443}


class WebUrl(msgspec.Struct, frozen=True, kw_only=True):
    """An address, in parts that are as they will be sent."""

    scheme: Literal["http", "https"]
    host: str  # lower case; an IPv6 address without brackets
    port: int
    path: str  # with its escapes, begins with "/"
    query: str = ""  # only where a server pointed to it
    sha256: str | None = None  # of the file, as asked for

    @property
    def authority(self) -> str:
        """Scheme, host and port: what may see the same credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + ("" if self.port == _PORTS[self.scheme] else f":{self.port}")

    @property
    def is_folder(self) -> bool:
        return self.path.endswith("/")

    @property
    def name(self) -> str:
        """The last part of the path, its escapes resolved."""
        return unquote(self.path.rstrip("/").rpartition("/")[2])

    def child(self, name: str) -> "WebUrl":
        """A file of this folder."""
        return msgspec.structs.replace(self, path=self.path.rstrip("/") + "/" + name, sha256=None)

    def __str__(self) -> str:
        """Without its query, which may hold a signature."""
        return self.authority + self.path


def parse_url(text: str) -> WebUrl:
    """Read the address of a model. Raises ``ValueError`` that says what is wrong with it."""
    url = _parse(text, MAX_URL)
    if url.query:
        raise ValueError("a query is not accepted: it may hold credentials, which do not belong here")
    if not url.is_folder and not url.path.endswith(".gguf"):
        raise ValueError(f"neither a folder (ending in /) nor a .gguf file; {ACCEPTS}")
    if url.is_folder and url.sha256 is not None:
        raise ValueError("#sha256= is of one file; a folder may hold a SHA256SUMS file instead")
    return url


def redirected(url: WebUrl, location: str) -> WebUrl:
    """Where a server points to. Raises ``ValueError`` for an address that is not followed."""
    if len(location) > MAX_REDIRECT or not _printable(location):
        raise ValueError("it points to something that is no address")
    asked = str(url) + (f"?{url.query}" if url.query else "")
    target = _parse(urljoin(asked, location.partition("#")[0]), MAX_REDIRECT)
    if url.scheme == "https" and target.scheme == "http":
        raise ValueError(f"it points from https to {target}, which is not encrypted")
    return target


def parse_signed(text: str) -> WebUrl:
    """Read an address that was made here, with a signature in its query. Raises ``ValueError``."""
    return _parse(text, MAX_REDIRECT)


def parse_endpoint(text: str) -> WebUrl:
    """Read the address of a service that has no path. Raises ``ValueError``."""
    try:
        url = _parse(text, MAX_URL)
    except ValueError as error:
        raise ValueError(f"endpoint {text!r}: {error}") from None
    if url.path != "/" or url.query or url.sha256 is not None:
        raise ValueError(f"endpoint {text!r}: accepts http(s)://HOST[:PORT] and nothing behind it")
    return url


def _printable(text: str) -> bool:
    return _CHARACTERS.fullmatch(text) is not None and not _NOT_IN_URLS & set(text)


def _parse(text: str, most: int) -> WebUrl:
    if len(text) > most or not _printable(text) or (found := _URL.fullmatch(text)) is None:
        raise ValueError(f"not an address; {ACCEPTS}")
    scheme, authority, path, query, fragment = found.groups()
    if "@" in authority:
        raise ValueError("a name or password in an address is not accepted: credentials do not belong here")
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        raise ValueError(f"{authority!r} is no host with an optional port")
    port = _PORTS[scheme.lower()] if parts[2] is None else int(parts[2])
    if not 1 <= port <= 65535:
        raise ValueError(f"port {port}, not from 1 to 65535")
    digest = None
    if fragment is not None:
        if (given := _DIGEST.fullmatch(fragment)) is None:
            raise ValueError("after #, sha256= and 64 hex digits are accepted")
        digest = given[1]
    return WebUrl(
        scheme="https" if scheme.lower() == "https" else "http",
        host=_host(parts[1]),
        port=port,
        path=_path(path or "/"),
        query=query or "",
        sha256=digest,
    )


def _host(text: str) -> str:
    """A host name, or an address in its one canonical form: others read differently in different programs."""
    host = text.lower()
    if host.startswith("["):
        try:
            return str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            raise ValueError(f"{text} is no IPv6 address") from None
    if ".." in host:
        raise ValueError(f"{text!r} is no host name")
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise ValueError(f"{text!r}: an IPv4 address is four decimal numbers from 0 to 255") from None
    return host


def _path(text: str) -> str:
    if _BAD_ESCAPE.search(text):
        raise ValueError("the path holds a broken or refused escape")
    if any(unquote(part) in (".", "..") for part in text.split("/")):
        raise ValueError("the path holds . or .. as a part")
    return text


# ---- addresses -----------------------------------------------------------------------------------------------------


class Zone(enum.IntEnum):
    """How far an address reaches. What answers from one zone may not lead to a nearer one."""

    LOOPBACK = 0
    PRIVATE = 1
    PUBLIC = 2


# Services that hand credentials of a machine to whoever asks, at addresses that are not link-local.
METADATA_ADDRESSES = ("100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254")
_METADATA = frozenset(ipaddress.ip_address(text) for text in METADATA_ADDRESSES)
_THIS_NETWORK = ipaddress.IPv4Network((0, 8))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def zone_of(text: str) -> Zone:
    """The zone of an IP address. Raises ``ValueError`` that says why it is never connected to."""
    address = ipaddress.ip_address(text.partition("%")[0])
    zones = [_zone(part) for part in (address, *_embedded(address))]
    return min(zones)


def _embedded(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[ipaddress.IPv4Address, ...]:
    """IPv4 addresses that an IPv6 address stands for."""
    if isinstance(address, ipaddress.IPv4Address):
        return ()
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64 or (int(address) >> 32 == 0 and int(address) > 1):
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return tuple(part for part in found if part is not None)


def _zone(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> Zone:
    if address in _METADATA or address.is_link_local:
        raise ValueError(f"{address} is a link-local or metadata address, which is never asked")
    mapped = isinstance(address, ipaddress.IPv6Address) and bool(_embedded(address))
    if address.is_loopback:
        return Zone.LOOPBACK
    if address.is_unspecified or address.is_multicast or address in _THIS_NETWORK:
        raise ValueError(f"{address} is no address of a server")
    if mapped:
        return Zone.PUBLIC  # as far as the address it stands for
    if address.is_reserved:
        raise ValueError(f"{address} is a reserved address")
    return Zone.PUBLIC if address.is_global else Zone.PRIVATE
