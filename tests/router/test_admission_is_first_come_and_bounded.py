"""Admission: caps hold, order holds, and a request that ends twice counts once."""

from kvferry_router.admission import Admission
from kvferry_wire.limits import Limits


def test_requests_run_then_wait_then_are_refused() -> None:
    """In-flight cap, queue cap, refusal; an end lets the first waiting one run."""
    admission = Admission(Limits(inflight=2, queue=2))
    assert [admission.arrive(name) for name in "abcde"] == ["run", "run", "wait", "wait", "full"]
    assert admission.leave("a") == ["c"]
    assert admission.leave("a") == []
    assert (admission.running, admission.waiting) == (2, 1)


def test_waiting_request_that_gives_up_leaves_no_trace() -> None:
    """Its place goes to the next one."""
    admission = Admission(Limits(inflight=1, queue=2))
    for name in "abc":
        admission.arrive(name)
    assert admission.leave("b") == []
    assert admission.leave("a") == ["c"]
    assert admission.leave("c") == []
    assert (admission.running, admission.waiting) == (0, 0)


def test_nobody_overtakes_the_queue() -> None:
    """While one waits, a newcomer waits behind it."""
    admission = Admission(Limits(inflight=1, queue=5))
    admission.arrive("a")
    admission.arrive("b")
    admission.leave("a")
    assert admission.arrive("c") == "wait"
    assert admission.leave("b") == ["c"]
