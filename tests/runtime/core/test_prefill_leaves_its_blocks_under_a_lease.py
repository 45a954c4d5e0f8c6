"""Prefill legs: first tokens, a lease on the prompt's blocks, and the share that leases may hold."""

from kvferry_runtime.core.messages import FailOut, GrantLease, LeaseEnded, PrefilledOut, StopChoice
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.hashing import prompt_digest
from tests.runtime.core.builders import EOS, assert_at_rest, make_driver, make_submit, own_ids


def test_the_lease_is_granted_just_before_the_answer_and_holds_the_whole_prompt() -> None:
    """The partial last block is leased too; digest, epoch and token count are the prompt's."""
    driver = make_driver(epoch=7)
    driver.send(make_submit("p", 6, kind="prefill", n=2, salt=b"t"))
    grant, prefilled = driver.run()
    assert isinstance(grant, GrantLease)
    assert (grant.lease_id, grant.epoch, grant.token_count, grant.blocks) == (1, 7, 6, ((1, 2),))
    assert grant.prompt_digest == prompt_digest(b"k" * 32, own_ids("p", 6), KeyExtras(tenant_salt=b"t"))
    assert prefilled == PrefilledOut(key=grant.key, first=(10_006, 10_006), cached_tokens=0)
    load = driver.core.load()
    assert (load.leases, load.running, load.free_blocks) == (1, 0, 14)
    assert driver.core.idle()


def test_the_end_of_a_lease_drops_exactly_its_references() -> None:
    """Two leases share a prefix; the first one's end leaves the second one's blocks alone. Unknown ids are ignored."""
    driver = make_driver()
    prompt = list(range(300, 310))
    for name in ("p", "q"):
        driver.send(make_submit(name, prompt, kind="prefill"))
        driver.run()
    grants = [effect for effect in driver.effects if isinstance(effect, GrantLease)]
    assert [grant.lease_id for grant in grants] == [1, 2]
    assert grants[0].blocks[0][:2] == grants[1].blocks[0][:2]
    driver.send(LeaseEnded(lease_id=1, why="released"), LeaseEnded(lease_id=1, why="released"))
    assert driver.core.load().free_blocks == 16 - 3
    driver.send(LeaseEnded(lease_id=2, why="expired"), LeaseEnded(lease_id=99, why="expired"))
    assert_at_rest(driver.core)


def test_leased_blocks_are_neither_evicted_nor_given_away() -> None:
    """Other legs use what is left; nobody writes a leased block."""
    driver = make_driver(blocks=9)
    driver.send(make_submit("p", 14, kind="prefill"))
    driver.run()
    leased = {block for e in driver.effects if isinstance(e, GrantLease) for block in e.blocks[0]}
    driver.send(*(make_submit(f"g{number}", 9, max_tokens=6) for number in range(4)))
    driver.run()
    used = {block for plan in driver.plans[1:] for row in plan.rows for block in row.table}
    assert len(leased) == 4
    assert not leased & used
    driver.send(LeaseEnded(lease_id=1, why="released"))
    assert_at_rest(driver.core)


def test_no_lease_when_every_choice_ends_with_its_first_token() -> None:
    """End of sequence, a stop id, or max_tokens 1: nobody will decode, so nothing is kept."""
    driver = make_driver()
    driver.token = lambda row, pick: EOS
    driver.send(make_submit("eos", 6, kind="prefill"))
    driver.run()
    driver.token = lambda row, pick: 77
    driver.send(make_submit("one", 6, kind="prefill", max_tokens=1))
    driver.send(make_submit("stop", 6, kind="prefill", stop_token_ids=(77,)))
    driver.run()
    assert [effect.first for effect in driver.effects if isinstance(effect, PrefilledOut)] == [(EOS,), (77,), (77,)]
    assert not [effect for effect in driver.effects if isinstance(effect, GrantLease)]
    assert_at_rest(driver.core)


def test_an_end_of_sequence_that_is_ignored_leaves_a_lease() -> None:
    """``ignore_eos``: the answer goes on elsewhere."""
    driver = make_driver()
    driver.token = lambda row, pick: EOS
    driver.send(make_submit("p", 6, kind="prefill", ignore_eos=True))
    assert any(isinstance(effect, GrantLease) for effect in driver.run())


def test_leases_hold_at_most_their_share_and_busy_is_said_before_anything_is_computed() -> None:
    """Half of 16 blocks: granted and promised leases count; what would exceed them fails at submission."""
    driver = make_driver()
    driver.send(make_submit("a", 16, kind="prefill"))
    driver.run()
    driver.send(make_submit("b", 12, kind="prefill"))
    (effect,) = driver.send(make_submit("c", 8, kind="prefill"))
    assert isinstance(effect, FailOut)
    assert effect.kind == "busy"
    assert "needs 2 blocks under a lease; 7 of 8 are held" in effect.message
    assert driver.send(make_submit("d", 3, kind="prefill")) == []
    driver.run()
    assert driver.core.load().leases == 3
    for lease_id in (1, 2, 3):
        driver.send(LeaseEnded(lease_id=lease_id, why="released"))
    assert_at_rest(driver.core)


def test_a_prompt_larger_than_the_share_is_always_busy_for_prefill_and_fine_for_generate() -> None:
    """The router then uses a decode pod alone."""
    driver = make_driver()
    (effect,) = driver.send(make_submit("p", 40, kind="prefill"))
    assert isinstance(effect, FailOut)
    assert effect.kind == "busy"
    driver.send(make_submit("g", 40, max_tokens=2))
    driver.run()
    assert len(driver.ids("g")) == 2


def test_a_promise_goes_with_its_leg() -> None:
    """A prefill leg that ends without a lease gives its reservation back."""
    driver = make_driver()
    driver.send(make_submit("a", 32, kind="prefill", deadline=1.0))
    driver.now = 2.0
    driver.step()
    assert driver.send(make_submit("b", 32, kind="prefill")) == []


def test_a_resumed_leg_is_prefilled_without_a_pick() -> None:
    """Choices that bring emitted ids keep their first token; only the prompt is computed and leased."""
    driver = make_driver()
    driver.send(make_submit("p", 6, kind="prefill", emitted=[[55, 56], []]))
    grant, prefilled = driver.run()
    assert isinstance(grant, GrantLease)
    assert grant.token_count == 6
    assert isinstance(prefilled, PrefilledOut)
    assert prefilled.first == (55, 10_006)
    assert [pick.choice for pick in driver.plan.rows[0].picks] == [1]


def test_stop_choice_means_nothing_to_a_prefill_leg() -> None:
    """A first token is due for each choice."""
    driver = make_driver()
    submit = make_submit("p", 6, kind="prefill", n=2)
    driver.send(submit, StopChoice(key=submit.key, choice=0))
    _, prefilled = driver.run()
    assert isinstance(prefilled, PrefilledOut)
    assert len(prefilled.first) == 2
