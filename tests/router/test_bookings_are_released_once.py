"""Bookings: sums follow them exactly, and a double release is an error and not a negative count."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_router.bookings import BookingError, Bookings, PodBookings


def test_release_takes_back_what_was_booked() -> None:
    """Sums return to zero, also after the prompt was computed in between."""
    bookings = Bookings()
    bookings.book(("r", "prefill"), "p", prefill_tokens=100, decode_blocks=3)
    bookings.book(("s", "prefill"), "p", prefill_tokens=50, decode_blocks=0)
    bookings.computed(("r", "prefill"))
    assert bookings.of("p") == PodBookings(legs=2, prefill_tokens=50, decode_blocks=3)
    bookings.release(("r", "prefill"))
    bookings.release(("s", "prefill"))
    assert bookings.of("p") == PodBookings()
    assert len(bookings) == 0


def test_second_release_and_second_booking_are_errors() -> None:
    """Both are bugs of the caller; nothing is counted twice."""
    bookings = Bookings()
    bookings.book(("r", "decode"), "d", prefill_tokens=1, decode_blocks=1)
    with pytest.raises(BookingError):
        bookings.book(("r", "decode"), "e", prefill_tokens=1, decode_blocks=1)
    bookings.release(("r", "decode"))
    with pytest.raises(BookingError):
        bookings.release(("r", "decode"))
    bookings.check_integrity()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("bcr"), st.integers(0, 5), st.integers(0, 9)), max_size=40))
def test_sums_equal_the_bookings_after_any_order(steps: list[tuple[str, int, int]]) -> None:
    """Whatever the order of booking, computing and releasing, the sums are those of what is held."""
    bookings = Bookings()
    held: set[int] = set()
    for action, number, size in steps:
        key = (str(number), "decode")
        if action == "b" and number not in held:
            bookings.book(key, f"pod-{number % 2}", prefill_tokens=size, decode_blocks=size)
            held.add(number)
        elif action == "c":
            bookings.computed(key)
        elif action == "r" and number in held:
            bookings.release(key)
            held.discard(number)
        bookings.check_integrity()
    assert len(bookings) == len(held)
