"""The handshake between two engines: once per pair of incarnations, decided here, sent elsewhere.

Pure. `answer_hello` and `judge_reply` are the owner's and the reader's verdicts; `PeerBook` is the reader's memory of
its peers. A refusal is final until the peer has another incarnation.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvferry_wire.control import Answers, Hello, HelloBody, Refuse, Welcome, decode_compat, decode_hello_body, encode
from kvferry_wire.hashing import CompatFields
from kvferry_wire.limits import Limits


@dataclass(frozen=True, slots=True)
class OwnSide:
    """What this engine says of itself in a handshake."""

    protocol_version: int
    compat_hash: str
    body: HelloBody
    compat: CompatFields | None = None  # what the hash is of

    def hello(self) -> Hello:
        """The first message to a peer."""
        return Hello(
            protocol_version=self.protocol_version,
            compat_hash=self.compat_hash,
            compat=b"" if self.compat is None else encode(self.compat),
            body=encode(self.body),
        )


def answer_hello(hello: Hello, own: OwnSide) -> Welcome | Refuse:
    """The owner's verdict: version and compat hash first, the body only if both are equal."""
    if hello.protocol_version != own.protocol_version:
        return Refuse(field="protocol_version", ours=str(own.protocol_version), theirs=str(hello.protocol_version))
    if hello.compat_hash != own.compat_hash:
        return _compat_refused(hello, own)
    try:
        body = decode_hello_body(hello.body)
    except msgspec.DecodeError as error:
        return Refuse(field="body", ours="HelloBody", theirs=str(error))
    difference = own.body.layout.first_difference(body.layout)
    if difference is not None:
        name, ours, theirs = difference
        return Refuse(field=f"layout.{name}", ours=ours, theirs=theirs)
    if not own.body.backends.keys() & body.backends.keys():
        return Refuse(field="backends", ours=_names(own.body), theirs=_names(body))
    return Welcome(body=encode(own.body))


def judge_reply(reply: Welcome | Refuse | Answers, own: OwnSide, incarnation: bytes) -> HelloBody | Refuse:
    """The reader's verdict on the answer to its `Hello`: the peer's body, or where the two do not fit.

    Args:
        incarnation: whom the handle names; another one at the same address is refused.
    """
    if isinstance(reply, Refuse):
        return Refuse(field=reply.field, ours=reply.theirs, theirs=reply.ours)
    if isinstance(reply, Answers):
        return Refuse(field="reply", ours="welcome or refuse", theirs="answers")
    try:
        body = decode_hello_body(reply.body)
    except msgspec.DecodeError as error:
        return Refuse(field="body", ours="HelloBody", theirs=str(error))
    if body.incarnation != incarnation:
        return Refuse(field=INCARNATION, ours=incarnation.hex(), theirs=body.incarnation.hex())
    difference = own.body.layout.first_difference(body.layout)
    if difference is not None:
        name, ours, theirs = difference
        return Refuse(field=f"layout.{name}", ours=ours, theirs=theirs)
    return body


def _compat_refused(hello: Hello, own: OwnSide) -> Refuse:
    """By the field that differs, if both sides say what their hashes are of."""
    difference = None
    if own.compat is not None and hello.compat:
        try:
            difference = own.compat.first_difference(decode_compat(hello.compat))
        except msgspec.DecodeError as error:
            return Refuse(field="compat", ours="CompatFields", theirs=str(error))
    name, ours, theirs = difference or ("compat_hash", own.compat_hash, hello.compat_hash)
    return Refuse(field=name, ours=ours, theirs=theirs)


INCARNATION = "incarnation"


def _names(body: HelloBody) -> str:
    return ",".join(sorted(body.backends)) or "none"


@dataclass(frozen=True, slots=True)
class PeerKey:
    """One incarnation of an engine, at the address that its handles give."""

    incarnation: bytes
    host: str
    control_port: int


@dataclass(slots=True)
class Peer:
    """What the reader knows of a peer. `verdict`: ``None`` while its answer is awaited."""

    hello_id: int
    resend_at: float
    used_at: float
    verdict: HelloBody | Refuse | None = None
    users: int = 0  # flows that have not ended
    waiters: list[object] = field(default_factory=list)  # whom to tell the verdict


class PeersFullError(RuntimeError):
    """More peers in use than `Limits.peers`."""


class PeerBook:
    """The peers of one reader: each asked once at a time, its answer shared by all flows.

    Args:
        next_id: gives message ids.
        limits: `peers`, `peer_ttl_s` and `control_reply_s` are used.
    """

    def __init__(self, *, next_id: Callable[[], int], limits: Limits) -> None:
        self._next_id = next_id
        self._limits = limits
        self._peers: dict[PeerKey, Peer] = {}
        self._by_hello: dict[int, PeerKey] = {}
        self._refused: OrderedDict[PeerKey, Refuse] = OrderedDict()  # of forgotten peers: refusals are final
        self.handshakes = 0

    def enter(self, key: PeerKey, now: float) -> list[PeerKey]:
        """A flow begins to use a peer. Returns the idle peers that are forgotten for it.

        Those are earlier incarnations at its address, and the longest idle one when there is no room.

        Raises:
            PeersFullError: all known peers are in use.
        """
        forgotten: list[PeerKey] = []
        if key not in self._peers:
            address = (key.host, key.control_port)
            idle = {known: peer for known, peer in self._peers.items() if not peer.users}
            forgotten += [known for known in idle if (known.host, known.control_port) == address]
            if len(self._peers) - len(forgotten) >= self._limits.peers:
                if not idle:
                    raise PeersFullError(
                        f"peers: {len(self._peers)} are in use, at most {self._limits.peers} are accepted"
                    )
                forgotten.append(min(idle, key=lambda known: idle[known].used_at))
            for known in forgotten:
                self._forget(known)
            self._peers[key] = Peer(hello_id=0, resend_at=0.0, used_at=now, verdict=self._refused.get(key))
        self._peers[key].users += 1
        return forgotten

    def leave(self, key: PeerKey, waiter: object, now: float) -> None:
        """A flow that entered has ended."""
        peer = self._peers[key]
        peer.users -= 1
        peer.used_at = now
        if waiter in peer.waiters:
            peer.waiters.remove(waiter)

    def ask(self, key: PeerKey, waiter: object, now: float) -> HelloBody | Refuse | int | None:
        """A flow wants the verdict: it, or the id of the `Hello` to send now, or ``None`` when one is on its way."""
        peer = self._peers[key]
        if peer.verdict is not None:
            return peer.verdict
        peer.waiters.append(waiter)
        if peer.hello_id:
            return None
        peer.hello_id = self._next_id()
        peer.resend_at = now + self._limits.control_reply_s
        self._by_hello[peer.hello_id] = key
        self.handshakes += 1
        return peer.hello_id

    def asked(self, message_id: int) -> PeerKey | None:
        """Whose `Hello` had this id, if its answer is awaited."""
        return self._by_hello.get(message_id)

    def settle(self, key: PeerKey, verdict: HelloBody | Refuse) -> list[object]:
        """The answer has come: remember it, return who waits for it."""
        peer = self._peers[key]
        peer.verdict = verdict
        self._by_hello.pop(peer.hello_id, None)
        waiters, peer.waiters = peer.waiters, []
        return waiters

    def tick(self, now: float) -> tuple[list[tuple[PeerKey, int]], list[PeerKey]]:
        """`Hello`s to send again (same id), and the peers that were idle for too long and are forgotten."""
        resend = []
        for key, peer in self._peers.items():
            if peer.verdict is None and peer.waiters and now >= peer.resend_at:
                peer.resend_at = now + self._limits.control_reply_s
                resend.append((key, peer.hello_id))
        ttl = self._limits.peer_ttl_s
        idle = [key for key, peer in self._peers.items() if not peer.users and now - peer.used_at >= ttl]
        for key in idle:
            self._forget(key)
        return resend, idle

    def __len__(self) -> int:
        return len(self._peers)

    def _forget(self, key: PeerKey) -> None:
        peer = self._peers.pop(key)
        self._by_hello.pop(peer.hello_id, None)
        if isinstance(peer.verdict, Refuse):
            self._refused[key] = peer.verdict
            self._refused.move_to_end(key)
            while len(self._refused) > self._limits.peers:
                self._refused.popitem(last=False)
