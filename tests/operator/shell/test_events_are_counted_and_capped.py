"""Events: the same thing again is counted, not repeated; nobody floods the namespace."""

import itertools

from kvferry_operator.plan.events import Event
from kvferry_operator.shell.recorder import BURST, KNOWN, REFILL_S, SERIES_S, EventLog, MoreOf, NewEvent


def make_log() -> EventLog:
    numbers = itertools.count(1)
    return EventLog(lambda: str(next(numbers)))


def make_event(reason: str = "NoRoom", message: str = "m") -> Event:
    return Event(type="Warning", reason=reason, message=message)


def test_the_same_event_again_is_counted_on_the_first() -> None:
    """As long as it comes again within ten minutes."""
    log = make_log()
    assert log.next("demo", "u", make_event(), 0.0) == NewEvent("demo.1")
    assert log.next("demo", "u", make_event(), 10.0) == MoreOf("demo.1", 2)
    assert log.next("demo", "u", make_event(), 20.0) == MoreOf("demo.1", 3)
    assert log.next("demo", "u", make_event(), 20.0 + SERIES_S) == NewEvent("demo.2")


def test_other_words_services_and_reasons_are_other_events() -> None:
    """Nothing is hidden behind a count."""
    log = make_log()
    made = [
        log.next("demo", "u", make_event(), 0.0),
        log.next("demo", "u", make_event(message="other"), 0.0),
        log.next("demo", "u", make_event("CrashLoop"), 0.0),
        log.next("demo", "v", make_event(), 0.0),
    ]
    assert made == [NewEvent(f"demo.{number}") for number in range(1, 5)]


def test_a_service_gets_a_few_at_once_and_then_one_each_half_minute() -> None:
    """A flapping service does not fill etcd; others are not concerned."""
    log = make_log()
    made = [log.next("demo", "u", make_event(message=str(number)), 0.0) for number in range(50)]
    assert sum(one is not None for one in made) == BURST
    assert log.next("other", "v", make_event(), 0.0) is not None
    assert log.next("demo", "u", make_event(), REFILL_S - 1) is None
    assert log.next("demo", "u", make_event(), REFILL_S + 1) is not None


def test_a_long_name_still_makes_a_name() -> None:
    """At most 253 characters, whatever the service is called."""
    made = make_log().next("x" * 253, "u", make_event(), 0.0)
    assert isinstance(made, NewEvent)
    assert len(made.name) <= 253


def test_what_is_remembered_has_a_cap() -> None:
    """The oldest series is forgotten first."""
    log = make_log()
    for number in range(KNOWN + 10):
        log.next("demo", f"u{number}", make_event(), 0.0)
    assert len(log._series) == len(log._tokens) == KNOWN
    assert isinstance(log.next("demo", "u0", make_event(), 1.0), NewEvent)
