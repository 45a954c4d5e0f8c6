"""Pods whose compat hashes differ get no KV across: the router says which, and what differs."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry_router.select.pairing import PairingNews, Unpaired, unpaired
from kvferry_wire.pod import PodInfo

from .harness import running
from .scripted_pod import ScriptedPod
from .test_pair_breakers_leave_a_pair_alone import make_info


def told(name: str, role: Any, compat: str = "c", **changes: Any) -> tuple[str, PodInfo]:
    """A pod's name with what it says of itself."""
    return name, msgspec.structs.replace(make_info(name, role), compat_hash=compat, **changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"protocol_version": 99}, "protocol_version: "),
        ({"model_digest": "other"}, "model_digest: m and other"),
        ({"dtype": "float32"}, "dtype: int64 and float32"),
        ({}, "keys: "),
    ],
)
def test_what_differs_is_named(changes: dict[str, Any], why: str) -> None:
    """Of a hash's fields all but the key can be compared: if they are equal it is the key."""
    (prefill, decode) = unpaired([told("p", "prefill")], [told("d", "decode", "other", **changes)])
    assert (prefill.pod, prefill.beside, prefill.pair) == ("p", "d", "p d")
    assert prefill.why.startswith(why)
    assert (decode.pod, decode.pair) == ("d", "p d")


def test_only_pods_without_any_partner_are_told() -> None:
    """A second pod of the same hash is enough; a side without pods is another matter."""
    new = told("d2", "decode", "new")
    found = unpaired([told("p", "prefill")], [told("d1", "decode"), new])
    assert [one.pod for one in found] == ["d2"]
    assert unpaired([told("p", "prefill"), told("p2", "prefill", "new")], [told("d1", "decode"), new]) == []
    assert unpaired([told("p", "prefill")], []) == []


def test_pods_of_both_roles_are_told_once_and_never_beside_themselves() -> None:
    """One alone misses nobody; two that differ are told of each."""
    one, two = told("a", "both"), told("b", "both", "new")
    assert unpaired([one], [one]) == []
    found = unpaired([one, two], [one, two])
    assert found == [
        Unpaired("a", "both", "b", "keys: the two have different hash keys"),
        Unpaired("b", "both", "a", "keys: the two have different hash keys"),
    ]


async def test_metric_and_decisions_tell_it_until_a_pod_pairs(tmp_path: Path) -> None:
    """Requests are answered by decode alone meanwhile."""
    prefill, decode, partner = ScriptedPod("p", "prefill"), ScriptedPod("d", "decode"), ScriptedPod("e", "decode")
    decode.compat = "other"
    async with running(tmp_path, prefill, decode) as router:
        await router.wait_pods(2)
        assert await router.metric("router_pods_unpaired", role="prefill") == 1
        assert await router.metric("router_pods_unpaired", role="decode") == 1
        async with router.complete("hello, who is there today?") as answer:
            assert answer.status == 200
        (decision,) = await router.decisions()
        assert decision["reason"] == "no_prefill"
        assert decision["filtered"]["pairs"] == {"p d": "compat hashes differ: keys: the two have different hash keys"}
        await partner.start()
        try:
            router.write_pods(prefill, decode, partner)
            await router.wait_pods(3)
            assert await router.metric("router_pods_unpaired", role="prefill") == 0
            assert await router.metric("router_pods_unpaired", role="decode") == 1
        finally:
            await partner.stop()


def test_the_log_tells_each_once_and_nothing_of_a_passing_moment() -> None:
    """A pod that is alone at one look only is between two steps of a rollout; another reason is told anew."""
    news = PairingNews()
    alone, otherwise = Unpaired("d", "decode", "p", "dtype"), Unpaired("d", "decode", "p", "model")
    assert [news.look(seen) for seen in ([alone], [], [alone], [])] == [[], [], [], []]
    assert [news.look([alone]) for _ in range(4)] == [[], [alone], [], []]
    assert [news.look([otherwise]) for _ in range(3)] == [[], [otherwise], []]
    assert news.look([]) == []
    assert [news.look([otherwise]) for _ in range(3)] == [[], [otherwise], []]
