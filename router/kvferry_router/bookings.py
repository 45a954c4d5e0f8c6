"""What this router has under way at each pod, counted from before a leg is opened until its flow is done with it.

Load reports lag; these counts do not. A booking is released exactly once, by the flow that made it.
"""

from dataclasses import dataclass


class BookingError(RuntimeError):
    """A booking made twice, or released without having been made."""


@dataclass(slots=True)
class PodBookings:
    """Sums over the bookings of one pod."""

    legs: int = 0
    prefill_tokens: int = 0  # uncached prompt tokens not computed yet
    decode_blocks: int = 0  # KV blocks that the sequences may still take


@dataclass(slots=True)
class _Booking:
    pod: str
    prefill_tokens: int
    decode_blocks: int


class Bookings:
    """All bookings of the router, by key (internal id, kind of leg)."""

    def __init__(self) -> None:
        self._pods: dict[str, PodBookings] = {}
        self._held: dict[tuple[str, str], _Booking] = {}

    def __len__(self) -> int:
        return len(self._held)

    def of(self, pod: str) -> PodBookings:
        """The sums of a pod; all zero when it has none."""
        return self._pods.get(pod) or PodBookings()

    def book(self, key: tuple[str, str], pod: str, *, prefill_tokens: int, decode_blocks: int) -> None:
        if key in self._held:
            raise BookingError(f"{key} is booked at {self._held[key].pod} already")
        self._held[key] = _Booking(pod, prefill_tokens, decode_blocks)
        sums = self._pods.setdefault(pod, PodBookings())
        sums.legs += 1
        sums.prefill_tokens += prefill_tokens
        sums.decode_blocks += decode_blocks

    def computed(self, key: tuple[str, str]) -> None:
        """The prompt of this booking is computed; ignored for one that is gone."""
        booking = self._held.get(key)
        if booking is not None:
            self._pods[booking.pod].prefill_tokens -= booking.prefill_tokens
            booking.prefill_tokens = 0

    def release(self, key: tuple[str, str]) -> None:
        booking = self._held.pop(key, None)
        if booking is None:
            raise BookingError(f"{key} is not booked")
        sums = self._pods[booking.pod]
        sums.legs -= 1
        sums.prefill_tokens -= booking.prefill_tokens
        sums.decode_blocks -= booking.decode_blocks
        if sums.legs == 0:
            del self._pods[booking.pod]

    def check_integrity(self) -> None:
        """Sums must be those of the bookings. Raises ``BookingError`` naming the pod."""
        expected: dict[str, PodBookings] = {}
        for booking in self._held.values():
            sums = expected.setdefault(booking.pod, PodBookings())
            sums.legs += 1
            sums.prefill_tokens += booking.prefill_tokens
            sums.decode_blocks += booking.decode_blocks
        if expected != self._pods:
            raise BookingError(f"summed: {self._pods}; by booking: {expected}")
