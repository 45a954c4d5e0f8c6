"""Random lives of leases: the table answers like a twin that keeps every fact for ever and recomputes all."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry_runtime.transfer.lease import LeaseTable
from kvferry_wire.control import LeaseRef
from tests.runtime.transfer.builders import EPOCH, OWNER, READER, make_grant, make_table

LEASE_S, ANSWER_S = 15.0, 30.0
IDS = st.integers(1, 12)


@dataclass
class Twin:
    """All facts of all leases: nothing is forgotten, so memory caps are set out of its reach."""

    epoch: int = EPOCH
    epochs: dict[int, int] = field(default_factory=dict)
    deadline: dict[int, float] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    end: dict[int, str] = field(default_factory=dict)
    released_by: dict[int, int] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)

    def answer(self, ref: LeaseRef) -> str:
        digest = b"d" * 31 + bytes((ref.lease_id,))
        if ref.incarnation != OWNER or ref.prompt_digest != digest or self.epochs.get(ref.lease_id) != ref.epoch:
            return "unknown"
        end = self.end.get(ref.lease_id)
        return {"expired": "expired", "withdrawn": "expired", None: "held"}.get(end, "unknown")

    def extend(self, lease_id: int, now: float) -> None:
        first = lease_id not in self.started
        self.started.add(lease_id)
        self.deadline[lease_id] = now + LEASE_S if first else max(self.deadline[lease_id], now + LEASE_S)


class LeaseLives(RuleBasedStateMachine):
    """Drives both, and compares each answer and each end."""

    @initialize()
    def begin(self) -> None:
        self.table: LeaseTable = make_table(
            lease_s=LEASE_S, answer_s=ANSWER_S, ended_lease_s=1e9, ended_leases=10_000, reply_memory=10_000
        )
        self.twin = Twin()
        self.now = 0.0
        self.next_lease = 1
        self.next_message = 1
        self.told: dict[int, str] = {}
        self.told_taken: list[int] = []

    def ref(self, lease_id: int, flaw: str) -> LeaseRef:
        return LeaseRef(
            lease_id=lease_id,
            incarnation=b"other" if flaw == "incarnation" else OWNER,
            epoch=self.twin.epochs.get(lease_id, 1) + (flaw == "epoch"),
            prompt_digest=b"" if flaw == "digest" else b"d" * 31 + bytes((lease_id,)),
        )

    flaws = st.sampled_from(["", "", "", "", "incarnation", "epoch", "digest"])

    @rule()
    def grant(self) -> None:
        if self.next_lease > 12:
            return
        lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        digest = b"d" * 31 + bytes((lease_id,))
        self.table.grant(make_grant(lease_id, epoch=self.twin.epoch, digest=digest), self.now)
        self.twin.epochs[lease_id] = self.twin.epoch
        self.twin.deadline[lease_id] = self.now + ANSWER_S

    @rule(lease_id=IDS, delivered=st.booleans())
    def answered(self, lease_id: int, delivered: bool) -> None:
        self.table.answered(lease_id, delivered, self.now)
        if lease_id in self.twin.epochs and lease_id not in self.twin.end:
            if delivered:
                self.twin.extend(lease_id, self.now)
            else:
                self.twin.end[lease_id] = "withdrawn"

    @rule(lease_id=IDS, flaw=flaws)
    def renew(self, lease_id: int, flaw: str) -> None:
        ref = self.ref(lease_id, flaw)
        expected = self.twin.answer(ref)
        assert self.table.renew(ref, self.now) == expected
        if expected == "held":
            self.twin.extend(lease_id, self.now)
            if lease_id not in self.twin.taken:
                self.twin.taken.append(lease_id)

    @rule(lease_id=IDS, flaw=flaws, repeat=st.booleans())
    def release(self, lease_id: int, flaw: str, repeat: bool) -> None:
        ref = self.ref(lease_id, flaw)
        message = self.twin.released_by.get(lease_id, 0) if repeat else 0
        if not message:
            message, self.next_message = self.next_message, self.next_message + 1
        repeated = not flaw and self.twin.released_by.get(lease_id) == message
        expected = "held" if repeated else self.twin.answer(ref)
        assert self.table.release(ref, READER, message, self.now) == expected
        if expected == "held" and not repeated:
            self.twin.end[lease_id] = "released"
            self.twin.released_by[lease_id] = message

    @rule(lease_id=IDS, flaw=flaws)
    def failed(self, lease_id: int, flaw: str) -> None:
        ref = self.ref(lease_id, flaw)
        expected = self.twin.answer(ref)
        assert self.table.failed(ref, self.now) == expected
        if expected == "held":
            self.twin.end[lease_id] = "failed"

    @rule(lease_id=IDS)
    def withdraw(self, lease_id: int) -> None:
        live = lease_id in self.twin.epochs and lease_id not in self.twin.end
        assert self.table.withdraw(lease_id, self.now) == live
        if live:
            self.twin.end[lease_id] = "withdrawn"

    @rule()
    def raise_epoch(self) -> None:
        self.table.raise_epoch(self.twin.epoch + 1, self.now)
        self.twin.epoch += 1
        for lease_id in self.twin.epochs.keys() - self.twin.end.keys():
            self.twin.end[lease_id] = "withdrawn"

    @rule(passed=st.sampled_from([0.1, 2.5, 7.0, 16.0, 31.0]), judge=st.booleans())
    def time_passes(self, passed: float, judge: bool) -> None:
        self.now += passed
        if not judge:
            return
        for lease_id in self.twin.epochs.keys() - self.twin.end.keys():
            if self.twin.deadline[lease_id] <= self.now:
                self.twin.end[lease_id] = "expired"
        self.hear(self.table.tick(self.now))

    def hear(self, ended: list) -> None:
        for end in ended:
            assert end.lease_id not in self.told, "an end was told twice"
            self.told[end.lease_id] = end.why

    @invariant()
    def both_agree(self) -> None:
        self.hear(self.table.take_ended())
        assert self.told == self.twin.end
        self.told_taken += [taken.lease_id for taken in self.table.take_taken()]
        assert self.told_taken == self.twin.taken
        assert self.table.live() == len(self.twin.epochs) - len(self.twin.end)
        self.table.check_integrity()


LeaseLives.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestLeaseLives = LeaseLives.TestCase
