"""Golden bytes of protocol version 3. A change here is a change of the protocol: raise ``PROTOCOL_VERSION``."""

import pytest

from kvferry_wire import PROTOCOL_VERSION, control, data, state
from kvferry_wire.canonical import KeyExtras
from kvferry_wire.frames import Alive, Begun, End, Fail, FrameDecoder, Handoff, Prefilled, Tokens, encode_frame
from tests.wire.builders import COMPAT, KV_KEY, make_handle, make_hello_body, make_ref
from tests.wire.golden import GOLDEN

MESSAGES = {
    "frame prefilled": encode_frame(Prefilled(first=(3,), cached_tokens=16, handle=make_handle().signed(KV_KEY))),
    "frame begun": encode_frame(Begun(cached_tokens=16, recomputed="deadline")),
    "frame tokens": encode_frame(Tokens(choice=1, ids=(5, 70_000), data=b"data: x\n\n", chars=1)),
    "frame alive": encode_frame(Alive(step=300)),
    "frame handoff": encode_frame(Handoff(handle=make_handle())),
    "frame end": encode_frame(End(data=b"x", finish=("stop",), completion_tokens=2, cached_tokens=0)),
    "frame fail": encode_frame(Fail(kind="busy", message="m", param="n")),
    "control hello": control.encode(
        control.ControlRequest(
            reader=b"r",
            id=1,
            body=control.Hello(
                protocol_version=3,
                compat_hash="c",
                compat=control.encode(COMPAT),
                body=control.encode(make_hello_body()),
            ),
        )
    ),
    "control renew": control.encode(
        control.ControlRequest(reader=b"r", id=2, body=control.Renew(leases=(make_ref(), make_ref())))
    ),
    "control release": control.encode(
        control.ControlRequest(reader=b"r", id=3, body=control.Release(lease=make_ref()))
    ),
    "control failed": control.encode(
        control.ControlRequest(reader=b"r", id=4, body=control.Failed(lease=make_ref(), reason="deadline"))
    ),
    "control welcome": control.encode(control.ControlReply(id=1, body=control.Welcome(body=b"b"))),
    "control refuse": control.encode(
        control.ControlReply(id=1, body=control.Refuse(field="compat_hash", ours="a", theirs="b"))
    ),
    "control answers": control.encode(
        control.ControlReply(id=2, body=control.Answers(answers=("held", "expired", "unknown")))
    ),
    "data request": data.encode(
        data.ReadRequest(
            incarnation=b"i" * 16, epoch=1, lease_id=7, prompt_digest=b"d" * 32, group=0, first=64, count=64
        )
    ),
    "data release": data.encode(data.ReleaseRequest(reader=b"r", id=3, lease=make_ref())),
    "data reply": data.encode(data.ReadReply(status="ok", nbytes=4096)),
    "data proofs": b"".join(
        data.proof(KV_KEY, side, b"a" * data.NONCE_BYTES, b"b" * data.NONCE_BYTES) for side in ("reader", "owner")
    ),
    "state stored": state.encode(
        state.StateMessage(
            incarnation=b"i" * 16, sequence=9, event=state.BlocksStored(hashes=(b"h" * 16,), parent=None)
        )
    ),
    "state removed": state.encode(
        state.StateMessage(incarnation=b"i" * 16, sequence=10, event=state.BlocksRemoved(hashes=(b"h" * 16,)))
    ),
    "state cleared": state.encode(state.StateMessage(incarnation=b"i" * 16, sequence=11, event=state.Cleared())),
    "extras": KeyExtras(tenant_salt=b"t", adapter="a", adapter_generation=2, media=(b"m",)).canonical(),
}


def test_the_protocol_is_version_3() -> None:
    """Raising the version means new golden bytes below, and a line of history in ``kvferry_wire``."""
    assert PROTOCOL_VERSION == 3


@pytest.mark.parametrize("name", MESSAGES)
def test_the_bytes_of_a_message_do_not_change(name: str) -> None:
    """What this version writes is what every engine of this version reads."""
    assert MESSAGES[name].hex() == GOLDEN[name]


def test_all_golden_bytes_belong_to_a_message() -> None:
    """None is left over from an earlier version."""
    assert GOLDEN.keys() == MESSAGES.keys()


@pytest.mark.parametrize("name", [name for name in MESSAGES if name.startswith("frame")])
def test_golden_frames_decode(name: str) -> None:
    """Each golden frame is one whole frame for today's decoder, and encodes to itself again."""
    (frame,) = FrameDecoder().feed(bytes.fromhex(GOLDEN[name]))
    assert encode_frame(frame).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", [name for name in MESSAGES if name.startswith("control")])
def test_golden_control_messages_decode(name: str) -> None:
    """Requests and replies alike."""
    is_reply = name.split()[1] in {"welcome", "refuse", "answers"}
    decode = control.decode_reply if is_reply else control.decode_request
    assert control.encode(decode(bytes.fromhex(GOLDEN[name]))).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", ["data request", "data release"])
def test_golden_data_requests_decode(name: str) -> None:
    """A read and a release are told apart on one connection."""
    assert data.encode(data.decode_request(bytes.fromhex(GOLDEN[name]))).hex() == GOLDEN[name]
