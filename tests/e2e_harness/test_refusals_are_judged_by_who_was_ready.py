"""The judge of refusals under faults on a cluster: it finds those that a ready pod had to answer, and no other."""

from typing import Any

from e2e.harness.asking import Answer
from e2e.harness.readiness import SETTLED_S, Readiness


def slice_of(*ready: str, unready: tuple[str, ...] = (), name: str = "s1", role: str = "decode") -> dict[str, Any]:
    named = [(pod, True) for pod in ready] + [(pod, False) for pod in unready]
    return {
        "metadata": {"uid": name, "labels": {"app.kubernetes.io/component": role}},
        "endpoints": [{"targetRef": {"name": pod}, "conditions": {"ready": state}} for pod, state in named],
    }


class Cluster:
    """What the watch of EndpointSlices told, and when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seen = Readiness("decode", clock=lambda: self.now)

    def tell(self, at: float, found: dict[str, Any], kind: str = "MODIFIED") -> None:
        self.now = at
        self.seen.take_slice(kind, found)


def refusal(at: float) -> Answer:
    return Answer(status=503, error="no decode pod is ready", ended_at=at)


def test_a_refusal_beside_a_ready_pod_is_found() -> None:
    """And the pod that should have answered is named."""
    cluster = Cluster()
    cluster.tell(100.0, slice_of("a", "b"))
    cluster.tell(125.0, slice_of("b", unready=("a",)))
    (told,) = cluster.seen.refused([refusal(120.0)])
    assert "no decode pod is ready" in told
    assert told.endswith("though b had to take it")


def test_one_without_a_settled_pod_is_none() -> None:
    """Too soon after a pod came, and too shortly before it went, to know of it."""
    cluster = Cluster()
    cluster.tell(100.0, slice_of("a"))
    cluster.tell(140.0, slice_of(unready=("a",)))
    cluster.tell(200.0, slice_of("b"))
    judged = {
        at: bool(cluster.seen.refused([refusal(at)])) for at in (99.0, 105.0, 110.0, 130.0, 135.0, 170.0, 205.0, 210.0)
    }
    assert [at for at, found in judged.items() if found] == [110.0, 130.0, 210.0]
    assert SETTLED_S == 10.0


def test_pods_that_take_turns_are_none_that_stayed() -> None:
    """That some pod was ready all the time is not enough: each of them came or went too lately."""
    cluster = Cluster()
    for number in range(10):
        cluster.tell(100.0 + 15 * number, slice_of(f"pod-{number}"))
    assert cluster.seen.refused([refusal(at) for at in range(100, 230)]) == []


def test_a_whole_answer_is_no_refusal() -> None:
    """However many pods are ready."""
    cluster = Cluster()
    cluster.tell(0.0, slice_of("a"))
    whole = Answer(status=200, done=True, finish="stop", ended_at=50.0)
    cut = Answer(status=200, cut="reset", ended_at=50.0)
    assert whole.whole
    assert len(cluster.seen.refused([whole, cut])) == 1


def test_slices_add_up_and_go() -> None:
    """A pod in a second slice is ready too, until that slice is deleted; another role's pods never are."""
    cluster = Cluster()
    cluster.tell(0.0, slice_of("a", name="s1"))
    cluster.tell(1.0, slice_of("b", name="s2"))
    cluster.tell(2.0, slice_of("p", name="s3", role="prefill"))
    assert cluster.seen.ready() == {"a", "b"}
    cluster.tell(40.0, slice_of("b", name="s2"), kind="DELETED")
    assert cluster.seen.ready() == {"a"}
    assert cluster.seen.settled(25.0) == {"a", "b"}
    assert cluster.seen.settled(35.0) == {"a"}
