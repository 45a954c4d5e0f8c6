"""Admission: caps hold, order holds, and a request that ends twice counts once."""

from kvferry_router.admission import Admission, BodyBudget
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


def test_bodies_of_all_requests_are_bounded() -> None:
    """A body of unknown length counts as the largest until it is here; what a request held is free again after it."""
    budget = BodyBudget(Limits(body_bytes=40, bodies_bytes=100))
    assert budget.take("a", None)
    assert budget.take("b", 50)  # too large by itself: it counts as what will be read of it at most
    assert not budget.take("c", 21)
    budget.read("a", 10)
    assert budget.held_bytes == 50
    assert budget.take("c", 21)
    for request in ("a", "b", "c", "c", "d"):
        budget.give_back(request)
    assert budget.held_bytes == 0
