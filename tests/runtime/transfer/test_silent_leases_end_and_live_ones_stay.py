"""Expiry: who is heard keeps the lease, who is silent loses it within a tick, and only durations matter."""

import random

import pytest

from tests.runtime.transfer.builders import READER, make_grant, make_ref, make_table

LEASE_S = 2.0
TICK_S = 0.05
RENEW_S = LEASE_S / 6


@pytest.mark.parametrize("origin", [0.0, -3600.0, 1e5, 1.7e9], ids=str)
@pytest.mark.parametrize("rate", [0.8, 1.0, 1.2], ids=str)
def test_one_that_renews_outlives_99_silent_ones(origin: float, rate: float) -> None:
    """Whatever the clock's origin, and with the reader's clock 20 % off: 99 end a tick after expiry, one never."""
    table = make_table(lease_s=LEASE_S, renew_fraction=1 / 6)
    for lease_id in range(1, 101):
        table.grant(make_grant(lease_id), origin)
        table.answered(lease_id, True, origin)
    ended_at: dict[int, float] = {}
    now, next_renew = origin, origin
    while now < origin + 10 * LEASE_S:
        if now >= next_renew:
            assert table.renew(make_ref(1), now) == "held"
            next_renew += RENEW_S * rate
        for end in table.tick(now):
            assert end.why == "expired"
            ended_at[end.lease_id] = now - origin
        now += TICK_S
    assert sorted(ended_at) == list(range(2, 101))
    assert all(LEASE_S <= at <= LEASE_S + TICK_S + 1e-6 for at in ended_at.values())
    assert table.live() == 1
    assert table.release(make_ref(1), READER, 1, now) == "held"
    table.check_integrity()


def test_a_dead_readers_leases_end_within_a_lease_and_a_tick() -> None:
    """After the last renewal of a killed reader everything is free one lease later."""
    table = make_table(lease_s=LEASE_S)
    rng = random.Random(7)
    last = 0.0
    for lease_id in range(1, 21):
        table.grant(make_grant(lease_id), 0.0)
        last = max(last, at := rng.uniform(0.0, 1.0))
        table.renew(make_ref(lease_id), at)
    table.tick(last + LEASE_S)
    assert table.live() == 0


def test_renewal_never_shortens() -> None:
    """A renewal judged by an earlier clock reading leaves the longer time as it is."""
    table = make_table(lease_s=15.0)
    table.grant(make_grant(), 0.0)
    table.renew(make_ref(), 10.0)
    table.renew(make_ref(), 3.0)
    table.answered(1, True, 1.0)
    assert table.next_expiry() == 25.0


def test_the_lease_starts_when_the_answer_is_written() -> None:
    """Before that only the time allowed to the answer counts; it is no part of the lease, longer or shorter."""
    table = make_table(lease_s=15.0, answer_s=30.0)
    table.grant(make_grant(1), 0.0)
    assert table.next_expiry() == 30.0
    table.answered(1, True, 5.0)
    assert table.next_expiry() == 20.0
    table.grant(make_grant(2), 100.0)
    table.tick(129.9)
    assert table.live() == 1
    assert [end.why for end in table.tick(130.0)] == ["expired"]


def test_what_arrived_in_time_counts_however_late_it_is_judged() -> None:
    """Expiry is a decision of `tick`: messages handled before it keep the lease, even after a long pause."""
    table = make_table(lease_s=2.0)
    for lease_id in (1, 2, 3):
        table.grant(make_grant(lease_id), 0.0)
        table.answered(lease_id, True, 0.0)
    resumed = 60.0
    assert table.renew(make_ref(1), resumed) == "held"
    assert table.release(make_ref(2), READER, 1, resumed) == "held"
    assert {end.lease_id: end.why for end in table.tick(resumed)} == {2: "released", 3: "expired"}
    assert table.renew(make_ref(3), resumed) == "expired"


def test_no_live_lease_is_lost_under_many_waiters() -> None:
    """128 readers that wait ten times the lease and renew in time lose none, with 2 of 3 renewals lost."""
    table = make_table(lease_s=5.0)
    rng = random.Random(11)
    for lease_id in range(1, 129):
        table.grant(make_grant(lease_id), 0.0)
        table.answered(lease_id, True, 0.0)
    for step in range(int(50 / (5 / 6))):
        now = step * 5 / 6
        for lease_id in range(1, 129):
            if step % 3 == 0 or rng.random() < 0.1:
                assert table.renew(make_ref(lease_id), now) == "held"
        assert table.tick(now) == []
    assert table.live() == 128
