"""The transfer of one engine, both roles: what the engine's process talks to.

engine thread --grant, answered--> LeaseDesk <--lookups-- data plane threads
                                      ^--messages, expiry-- OwnerControl (thread)
engine thread --hold, pull, drop--> ReaderControl (a thread, and whoever brings news) --reads--> back ends (threads)
all of them --post--> the engine's inbox
"""

import logging
import time
from collections.abc import Callable

import zmq

from kvferry_runtime.core.messages import (
    DropLease,
    GrantLease,
    HoldLease,
    Posted,
    StartPull,
    Submit,
)
from kvferry_runtime.transfer import checksums
from kvferry_runtime.transfer.backends.base import BackendContext, BackendError, TransferBackend
from kvferry_runtime.transfer.backends.registry import make_backend
from kvferry_runtime.transfer.check import handle_fault
from kvferry_runtime.transfer.config import TransferConfig, TransferError, TransferPorts, TransferState
from kvferry_runtime.transfer.control_owner import OwnerControl
from kvferry_runtime.transfer.control_reader import ReaderControl
from kvferry_runtime.transfer.desk import LeaseDesk
from kvferry_runtime.transfer.handshake import OwnSide
from kvferry_runtime.transfer.memory import BlockMemory
from kvferry_service import curve
from kvferry_wire import PROTOCOL_VERSION
from kvferry_wire.control import HelloBody
from kvferry_wire.handle import KVHandle
from kvferry_wire.keys import ServiceKeys

_log = logging.getLogger(__name__)

MakeBackend = Callable[[str, BackendContext], TransferBackend]


class TransferService:
    """Leases out this engine's KV, and pulls that of others.

    Args:
        config: see `TransferConfig`.
        keys: `kv` is needed.
        memory: the KV blocks; must outlive the service.
        post: thread-safe; hears of leases that were taken up or have ended, and of finished pulls, on any thread, the
            caller's too: it must not wait.
        make: builds back ends by name; a seam for tests.

    Raises:
        TransferError: the keys hold no ``kv``.
    """

    def __init__(
        self,
        *,
        config: TransferConfig,
        keys: ServiceKeys,
        memory: BlockMemory,
        post: Callable[[Posted], None],
        make: MakeBackend = make_backend,
    ) -> None:
        if keys.kv is None:
            raise TransferError("keys: `kv` is missing; an engine cannot transfer KV without it")
        self._config = config
        self._kv_key = keys.kv
        self._memory = memory
        self._post = post
        self._make = make
        self._block_bytes = tuple(group.block_bytes(config.layout.block_size) for group in config.layout.groups)
        self._desk = LeaseDesk(incarnation=config.incarnation, epoch=config.epoch, limits=config.limits, post=post)
        self._backends: dict[str, TransferBackend] = {}
        self._backend_reasons: dict[str, str] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._gate: curve.Gate | None = None
        self._owner: OwnerControl | None = None
        self._reader: ReaderControl | None = None
        self._own: OwnSide | None = None

    # ---- life ----------------------------------------------------------------------------------------------------

    def start(self) -> TransferPorts:
        """Listen and work. Returns the ports.

        Raises:
            TransferError: a port cannot be bound, or no back end works; nothing is left running.
        """
        config = self._config
        try:
            self._start_backends()
            self._own = self._describe(config.epoch)
            self._context = zmq.Context()
            self._gate = curve.Gate(self._context)
            self._gate.admit("kv", self._kv_key)
            self._gate.start()
            self._owner = OwnerControl(
                context=self._context,
                kv_key=self._kv_key,
                host=config.bind_host,
                port=config.control_port,
                own=self._own_side,
                desk=self._desk,
                limits=config.limits,
            )
            self._reader = ReaderControl(
                context=self._context,
                kv_key=self._kv_key,
                own=self._own_side,
                backends=self._backends,
                block_bytes=self._block_bytes,
                limits=config.limits,
                post=self._post,
            )
        except Exception:
            self.close(1.0)
            raise
        self._owner.start()
        self._reader.start()
        ports = TransferPorts(control=self._owner.port, data=max(backend.port() for backend in self._backends.values()))
        _log.info("KV transfer: control port %d, data port %d, %s", ports.control, ports.data, self._backend_reasons)
        return ports

    def close(self, timeout: float) -> None:
        """Cancel all pulls (each is posted), end all leases (each is posted), stop. Idempotent.

        Raises:
            TransferError: a thread did not end in `timeout` seconds.
        """
        deadline = time.monotonic() + timeout

        def left() -> float:
            return max(0.1, deadline - time.monotonic())

        stuck = []
        reader, owner, gate, context = self._reader, self._owner, self._gate, self._context
        self._gate = self._context = None
        if reader is not None and not reader.close(left()):
            stuck.append("reader")
        if owner is not None and not owner.close(left()):
            stuck.append("owner")
        for backend in self._backends.values():
            backend.close(left())
        self._backends = {}
        self._desk.withdraw_all()
        if gate is not None:
            gate.close()
        if stuck:  # their sockets are open, and the context would wait for them
            raise TransferError(f"close: threads still run after {timeout:g} s: {', '.join(stuck)}")
        if context is not None:
            context.term()

    # ---- owner ---------------------------------------------------------------------------------------------------

    def grant(self, grant: GrantLease) -> KVHandle:
        """Keep blocks for a reader. The lease exists when this returns.

        Raises:
            LeaseError: see `LeaseTable.grant`.
        """
        own = self._own_side()
        self._desk.grant(grant)
        config = self._config
        return KVHandle(
            lease_id=grant.lease_id,
            incarnation=config.incarnation,
            epoch=grant.epoch,
            host=config.host,
            control_port=self._running_owner().port,
            backends=own.body.backends,
            block_count=len(grant.blocks[0]),
            token_count=grant.token_count,
            compat_hash=config.compat_hash,
            compat=config.compat,
            layout=config.layout,
            lease_ms=round(config.limits.lease_s * 1000),
            checksum=checksums.METHOD if config.checksums else "",
            checksums=checksums.block_sums(self._memory, grant.blocks) if config.checksums else (),
            prompt_digest=grant.prompt_digest,
        ).signed(self._kv_key)

    def answered(self, lease_id: int, delivered: bool) -> None:
        """The prefill answer was written, which starts the lease, or could not be, which ends it."""
        self._desk.answered(lease_id, delivered)

    def withdraw(self, lease_id: int) -> bool:
        """End a lease from this side. False if it has ended already."""
        return self._desk.withdraw(lease_id)

    def raise_epoch(self, epoch: int) -> None:
        """KV memory is registered anew or was made invalid: older leases are void.

        Raises:
            LeaseError: the epoch is not above the current one.
        """
        self._desk.raise_epoch(epoch)
        self._own = self._describe(epoch)

    # ---- reader --------------------------------------------------------------------------------------------------

    def check(self, submit: Submit) -> str:
        """ "" or the `RecomputeReason` why the handle cannot be used; a leg without a handle has nothing to check."""
        if submit.handle is None:
            return ""
        fault = handle_fault(
            submit,
            submit.handle,
            kv_key=self._kv_key,
            incarnation=self._config.incarnation,
            compat_hash=self._config.compat_hash,
            compat=self._config.compat,
            layout=self._config.layout,
            backends=frozenset(self._backends),
        )
        if fault is None:
            return ""
        _log.warning("the handle of %s is not used: %s", submit.key.internal_id, fault.detail)
        return fault.reason.value

    def hold(self, effect: HoldLease) -> None:
        """Renew a lease from now on."""
        self._running_reader().command(effect)

    def pull(self, effect: StartPull) -> None:
        """Fill blocks; they are the transfer's until `PullFinished`."""
        self._running_reader().command(effect)

    def drop(self, effect: DropLease) -> None:
        """Give a lease up, and cancel its pull, if any."""
        self._running_reader().command(effect)

    # ---- what it tells -------------------------------------------------------------------------------------------

    def state(self) -> TransferState:
        """A moment of the transfer. Raises `TransferError` before `start`."""
        reader, owner = self._running_reader(), self._running_owner()
        live, granted, ended = self._desk.counts()
        holds, pulls, reads = reader.holds_and_pulls()
        peers, handshakes = reader.peers()
        backends = self._backends.values()
        return TransferState(
            leases=live,
            leases_granted=granted,
            leases_ended=ended,
            holds=holds,
            pulls=pulls,
            reads=reads,
            peers=peers,
            handshakes=handshakes,
            pulls_ok=reader.counters.ok,
            pulls_failed=dict(reader.counters.failed),
            pulled_bytes=reader.counters.nbytes,
            pull_seconds=reader.counters.seconds,
            sent_bytes=sum(backend.sent_bytes() for backend in backends),
            dropped_messages=owner.dropped,
            dropped_connections=sum(backend.dropped_connections() for backend in backends),
            backends=dict(self._backend_reasons),
        )

    def check_alive(self) -> None:
        """Raise `TransferError` if one of its threads has died: pulls would then never finish. Cheap."""
        faults = {
            "the owner's control thread": self._running_owner().failure,
            "the reader's control thread": self._running_reader().failure,
            **{f"the {name} back end": backend.fault() for name, backend in self._backends.items()},
        }
        for name, fault in faults.items():
            if fault:
                raise TransferError(f"{name} has died: {fault}")

    def check_integrity(self) -> None:
        """`check_alive`, and raise `IntegrityError` if the leases do not add up."""
        self.check_alive()
        self._desk.check_integrity()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _start_backends(self) -> None:
        config = self._config
        last: BackendError | None = None
        for name in config.backends:
            context = BackendContext(
                kv_key=self._kv_key,
                limits=config.limits,
                bind_host=config.bind_host,
                port=config.data_port,
                lookup=self._desk.lookup,
                release=self._desk.release,
                wake=self._read_moved,
            )
            try:
                backend = self._make(name, context)
                backend.register(self._memory, config.layout)
                backend.start()
            except BackendError as error:
                self._backend_reasons[name], last = str(error), error
                continue
            self._backends[name] = backend
            self._backend_reasons[name] = "ok"
        if not self._backends:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._backend_reasons.items())
            raise TransferError(f"backends: none works ({reasons or 'none given'})") from last

    def _describe(self, epoch: int) -> OwnSide:
        body = HelloBody(
            incarnation=self._config.incarnation,
            epoch=epoch,
            layout=self._config.layout,
            backends={name: backend.describe() for name, backend in self._backends.items()},
        )
        return OwnSide(PROTOCOL_VERSION, self._config.compat_hash, body, self._config.compat)

    def _read_moved(self) -> None:
        if self._reader is not None:
            self._reader.attend()

    def _own_side(self) -> OwnSide:
        if self._own is None:
            raise TransferError("the transfer is not started")
        return self._own

    def _running_owner(self) -> OwnerControl:
        if self._owner is None:
            raise TransferError("the transfer is not started")
        return self._owner

    def _running_reader(self) -> ReaderControl:
        if self._reader is None:
            raise TransferError("the transfer is not started")
        return self._reader
