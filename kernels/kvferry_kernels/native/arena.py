"""Memory for weights: one mapping, of huge pages where the system gives them, so that few TLB entries miss."""

import contextlib
import mmap

import torch
from torch import Tensor

_ALIGNMENT = 16  # floats: a cache line


class Arena:
    """Hands out float32 tensors of one mapping, which lives as long as any of them. Untouched pages cost nothing."""

    def __init__(self, floats: int) -> None:
        self._floats = floats
        self._used = 0
        self._memory = mmap.mmap(-1, max(1, floats) * 4)
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel without huge pages: small ones do
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    @staticmethod
    def rounded(floats: int) -> int:
        """What a tensor of so many floats takes."""
        return -(-floats // _ALIGNMENT) * _ALIGNMENT

    def take(self, floats: int) -> Tensor:
        """The next ``floats`` elements, aligned to a cache line. Raises ``ValueError`` when there are fewer left."""
        if self._used + floats > self._floats:
            raise ValueError(f"arena: {floats} floats asked for; {self._floats - self._used} are left")
        tensor = torch.frombuffer(self._memory, dtype=torch.float32, count=floats, offset=self._used * 4)
        self._used += self.rounded(floats)
        return tensor

    @property
    def nbytes(self) -> int:
        """Bytes handed out."""
        return self._used * 4
