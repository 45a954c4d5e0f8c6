"""Stand-ins for the loop's neighbours: a runner, a transfer and a link without model, peers and sockets.

For tests and simulation of ``turns.EngineLoop``: everything happens in the caller's thread, in the order it was given.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvferry_runtime.core.messages import (
    DropLease,
    GrantLease,
    HoldLease,
    Posted,
    StartPull,
    Submit,
)
from kvferry_runtime.core.plan import StepPlan, StepResult
from kvferry_runtime.engine.messages import Downward, Upward
from kvferry_runtime.transfer.config import TransferState
from kvferry_wire.handle import KVHandle
from kvferry_wire.layout import BLOCK_ORDER, LayoutDescriptor

Message = TypeVar("Message")


class ScriptedRunner:
    """Picks the token ``position % 100`` everywhere."""

    def step(self, plan: StepPlan) -> StepResult:
        return StepResult(tuple(pick.position % 100 for row in plan.rows for pick in row.picks))


class ScriptedTransfer:
    """Notes what it is asked; grants every lease; finds fault with handles, or with its books, when told to."""

    def __init__(self) -> None:
        self.calls: list[GrantLease | HoldLease | StartPull | DropLease] = []
        self.answers: list[tuple[int, bool]] = []
        self.withdrawn: list[int] = []
        self.reason = ""  # what ``check`` returns
        self.broken = False  # whether ``check_integrity`` raises
        self.dead = False  # whether ``check_alive`` raises

    def calls_of(self, kind: type[Message]) -> list[Message]:
        return [call for call in self.calls if isinstance(call, kind)]

    def check(self, submit: Submit) -> str:
        return self.reason

    def grant(self, grant: GrantLease) -> KVHandle:
        self.calls.append(grant)
        return _handle(grant.lease_id, grant.token_count, len(grant.blocks[0]))

    def grant_for(self, submit: Submit) -> KVHandle:
        """A handle for the prompt of a leg, as if another engine had prefilled it."""
        return _handle(1, len(submit.prompt_ids), 1)

    def answered(self, lease_id: int, delivered: bool) -> None:
        self.answers.append((lease_id, delivered))

    def withdraw(self, lease_id: int) -> bool:
        self.withdrawn.append(lease_id)
        return True

    def hold(self, effect: HoldLease) -> None:
        self.calls.append(effect)

    def pull(self, effect: StartPull) -> None:
        self.calls.append(effect)

    def drop(self, effect: DropLease) -> None:
        self.calls.append(effect)

    def state(self) -> TransferState:
        return TransferState(
            leases=0,
            leases_granted=len(self.calls_of(GrantLease)),
            leases_ended={},
            holds=0,
            pulls=0,
            reads=0,
            peers=0,
            handshakes=0,
            pulls_ok=0,
            pulls_failed={},
            pulled_bytes=0,
            pull_seconds=0.0,
            sent_bytes=0,
            dropped_messages=0,
            dropped_connections=0,
            backends={"scripted": "ok"},
        )

    def check_alive(self) -> None:
        if self.dead:
            raise RuntimeError("scripted: a thread is dead")

    def check_integrity(self) -> None:
        if self.broken:
            raise RuntimeError("the scripted transfer's books are broken")


class ScriptedLink:
    """An inbox that the test fills and an outbox that it reads. ``on_wait`` is told how long the loop would wait."""

    def __init__(self, on_wait: Callable[[float], None] = lambda _: None) -> None:
        self.sent: list[Upward] = []
        self.on_turn: Callable[[], None] = lambda: None
        self._inbox: deque[Downward | Posted] = deque()
        self._on_wait = on_wait
        self._last: tuple[Downward | Posted, ...] = ()

    def give(self, *messages: Downward | Posted) -> None:
        """Put messages into the inbox."""
        self._inbox.extend(messages)

    def when_quiet(self, *messages: Downward | Posted) -> None:
        """Give these messages when the loop waits."""
        self._last = messages

    def sent_of(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.sent if isinstance(message, kind)]

    def inbox(self) -> list[Downward | Posted]:
        self.on_turn()
        found = list(self._inbox)
        self._inbox.clear()
        return found

    def wait(self, timeout_s: float) -> None:
        self._on_wait(timeout_s)
        self._inbox.extend(self._last)

    def wake(self) -> None:
        """Nothing to wake: all is one thread."""

    def send(self, message: Upward) -> None:
        self.sent.append(message)


def _handle(lease_id: int, tokens: int, blocks: int) -> KVHandle:
    return KVHandle(
        lease_id=lease_id,
        incarnation=bytes(16),
        epoch=1,
        host="scripted",
        control_port=1,
        backends={"scripted": b""},
        block_count=blocks,
        token_count=tokens,
        compat_hash="",
        layout=LayoutDescriptor(block_size=1, tensor_parallel=1, order=BLOCK_ORDER, groups=()),
        lease_ms=1000,
        prompt_digest=b"",
    )
