"""What one request holds at pods: a booking per kind of leg, and the lease on its prompt's KV. Pure."""

from kvferry_router.flow_messages import AbortLeg, Book, Effect, Kind, Release
from kvferry_wire.handle import KVHandle


class Holdings:
    """Each booking is released exactly once. A lease ends with the decode leg that reads it, or is withdrawn."""

    def __init__(self) -> None:
        self._booked: dict[Kind, str] = {}
        self._lease: tuple[int, str] | None = None  # the leg that it was granted to: attempt, pod
        self.handle: KVHandle | None = None
        self._moved = False

    def booked(self) -> dict[Kind, str]:
        """Bookings that were not released yet."""
        return dict(self._booked)

    def book(self, kind: Kind, pod: str, out: list[Effect], *, computes: bool = True) -> None:
        assert kind not in self._booked
        self._booked[kind] = pod
        out.append(Book(kind, pod, computes))

    def release(self, kind: Kind, out: list[Effect]) -> None:
        pod = self._booked.pop(kind, None)
        if pod is not None:
            out.append(Release(kind, pod))

    @property
    def lease_pod(self) -> str | None:
        """The pod that keeps the prompt's KV."""
        return None if self._lease is None else self._lease[1]

    @property
    def must_ferry(self) -> bool:
        """Whether there is KV that a service may insist on: prefill's, and not what a leg took along as it moved."""
        return self.handle is not None and not self._moved

    def leased(self, attempt: int, pod: str, handle: KVHandle | None, *, moved: bool = False) -> None:
        """A prefill leg has ended in this handle, or a decode leg that ``moved``."""
        self.handle = handle
        self._moved = moved
        self._lease = None if handle is None else (attempt, pod)

    def withdraw(self, out: list[Effect]) -> None:
        """Nobody will read the KV, or nobody says whether it was read: the prefill leg is aborted after its end."""
        if self._lease is not None:
            out.append(AbortLeg(*self._lease))
        self.read()

    def read(self) -> None:
        """Decode has read the KV: the lease is over."""
        self._lease = None
        self.handle = None

    def give_back(self, out: list[Effect]) -> None:
        """Leave nothing behind."""
        self.withdraw(out)
        for kind in tuple(self._booked):
            self.release(kind, out)
