"""EndpointSlices to pods: whose, where, and what is held against them. Pure."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_router.discovery.slices import NOT_READY, TERMINATING

from .objects import DECODE, NAMESPACE, PREFILL, make_endpoint, make_known, make_pool, make_slice, read_slice, shown


def test_roles_come_from_the_services_and_ports_from_their_names() -> None:
    """The order of ports and further ports mean nothing."""
    ports = {"data": 5601, "state": 15557, "http": 18000}
    pool = make_known(
        make_slice("d-1", make_endpoint("d1", "10.0.0.1"), ports=ports),
        make_slice("p-1", make_endpoint("p1", "10.0.0.2"), service=PREFILL),
    )
    d1, p1 = pool.members()
    assert (d1.name, d1.role, d1.host, d1.http, d1.state, d1.uid) == (
        "d1",
        "decode",
        "10.0.0.1",
        18000,
        15557,
        "uid-of-d1",
    )
    assert (p1.name, p1.role, p1.http, p1.state) == ("p1", "prefill", 8000, 5557)


@pytest.mark.parametrize(
    ("ready", "serving", "terminating", "withheld"),
    [
        (None, None, None, ""),  # the API says: unknown is ready
        (True, True, False, ""),
        (True, None, None, ""),
        (False, False, False, NOT_READY),
        (False, None, None, NOT_READY),
        (False, True, True, TERMINATING),
        (False, False, True, TERMINATING),
        (True, True, True, TERMINATING),  # of a Service that publishes addresses that are not ready
        (None, None, True, TERMINATING),
    ],
)
def test_conditions_are_read_as_the_api_says(
    ready: bool | None, serving: bool | None, terminating: bool | None, withheld: str
) -> None:
    """Only a ready pod that does not leave gets anything new; one that leaves stays known while it is named."""
    endpoint = make_endpoint("d1", "10.0.0.1", ready=ready, serving=serving, terminating=terminating)
    pool = make_known(make_slice("s", endpoint))
    assert shown(pool) == [("d1", "decode", "10.0.0.1", withheld)]
    # Where nobody tells of changes, the pod itself is asked whether it is ready. It never comes back from its end.
    assert shown(pool, current=False)[0][3] == ("" if withheld == NOT_READY else withheld)


def test_absent_conditions_and_lists_are_allowed() -> None:
    """Go writes an empty list as null."""
    bare = make_endpoint("d1", "10.0.0.1")
    del bare["conditions"]
    empty = make_slice("e") | {"endpoints": None, "ports": None}
    pool = make_known(make_slice("s", bare), empty)
    assert shown(pool) == [("d1", "decode", "10.0.0.1", "")]


FOREIGN: list[tuple[str, dict[str, Any]]] = [
    ("foreign", {"targetRef": None}),
    ("foreign", {"targetRef": {"kind": "Node", "namespace": NAMESPACE, "name": "n", "uid": "u"}}),
    ("foreign", {"targetRef": {"kind": "Pod", "namespace": "other", "name": "d1", "uid": "u"}}),
    ("foreign", {"targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": "d1"}}),
    ("address", {"addresses": []}),
    ("address", {"addresses": ["llm.example.com"]}),
    ("address", {"addresses": ["fd00::1"]}),
    ("address", {"addresses": ["127.0.0.1"]}),
    ("address", {"addresses": ["169.254.169.254"]}),
    ("address", {"addresses": ["0.0.0.0"]}),
    ("address", {"addresses": ["224.0.0.1"]}),
]


@pytest.mark.parametrize(("reason", "changes"), FOREIGN, ids=lambda value: str(value)[:50])
def test_what_is_no_pod_of_the_namespace_is_left_out_and_counted(reason: str, changes: dict[str, Any]) -> None:
    """A hand-written slice leads nowhere: neither to the node, nor to metadata services, nor to other namespaces."""
    pool = make_known(make_slice("s", make_endpoint("d1", "10.0.0.1", **changes), make_endpoint("d2", "10.0.0.2")))
    assert [pod.name for pod in pool.members()] == ["d2"]
    assert pool.left_out[reason] == 1


@pytest.mark.parametrize("address", ["::1", "fe80::1%eth0", "::ffff:127.0.0.1", "::", "ff02::1", "10.0.0.1"])
def test_special_addresses_of_the_other_family_are_left_out(address: str) -> None:
    """Neither loopback nor link-local nor an IPv4 address in disguise."""
    pool = make_known(make_slice("s", make_endpoint("d1", address), family="IPv6"))
    assert pool.members() == ()
    assert pool.left_out["address"] == 1


@pytest.mark.parametrize("family", ["FQDN", "", "IPv5"])
def test_names_are_not_resolved(family: str) -> None:
    """Only addresses are dialled."""
    pool = make_known(make_slice("s", make_endpoint("d1", "10.0.0.1"), family=family))
    assert pool.members() == ()


@pytest.mark.parametrize(
    "ports",
    [{}, {"http": 8000}, {"http": 8000, "state": None}, {"http": 0, "state": 5557}, {"http": 70000, "state": 1}],
)
def test_a_slice_without_our_ports_leads_nowhere(ports: dict[str, int | None]) -> None:
    """A port is never guessed."""
    pool = make_known(make_slice("s", make_endpoint("d1", "10.0.0.1"), ports=ports))
    assert pool.members() == ()
    assert pool.left_out["no_port"] == 1


@pytest.mark.parametrize(
    "changes", [{"service": "demo-decode-2"}, {"service": ""}, {"service": "other"}, {"namespace": "other"}]
)
def test_slices_of_other_services_are_no_ones_here(changes: dict[str, Any]) -> None:
    """Whatever the API server sends: the label and the namespace are looked at again."""
    pool = make_known(make_slice("s", make_endpoint("d1", "10.0.0.1"), **changes))
    pool.replace([read_slice(make_slice("s", make_endpoint("d1", "10.0.0.1"), **changes))])
    assert (len(pool), pool.members()) == (0, ())


def test_a_slice_that_is_given_to_another_service_goes() -> None:
    """Its pods are not ours any more."""
    pool = make_known(make_slice("s", make_endpoint("d1", "10.0.0.1")))
    pool.put(read_slice(make_slice("s", make_endpoint("d1", "10.0.0.1"), service="other")))
    assert pool.members() == ()


def test_several_slices_of_a_service_are_one_pool() -> None:
    """As the controller makes them of many pods; one that is deleted takes its pods with it."""
    pool = make_known(
        make_slice("s-1", make_endpoint("d1", "10.0.0.1"), make_endpoint("d2", "10.0.0.2")),
        make_slice("s-2", make_endpoint("d3", "10.0.0.3")),
    )
    assert [pod.name for pod in pool.members()] == ["d1", "d2", "d3"]
    pool.remove("s-1")
    pool.remove("s-1")
    assert [pod.name for pod in pool.members()] == ["d3"]


@pytest.mark.parametrize("first", [True, False])
def test_of_two_slices_the_one_that_changed_last_has_the_last_word(first: bool) -> None:
    """A pod that is moved between slices is in both for a while."""
    before = make_slice("s-1", make_endpoint("d1", "10.0.0.1", ready=first))
    after = make_slice("s-2", make_endpoint("d1", "10.0.0.1", ready=not first))
    assert shown(make_known(before, after)) == [("d1", "decode", "10.0.0.1", NOT_READY if first else "")]


def test_of_two_words_in_one_list_the_more_careful_is_believed() -> None:
    """Which is newer cannot be told."""
    slices = [
        make_slice("s-1", make_endpoint("d1", "10.0.0.1", ready=False, terminating=True)),
        make_slice("s-2", make_endpoint("d1", "10.0.0.1", ready=False)),
        make_slice("s-3", make_endpoint("d1", "10.0.0.1")),
    ]
    for given_ in (slices, slices[::-1]):
        pool = make_pool()
        pool.replace([read_slice(made) for made in given_])
        assert shown(pool) == [("d1", "decode", "10.0.0.1", TERMINATING)]


def test_a_new_list_does_not_make_old_words_new() -> None:
    """After a lost watch everything is listed: a slice that is unchanged has not spoken again."""
    stale = make_slice("s-1", make_endpoint("d1", "10.0.0.1", ready=False), version="5")
    fresh = make_slice("s-2", make_endpoint("d1", "10.0.0.1"), version="6")
    pool = make_known(stale, fresh)
    assert shown(pool)[0][3] == ""
    pool.replace([read_slice(stale), read_slice(fresh)])
    assert shown(pool)[0][3] == ""
    pool.replace([read_slice(stale | {"metadata": stale["metadata"] | {"resourceVersion": "9"}}), read_slice(fresh)])
    assert shown(pool)[0][3] == NOT_READY


@pytest.mark.parametrize(("family", "host"), [(4, "10.0.0.1"), (6, "fd00::1")])
def test_a_pod_of_both_families_is_one_pod_at_the_address_of_ours(family: int, host: str) -> None:
    """It listens on its first address, which is of the family that this process has too."""
    four = make_slice("s-4", make_endpoint("d1", "10.0.0.1"))
    six = make_slice("s-6", make_endpoint("d1", "fd00::1"), family="IPv6")
    for slices in ((four, six), (six, four)):
        assert shown(make_known(*slices, family=family)) == [("d1", "decode", host, "")]
    unready = make_slice("s-6", make_endpoint("d1", "fd00::1", ready=False), family="IPv6")
    assert shown(make_known(four, unready, family=family)) == [("d1", "decode", host, NOT_READY)]


def test_a_pod_of_the_other_family_alone_is_used_too() -> None:
    """There is no other way to it."""
    six = make_slice("s-6", make_endpoint("d1", "fd00:0:0::1"), family="IPv6")
    assert shown(make_known(six, family=4)) == [("d1", "decode", "fd00::1", "")]


def test_an_address_used_again_is_the_ready_pods() -> None:
    """A pod that has gone may be named for a while longer than it has its address."""
    old = make_endpoint("d-old", "10.0.0.1", ready=False)
    new = make_endpoint("d-new", "10.0.0.1")
    for endpoints in ((old, new), (new, old)):
        pool = make_known(make_slice("s", *endpoints))
        assert shown(pool) == [("d-new", "decode", "10.0.0.1", "")]
        assert pool.left_out["shadowed"] == 1
    moved = make_known(make_slice("s-1", make_endpoint("d1", "10.0.0.1")), make_slice("s-2", new, service=PREFILL))
    assert shown(moved) == [("d-new", "prefill", "10.0.0.1", "")]


def test_a_pod_made_anew_under_its_name_is_another_pod() -> None:
    """Told by the uid, also at the same address."""
    before = make_slice("s-1", make_endpoint("d1", "10.0.0.1", uid="u1"))
    after = make_slice("s-2", make_endpoint("d1", "10.0.0.1", uid="u2"))
    (old,), (new,) = make_known(before).members(), make_known(before, after).members()
    assert (old.uid, new.uid) == ("u1", "u2")
    assert not old.same_pod(new)


def test_what_is_held_against_a_pod_makes_no_other_pod_of_it() -> None:
    """Its record, its streams and its index stay."""
    (ready,) = make_known(make_slice("s", make_endpoint("d1", "10.0.0.1"))).members()
    (unready,) = make_known(make_slice("s", make_endpoint("d1", "10.0.0.1", ready=False))).members()
    assert ready.same_pod(unready)


def test_pods_and_slices_have_a_cap_and_ready_pods_come_first() -> None:
    """What is left out for it is counted."""
    many = [make_endpoint(f"d{number}", f"10.0.0.{number}", ready=number > 1) for number in range(1, 6)]
    pool = make_known(make_slice("s", *many), max_pods=3)
    assert [pod.name for pod in pool.members()] == ["d2", "d3", "d4"]
    assert pool.left_out["too_many"] == 2
    crowded = make_known(*(make_slice(f"s-{number}") for number in range(5)), max_pods=3)
    crowded.members()
    assert (len(crowded), crowded.left_out["too_many"]) == (3, 1)


# ---- any history -------------------------------------------------------------------------------------------------

PODS = st.sampled_from(["a", "b", "c", "d"])
ENDPOINTS = st.builds(
    lambda pod, host, uid, ready, leaving: make_endpoint(
        pod, f"10.0.0.{host}", uid=f"{pod}-{uid}", ready=ready, terminating=leaving
    ),
    PODS,
    st.integers(1, 5),
    st.integers(1, 2),
    st.sampled_from([True, False, None]),
    st.sampled_from([True, False, None]),
)
SLICES = st.builds(
    lambda name, endpoints, service: make_slice(name, *endpoints, service=service),
    st.sampled_from(["s-1", "s-2", "s-3"]),
    st.lists(ENDPOINTS, max_size=4, unique_by=lambda endpoint: endpoint["targetRef"]["name"]),
    st.sampled_from([DECODE, PREFILL, "other"]),
)
CHANGES = st.lists(st.one_of(SLICES, st.sampled_from(["s-1", "s-2", "s-3"])), max_size=12)


def apply(changes: Sequence[dict[str, Any] | str]) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The pool after a history, and the slices that there are at its end."""
    pool, there = make_pool(), {}
    for change in changes:
        if isinstance(change, str):
            pool.remove(change)
            there.pop(change, None)
        else:
            pool.put(read_slice(change))
            there[change["metadata"]["name"]] = change
    return pool, there


def own(there: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, bool]]:
    """What the slices of the pools say at the end: pod, uid, address, whether nothing is held against it."""
    return [
        (
            endpoint["targetRef"]["name"],
            endpoint["targetRef"]["uid"],
            endpoint["addresses"][0],
            endpoint["conditions"].get("ready", True) and not endpoint["conditions"].get("terminating", False),
        )
        for made in there.values()
        if made["metadata"]["labels"]["kubernetes.io/service-name"] != "other"
        for endpoint in made["endpoints"]
    ]


@given(CHANGES)
def test_members_are_pods_that_some_slice_names_each_once(changes: Sequence[dict[str, Any] | str]) -> None:
    """No name, no address twice; nothing that is not there any more; nothing better than it was said to be."""
    pool, there = apply(changes)
    members, said = pool.members(), own(there)
    assert len({pod.name for pod in members}) == len(members)
    assert len({pod.host for pod in members}) == len(members)
    for pod in members:
        assert (pod.name, pod.uid, pod.host) in {word[:3] for word in said}
        if not pod.withheld:
            assert (pod.name, pod.uid, True) in {(word[0], word[1], word[3]) for word in said}


@given(CHANGES, SLICES)
def test_a_pod_that_the_newest_word_holds_back_gets_nothing(
    changes: Sequence[dict[str, Any] | str], newest: dict[str, Any]
) -> None:
    """Whatever other slices still say."""
    pool, _ = apply([*changes, newest])
    held = {name for name, _, _, free in own({"newest": newest}) if not free}
    assert not [pod for pod in pool.members() if pod.name in held and not pod.withheld]


@given(CHANGES)
def test_listing_anew_what_is_there_gives_the_same_pods(changes: Sequence[dict[str, Any] | str]) -> None:
    """Without words that contradict each other, history leaves no trace."""
    pool, there = apply(changes)
    said = own(there)
    if len({word[0] for word in said}) == len(said) == len({word[2] for word in said}):
        fresh = make_pool()
        fresh.replace([read_slice(made) for made in there.values()])
        assert fresh.members() == pool.members()
