"""The cache and the log of watches: newest version wins, services are found, what vanished is noticed."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvferry_operator.plan.manifests.meta import INSTANCE, Object
from kvferry_operator.shell.cache import ObjectCache, trimmed
from kvferry_operator.shell.streams import Streams
from tests.operator.cluster import make_found

POD = ("Pod", "ns", "p")
STREAM = ("Pod", None)


def make_object(
    name: str = "p", version: int = 1, *, uid: str = "u", service: str = "demo", kind: str = "Pod", **more: Any
) -> Object:
    metadata = {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(version)}
    return {"apiVersion": "v1", "kind": kind, "metadata": {**metadata, "labels": {INSTANCE: service}, **more}}


def test_an_object_is_found_by_the_service_of_its_label_and_of_its_owner() -> None:
    """Both are told when it changes: it may be in the way of one and belong to another."""
    cache = ObjectCache()
    owner = {"apiVersion": "serving.kvferry.dev/v1alpha1", "kind": "InferenceService", "name": "other", "uid": "x"}
    stranger = {"apiVersion": "v1", "kind": "ConfigMap", "name": "no", "uid": "y"}
    assert cache.put(make_object(ownerReferences=[stranger, owner])) == (("ns", "demo"), ("ns", "other"))
    assert len(cache.related(("ns", "demo"))) == len(cache.related(("ns", "other"))) == 1
    assert cache.related(("elsewhere", "demo")) == ()


def test_an_older_version_changes_nothing() -> None:
    """A watch that is late does not undo what the answer to our own write has told."""
    cache = ObjectCache()
    cache.put(make_object(version=5, service="new"))
    assert cache.put(make_object(version=4, service="old")) == ()
    assert cache.put(make_object(version=5, service="old")) == ()
    assert [found["metadata"]["labels"][INSTANCE] for found in cache.related(("ns", "new"))] == ["new"]


def test_a_label_that_moves_tells_both_services() -> None:
    """The one that lost the object looks again too."""
    cache = ObjectCache()
    cache.put(make_object(version=1, service="a"))
    assert cache.put(make_object(version=2, service="b")) == (("ns", "b"), ("ns", "a"))
    assert cache.related(("ns", "a")) == ()


def test_a_late_deletion_does_not_take_the_object_that_followed() -> None:
    """Deleted and made anew under one name."""
    cache = ObjectCache()
    cache.put(make_object(version=7, uid="second"))
    cache.remove(make_object(version=6, uid="first"))
    assert cache.uid(POD) == "second"
    assert cache.remove(make_object(version=8, uid="second")) == (("ns", "demo"),)
    assert len(cache) == 0
    assert cache.related(("ns", "demo")) == ()


def test_what_no_decision_reads_is_not_kept() -> None:
    """Managed fields and kubectl's annotation are half of an object."""
    cache = ObjectCache()
    found = make_found()
    cache.put(found)
    kept = cache.service(("ns", "demo"))
    assert kept is not None
    assert "managedFields" not in kept["metadata"]
    assert kept["metadata"]["annotations"] == {}
    assert kept["spec"] == found["spec"]
    assert "managedFields" in found["metadata"]
    assert trimmed(kept) == kept


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.sampled_from("pq"), st.integers(1, 30), st.sampled_from("uv"), st.sampled_from("ab")
        ),
        max_size=60,
    )
)
def test_the_index_and_the_objects_agree_after_any_history(history: list[tuple[bool, str, int, str, str]]) -> None:
    """Every object is listed under exactly the services that it names now."""
    cache = ObjectCache()
    for put, name, version, uid, service in history:
        found = make_object(name, version, uid=uid, service=service)
        cache.put(found) if put else cache.remove(found)
        objects = {ref: cache.get(ref) for ref in cache.refs("Pod", "ns")}
        for key in "ab":
            mine = [found for found in objects.values() if found and found["metadata"]["labels"][INSTANCE] == key]
            assert sorted(map(str, cache.related(("ns", key)))) == sorted(map(str, mine))


def list_again(streams: Streams, *names: str, now: float) -> None:
    streams.requested(STREAM, watch=False, more=False, now=now)
    for name in names:
        streams.heard(STREAM, ("ns", name), listing=True, now=now)
    streams.requested(STREAM, watch=True, more=False, now=now)


def test_streams_are_unlisted_until_their_first_watch_begins() -> None:
    """A list in parts is over with its last part only."""
    streams = Streams((STREAM, ("Service", "ns")), 0.0)
    assert streams.unlisted() == [STREAM, ("Service", "ns")]
    streams.requested(STREAM, watch=False, more=False, now=1.0)
    streams.requested(STREAM, watch=False, more=True, now=1.0)
    assert STREAM in streams.unlisted()
    streams.requested(STREAM, watch=True, more=False, now=1.0)
    assert streams.unlisted() == [("Service", "ns")]


def test_everything_was_seen_when_all_lists_are_over_and_it_is_quiet() -> None:
    """Work begins only then; a kind whose CRD is not installed is not waited for."""
    other = ("HTTPRoute", None)
    streams = Streams((STREAM, other), 0.0)
    assert not streams.settled(50.0, 1.0, frozenset({"HTTPRoute"}))
    list_again(streams, "a", now=60.0)
    assert not streams.settled(60.5, 1.0, frozenset({"HTTPRoute"}))
    streams.heard(STREAM, ("ns", "b"), listing=True, now=60.9)
    assert not streams.settled(61.5, 1.0, frozenset({"HTTPRoute"}))
    streams.heard(STREAM, ("ns", "c"), listing=False, now=61.8)
    assert streams.settled(61.9, 1.0, frozenset({"HTTPRoute"}))
    assert not streams.settled(61.9, 1.0, frozenset())


def test_what_a_new_list_does_not_show_is_doubtful_once() -> None:
    """kopf tells of no deletion that fell into a gap between two watches."""
    streams = Streams((STREAM,), 0.0)
    list_again(streams, "a", "b", now=1.0)
    assert streams.relisted(100.0, 2.0) == []
    list_again(streams, "b", now=101.0)
    assert streams.relisted(102.0, 2.0) == []
    streams.heard(STREAM, ("ns", "c"), listing=False, now=102.5)
    assert streams.relisted(103.0, 2.0) == [STREAM]
    known = {("ns", "a"), ("ns", "b"), ("ns", "c")}
    assert streams.doubtful(STREAM, known) == {("ns", "a")}
    assert streams.relisted(200.0, 2.0) == []


def test_a_new_list_that_shows_nothing_makes_everything_doubtful() -> None:
    """Also when all objects went."""
    streams = Streams((STREAM,), 0.0)
    list_again(streams, "a", now=1.0)
    list_again(streams, now=2.0)
    assert streams.relisted(4.0, 2.0) == [STREAM]
    assert streams.doubtful(STREAM, {("ns", "a")}) == {("ns", "a")}


def test_a_list_whose_objects_still_come_by_is_waited_for() -> None:
    """The watch layer hands ten thousand objects on one by one."""
    streams = Streams((STREAM,), 0.0)
    list_again(streams, now=1.0)
    list_again(streams, now=2.0)
    streams.heard(STREAM, ("ns", "a"), listing=True, now=3.5)
    assert streams.relisted(5.0, 2.0) == []
    assert streams.relisted(5.5, 2.0) == [STREAM]


def test_a_stream_without_a_word_is_silent() -> None:
    """A watch that lives asks again within its time-out; one whose CRD is not installed never begins."""
    streams = Streams((STREAM, ("HTTPRoute", None)), 0.0)
    list_again(streams, now=10.0)
    assert streams.silent(360.0, 350.0) == []
    assert streams.silent(360.1, 350.0) == [STREAM]
    streams.heard(STREAM, ("ns", "a"), listing=False, now=360.0)
    assert streams.silent(360.1, 350.0) == []


def test_requests_of_unknown_streams_are_ignored() -> None:
    """Discovery and other namespaces are not ours."""
    streams = Streams((STREAM,), 0.0)
    streams.requested(("Node", None), watch=True, more=False, now=1.0)
    streams.heard(("Node", None), ("", "n"), listing=False, now=1.0)
    assert streams.unlisted() == [STREAM]
