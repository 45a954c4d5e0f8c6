"""A pair of pods between which transfers fail is left alone, tried again by one request, and used when it works."""

import random

import pytest

from kvferry_router.bookings import PodBookings
from kvferry_router.breakers import BETWEEN_PODS, Breaker, Pair, PairBreakers
from kvferry_router.discovery.endpoints import Endpoint
from kvferry_router.discovery.pod_table import Probe
from kvferry_router.flow_messages import NeedPod
from kvferry_router.pool import PodPool
from kvferry_router.select.candidates import Ask, Candidate
from kvferry_router.select.policy import Policy, choose
from kvferry_runtime.transfer.reasons import RecomputeReason
from kvferry_wire import PROTOCOL_VERSION
from kvferry_wire.limits import Limits
from kvferry_wire.pod import PodInfo, PodPorts, Role

from .builders import make_layout

LIMITS = Limits(pair_failures=3, pair_open_s=1.0, pair_open_cap_s=8.0, pair_trial_s=10.0, pairs=4)
PAIR = Pair("p1", "d1", "a", "b")


def failed(breakers: PairBreakers, times: int, *, now: float = 0.0, pair: Pair = PAIR) -> None:
    for _ in range(times):
        breakers.result(pair, "read_error", now)


def test_three_failures_in_a_row_open_it() -> None:
    """A success between them counts them anew."""
    breakers = PairBreakers(LIMITS)
    failed(breakers, 2)
    breakers.result(PAIR, "", 0.0)
    failed(breakers, 2)
    assert breakers.barred(0.0) == frozenset()
    failed(breakers, 1)
    assert breakers.barred(0.0) == {PAIR}
    assert breakers.barred(0.99) == {PAIR}
    assert breakers.state(PAIR, 1.0) is Breaker.HALF_OPEN


def test_one_request_tries_it_and_closes_or_opens_it() -> None:
    """While that one is under way no other one gets the pair; a trial without a result is over after its time."""
    breakers = PairBreakers(LIMITS)
    failed(breakers, 3)
    assert breakers.barred(1.0) == frozenset()
    breakers.chosen(PAIR, 1.0)
    assert breakers.barred(1.0) == {PAIR}
    failed(breakers, 1, now=2.0)
    assert breakers.barred(3.9) == {PAIR}
    assert breakers.barred(4.0) == frozenset()
    breakers.chosen(PAIR, 4.0)
    assert breakers.barred(13.9) == {PAIR}
    assert breakers.barred(14.0) == frozenset()
    breakers.result(PAIR, "", 14.0)
    assert breakers.state(PAIR, 14.0) is Breaker.CLOSED
    assert len(breakers) == 0


def test_its_time_is_doubled_up_to_a_cap() -> None:
    """One, two, four, eight and no more."""
    breakers = PairBreakers(LIMITS)
    failed(breakers, 2)
    lengths = []
    for _ in range(6):
        failed(breakers, 1, now=100.0)
        lengths.append(next(s for s in range(1, 20) if not breakers.barred(100.0 + s)))
    assert lengths == [1, 2, 4, 8, 8, 8]


def test_another_life_of_a_pod_is_another_pair() -> None:
    """A pod that was started again is not blamed for what came before."""
    breakers = PairBreakers(LIMITS)
    failed(breakers, 3)
    assert breakers.state(Pair("p1", "d1", "a", "c"), 0.0) is Breaker.CLOSED


def test_failures_that_lie_in_one_request_or_engine_do_not_count() -> None:
    """A forged handle, or no room, says nothing of the way between two pods."""
    breakers = PairBreakers(LIMITS)
    for reason in RecomputeReason:
        if reason not in BETWEEN_PODS:
            for _ in range(5):
                breakers.result(PAIR, reason, 0.0)
    assert breakers.barred(0.0) == frozenset()


def test_reasons_are_of_the_closed_set() -> None:
    """The router names them without importing the engine; this keeps the two in step."""
    assert set(RecomputeReason) >= BETWEEN_PODS
    assert set(RecomputeReason) - BETWEEN_PODS == {"digest", "handle", "own_handle", "no_room", "cancelled"}


def test_the_table_is_bounded() -> None:
    """The oldest failures are forgotten first."""
    breakers = PairBreakers(LIMITS)
    for number in range(9):
        failed(breakers, 3, pair=Pair(f"p{number}", "d1"))
    assert {pair.prefill for pair in breakers.barred(0.0)} == {"p5", "p6", "p7", "p8"}


def make_pod(name: str, role: Role) -> Candidate:
    return Candidate(
        name=name,
        role=role,
        compat_hash="c",
        text_digest="t",
        block_size=16,
        total_blocks=1000,
        max_running=8,
        max_model_len=4096,
        kv_bytes_per_token=100,
        ready=True,
        draining=False,
        cached_blocks=0,
        load=None,
        bookings=PodBookings(),
    )


PODS = [make_pod("p1", "prefill"), make_pod("p2", "prefill"), make_pod("d1", "decode"), make_pod("d2", "decode")]


def chosen(barred: set[tuple[str, str]], pods: list[Candidate], seed: int) -> tuple[str | None, str | None]:
    ask = Ask("r", 500, 10, 10, "t", barred=frozenset(barred))
    decision = choose(ask, pods, Policy(), random.Random(seed))
    if barred:
        assert set(decision.filtered["pairs"]) == {" ".join(pair) for pair in barred}
    return decision.prefill, decision.decode


@pytest.mark.parametrize("count", range(4))
def test_selection_leaves_barred_pairs_out(count: int) -> None:
    """Every other pair is still chosen; with none left decode does it alone."""
    pairs = [("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2")]
    barred = set(pairs[: count + 1])
    found = {chosen(barred, PODS, seed) for seed in range(60)}
    if count == 3:
        assert found == {(None, "d1"), (None, "d2")}
    else:
        assert found == set(pairs) - barred


def test_selection_with_barred_pairs_is_the_best_of_all_others() -> None:
    """Against brute force, over random costs, roles and barred pairs."""
    for seed in range(300):
        rng = random.Random(seed)
        pods = []
        for number in range(rng.randint(2, 7)):
            pod = make_pod(f"n{number}", rng.choice(("prefill", "decode", "both")))
            tokens = rng.randint(0, 9000)
            pods.append(
                Candidate(
                    **{name: getattr(pod, name) for name in pod.__slots__}
                    | {"bookings": PodBookings(legs=rng.randint(0, 7), prefill_tokens=tokens)}
                )
            )
        pairs = [
            (p.name, d.name) for p in pods for d in pods if p is not d and p.serves("prefill") and d.serves("decode")
        ]
        barred = frozenset(pair for pair in pairs if rng.random() < 0.4)
        decision = choose(Ask("r", 500, 10, 10, "t", barred=barred), pods, Policy(disaggregate="always"), rng)
        allowed = [pair for pair in pairs if pair not in barred]
        if decision.decode is None:
            continue
        if not allowed:
            assert decision.prefill is None
            continue
        costs = {
            (p.pod, d.pod): p.total_s + d.total_s for p in decision.scores["prefill"] for d in decision.scores["decode"]
        }
        assert costs[decision.prefill or "", decision.decode] <= min(costs[pair] for pair in allowed) + 1e-9


def make_pool(*names: tuple[str, Role]) -> PodPool:
    """Pods that are ready and have said what they are."""
    pool = PodPool(limits=LIMITS, policy=Policy(disaggregate="always"), model="toy", rng=random.Random(1))
    endpoints = [Endpoint(name=name, role=role, host="127.0.0.1", http=1, state=2) for name, role in names]
    pool.table.replace(tuple(endpoints))
    for record in pool.table:
        record.probed(Probe("ready"))
        record.informed(make_info(record.name, record.endpoint.role))
    return pool


def make_info(name: str, role: Role) -> PodInfo:
    return PodInfo(
        version="0",
        protocol_version=PROTOCOL_VERSION,
        incarnation=name,
        epoch=1,
        role=role,
        model="toy",
        model_digest="m",
        text_digest="t",
        compat_hash="c",
        dtype="int64",
        threads=1,
        block_size=16,
        total_blocks=1000,
        max_model_len=4096,
        max_running=8,
        token_budget=64,
        layout=make_layout(),
        ports=PodPorts(http=1, control=0, data=0, state=2),
        transfer_backends={},
        attention_backends={},
        draining=False,
        limits=LIMITS,
    )


def test_answer_whose_kv_waits_at_a_barred_pair_still_gets_the_only_decode_pod() -> None:
    """That pod may not get the KV, and computes the prompt then; no pod at all would be the end of the answer."""
    pool = make_pool(("p1", "prefill"), ("d1", "decode"))
    for _ in range(3):
        pool.ferried("p1", "d1", "peer_dead", 0.0)
    assert pool.barred(0.0) == {("p1", "d1")}
    need = NeedPod("decode", frozenset(), "c", beside="p1", ferried=True, resume=True)
    assert pool.choose_again(Ask("r", 500, 10, 10, "t"), {}, 0.0, need).decode == "d1"
    # A pod that failed on this request stays out, and a new request goes another way.
    failed_here = NeedPod("decode", frozenset({"d1"}), "c", beside="p1", ferried=True, resume=True)
    assert pool.choose_again(Ask("r", 500, 10, 10, "t"), {}, 0.0, failed_here).decode is None
    assert pool.choose(Ask("r", 500, 10, 10, "t"), {}, 0.0).prefill is None


def test_answer_whose_kv_waits_prefers_a_decode_pod_that_can_get_it() -> None:
    """With another pod that gets KV from there, the barred one is left alone."""
    pool = make_pool(("p1", "prefill"), ("d1", "decode"), ("d2", "decode"))
    for _ in range(3):
        pool.ferried("p1", "d1", "peer_dead", 0.0)
    need = NeedPod("decode", frozenset(), "c", beside="p1", ferried=True)
    assert {pool.choose_again(Ask("r", 500, 10, 10, "t"), {}, 0.0, need).decode for _ in range(20)} == {"d2"}


def test_pods_of_a_new_life_are_a_new_pair() -> None:
    """The pool names pairs by incarnations: a pod that was started again is used at once."""
    pool = make_pool(("p1", "prefill"), ("d1", "decode"))
    for _ in range(3):
        pool.ferried("p1", "d1", "peer_dead", 0.0)
    record = pool.table.get("p1")
    assert record is not None
    record.informed(make_info("another life", "prefill"))
    assert pool.barred(0.0) == frozenset()
    assert pool.choose(Ask("r", 500, 10, 10, "t"), {}, 0.0).prefill == "p1"
