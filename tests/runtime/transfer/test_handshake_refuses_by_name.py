"""The handshake: once per pair, a mismatch refused by the field's name, and final until the peer restarts."""

import itertools

import msgspec
import pytest

from kvferry_runtime.transfer.handshake import (
    INCARNATION,
    OwnSide,
    PeerBook,
    PeerKey,
    PeersFullError,
    answer_hello,
    judge_reply,
)
from kvferry_wire.control import Answers, HelloBody, Refuse, Welcome
from kvferry_wire.hashing import CompatFields
from kvferry_wire.layout import BLOCK_ORDER, LayoutDescriptor
from kvferry_wire.limits import Limits
from tests.runtime.transfer.builders import FULL, OWNER, READER, SLIDING

LAYOUT = LayoutDescriptor(block_size=16, tensor_parallel=1, order=BLOCK_ORDER, groups=(FULL,))


COMPAT = CompatFields(
    protocol_version=1, model_digest="m", dtype="float32", kv_dtype="float32", kv_groups=("g",), hash_key_id="k"
)


def make_side(incarnation: bytes = OWNER, **changes: object) -> OwnSide:
    body = HelloBody(incarnation=incarnation, epoch=1, layout=LAYOUT, backends={"tcp": b"p"})
    side_changes = {
        name: changes.pop(name) for name in ("protocol_version", "compat_hash", "compat") if name in changes
    }
    backends = changes.pop("backends", None)
    if backends is not None:
        body = msgspec.structs.replace(body, backends=backends)
    body = msgspec.structs.replace(body, layout=msgspec.structs.replace(LAYOUT, **changes))
    return OwnSide(**{"protocol_version": 1, "compat_hash": "c", "body": body, "compat": COMPAT, **side_changes})


def other_model(**changes: object) -> dict[str, object]:
    compat = msgspec.structs.replace(COMPAT, **changes)
    return {"compat_hash": compat.compat_hash(), "compat": compat}


MISMATCHES = {
    "protocol_version": {"protocol_version": 2},
    "compat_hash": {"compat_hash": "d", "compat": None},
    # Model digest: config, tokenizer and weights; hash key: the salt's seed.
    "model_digest": other_model(model_digest="another model or tokenizer"),
    "dtype": other_model(dtype="bfloat16"),
    "kv_dtype": other_model(kv_dtype="bfloat16"),
    "kv_groups": other_model(kv_groups=("g", "h")),
    "hash_key_id": other_model(hash_key_id="another"),
    "layout.block_size": {"block_size": 32},
    "layout.tensor_parallel": {"tensor_parallel": 2},
    "layout.order": {"order": "layer,block"},
    "layout.groups": {"groups": (SLIDING,)},
    "backends": {"backends": {"nixl": b""}},
}


def test_equal_sides_welcome_each_other() -> None:
    """The reader gets the owner's body."""
    owner, reader = make_side(OWNER), make_side(READER)
    reply = answer_hello(reader.hello(), owner)
    assert isinstance(reply, Welcome)
    assert judge_reply(reply, reader, OWNER) == owner.body


@pytest.mark.parametrize(("field", "changes"), MISMATCHES.items(), ids=MISMATCHES)
def test_a_difference_is_refused_by_its_field(field: str, changes: dict[str, object]) -> None:
    """Both sides name the same field; each calls its own value ours."""
    reader = make_side(READER, **changes)
    reply = answer_hello(reader.hello(), make_side(OWNER))
    assert isinstance(reply, Refuse) and reply.field == field
    verdict = judge_reply(reply, reader, OWNER)
    assert isinstance(verdict, Refuse)
    assert (verdict.ours, verdict.theirs) == (reply.theirs, reply.ours)
    assert verdict.ours != verdict.theirs


def test_the_body_is_not_decoded_before_version_and_hash_are_equal() -> None:
    """A later protocol's body may be anything: the refusal names the version, not a decode error."""
    hello = msgspec.structs.replace(make_side(READER, protocol_version=9).hello(), body=b"\xc1 not msgpack")
    assert answer_hello(hello, make_side()).field == "protocol_version"
    garbled = msgspec.structs.replace(make_side(READER).hello(), body=b"\xc1 not msgpack")
    assert answer_hello(garbled, make_side()).field == "body"


def test_what_is_no_list_of_fields_is_refused_too() -> None:
    """The fields are compared only for their names: garbage in their place opens nothing."""
    garbled = msgspec.structs.replace(make_side(READER, compat_hash="d").hello(), compat=b"\xc1 not msgpack")
    refusal = answer_hello(garbled, make_side())
    assert isinstance(refusal, Refuse) and refusal.field == "compat"


def test_another_incarnation_at_the_address_is_refused() -> None:
    """The owner of the handle has been replaced: its leases are gone, whatever the new one says."""
    reply = answer_hello(make_side(READER).hello(), make_side(b"a new incarnation"))
    verdict = judge_reply(reply, make_side(READER), OWNER)
    assert isinstance(verdict, Refuse) and verdict.field == INCARNATION


@pytest.mark.parametrize("reply", [Answers(answers=("held",)), Welcome(body=b"\xc1"), Welcome(body=b"")])
def test_what_is_no_answer_to_a_hello_is_refused(reply: Answers | Welcome) -> None:
    """A peer that speaks nonsense is refused, not crashed on."""
    assert isinstance(judge_reply(reply, make_side(READER), OWNER), Refuse)


# ---- the book of peers -------------------------------------------------------------------------------------------


def make_book(**limits: float) -> PeerBook:
    return PeerBook(next_id=itertools.count(1).__next__, limits=msgspec.structs.replace(Limits(), **limits))


def make_key(number: int = 0, port: int = 5600) -> PeerKey:
    return PeerKey(b"peer%d" % number, "10.0.0.1", port)


def test_twenty_flows_share_one_hello() -> None:
    """Only the first is told to send; all are told the verdict; later ones get it at once."""
    book, key = make_book(), make_key()
    sent = []
    for flow in range(20):
        book.enter(key, 0.0)
        sent.append(book.ask(key, flow, 0.0))
    assert sent == [1] + [None] * 19
    assert book.asked(1) == key
    body = make_side().body
    assert book.settle(key, body) == list(range(20))
    assert book.ask(key, 20, 1.0) == body
    assert book.handshakes == 1
    assert book.asked(1) is None


def test_an_unanswered_hello_is_sent_again_with_its_id() -> None:
    """As long as a flow waits for it."""
    book, key = make_book(control_reply_s=2.0), make_key()
    book.enter(key, 0.0)
    book.ask(key, "flow", 0.0)
    assert book.tick(1.9)[0] == []
    assert book.tick(2.0)[0] == [(key, 1)]
    assert book.tick(2.1)[0] == []
    assert book.tick(4.0)[0] == [(key, 1)]
    book.leave(key, "flow", 4.0)
    assert book.tick(9.0)[0] == []


def test_a_refusal_is_final_until_the_incarnation_changes() -> None:
    """Also after the peer was forgotten for idleness; a new incarnation is asked anew."""
    book = make_book(peer_ttl_s=10.0)
    refusal = Refuse(field="compat_hash", ours="a", theirs="b")
    book.enter(make_key(1), 0.0)
    book.ask(make_key(1), "flow", 0.0)
    book.settle(make_key(1), refusal)
    book.leave(make_key(1), "flow", 0.0)
    assert book.tick(10.0)[1] == [make_key(1)]
    assert len(book) == 0
    book.enter(make_key(1), 20.0)
    assert book.ask(make_key(1), "flow", 20.0) == refusal
    book.enter(make_key(2), 20.0)
    assert isinstance(book.ask(make_key(2), "flow", 20.0), int)
    assert book.handshakes == 2


def test_peers_in_use_are_never_forgotten() -> None:
    """Idleness counts from when the last flow left."""
    book, key = make_book(peer_ttl_s=10.0), make_key()
    book.enter(key, 0.0)
    assert book.tick(1000.0)[1] == []
    book.leave(key, "flow", 1000.0)
    assert book.tick(1009.9)[1] == []
    assert book.tick(1010.0)[1] == [key]


def test_an_earlier_incarnation_makes_room_at_once() -> None:
    """20 restarts at one address leave one entry, not twenty."""
    book = make_book()
    for number in range(20):
        forgotten = book.enter(make_key(number), float(number))
        assert forgotten == ([make_key(number - 1)] if number else [])
        book.leave(make_key(number), "flow", float(number))
    assert len(book) == 1


def test_the_book_is_bounded() -> None:
    """The longest idle peer goes first; when all are in use a new one is refused."""
    book = make_book(peers=2)
    for number in (1, 2):
        book.enter(make_key(number, port=number), 0.0)
    with pytest.raises(PeersFullError, match="peers"):
        book.enter(make_key(3, port=3), 1.0)
    book.leave(make_key(2, port=2), "flow", 5.0)
    book.leave(make_key(1, port=1), "flow", 6.0)
    assert book.enter(make_key(3, port=3), 7.0) == [make_key(2, port=2)]
    assert len(book) == 2
