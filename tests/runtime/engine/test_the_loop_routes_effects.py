"""The EngineCore loop with the real core, a scripted runner, transfer and link: who gets what, and in which order."""

from typing import Any

import msgspec
import pytest

from kvferry_runtime.core.config import CoreConfig
from kvferry_runtime.core.engine import EngineCore
from kvferry_runtime.core.integrity import IntegrityError
from kvferry_runtime.core.messages import (
    AbortLeg,
    FailOut,
    GrantLease,
    LeaseEnded,
    LeaseSettled,
    LeaseTaken,
    LegKey,
    PrefilledOut,
    Submit,
    TokensOut,
)
from kvferry_runtime.core.plan import StepPlan, StepResult
from kvferry_runtime.engine.messages import Batch, Heartbeat, PrefillAnswered, SnapshotReply, SnapshotRequest, Stop
from kvferry_runtime.engine.scripted import ScriptedLink, ScriptedRunner, ScriptedTransfer
from kvferry_runtime.engine.state_stream import StateNumbers
from kvferry_runtime.engine.turns import EngineLoop
from kvferry_wire import state
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.leg import Sampling
from kvferry_wire.limits import Limits

KEYS = {"hash_key": bytes(32), "kv_key": bytes([1]) * 32}


def make_submit(name: str = "a", kind: str = "generate", **changes: Any) -> Submit:
    values: dict[str, Any] = {
        "key": LegKey(name, 0),
        "kind": kind,
        "prompt_ids": tuple(range(20)),
        "emitted": ((),),
        "sampling": Sampling(seed=1, max_tokens=3),
        "extras": KeyExtras(),
        "deadline_s": 10.0,
        "eos_token_ids": (),
    }
    return Submit(**(values | changes))


class Rig:
    """A loop whose turns are driven by hand."""

    def __init__(self, *, transfer: bool = True, runner: Any = None) -> None:
        self.now = 0.0
        config = CoreConfig(block_size=4, blocks=40, token_budget=64, max_running=8, max_model_len=128, **KEYS)
        self.core = EngineCore(config)
        self.link = ScriptedLink(on_wait=self.advance)
        self.transfer = ScriptedTransfer() if transfer else None
        self.loop = EngineLoop(
            core=self.core,
            runner=runner or ScriptedRunner(),
            transfer=self.transfer,
            link=self.link,
            numbers=StateNumbers(bytes(16), Limits()),
            publisher=None,
            clock=lambda: self.now,
        )

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def run(self, *messages: Any) -> list[Any]:
        """Give messages, turn until all is quiet, stop; returns the outputs in order."""
        self.link.give(*messages)
        self.link.when_quiet(Stop())
        self.loop.run()
        return [output for batch in self.link.sent_of(Batch) for output in batch.outputs]


def test_a_generate_leg_gets_its_tokens() -> None:
    """One output per step, the last with the finish; heartbeats count turns."""
    rig = Rig()
    outputs = rig.run(make_submit())
    assert [type(output) for output in outputs] == [TokensOut] * 3
    assert outputs[-1].finish == "length"
    ticks = [beat.ticks for beat in rig.link.sent_of(Heartbeat)]
    assert ticks == sorted(set(ticks))


def test_a_prefill_leg_gets_the_handle_of_its_own_lease() -> None:
    """The lease is granted before the answer leaves; each answer carries its own handle."""
    rig = Rig()
    outputs = rig.run(make_submit("a", "prefill"), make_submit("b", "prefill", prompt_ids=tuple(range(50, 70))))
    assert rig.transfer is not None
    granted = {grant.key: grant.lease_id for grant in rig.transfer.calls_of(GrantLease)}
    assert len(granted) == 2
    for output in outputs:
        assert isinstance(output, PrefilledOut)
        assert output.handle is not None
        assert output.handle.lease_id == granted[output.key]


def test_without_a_transfer_nothing_is_leased() -> None:
    """A prefill answer has no handle, its blocks are free at once."""
    rig = Rig(transfer=False)
    (output,) = rig.run(make_submit("a", "prefill"))
    assert isinstance(output, PrefilledOut)
    assert output.handle is None
    assert rig.core.load().free_blocks == rig.core.load().total_blocks


def test_a_handle_that_fails_the_check_never_reaches_the_core() -> None:
    """The leg is recomputed, with the reason in its first output."""
    rig = Rig()
    assert rig.transfer is not None
    handle = rig.transfer.grant_for(make_submit("x"))
    rig.transfer.reason = "mac"
    outputs = rig.run(make_submit(handle=handle))
    assert outputs[0].recomputed == "mac"
    assert not [call for call in rig.transfer.calls if type(call).__name__ in ("HoldLease", "StartPull")]


def test_an_abort_leaves_no_output_and_no_block() -> None:
    """A leg aborted in the same turn as it came gives nothing."""
    rig = Rig()
    assert rig.run(make_submit(), AbortLeg(key=LegKey("a", 0))) == []
    assert rig.core.load().free_blocks == rig.core.load().total_blocks


def test_an_abort_after_the_answer_withdraws_its_lease_once() -> None:
    """The leg has ended, its answer waits or was of no use: the lease goes; one that has ended is left alone."""
    rig = Rig()
    assert rig.transfer is not None
    abort = AbortLeg(key=LegKey("a", 0))
    ended = LeaseEnded(lease_id=1, why="withdrawn")
    rig.link.give(make_submit("a", "prefill"))
    rig.link.when_quiet(AbortLeg(key=LegKey("a", 1)), abort, ended, abort, Stop())
    rig.loop.run()
    assert [grant.lease_id for grant in rig.transfer.calls_of(GrantLease)] == [1]
    assert rig.transfer.withdrawn == [1]
    assert rig.core.load().free_blocks == rig.core.load().total_blocks


def test_whoever_waits_hears_that_a_lease_is_settled() -> None:
    """Taken up by a reader, or ended: by the leg that it was granted to; of other leases nobody hears."""
    rig = Rig()
    rig.link.give(make_submit("a", "prefill"), make_submit("b", "prefill", prompt_ids=tuple(range(50, 70))))
    rig.link.when_quiet(
        LeaseTaken(lease_id=1),
        LeaseEnded(lease_id=2, why="expired"),
        LeaseTaken(lease_id=2),
        LeaseTaken(lease_id=9),
        Stop(),
    )
    rig.loop.run()
    outputs = [output for batch in rig.link.sent_of(Batch) for output in batch.outputs]
    granted = {output.handle.lease_id: output.key for output in outputs if isinstance(output, PrefilledOut)}
    settled = [output for output in outputs if isinstance(output, LeaseSettled)]
    assert settled == [LeaseSettled(key=granted[1]), LeaseSettled(key=granted[2])]


def test_a_deadline_fails_a_leg_that_waits() -> None:
    """Time alone ends a leg."""
    rig = Rig()
    rig.link.on_turn = lambda: rig.advance(20.0)
    outputs = rig.run(make_submit())
    assert isinstance(outputs[-1], FailOut)
    assert outputs[-1].kind == "deadline"


def test_answers_reach_the_lease_table() -> None:
    """Delivered or not is passed on as it is."""
    rig = Rig()
    rig.run(PrefillAnswered(lease_id=4, delivered=False))
    assert rig.transfer is not None
    assert rig.transfer.answers == [(4, False)]


def test_a_snapshot_agrees_with_the_numbers() -> None:
    """What was published before it is in it; the load is now's."""
    rig = Rig()
    rig.link.give(make_submit())
    rig.link.when_quiet(SnapshotRequest(number=2), Stop())
    rig.loop.run()
    (reply,) = rig.link.sent_of(SnapshotReply)
    snapshot = state.decode_snapshot(reply.snapshot)
    assert reply.number == 2
    assert len(snapshot.hashes) == 5  # 20 prompt tokens in blocks of 4
    assert snapshot.load.running == 0


def test_a_failing_step_ends_the_loop() -> None:
    """The error leaves the loop: the process ends, nothing goes on with books that may be wrong."""

    class Failing:
        def step(self, plan: StepPlan) -> StepResult:
            raise ArithmeticError(plan.number)

    with pytest.raises(ArithmeticError):
        Rig(runner=Failing()).run(make_submit())


def test_integrity_is_checked_when_work_has_ended() -> None:
    """A broken account is found in the first quiet moment, for which the loop does not wait longer than that."""
    rig = Rig()
    assert rig.transfer is not None
    rig.link.give(make_submit("a", "prefill"))
    rig.loop._turn()
    rig.transfer.broken = True
    rig.loop._turn()
    assert rig.loop._wait_s() <= 0.01
    rig.advance(0.011)
    with pytest.raises(RuntimeError, match="scripted"):
        rig.loop._turn()


def test_integrity_is_checked_before_the_end() -> None:
    """An engine that is told to stop right after its last leg has not left its books unread."""
    rig = Rig()
    assert rig.transfer is not None
    rig.transfer.broken = True
    with pytest.raises(RuntimeError, match="scripted"):
        rig.run(make_submit())


@pytest.mark.parametrize("step_s", [0.0, 3.0])
def test_no_check_comes_between_the_messages_of_a_hand_off(step_s: float) -> None:
    """However long its prompt took. One that is never quiet checks a second after its last step, then each."""

    class Slow(ScriptedRunner):
        def step(self, plan: StepPlan) -> StepResult:
            rig.advance(step_s)
            return super().step(plan)

    rig = Rig(runner=Slow())
    assert rig.transfer is not None
    checks: list[float] = []
    rig.transfer.check_integrity = lambda: checks.append(rig.now)  # type: ignore[method-assign]
    rig.link.give(make_submit("a", "prefill"))
    rig.loop._turn()
    worked_at = rig.now
    while rig.now < worked_at + 3.5:
        rig.advance(0.005)
        rig.link.give(PrefillAnswered(lease_id=1, delivered=True))
        rig.loop._turn()
    assert [round(at - worked_at, 1) for at in checks] == [1.0, 2.0, 3.0]


def test_steps_do_not_keep_the_check_away_for_good() -> None:
    """Legs and messages without a quiet moment: at least each ten seconds, in some idle turn."""
    rig = Rig()
    assert rig.transfer is not None
    checks: list[float] = []
    rig.transfer.check_integrity = lambda: checks.append(rig.now)  # type: ignore[method-assign]
    for number in range(7000):
        rig.advance(0.005)
        rig.link.give(PrefillAnswered(lease_id=1, delivered=True))
        if number % 100 == 0:
            rig.link.give(make_submit(f"leg-{number}", sampling=Sampling(seed=1, max_tokens=1)))
        rig.loop._turn()
    assert [round(at) for at in checks] == [10, 20, 30]


def test_all_blocks_are_walked_though_something_is_heard() -> None:
    """Each quiet moment between two messages looks at a slice of them."""
    rig = Rig()
    rig.run(make_submit())
    rig.core._kv.pool._free[0] = rig.core._kv.pool._free[1]
    with pytest.raises(IntegrityError, match="on the free list twice"):
        for _ in range(10):
            rig.link.give(PrefillAnswered(lease_id=1, delivered=True))
            rig.loop._turn()
            rig.advance(0.05)
            rig.loop._turn()


def test_blocks_that_nobody_references_are_walked_while_nothing_is_to_do() -> None:
    """A fault among them ends the process within the idle turns that follow, before the block is given to anybody."""
    rig = Rig()
    rig.core._kv.pool._free[0] = rig.core._kv.pool._free[1]
    with pytest.raises(IntegrityError, match="on the free list twice"):
        rig.run(make_submit())
        for _ in range(4):
            rig.advance(0.25)
            rig.loop._turn()


def test_a_dead_transfer_thread_ends_the_engine() -> None:
    """A leg that waits for a pull never waits for a thread that is gone: the loop ends within a heartbeat."""
    rig = Rig()
    assert rig.transfer is not None
    rig.transfer.dead = True
    with pytest.raises(RuntimeError, match="thread is dead"):
        rig.run()


def test_messages_hold_no_key_in_their_repr() -> None:
    """A config that is logged by mistake shows no key."""
    from kvferry_runtime.engine.messages import EngineConfig, decode_config, encode
    from kvferry_wire.keys import ServiceKeys

    keys = ServiceKeys(http=b"h" * 32, kv=b"k" * 32, state=b"s" * 32, hash=b"a" * 32)
    config = EngineConfig(model="toy", model_digest="", threads=1, keys=keys)
    assert "kkkk" not in repr(config)
    assert decode_config(encode(config)) == config
    assert msgspec.structs.replace(config, keys=None).keys is None
