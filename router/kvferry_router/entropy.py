"""Random bits by the buffer: one system call serves hundreds of requests. For ids and seeds; not for keys."""

import os

_BUFFER = 4096


class Entropy:
    """The operating system's random bytes, each given out once. For one thread."""

    def __init__(self) -> None:
        self._bytes = b""
        self._used = 0

    def take(self, count: int) -> bytes:
        """Fresh random bytes, at most 64."""
        assert 0 < count <= 64
        if self._used + count > len(self._bytes):
            self._bytes, self._used = os.urandom(_BUFFER), 0
        taken = self._bytes[self._used : self._used + count]
        self._used += count
        return taken

    def new_id(self, prefix: str) -> str:
        """``<prefix>-<96 random bits as hex>``."""
        return f"{prefix}-{self.take(12).hex()}"

    def seed(self) -> int:
        """0..2**63-1."""
        return int.from_bytes(self.take(8), "little") >> 1
