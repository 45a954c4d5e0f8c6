"""Selection: cost decides, reasons are kept, and thresholds keep short and cached prompts on one pod."""

import random
from dataclasses import replace
from typing import Any

import pytest

from kvferry_router.bookings import PodBookings
from kvferry_router.select.candidates import Ask, Candidate
from kvferry_router.select.policy import Decision, Policy, choose, choose_again
from kvferry_wire.state import Load

RNG = random.Random(1)
POLICY = Policy(disaggregate_min_tokens=64, disaggregate_max_cached_share=0.8)


def make_load(**changes: Any) -> Load:
    values = {
        "running": 0,
        "waiting": 0,
        "queued_tokens": 0,
        "free_blocks": 1000,
        "total_blocks": 1000,
        "leases": 0,
        "draining": False,
    }
    return Load(**(values | changes))


def make_pod(name: str, role: str = "both", **changes: Any) -> Candidate:
    values: dict[str, Any] = {
        "name": name,
        "role": role,
        "compat_hash": "c",
        "text_digest": "t",
        "block_size": 16,
        "total_blocks": 1000,
        "max_running": 32,
        "max_model_len": 8192,
        "kv_bytes_per_token": 46_080,
        "ready": True,
        "draining": False,
        "cached_blocks": 0,
        "load": make_load(),
        "bookings": PodBookings(),
    }
    return Candidate(**(values | changes))


def make_ask(tokens: int = 500, excluded: frozenset[str] = frozenset()) -> Ask:
    return Ask(
        internal_id="r", prompt_tokens=tokens, answer_tokens=100, growth_tokens=100, text_digest="t", excluded=excluded
    )


def decide(*pods: Candidate, ask: Ask | None = None) -> Decision:
    return choose(ask or make_ask(), pods, POLICY, RNG)


def test_long_prompt_is_split_over_both_pools() -> None:
    """The ordinary case: prefill in one pool, decode in the other."""
    decision = decide(make_pod("p", "prefill"), make_pod("d", "decode"))
    assert (decision.reason, decision.prefill, decision.decode) == ("split", "p", "d")


@pytest.mark.parametrize(("tokens", "reason"), [(63, "short"), (64, "split")])
def test_short_prompt_is_decodes_alone(tokens: int, reason: str) -> None:
    """Below the threshold of uncached tokens a transfer is not worth it."""
    assert decide(make_pod("p", "prefill"), make_pod("d", "decode"), ask=make_ask(tokens)).reason == reason


def test_prompt_cached_at_decode_is_decodes_alone() -> None:
    """Above the threshold of the cached share decode computes the rest itself."""
    decision = decide(make_pod("p", "prefill"), make_pod("d", "decode", cached_blocks=400), ask=make_ask(7000))
    assert (decision.reason, decision.prefill, decision.decode) == ("cached", None, "d")
    assert decide(make_pod("p", "prefill"), make_pod("d", "decode", cached_blocks=200), ask=make_ask(7000)).prefill


def test_no_prefill_pod_leaves_decode_alone_and_no_decode_pod_nothing() -> None:
    """Zero prefill: decode does the whole job. Zero decode: nothing can answer."""
    assert decide(make_pod("d", "decode")).reason == "no_prefill"
    assert decide(make_pod("p", "prefill"), make_pod("d", "decode", ready=False)).reason == "no_decode"
    assert decide().reason == "no_decode"


def test_incompatible_pods_are_never_paired() -> None:
    """Equal compat hashes or no transfer; the pair of least sum is taken within one hash."""
    old = (make_pod("p1", "prefill", compat_hash="old"), make_pod("d1", "decode", compat_hash="old"))
    busy = make_load(running=32)
    new = (make_pod("p2", "prefill", compat_hash="new"), make_pod("d2", "decode", compat_hash="new", load=busy))
    assert decide(*old, *new).decode == "d1"
    assert decide(*old, *new).prefill == "p1"
    assert decide(old[0], new[1]).reason == "no_prefill"


def test_two_pods_of_both_roles_split_the_work_and_one_does_it_alone() -> None:
    """A pod is never its own prefill pod."""
    decision = decide(make_pod("x"), make_pod("y"))
    assert {decision.prefill, decision.decode} == {"x", "y"}
    assert decide(make_pod("x")).reason == "no_prefill"


def test_miss_goes_to_the_idle_pod_and_not_to_the_one_with_the_smaller_cache() -> None:
    """Twenty new prefixes: all go to the idle pod, as each is booked there at most as deep as the other's queue."""
    crowded = make_pod("a", "prefill", bookings=PodBookings(legs=50, prefill_tokens=25_000))
    idle = PodBookings()
    chosen = []
    for _ in range(20):
        decision = decide(crowded, make_pod("b", "prefill", bookings=idle), make_pod("d", "decode"))
        chosen.append(decision.prefill)
        idle.prefill_tokens += 500
    assert chosen == ["b"] * 20


def test_hot_prefix_moves_off_a_pod_whose_queue_outweighs_the_hit() -> None:
    """A hit saves 480 tokens of prefill: it is followed past a shorter queue and left behind a longer one."""
    for queued, expected in ((300, "hot"), (600, "cold")):
        hot = make_pod("hot", "prefill", cached_blocks=30, bookings=PodBookings(legs=1, prefill_tokens=queued))
        assert decide(hot, make_pod("cold", "prefill"), make_pod("d", "decode")).prefill == expected


def test_decode_goes_where_there_is_room_for_the_growth() -> None:
    """Of two equally busy decode pods the one with the blocks is taken."""
    full = make_pod("full", "decode", load=make_load(free_blocks=10))
    assert decide(make_pod("p", "prefill"), full, make_pod("roomy", "decode")).decode == "roomy"


def test_unknown_load_is_neutral_and_not_out() -> None:
    """A pod whose state stream is silent is still used; our own bookings stand in for its load."""
    silent = make_pod("d", "decode", load=None)
    assert decide(make_pod("p", "prefill", load=None), silent).reason == "split"
    booked = make_pod("d2", "decode", load=None, bookings=PodBookings(legs=20))
    assert decide(make_pod("p", "prefill"), silent, booked).decode == "d"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ready": False}, "not ready"),
        ({"draining": True}, "draining"),
        ({"load": make_load(draining=True)}, "draining"),
        ({"text_digest": "other"}, "another tokenizer"),
        ({"max_model_len": 500}, "context is 500"),
        ({"max_model_len": 599}, "context is 599"),
        ({"total_blocks": 31}, "holds 496"),
        ({"role": "prefill"}, "role is prefill"),
    ],
)
def test_each_pod_left_out_has_its_reason(changes: dict[str, Any], reason: str) -> None:
    """Filters say why, for the explain API."""
    decision = decide(make_pod("d", **({"role": "decode"} | changes)))
    assert reason in decision.filtered["decode"]["d"]


def test_equal_costs_are_spread_by_chance() -> None:
    """Ties are random under the injected generator, and the same seed chooses the same."""
    pods = [make_pod(f"d{i}", "decode") for i in range(4)]
    first = [choose(make_ask(10), pods, POLICY, random.Random(seed)).decode for seed in range(40)]
    assert set(first) == {"d0", "d1", "d2", "d3"}
    assert first == [choose(make_ask(10), pods, POLICY, random.Random(seed)).decode for seed in range(40)]


def test_retry_leaves_the_failed_pod_out_and_keeps_the_pair_compatible() -> None:
    """The second choice excludes what failed and what could not read the first's KV."""
    pods = [make_pod("p1", "prefill"), make_pod("p2", "prefill", compat_hash="x"), make_pod("p3", "prefill")]
    ask = replace(make_ask(excluded=frozenset({"p1"})), compat_hash="c")
    decision = choose_again(ask, pods, POLICY, RNG, kind="prefill", ferried=False)
    assert decision.prefill == "p3"
    assert set(decision.filtered["prefill"]) == {"p1", "p2"}
    assert choose_again(ask, pods[:2], POLICY, RNG, kind="prefill", ferried=False).prefill is None
