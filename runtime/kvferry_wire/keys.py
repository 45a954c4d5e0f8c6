"""The four keys of a service and what is derived from them. Reading key files is the callers' work."""

import hashlib
import hmac
import struct

import msgspec

KEY_BYTES = 32
KEY_NAMES = ("http", "kv", "state", "hash")

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def derive(key: bytes, purpose: str) -> bytes:
    """Derive 32 bytes from a service key for one purpose; different purposes give unrelated bytes."""
    return hashlib.blake2b(purpose.encode(), digest_size=KEY_BYTES, key=key, person=b"kvferry-derive").digest()


def z85(data: bytes) -> bytes:
    """Encode bytes (a multiple of 4) in Z85, ZeroMQ RFC 32."""
    out = []
    for (value,) in struct.iter_unpack(">I", data):
        out.append("".join(_Z85[value // 85**power % 85] for power in (4, 3, 2, 1, 0)))
    return "".join(out).encode()


def curve_secret(key: bytes, side: str) -> bytes:
    """The Z85 CURVE secret key of one side (``server`` or ``client``) of the sockets that `key` guards.

    Any 32 bytes are a Curve25519 secret key (the scalar is clamped by its user, RFC 7748); ``zmq.curve_public``
    gives the public key.
    """
    return z85(derive(key, f"curve-{side}"))


def mac(key: bytes, purpose: str, message: bytes) -> bytes:
    """Keyed BLAKE2b (32 bytes) of a message, bound to a purpose."""
    return hashlib.blake2b(message, digest_size=32, key=derive(key, f"mac-{purpose}")).digest()


def mac_equal(left: bytes, right: bytes) -> bool:
    """Compare two MACs in constant time."""
    return hmac.compare_digest(left, right)


class ServiceKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that a process holds; the router holds none for ``kv``. Its ``repr`` shows no key."""

    http: bytes
    state: bytes
    hash: bytes
    kv: bytes | None = None

    def __repr__(self) -> str:
        held = [name for name in KEY_NAMES if getattr(self, name) is not None]
        return f"ServiceKeys(held={held})"

    def hash_key_id(self) -> str:
        """A short public name of the ``hash`` key: equal exactly where the key is equal."""
        return derive(self.hash, "hash-key-id")[:8].hex()

    def bearer(self) -> str:
        """The bearer token that the router shows to a pod."""
        return derive(self.http, "bearer").hex()
