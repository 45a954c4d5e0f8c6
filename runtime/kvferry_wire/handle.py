"""The KV handle: what a prefill engine tells a decode engine about blocks that it keeps under a lease."""

import msgspec

from kvferry_wire.hashing import CompatFields
from kvferry_wire.keys import mac, mac_equal
from kvferry_wire.layout import LayoutDescriptor


class KVHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Names leased KV; trusted only after ``verified`` and after its digest was recomputed by the reader.

    The reader checks the MAC and recomputes the prompt digest before it connects anywhere.
    """

    lease_id: int  # a counter, never reused in an incarnation
    incarnation: bytes  # 16 random bytes, drawn at each EngineCore start
    epoch: int
    host: str
    control_port: int
    backends: dict[str, bytes]  # transfer back end -> its own descriptor, opaque to all others
    blocks: tuple[tuple[int, ...], ...] = ()  # ids per KV group; for one-sided back ends only, else empty
    block_count: int  # of each group, in the lease's own order
    token_count: int  # positions whose K and V are in the blocks; the first sampled token has none yet
    compat_hash: str
    compat: CompatFields | None = None  # what the hash is of: so that a refusal can name the field
    layout: LayoutDescriptor
    lease_ms: int  # a duration; no wall-clock time crosses hosts
    checksum: str = ""  # the method of `checksums`; empty: none are given
    checksums: tuple[bytes, ...] = ()  # per KV group: of its blocks, one after the other, in the lease's own order
    prompt_digest: bytes
    mac: bytes = b""

    def signed(self, kv_key: bytes) -> "KVHandle":
        """This handle with its MAC under the service's ``kv`` key."""
        return msgspec.structs.replace(self, mac=self._expected_mac(kv_key))

    def verified(self, kv_key: bytes) -> bool:
        """Whether the MAC is that of this very handle."""
        return mac_equal(self.mac, self._expected_mac(kv_key))

    def _expected_mac(self, kv_key: bytes) -> bytes:
        unsigned = msgspec.structs.replace(self, mac=b"")
        # Deterministic order: the only mapping in the handle is encoded with sorted keys.
        return mac(kv_key, "handle", msgspec.msgpack.encode(unsigned, order="deterministic"))
